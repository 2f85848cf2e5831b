"""The router's book: what it has promised to places, kept so that a look-up never walks over requests."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from quartet.events.load import PlacementProgress
from router.placed_book import PlacedBooking, PlacedBookings, PlacedShare
from router.policy.base import Placement

_NO_PLACEMENTS = PlacementProgress()


def numbering(router_id: str, epoch: int) -> str:
    """The ``router_id`` under which a router numbers its starts to one life of a worker, as load reports name it.

    A start that was placed at one life may reach the next one, at the same address: its number must not count among
    those that are for that life.
    """
    return f"{router_id}.{epoch:x}"


@dataclass
class RankAccount:
    """Running sums over the bookings at one place.

    Attributes:
        num_promised_blocks: blocks that the bookings may take beyond what the place reports as used.
        num_unreported_tokens: tokens to prefill of bookings that have not arrived, as far as the place's reports tell.
        num_placed_tokens: of starts that clients may bring at any time, or never.
    """

    num_promised_blocks: int = 0
    num_unreported_tokens: int = 0
    num_placed_tokens: int = 0


class WorkerBook:
    """All bookings at one life of one worker.

    A booking counts in full until a load report names it as included; from then on only with what it may still take,
    since the report's ``used`` holds the rest. Tokens reach the router before the report that counts their blocks as
    used. So what a booking holds is taken off its promise one report late: no block is ever counted nowhere. Its tokens
    to prefill count until it has arrived, as reports have the tokens of whoever waits there, too.

    Attributes:
        placed: starts that were placed for clients; they have numbers of their own.
    """

    def __init__(self, data_parallel_size: int, block_size: int, *, epoch: int = 0) -> None:
        """``epoch`` names the life; ``block_size`` is in tokens."""
        self.epoch = epoch
        self._accounts = [RankAccount() for _ in range(data_parallel_size)]
        self._block_size = block_size
        self._last_number = 0
        self._unreported: deque[Booking] = deque()
        self._not_arrived: deque[Booking] = deque()
        self._grown: list[Booking] = []  # since the last report
        self._settling: list[Booking] = []  # before it
        self._num_booked = 0
        self.placed = PlacedBookings()

    @property
    def num_requests(self) -> int:
        """Requests booked here, placed ones included."""
        return self._num_booked + self.placed.num_booked

    def account(self, rank: int) -> RankAccount:
        """The sums of one data-parallel rank."""
        return self._accounts[rank]

    def book(self, rank: int, *, num_reserved_tokens: int = 0, num_queued_tokens: int = 0) -> Booking:
        """Reserve room for ``num_reserved_tokens`` and count ``num_queued_tokens`` to prefill."""
        num_blocks = -(-num_reserved_tokens // self._block_size) if num_reserved_tokens else 0
        self._num_booked += 1
        return Booking(self, self._accounts[rank], self._block_size, num_blocks, num_queued_tokens)

    def reported(self, number: int, placements: PlacementProgress = _NO_PLACEMENTS, *, arrived_number: int = 0) -> None:
        """A load report came.

        Args:
            number: all starts up to it are counted in.
            placements: what became of placed starts.
            arrived_number: all starts up to it, or up to ``number``, have arrived.
        """
        self.placed.reported(placements)
        for booking in self._settling:
            booking.settle()
        for booking in self._grown:
            booking.begin_settling()
        self._settling, self._grown = self._grown, []
        arrived_number = max(number, arrived_number)
        while self._not_arrived and self._not_arrived[0].number <= arrived_number:
            self._not_arrived.popleft().arrive()
        while self._unreported and self._unreported[0].number <= number:
            self._unreported.popleft().count_in()

    def released(self) -> None:
        """A booking is no more."""
        self._num_booked -= 1

    def grew(self, booking: Booking) -> None:
        """``booking`` holds more than at the last report; told once between two."""
        self._grown.append(booking)

    def next_number(self, booking: Booking) -> int:
        """The ``router_request_number`` of the start that ``booking`` is for."""
        self._last_number += 1
        self._unreported.append(booking)
        self._not_arrived.append(booking)
        return self._last_number


class Booking:
    """One request's share of one place, from placement to release."""

    def __init__(
        self, book: WorkerBook, account: RankAccount, block_size: int, num_blocks: int, num_queued_tokens: int
    ) -> None:
        self.number = 0
        self._book = book
        self._account = account
        self._block_size = block_size
        self._num_reserved = self._num_promised = num_blocks
        self._num_queued_tokens = num_queued_tokens
        # Blocks it holds: as known, as known at the last report, and as certainly counted in by now.
        self._num_held = self._num_settling = self._num_settled = 0
        self._has_grown = self._is_reported = self._is_released = False
        account.num_promised_blocks += num_blocks
        account.num_unreported_tokens += num_queued_tokens

    @property
    def epoch(self) -> int:
        """The life of the worker that it is for."""
        return self._book.epoch

    @property
    def is_released(self) -> bool:
        """Whether it counts no more."""
        return self._is_released

    def send(self) -> int:
        """The start goes out now: its ``router_request_number``."""
        self.number = self._book.next_number(self)
        return self.number

    def place(
        self, request_id: str, choice: int, *, num_first_tokens: int, lapses_at: float, ends_at: float
    ) -> PlacedBooking:
        """Book the same once more, for a client that may bring the start; this booking is released as ever.

        ``num_first_tokens`` are those whose KV it has from its first step on; the rest is as in ``PlacedShare``.
        """
        share = PlacedShare(
            request_id=request_id,
            choice=choice,
            num_reserved_blocks=self._num_reserved,
            num_first_blocks=-(-num_first_tokens // self._block_size),
            num_queued_tokens=self._num_queued_tokens,
            lapses_at=lapses_at,
            ends_at=ends_at,
        )
        return self._book.placed.add(share, self._account)

    def hold(self, num_tokens: int) -> int:
        """The place now has the KV of ``num_tokens`` tokens of the request.

        Returns:
            Up to so many there is nothing new to say.
        """
        if self._num_queued_tokens:
            self.arrive()  # who decodes waits for no prefill any more, whatever reports say, or don't
        num_held = -(-num_tokens // self._block_size)
        if num_held != self._num_held:
            self._num_held = num_held
            if not self._has_grown:
                self._has_grown = True
                self._book.grew(self)
        return num_held * self._block_size

    def begin_settling(self) -> None:
        """A report came: the next one surely counts in what is held now."""
        self._has_grown = False
        self._num_settling = self._num_held

    def settle(self) -> None:
        """The next report has come."""
        self._num_settled = self._num_settling
        self._promise()

    def arrive(self) -> None:
        """The place's reports have its tokens to prefill from now on."""
        self._account.num_unreported_tokens -= self._num_queued_tokens
        self._num_queued_tokens = 0

    def count_in(self) -> None:
        """The place's reports hold its blocks from now on."""
        self._is_reported = True
        self._promise()

    def release(self) -> None:
        """The request is no longer there. May be called twice."""
        if not self._is_released:
            self._is_released = True
            self._book.released()
            self._promise()
            self.arrive()

    def _promise(self) -> None:
        if self._is_released:
            num_promised = 0
        elif self._is_reported:
            num_promised = max(0, self._num_reserved - self._num_settled)
        else:
            num_promised = self._num_reserved
        self._account.num_promised_blocks += num_promised - self._num_promised
        self._num_promised = num_promised


@dataclass(frozen=True)
class Reservation:
    """A placed request's bookings; ``prefill`` is ``None`` where the decode place prefills itself."""

    placement: Placement
    prefill: Booking | None
    decode: Booking
    waited_s: float = field(default=0.0, kw_only=True)  # in the router's queue

    @property
    def is_released(self) -> bool:
        """Whether its room at the decode place was let go of."""
        return self.decode.is_released

    def release(self) -> None:
        """Let go of what is left of it. May be called twice."""
        if self.prefill is not None:
            self.prefill.release()
        self.decode.release()
