"""The router's one queue: requests wait here, by priority and fair share, until a policy finds them a rank."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import attrgetter
from typing import TypeAlias

from quartet.errors import PlaceTooLargeError, QueueFullError, ServingError, WorkerUnavailableError
from quartet.telemetry.routing_metrics import AdmissionOutcome, RoutingMetrics
from router.book import Reservation
from router.config import AdmissionConfig
from router.fair_share import FairShare
from router.kv_index.index import PrefixIndex, PromptMatches
from router.policy.base import Pending, Placement, Policy, Snapshot
from router.policy.room import with_way
from router.signing import Together
from router.workers import PoolKey, WorkerTable

#: As many requests at the head of the queue are assigned together; the rest would hardly find room anyway.
MAX_ASSIGNED_TOGETHER = 256

# Waits end late by this share of their limit at most, and never by more than that many seconds.
_LATENESS, _MAX_LOOK_INTERVAL_S = 0.1, 1.0

# Tokens pass the same event loop: where a long queue makes the policy take so long, it gets a fifth of the time.
_LONG_PUMP_S, _REST = 0.002, 4.0


class Admission:
    """Holds requests back until they fit, and no longer than allowed.

    All that arrive, or that became possible, within one turn of the event loop are assigned together. A full queue
    refuses whoever stands last: a tenant that floods is refused itself, and keeps nobody else out.
    """

    def __init__(
        self, table: WorkerTable, policy: Policy, config: AdmissionConfig, index: PrefixIndex, metrics: RoutingMetrics
    ) -> None:
        """Nobody waits yet; ``index`` knows what workers hold, and is told what they are sent."""
        self._table = table
        self._policy = policy
        self._config = config
        self._index = index
        self._metrics = metrics
        self._share = FairShare(config.tenant_weights)
        self._lines: defaultdict[PoolKey, WaitingLine] = defaultdict(WaitingLine)
        self._num_tickets = 0
        self._num_entries = 0
        self._length = 0
        self._look_interval_s = min(
            _MAX_LOOK_INTERVAL_S, min(config.queue_timeout_s, config.unavailable_timeout_s) * _LATENESS
        )
        self._look: asyncio.TimerHandle | None = None
        self._due_pump: asyncio.Handle | None = None
        self._next_pump: asyncio.TimerHandle | None = None
        self._rests_until = 0.0  # by the loop's clock

    @property
    def policy(self) -> Policy:
        """What chooses places."""
        return self._policy

    @property
    def length(self) -> int:
        """Choices that wait now. May be asked from any thread."""
        return self._length

    def ticket(
        self,
        pool: PoolKey,
        *,
        priority: int = 0,
        tenant: str = "",
        num_tokens: int = 1,
        num_choices: int = 1,
        deadline: float = float("inf"),
    ) -> Ticket:
        """Draw a rank in the queue, for ``num_choices`` choices of ``num_tokens`` tokens of work each."""
        self._num_tickets += 1
        return Ticket(
            pool=pool,
            tenant=tenant,
            priority=priority,
            start=self._share.start(tenant, num_tokens * num_choices),
            number=self._num_tickets,
            num_tokens=num_tokens,
            deadline=deadline,
        )

    def wake(self) -> None:
        """Something may have become possible: room, a worker, a report."""
        if self._due_pump is None and self._length:
            loop = asyncio.get_running_loop()
            rests = self._rests_until > loop.time()
            self._due_pump = loop.call_at(self._rests_until, self._pump) if rests else loop.call_soon(self._pump)

    def num_waiting(self, pool: PoolKey) -> int:
        """Choices that wait for a place of ``pool``."""
        return len(self._lines[pool]) if pool in self._lines else 0

    def preview(self, pool: PoolKey, pending: Pending) -> tuple[Pending, Snapshot]:
        """What the policy would be shown if ``pending`` waited; it does not."""
        now = time.monotonic()
        matches = PromptMatches(self._index, pending.sequence_hashes, self._table.block_size(pool, now))
        snapshot = self._table.snapshot(pool, now)
        return with_way(replace(pending, num_cached_tokens=matches), snapshot), snapshot

    async def admit(
        self, ticket: Ticket, pending: Pending, *, is_retry: bool = False, together: Together | None = None
    ) -> Reservation:
        """Wait for a rank; the caller must release the reservation. Leaves nothing behind when cancelled.

        One of several that are ``together`` does not wait while another one of them holds room.

        Raises:
            PlaceTooLargeError: it would.
            QueueFullError: the queue is full of others that come first, or no room came up in time.
            WorkerUnavailableError: no decode worker was ready for too long.
        """
        waiting = self._enqueue(ticket, pending, together, is_retry=is_retry)
        try:
            if self._length > self._config.max_queue_length and not is_retry:
                self._make_room(waiting)
            self.wake()
            return await waiting.placed
        except BaseException as error:
            # Placed in the very moment in which its wait ended otherwise.
            if waiting.placed.done() and not waiting.placed.cancelled() and waiting.placed.exception() is None:
                waiting.placed.result().release()
                self.wake()
            self._note_unserved(waiting, error)
            raise
        finally:
            self._leave(waiting)

    def _enqueue(self, ticket: Ticket, pending: Pending, together: Together | None, *, is_retry: bool) -> Waiting:
        loop, now = asyncio.get_running_loop(), time.monotonic()
        matches = PromptMatches(self._index, pending.sequence_hashes, self._table.block_size(ticket.pool, now))
        self._num_entries += 1
        waiting = Waiting(
            ticket=ticket,
            entry=self._num_entries,
            # Of several choices that go together none can wait for the best moment while others hold room.
            pending=replace(
                pending, num_cached_tokens=matches, binds_at_once=together is not None and not together.is_alone
            ),
            matches=matches,
            placed=loop.create_future(),
            since=now,
            ready_at=now,
            is_retry=is_retry,
            together=together,
        )
        self._lines[ticket.pool].add(waiting)
        self._length += 1
        if self._look is None:
            self._look = loop.call_later(self._look_interval_s, self._end_waits)
        return waiting

    def _make_room(self, newcomer: Waiting) -> None:
        """The queue is longer than it may be: unless some of it can be placed now, who stands last has to go."""
        if asyncio.get_running_loop().time() >= self._rests_until:
            self._pump()
        if self._length <= self._config.max_queue_length or newcomer.placed.done():
            return
        lasts = [line.last_refusable() for line in self._lines.values()]
        last = max((waiting for waiting in lasts if waiting is not None), key=lambda waiting: waiting.rank)
        self._take_out(last)
        last.placed.set_exception(self._refusal("the router's queue is full"))

    def _leave(self, waiting: Waiting) -> None:
        if self._take_out(waiting):
            # Its fence falls: others may fit now.
            self.wake()

    def _note_unserved(self, waiting: Waiting, error: BaseException) -> None:
        ticket = waiting.ticket
        if not waiting.is_retry:
            self._share.give_back(ticket.tenant, ticket.num_tokens)
        if isinstance(error, QueueFullError):
            is_late = time.monotonic() - waiting.since >= self._config.queue_timeout_s
            outcome = AdmissionOutcome.EXPIRED if is_late else AdmissionOutcome.REFUSED
        elif isinstance(error, WorkerUnavailableError):
            outcome = AdmissionOutcome.UNAVAILABLE
        elif isinstance(error, PlaceTooLargeError):
            outcome = AdmissionOutcome.REFUSED
        else:
            is_late = time.monotonic() >= ticket.deadline
            outcome = AdmissionOutcome.EXPIRED if is_late else AdmissionOutcome.CANCELLED
        self._metrics.count_admission(outcome)

    def _end_waits(self) -> None:
        """Look who has waited for too long. One look at all now and then costs less than a timer for each."""
        self._look, now = None, time.monotonic()
        for pool, line in self._lines.items():
            is_ready = self._table.has_ready_decode(pool, now)
            for waiting in line:
                if is_ready:
                    waiting.ready_at = now
                is_too_long = now - waiting.since >= self._config.queue_timeout_s
                is_too_long |= now - waiting.ready_at >= self._config.unavailable_timeout_s
                if is_too_long and not waiting.placed.done():
                    waiting.placed.set_exception(self._give_up_error(is_ready=is_ready))
        if self._length:
            self._look = asyncio.get_running_loop().call_later(self._look_interval_s, self._end_waits)

    def _give_up_error(self, *, is_ready: bool) -> ServingError:
        if is_ready:
            return self._refusal("no worker had room in time")
        message = "no decode worker of this model is ready"
        return WorkerUnavailableError(message, retry_delay_s=self._config.retry_delay_s)

    def _refusal(self, message: str) -> QueueFullError:
        return QueueFullError(message, retry_delay_s=self._config.retry_delay_s)

    def _pump(self) -> None:
        """Have the policy place whom it will, and look again when it says so."""
        for pump in (self._due_pump, self._next_pump):
            if pump is not None:
                pump.cancel()
        self._due_pump = self._next_pump = None
        loop, now = asyncio.get_running_loop(), time.monotonic()
        began_s = time.thread_time()  # what others took of the processor meanwhile is no reason to rest
        looks = [self._assign(pool, line, now) for pool, line in list(self._lines.items())]
        spent_s, ended = time.thread_time() - began_s, loop.time()
        self._rests_until = ended + _REST * spent_s if spent_s > _LONG_PUMP_S else 0.0
        look_in_s = min((look_s for look_s in looks if look_s is not None), default=None)
        if look_in_s is not None and self._length:
            self._next_pump = loop.call_at(max(ended + look_in_s, self._rests_until), self._pump)

    def _assign(self, pool: PoolKey, line: WaitingLine, now: float) -> float | None:
        """Place those of one pool; returns ``Decision.look_again_in_s``."""
        snapshot = self._table.snapshot(pool, now)
        adapters = frozenset[str]().union(*(candidate.adapters for candidate in snapshot.decode))
        head = line.head(MAX_ASSIGNED_TOGETHER, adapters)
        if not head:
            return None
        for waiting in head:
            waiting.matches.renew()
        decision = self._policy.assign([with_way(waiting.pending, snapshot) for waiting in head], snapshot)
        placed = list(zip(head, decision.placements, strict=True))
        # Those of which one has to wait.
        torn = {waiting.together for waiting, placement in placed if placement is None} - {None}
        for waiting, placement in placed:
            together = waiting.together
            if together in torn and together is not None and (placement is not None or together.holds_room):
                waiting.placed.set_exception(PlaceTooLargeError("there is no room for all choices at once"))
            elif placement is not None:
                self._place(waiting, placement, now)
                self._take_out(waiting)
        if len(head) == MAX_ASSIGNED_TOGETHER and None not in decision.placements:
            self.wake()  # there may be room for more
        return decision.look_again_in_s

    def _place(self, waiting: Waiting, placement: Placement, now: float) -> None:
        pending = waiting.pending
        reservation = self._table.book(placement, pending, waited_s=now - waiting.since)
        self._index.predict(placement.prefills_at, pending.sequence_hashes, now + self._config.prediction_life_s)
        self._share.served(waiting.ticket.start)
        self._metrics.count_admission(AdmissionOutcome.PLACED)
        self._metrics.count_matched_tokens(placement.num_cached_tokens)
        waiting.placed.set_result(reservation)
        if waiting.together is not None:
            waiting.together.booked(reservation)

    def _take_out(self, waiting: Waiting) -> bool:
        """Take ``waiting`` out of its line; return whether it was in there."""
        pool = waiting.ticket.pool
        line = self._lines.get(pool)
        if line is None or not line.remove(waiting):
            return False
        self._length -= 1
        if not line:
            del self._lines[pool]
        return True


# Who waits in the router's queue, and in what order.

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
