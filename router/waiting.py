"""Who waits in the router's queue, and in what order."""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import TypeAlias

from router.book import Reservation
from router.policy.base import Pending
from router.prompt_matches import PromptMatches
from router.together import Together
from router.worker import PoolKey

#: Less is further ahead.
Rank: TypeAlias = tuple[int, float, int, int]


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """A request's standing in the queue; its retries keep it.

    Attributes:
        tenant: whom it is accounted to.
        priority: higher first.
        start: among equals, lower first (see ``router.fair_share``).
        number: arrival at this router; lower first among those that start together.
        num_tokens: of work that each of its choices is.
        deadline: when the request ends in any case, in monotonic seconds.
    """

    pool: PoolKey
    tenant: str
    priority: int
    start: float
    number: int
    num_tokens: int
    deadline: float


@dataclass(eq=False, kw_only=True)
class Waiting:
    """A choice that waits.

    Attributes:
        entry: of all that ever waited, its number: orders the choices of one request.
        pending: what policies are shown of it; what ``matches`` say is in there.
        placed: its end, good or bad.
        since: when it came, in monotonic seconds.
        ready_at: when a decode worker was last seen to be ready.
        is_retry: an attempt was made before: it is never refused for want of room in the queue.
    """

    ticket: Ticket
    entry: int
    pending: Pending
    matches: PromptMatches
    placed: asyncio.Future[Reservation]
    since: float
    ready_at: float
    is_retry: bool
    together: Together | None
    rank: Rank = field(init=False)

    def __post_init__(self) -> None:
        ticket = self.ticket
        self.rank = (-ticket.priority, ticket.start, ticket.number, self.entry)

    def can_run(self, adapters: frozenset[str]) -> bool:
        """Whether it still waits, and for no other adapter."""
        return not self.placed.done() and (not self.pending.adapter or self.pending.adapter in adapters)

    @property
    def is_refusable(self) -> bool:
        """Whether it may be sent away to make room in the queue."""
        return not (self.is_retry or self.placed.done())


_by_rank: Callable[[Waiting], Rank] = attrgetter("rank")


class WaitingLine:
    """Those that wait for one pool, best rank first."""

    def __init__(self) -> None:
        self._line: list[Waiting] = []

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._line)

    def head(self, length: int, adapters: frozenset[str]) -> list[Waiting]:
        """The first ``length`` at most whose end is not known and that need none but these adapters."""
        return list(islice((waiting for waiting in self._line if waiting.can_run(adapters)), length))

    def add(self, waiting: Waiting) -> None:
        """Queue ``waiting`` at its rank."""
        insort(self._line, waiting, key=_by_rank)

    def remove(self, waiting: Waiting) -> bool:
        """Take ``waiting`` out; return whether it was in there."""
        index = bisect_left(self._line, waiting.rank, key=_by_rank)
        if index == len(self._line) or self._line[index] is not waiting:
            return False
        del self._line[index]
        return True

    def last_refusable(self) -> Waiting | None:
        """Of those that may be refused, the one that stands last."""
        return next((waiting for waiting in reversed(self._line) if waiting.is_refusable), None)
