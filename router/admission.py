"""The router's one queue: requests wait here, in order of priority, until a policy finds them a place with room."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from quartet.errors import ConfigError, QueueFullError, ServingError, WorkerUnavailableError
from router.book import Reservation
from router.policy.base import Pending, Policy
from router.worker import PoolKey
from router.worker_table import WorkerTable

#: As many requests at the head of the queue are assigned together; the rest would hardly find room anyway.
MAX_ASSIGNED_TOGETHER = 256


@dataclass(frozen=True, kw_only=True)
class AdmissionConfig:
    """Bounds of the queue.

    Attributes:
        max_queue_length: choices that wait at most; more are refused at once. Retries always get in.
        queue_timeout_s: longest wait for room.
        unavailable_timeout_s: longest wait while no decode worker is ready at all.
        retry_delay_s: what refused clients are told to wait.
    """

    max_queue_length: int = 1024
    queue_timeout_s: float = 60.0
    unavailable_timeout_s: float = 10.0
    retry_delay_s: float = 1.0

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        if self.max_queue_length < 1:
            raise ConfigError("max_queue_length: must be at least 1")
        for name in ("queue_timeout_s", "unavailable_timeout_s", "retry_delay_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: must be above 0")


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """A request's standing in the queue; its retries keep it.

    Attributes:
        priority: higher first.
        number: arrival at this router; lower first among equals.
    """

    pool: PoolKey
    priority: int
    number: int


@dataclass(eq=False)
class _Waiting:
    rank: tuple[int, int, int]
    pending: Pending
    placed: asyncio.Future[Reservation]
    since: float


_by_rank: Callable[[_Waiting], tuple[int, int, int]] = attrgetter("rank")


class Admission:
    """Holds requests back until they fit, and no longer than allowed.

    All that arrive, or that became possible, within one turn of the event loop are assigned together.
    """

    def __init__(
        self,
        table: WorkerTable,
        policy: Policy,
        config: AdmissionConfig,
        *,
        on_length: Callable[[int], None] = lambda _length: None,
    ) -> None:
        """``on_length`` is told the queue's length whenever that may have changed."""
        self._table = table
        self._policy = policy
        self._config = config
        self._queues: defaultdict[PoolKey, list[_Waiting]] = defaultdict(list)
        self._num_tickets = 0
        self._num_entries = 0
        self._is_pump_due = False
        self._on_length = on_length

    @property
    def length(self) -> int:
        """Choices that wait now."""
        return sum(len(queue) for queue in self._queues.values())

    def ticket(self, pool: PoolKey, priority: int) -> Ticket:
        """Draw a place in the order of arrival."""
        self._num_tickets += 1
        return Ticket(pool=pool, priority=priority, number=self._num_tickets)

    def wake(self) -> None:
        """Something may have become possible: room, a worker, a report."""
        if not self._is_pump_due and any(self._queues.values()):
            self._is_pump_due = True
            asyncio.get_running_loop().call_soon(self._pump)

    async def admit(self, ticket: Ticket, pending: Pending, *, is_retry: bool = False) -> Reservation:
        """Wait for a place; the caller must release the reservation. Leaves nothing behind when cancelled.

        Raises:
            QueueFullError: the queue is full, or no room came up in time.
            WorkerUnavailableError: no decode worker was ready for too long.
        """
        if not is_retry and self.length >= self._config.max_queue_length:
            self._pump()
            if self.length >= self._config.max_queue_length:
                raise self._refusal("the router's queue is full")
        waiting = self._enqueue(ticket, pending)
        try:
            return await self._wait(ticket.pool, waiting)
        except BaseException:
            # Placed in the very moment in which its wait ended otherwise.
            if waiting.placed.done() and not waiting.placed.cancelled():
                waiting.placed.result().release()
                self.wake()
            raise
        finally:
            self._leave(ticket.pool, waiting)

    def _enqueue(self, ticket: Ticket, pending: Pending) -> _Waiting:
        self._num_entries += 1
        rank = (-ticket.priority, ticket.number, self._num_entries)
        waiting = _Waiting(rank, pending, asyncio.get_running_loop().create_future(), time.monotonic())
        insort(self._queues[ticket.pool], waiting, key=_by_rank)
        self._on_length(self.length)
        self.wake()
        return waiting

    def _leave(self, pool: PoolKey, waiting: _Waiting) -> None:
        queue = self._queues[pool]
        if _take_out(waiting, queue):
            self._on_length(self.length)
            # Its fence falls: others may fit now.
            self.wake()
        if not queue:
            del self._queues[pool]

    async def _wait(self, pool: PoolKey, waiting: _Waiting) -> Reservation:
        end = waiting.since + self._config.queue_timeout_s
        ready_at = waiting.since
        while not waiting.placed.done():
            now = time.monotonic()
            if self._table.has_ready_decode(pool, now):
                ready_at = now
            give_up_at = min(end, ready_at + self._config.unavailable_timeout_s)
            if now >= give_up_at:
                raise self._give_up_error(is_ready=now == ready_at)
            # Readiness changes without a word to this waiter: look again now and then.
            await asyncio.wait([waiting.placed], timeout=min(give_up_at - now, 1.0))
        return waiting.placed.result()

    def _give_up_error(self, *, is_ready: bool) -> ServingError:
        if is_ready:
            return self._refusal("no worker had room in time")
        message = "no decode worker of this model is ready"
        return WorkerUnavailableError(message, retry_delay_s=self._config.retry_delay_s)

    def _refusal(self, message: str) -> QueueFullError:
        return QueueFullError(message, retry_delay_s=self._config.retry_delay_s)

    def _pump(self) -> None:
        self._is_pump_due = False
        now = time.monotonic()
        for pool, queue in list(self._queues.items()):
            head = [waiting for waiting in queue[:MAX_ASSIGNED_TOGETHER] if not waiting.placed.done()]
            placements = self._policy.assign([waiting.pending for waiting in head], self._table.snapshot(pool, now))
            for waiting, placement in zip(head, placements, strict=True):
                if placement is not None:
                    waited_s = now - waiting.since
                    waiting.placed.set_result(self._table.book(placement, waiting.pending, waited_s=waited_s))
                    _take_out(waiting, queue)
        self._on_length(self.length)


def _take_out(waiting: _Waiting, queue: list[_Waiting]) -> bool:
    """Take ``waiting`` out of the sorted ``queue``; return whether it was in there."""
    index = bisect_left(queue, waiting.rank, key=_by_rank)
    if index == len(queue) or queue[index] is not waiting:
        return False
    del queue[index]
    return True
