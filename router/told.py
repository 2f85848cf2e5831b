"""What other routers told of the starts that they sent to one worker, until its load reports count these. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from quartet.events.bookings import BookedStart

# By then the worker's reports have counted a start, or it never arrived.
_LIFE_S = 1.0

# Starts of one router at one worker; of more, the oldest are dropped: reports count them any moment.
_MAX_STARTS = 512


class Account(Protocol):
    """The sums of one rank that told starts are part of (see ``router.book.RankAccount``)."""

    num_requests: int

    def add(self, *, num_promised_blocks: int = 0, num_unreported_tokens: int = 0, num_placed_tokens: int = 0) -> None:
        """Add these to the sums; negative ones take away."""


@dataclass(slots=True)
class _Told:
    start: BookedStart
    account: Account
    ends_at: float


@dataclass
class ToldStarts:
    """All told starts at one epoch of one worker. Times are monotonic seconds."""

    _by_router: dict[str, deque[_Told]] = field(default_factory=dict)  # by the router's numbering
    _arrivals: Mapping[str, int] = field(default_factory=dict)  # as the last report had them

    def add(self, numbering: str, start: BookedStart, account: Account, now: float) -> None:
        """A router told of ``start``; its numbers grow. No-op if the last report counts it already."""
        if start.number <= self._arrivals.get(numbering, 0):
            return
        told = self._by_router.setdefault(numbering, deque())
        if len(told) == _MAX_STARTS:
            _take_out(told.popleft())
        told.append(_Told(start, account, now + _LIFE_S))
        account.num_requests += 1
        account.add(num_promised_blocks=start.num_reserved_blocks, num_unreported_tokens=start.num_queued_tokens)

    def on_report(self, arrivals: Mapping[str, int]) -> None:
        """A load report counts all starts up to these numbers, by numbering."""
        self._arrivals = arrivals
        for numbering, told in self._by_router.items():
            arrived = arrivals.get(numbering, 0)
            while told and told[0].start.number <= arrived:
                _take_out(told.popleft())

    def poll(self, now: float) -> None:
        """Drop what no report has counted for too long."""
        for told in self._by_router.values():
            while told and told[0].ends_at <= now:
                _take_out(told.popleft())
        self._by_router = {numbering: told for numbering, told in self._by_router.items() if told}


def _take_out(told: _Told) -> None:
    told.account.num_requests -= 1
    told.account.add(
        num_promised_blocks=-told.start.num_reserved_blocks, num_unreported_tokens=-told.start.num_queued_tokens
    )
