"""What the router goes on booking after Place has answered: starts that clients may bring to a worker, or never do."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from quartet.events.load import PlacementProgress


class Account(Protocol):
    """The sums of one place (``router.book.RankAccount``)."""

    num_promised_blocks: int
    num_placed_tokens: int


class PlacedState(Enum):
    """How far a placed start is, as its worker's reports tell."""

    WAITING = auto()  # nobody brought it yet, or it waits for the running batch
    STARTED = auto()  # it is in the worker's load
    LAPSED = auto()  # its seal has expired; only one that still waits for the batch may come yet
    ENDED = auto()


@dataclass(frozen=True, kw_only=True)
class PlacedShare:
    """What one placed start takes, in blocks and tokens, and how long it is waited for, in monotonic seconds.

    Attributes:
        request_id, choice: whose it is.
        num_reserved_blocks: blocks that it may take in all.
        num_first_blocks: blocks that it has from its first step on.
        num_queued_tokens: tokens to prefill at the place itself.
        lapses_at: nobody can bring it any more.
        ends_at: by then it has ended in any case.
    """

    request_id: str
    choice: int
    num_reserved_blocks: int
    num_first_blocks: int
    num_queued_tokens: int
    lapses_at: float
    ends_at: float


class PlacedBooking:
    """One placed start's share of one place.

    It counts in full until a report says that it started. From then on it counts with what it may still take beyond
    its first blocks, until it ends: its tokens don't pass the router, so nobody tells what of that it has taken.
    """

    def __init__(
        self, number: int, share: PlacedShare, account: Account, on_change: Callable[[PlacedBooking, bool], None]
    ) -> None:
        """Book ``share``; ``on_change`` is told, after each change, whether it was booked before."""
        self.number = number
        self.state = PlacedState.WAITING
        self._share = share
        self._account = account
        self._on_change = on_change
        self._num_promised = 0
        self._num_queued = 0
        self._count(share.num_reserved_blocks, share.num_queued_tokens)

    @property
    def looks_at(self) -> float:
        """When time changes it next, unless something else does before."""
        return self._share.lapses_at if self.state is PlacedState.WAITING else self._share.ends_at

    @property
    def is_booked(self) -> bool:
        """Whether it counts as a request at its place."""
        return self.state in (PlacedState.WAITING, PlacedState.STARTED)

    def is_for(self, request_id: str, choice: int) -> bool:
        """Whether it is an attempt of that choice of that request."""
        return (self._share.request_id, self._share.choice) == (request_id, choice)

    def start(self) -> None:
        """A report counts it in; one that was given up as lapsed had waited at the worker."""
        if self.state is not PlacedState.ENDED:
            num_promised = max(0, self._share.num_reserved_blocks - self._share.num_first_blocks)
            self._change(PlacedState.STARTED, num_promised)

    def look(self, now: float) -> None:
        """Time has passed."""
        if now >= self._share.ends_at:
            self.release()
        elif self.state is PlacedState.WAITING and now >= self._share.lapses_at:
            self._change(PlacedState.LAPSED, 0)

    def release(self) -> None:
        """It has ended, or was never given out. May be called twice."""
        if self.state is not PlacedState.ENDED:
            self._change(PlacedState.ENDED, 0)

    def _change(self, state: PlacedState, num_promised: int) -> None:
        was_booked, self.state = self.is_booked, state
        self._count(num_promised, 0)
        self._on_change(self, was_booked)

    def _count(self, num_promised: int, num_queued: int) -> None:
        self._account.num_promised_blocks += num_promised - self._num_promised
        self._account.num_placed_tokens += num_queued - self._num_queued
        self._num_promised, self._num_queued = num_promised, num_queued


class PlacedBookings:
    """The placed starts of one life of one worker, by their own sequence of numbers."""

    def __init__(self) -> None:
        """Nothing is placed."""
        self._bookings: dict[int, PlacedBooking] = {}
        self._looks: list[tuple[float, int]] = []  # a heap of when to look at which; some have ended meanwhile
        self._num_booked = 0
        self._last_number = 0

    @property
    def num_booked(self) -> int:
        """Placed starts that count as requests."""
        return self._num_booked

    def add(self, share: PlacedShare, account: Account) -> PlacedBooking:
        """Book ``share``; its number is the next one."""
        self._last_number += 1
        booking = PlacedBooking(self._last_number, share, account, self._changed)
        self._bookings[booking.number] = booking
        self._num_booked += 1
        self._look_later(booking)
        return booking

    def has(self, request_id: str, choice: int) -> bool:
        """Whether that choice of that request was placed here, and has not ended as far as is known."""
        return any(booking.is_for(request_id, choice) for booking in self._bookings.values())

    def reported(self, progress: PlacementProgress) -> None:
        """The worker told what became of some; each is told several times."""
        for number in progress.started:
            if number in self._bookings:
                self._bookings[number].start()
        for number in progress.ended:
            if number in self._bookings:
                self._bookings[number].release()

    def look(self, now: float) -> None:
        """Give up what nobody brought in time."""
        while self._looks and self._looks[0][0] <= now:
            _, number = heapq.heappop(self._looks)
            booking = self._bookings.get(number)
            if booking is not None:
                booking.look(now)
                if number in self._bookings:
                    self._look_later(booking)

    def _look_later(self, booking: PlacedBooking) -> None:
        heapq.heappush(self._looks, (booking.looks_at, booking.number))

    def _changed(self, booking: PlacedBooking, was_booked: bool) -> None:
        self._num_booked += booking.is_booked - was_booked
        if booking.state is PlacedState.ENDED:
            del self._bookings[booking.number]
