"""The router's book: the room that it has promised to requests, summed by data-parallel rank.

``WorkerBook.reserve`` reserves room for one attempt of a request; ``Booking.release`` gives it back. A request placed
for its client (the RPC Place) outlives its attempt: ``Booking.commit`` keeps the same room until the worker reports
that the request has ended, or until its client can no longer bring it. Sums are kept up to date, so no look-up goes
through all requests. Pure: no clock, no task.
"""

from __future__ import annotations

import heapq
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import zip_longest

from quartet.events.load import PlacementProgress
from router.policy.base import Placement
from router.told import ToldStarts
from router.untaken import Untaken


def numbering(router_id: str, epoch: int) -> str:
    """The ``router_id`` under which a router numbers its starts to one epoch of a worker, as load reports name it.

    A start meant for one epoch may reach the next one, at the same address. Its number must not count among the numbers
    of the starts meant for that epoch.
    """
    return f"{router_id}.{epoch:x}"


@dataclass(slots=True)
class RankAccount:
    """Running sums over the bookings at one rank.

    Attributes:
        num_promised_blocks: blocks that the bookings may take beyond those that the rank reports as used.
        num_unreported_tokens: tokens to prefill of bookings whose arrival the rank has not reported yet.
        num_placed_tokens: tokens to prefill of placed starts, which clients may bring at any time or never.
        num_requests: requests booked, placed ones and those of other routers included that no report counts yet; at an
            encode worker, items.
        num_reported_requests: those of them that the last report counts.
        num_other_requests: requests that the last report counts and that are not booked here: other routers', or
            such as have just ended.
        version: grows with each change.
    """

    num_promised_blocks: int = 0
    num_unreported_tokens: int = 0
    num_placed_tokens: int = 0
    num_requests: int = 0
    num_reported_requests: int = 0
    num_other_requests: int = 0
    version: int = 0

    def add(self, *, num_promised_blocks: int = 0, num_unreported_tokens: int = 0, num_placed_tokens: int = 0) -> None:
        """Add these to the sums; negative ones take away."""
        self.num_promised_blocks += num_promised_blocks
        self.num_unreported_tokens += num_unreported_tokens
        self.num_placed_tokens += num_placed_tokens
        self.version += 1


class WorkerBook:
    """All bookings at one epoch of one worker.

    A booking counts in full until a load report includes it. Then it counts only with what it may still take, since the
    report's used blocks include the rest. Tokens reach the router before the report that counts their blocks as used,
    so the book subtracts them from the booking's promise one report late: every block is always counted. Its tokens to
    prefill count until it has arrived, since reports include the tokens of requests that wait at the worker.

    Attributes:
        accounts: the sums of each data-parallel rank, in order.
        placed: starts that were placed for clients; they are numbered separately.
        told: starts of which other routers told.
    """

    def __init__(
        self,
        data_parallel_size: int,
        block_size: int,
        *,
        epoch: int = 0,
        on_sent: Callable[[Booking], None] | None = None,
    ) -> None:
        """``epoch`` is the worker's; ``block_size`` is in tokens; ``on_sent`` is called when a start goes out."""
        self.epoch = epoch
        self._on_sent = on_sent
        self.accounts = [RankAccount() for _ in range(data_parallel_size)]
        self._block_size = block_size
        self._last_number = 0
        self._unreported: deque[Booking] = deque()
        self._not_arrived: deque[Booking] = deque()
        self._grown: list[Booking] = []  # bookings that grew since the last report
        self._settling: list[Booking] = []  # bookings that grew before it
        self._num_booked = 0
        self.placed = PlacedBookings()
        self.told = ToldStarts()

    @property
    def num_requests(self) -> int:
        """Requests booked here, placed ones included."""
        return self._num_booked + self.placed.num_booked

    def reserve(self, data_parallel_rank: int, *, num_reserved_tokens: int = 0, num_queued_tokens: int = 0) -> Booking:
        """Reserve room for ``num_reserved_tokens``, and count ``num_queued_tokens`` to prefill."""
        num_blocks = -(-num_reserved_tokens // self._block_size) if num_reserved_tokens else 0
        self._num_booked += 1
        return Booking(self, data_parallel_rank, self._block_size, num_blocks, num_queued_tokens)

    def reserve_prompt(self, data_parallel_rank: int, *, num_tokens: int, num_queued_tokens: int) -> Booking:
        """Reserve room for the ``num_tokens`` tokens of a prompt at a rank that only prefills.

        The rank takes all of it at once, so nothing is promised any more once a report includes it.
        """
        booking = self.reserve(data_parallel_rank, num_reserved_tokens=num_tokens, num_queued_tokens=num_queued_tokens)
        booking.take_all_at_once()
        return booking

    def reserve_items(self, num_items: int) -> ItemsBooking:
        """Count ``num_items`` items to encode: an encode worker reports items where others report requests."""
        self._num_booked += 1
        return ItemsBooking(self, num_items)

    def on_report(
        self,
        number: int,
        placements: PlacementProgress | None = None,
        *,
        arrived_number: int = 0,
        num_requests: Sequence[int] = (),
    ) -> None:
        """Apply a load report.

        Args:
            number: the report includes all starts up to this number.
            placements: the progress of placed starts; ``None``: there is no news of any.
            arrived_number: all starts up to this number, or up to ``number``, have arrived.
            num_requests: by rank, requests that run or wait there; ranks that are left out have none.
        """
        if placements is not None:
            self.placed.on_report(placements)
        for booking in self._settling:
            booking.settle()
        for booking in self._grown:
            booking.begin_settling()
        self._settling, self._grown = self._grown, []
        arrived_number = max(number, arrived_number)
        while self._not_arrived and self._not_arrived[0].number <= arrived_number:
            self._not_arrived.popleft().appear()
        while self._unreported and self._unreported[0].number <= number:
            self._unreported.popleft().count_in()
        for rank, account in enumerate(self.accounts):
            num_reported = num_requests[rank] if rank < len(num_requests) else 0
            account.num_other_requests = max(num_reported - account.num_reported_requests, 0)

    def on_release(self) -> None:
        """Note that a booking was released."""
        self._num_booked -= 1

    def on_growth(self, booking: Booking) -> None:
        """Note that ``booking`` holds more than at the last report; called once between two reports."""
        self._grown.append(booking)

    def next_number(self, booking: Booking) -> int:
        """The ``router_request_number`` of the start that ``booking`` is for."""
        self._last_number += 1
        self._unreported.append(booking)
        self._not_arrived.append(booking)
        return self._last_number

    def sent(self, booking: Booking) -> None:
        """The start that ``booking`` is for goes out, with its number."""
        if self._on_sent is not None:
            self._on_sent(booking)


class Booking:
    """One attempt's share of one rank, from ``WorkerBook.reserve`` to ``release``.

    Attributes:
        number: its ``router_request_number``; 0: the start has not gone out.
        epoch: of the worker to which it belongs.
        data_parallel_rank: the rank.
    """

    #: What it counts among the requests at its rank.
    _num_places = 1

    def __init__(
        self, book: WorkerBook, data_parallel_rank: int, block_size: int, num_blocks: int, num_queued_tokens: int
    ) -> None:
        self.number = 0
        self.epoch = book.epoch
        self.data_parallel_rank = data_parallel_rank
        self._book = book
        self._account = account = book.accounts[data_parallel_rank]
        self._block_size = block_size
        self._num_reserved = self._num_promised = num_blocks
        self._num_queued_tokens = num_queued_tokens
        # Blocks that it holds: as known now, as known at the last report, and as certainly included in reports now.
        self._num_held = self._num_settling = self._num_settled = 0
        self._has_grown = self._has_appeared = self._is_reported = self._is_released = False
        account.num_requests += 1
        account.add(num_promised_blocks=num_blocks, num_unreported_tokens=num_queued_tokens)

    @property
    def is_released(self) -> bool:
        """Whether it no longer counts."""
        return self._is_released

    def send(self) -> int:
        """The start goes out now: returns its ``router_request_number``."""
        self.number = self._book.next_number(self)
        self._book.sent(self)
        return self.number

    @property
    def num_reserved_blocks(self) -> int:
        """Blocks that it may take."""
        return self._num_reserved

    @property
    def num_queued_tokens(self) -> int:
        """Tokens to prefill that no report counts yet."""
        return self._num_queued_tokens

    def commit(
        self,
        request_id: str,
        choice: int,
        *,
        num_first_tokens: int,
        lapses_at: float,
        ends_at: float,
        untaken: Untaken | None = None,
        on_end: Callable[[int], None] | None = None,
    ) -> PlacedBooking:
        """Keep room for a client that may bring the start; this booking itself is released like any other.

        ``num_first_tokens``: tokens whose KV the request has from its first step on. The other arguments are as in
        ``PlacedShare``.
        """
        share = PlacedShare(
            request_id=request_id,
            choice=choice,
            num_reserved_blocks=self._num_reserved,
            num_first_blocks=-(-num_first_tokens // self._block_size),
            num_queued_tokens=self._num_queued_tokens,
            lapses_at=lapses_at,
            ends_at=ends_at,
            untaken=untaken,
            on_end=on_end,
        )
        return self._book.placed.add(share, self._account)

    def grow_to(self, num_tokens: int) -> int:
        """Note that the rank now has the KV of ``num_tokens`` tokens of the request; no-op once it has left the rank.

        Returns:
            The caller need not call again until the rank has more tokens than this.
        """
        if self._is_released:
            return sys.maxsize
        if self._num_queued_tokens:
            self.arrive()  # a request that decodes waits for no prefill, whatever the reports say
        num_held = -(-num_tokens // self._block_size)
        if num_held != self._num_held:
            self._num_held = num_held
            if not self._has_grown:
                self._has_grown = True
                self._book.on_growth(self)
        return num_held * self._block_size

    def take_all_at_once(self) -> None:
        """The report that counts it in includes all its blocks."""
        self._num_settled = self._num_reserved

    def begin_settling(self) -> None:
        """A report came: the next report certainly includes what the request holds now."""
        self._has_grown = False
        self._num_settling = self._num_held

    def settle(self) -> None:
        """The next report came."""
        self._num_settled = self._num_settling
        self._update_promise()

    def appear(self) -> None:
        """From now on the rank's reports count it among the requests that run or wait."""
        if not self._is_released:
            self._has_appeared = True
            self._account.num_reported_requests += self._num_places
            self.arrive()

    def arrive(self) -> None:
        """From now on the rank's reports include its tokens to prefill."""
        if self._num_queued_tokens:
            self._account.add(num_unreported_tokens=-self._num_queued_tokens)
            self._num_queued_tokens = 0

    def count_in(self) -> None:
        """From now on the rank's reports include its blocks."""
        self._is_reported = True
        self._update_promise()

    def release(self) -> None:
        """The request has left the rank. May be called twice."""
        if not self._is_released:
            self._is_released = True
            self._book.on_release()
            account = self._account
            account.num_requests -= self._num_places
            account.num_reported_requests -= self._has_appeared * self._num_places
            account.version += 1
            self._update_promise()
            self.arrive()

    def _update_promise(self) -> None:
        if self._is_released:
            num_promised = 0
        elif self._is_reported:
            num_promised = max(0, self._num_reserved - self._num_settled)
        else:
            num_promised = self._num_reserved
        if num_promised != self._num_promised:
            self._account.add(num_promised_blocks=num_promised - self._num_promised)
            self._num_promised = num_promised


class ItemsBooking(Booking):
    """The share of an encode worker that one request's items have, each until it is encoded."""

    def __init__(self, book: WorkerBook, num_items: int) -> None:
        """Made by ``WorkerBook.reserve_items``."""
        super().__init__(book, 0, 1, 0, 0)
        self._num_places = num_items
        self._account.num_requests += num_items - 1

    def leave_one(self) -> None:
        """One of its items is encoded. No-op once the request has left."""
        if not self._is_released:
            self._num_places -= 1
            self._account.num_requests -= 1
            self._account.num_reported_requests -= self._has_appeared


@dataclass(slots=True)
class Reservation:
    """A placed attempt's bookings; ``prefill`` is ``None`` if the decode rank prefills itself."""

    placement: Placement
    prefill: Booking | None
    decode: Booking
    waited_s: float = field(default=0.0, kw_only=True)  # in the router's queue

    @property
    def is_released(self) -> bool:
        """Whether its room at the decode rank was released."""
        return self.decode.is_released

    def release(self) -> None:
        """Release what is left of it. May be called twice."""
        if self.prefill is not None:
            self.prefill.release()
        self.decode.release()


class PlacedState(Enum):
    """The progress of a placed start, as its worker reports it."""

    WAITING = auto()  # no client has brought it yet, or it waits for the running batch
    STARTED = auto()  # the worker's load includes it
    LAPSED = auto()  # its signature has expired: it can only run if it already waits for the batch
    ENDED = auto()


@dataclass(frozen=True, kw_only=True)
class PlacedShare:
    """How much room one placed start takes, in blocks and tokens, and until when, in monotonic seconds.

    Attributes:
        request_id, choice: the choice that it belongs to.
        num_reserved_blocks: blocks that it may take in total.
        num_first_blocks: blocks that it has from its first step on.
        num_queued_tokens: tokens to prefill at the rank itself.
        lapses_at: from then on no client can bring it to the worker.
        ends_at: when it has ended at the latest.
        untaken: counts in the tenant's budgets until it was taken up; ``None``: it has none.
        on_end: called with the number of its output tokens, those of earlier attempts included, when a report says that
            it ended after so many; ``None``: not asked.
    """

    request_id: str
    choice: int
    num_reserved_blocks: int
    num_first_blocks: int
    num_queued_tokens: int
    lapses_at: float
    ends_at: float
    untaken: Untaken | None = None
    on_end: Callable[[int], None] | None = None


class PlacedBooking:
    """One placed start's share of one rank, after the router has answered Place.

    Until a report says that it started, it counts with its first blocks: its client may never bring it. From then on it
    counts with what it may still take beyond these until it ends: its tokens do not pass the router, so the router
    can't know how much it has taken.
    """

    def __init__(
        self, number: int, share: PlacedShare, account: RankAccount, on_change: Callable[[PlacedBooking, bool], None]
    ) -> None:
        """Book ``share``; each change calls ``on_change`` with this booking and whether it was booked before."""
        self.number = number
        self.state = PlacedState.WAITING
        self._share = share
        self._account = account
        self._on_change = on_change
        self._num_promised = 0
        self._num_queued = 0
        account.num_requests += 1
        if share.untaken is not None:
            share.untaken.keep()
        self._count(min(share.num_first_blocks, share.num_reserved_blocks), share.num_queued_tokens)

    @property
    def changes_at(self) -> float:
        """When it next changes if no report comes."""
        return self._share.lapses_at if self.state is PlacedState.WAITING else self._share.ends_at

    @property
    def is_booked(self) -> bool:
        """Whether it counts as a request at its rank."""
        return self.state in (PlacedState.WAITING, PlacedState.STARTED)

    def is_for(self, request_id: str, choice: int) -> bool:
        """Whether it is an attempt of ``choice`` of the request ``request_id``."""
        return (self._share.request_id, self._share.choice) == (request_id, choice)

    def start(self) -> None:
        """A report includes it. If it had lapsed before, it was waiting at the worker then."""
        if self.state is not PlacedState.ENDED:
            num_promised = max(0, self._share.num_reserved_blocks - self._share.num_first_blocks)
            self._change(PlacedState.STARTED, num_promised)

    def poll(self, now: float) -> None:
        """Apply the passage of time."""
        if now >= self._share.ends_at:
            self.release()
        elif self.state is PlacedState.WAITING and now >= self._share.lapses_at:
            self._change(PlacedState.LAPSED, 0)

    def end(self, num_output_tokens: int | None) -> None:
        """A report says that it ended after so many output tokens; ``None``: it does not say how many."""
        if self.state is not PlacedState.ENDED and self._share.on_end is not None and num_output_tokens is not None:
            self._share.on_end(num_output_tokens)
        self.release()

    def release(self) -> None:
        """It has ended, or no client ever got it. May be called twice."""
        if self.state is not PlacedState.ENDED:
            self._change(PlacedState.ENDED, 0)

    def _change(self, state: PlacedState, num_promised: int) -> None:
        was_booked, before = self.is_booked, self.state
        self.state = state
        self._account.num_requests += self.is_booked - was_booked
        self._account.num_reported_requests += (state is PlacedState.STARTED) - (before is PlacedState.STARTED)
        self._count(num_promised, 0)
        self._on_change(self, was_booked)
        if before is PlacedState.WAITING and self._share.untaken is not None:
            self._share.untaken.drop()

    def _count(self, num_promised: int, num_queued: int) -> None:
        self._account.add(
            num_promised_blocks=num_promised - self._num_promised, num_placed_tokens=num_queued - self._num_queued
        )
        self._num_promised, self._num_queued = num_promised, num_queued


class PlacedBookings:
    """The placed starts of one epoch of one worker, numbered separately from all other starts."""

    def __init__(self) -> None:
        """Start without placed starts."""
        self._bookings: dict[int, PlacedBooking] = {}
        self._due: list[tuple[float, int]] = []  # a heap: when to poll which number; some have ended meanwhile
        self._num_booked = 0
        self._last_number = 0

    @property
    def num_booked(self) -> int:
        """Placed starts that count as requests."""
        return self._num_booked

    def add(self, share: PlacedShare, account: RankAccount) -> PlacedBooking:
        """Book ``share``; its number is the next one."""
        self._last_number += 1
        booking = PlacedBooking(self._last_number, share, account, self._changed)
        self._bookings[booking.number] = booking
        self._num_booked += 1
        self._poll_later(booking)
        return booking

    def has(self, request_id: str, choice: int) -> bool:
        """Whether ``choice`` of that request was placed here, and is not known to have ended."""
        return any(booking.is_for(request_id, choice) for booking in self._bookings.values())

    def on_report(self, progress: PlacementProgress) -> None:
        """Apply a worker's report on placed starts; it reports each of them several times."""
        for number in progress.started:
            if number in self._bookings:
                self._bookings[number].start()
        for number, num_output_tokens in zip_longest(progress.ended, progress.num_output_tokens[: len(progress.ended)]):
            if number in self._bookings:
                self._bookings[number].end(num_output_tokens)

    def poll(self, now: float) -> None:
        """Release the room of starts that no client brought in time."""
        while self._due and self._due[0][0] <= now:
            _, number = heapq.heappop(self._due)
            booking = self._bookings.get(number)
            if booking is not None:
                booking.poll(now)
                if number in self._bookings:
                    self._poll_later(booking)

    def release_all(self) -> None:
        """The worker is gone: none of its starts will run."""
        for booking in tuple(self._bookings.values()):
            booking.release()

    def _poll_later(self, booking: PlacedBooking) -> None:
        heapq.heappush(self._due, (booking.changes_at, booking.number))

    def _changed(self, booking: PlacedBooking, was_booked: bool) -> None:
        self._num_booked += booking.is_booked - was_booked
        if booking.state is PlacedState.ENDED:
            del self._bookings[booking.number]
