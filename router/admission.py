"""The router's one queue: requests wait here, in order of priority, until a policy finds them a place with room."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from quartet.errors import ConfigError, PlaceTooLargeError, QueueFullError, ServingError, WorkerUnavailableError
from router.book import Reservation
from router.policy.base import Pending, Placement, Policy
from router.together import Together
from router.worker import PoolKey
from router.worker_table import WorkerTable

#: As many requests at the head of the queue are assigned together; the rest would hardly find room anyway.
MAX_ASSIGNED_TOGETHER = 256

# Waits end late by this share of their limit at most, and never by more than that many seconds.
_LATENESS, _MAX_LOOK_INTERVAL_S = 0.1, 1.0


@dataclass(frozen=True, kw_only=True)
class AdmissionConfig:
    """Bounds of the queue.

    Attributes:
        max_queue_length: choices that wait at most; more are refused at once. A router's own retries always get in.
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
    ready_at: float  # when a decode worker was last seen to be ready
    together: Together | None


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
    ) -> None:
        """Nobody waits yet."""
        self._table = table
        self._policy = policy
        self._config = config
        self._queues: defaultdict[PoolKey, list[_Waiting]] = defaultdict(list)
        self._num_tickets = 0
        self._num_entries = 0
        self._is_pump_due = False
        self._length = 0
        self._look_interval_s = min(
            _MAX_LOOK_INTERVAL_S, min(config.queue_timeout_s, config.unavailable_timeout_s) * _LATENESS
        )
        self._look: asyncio.TimerHandle | None = None

    @property
    def length(self) -> int:
        """Choices that wait now. May be asked from any thread."""
        return self._length

    def ticket(self, pool: PoolKey, priority: int) -> Ticket:
        """Draw a place in the order of arrival."""
        self._num_tickets += 1
        return Ticket(pool=pool, priority=priority, number=self._num_tickets)

    def wake(self) -> None:
        """Something may have become possible: room, a worker, a report."""
        if not self._is_pump_due and any(self._queues.values()):
            self._is_pump_due = True
            asyncio.get_running_loop().call_soon(self._pump)

    async def admit(
        self, ticket: Ticket, pending: Pending, *, is_retry: bool = False, together: Together | None = None
    ) -> Reservation:
        """Wait for a place; the caller must release the reservation. Leaves nothing behind when cancelled.

        One of several that are ``together`` does not wait while another one of them holds room.

        Raises:
            PlaceTooLargeError: it would.
            QueueFullError: the queue is full, or no room came up in time.
            WorkerUnavailableError: no decode worker was ready for too long.
        """
        if not is_retry and self.length >= self._config.max_queue_length:
            self._pump()
            if self.length >= self._config.max_queue_length:
                raise self._refusal("the router's queue is full")
        waiting = self._enqueue(ticket, pending, together)
        try:
            return await waiting.placed
        except BaseException:
            # Placed in the very moment in which its wait ended otherwise.
            if waiting.placed.done() and not waiting.placed.cancelled() and waiting.placed.exception() is None:
                waiting.placed.result().release()
                self.wake()
            raise
        finally:
            self._leave(ticket.pool, waiting)

    def _enqueue(self, ticket: Ticket, pending: Pending, together: Together | None) -> _Waiting:
        self._num_entries += 1
        rank = (-ticket.priority, ticket.number, self._num_entries)
        loop, now = asyncio.get_running_loop(), time.monotonic()
        waiting = _Waiting(rank, pending, loop.create_future(), now, now, together)
        insort(self._queues[ticket.pool], waiting, key=_by_rank)
        self._length += 1
        if self._look is None:
            self._look = loop.call_later(self._look_interval_s, self._end_waits)
        self.wake()
        return waiting

    def _leave(self, pool: PoolKey, waiting: _Waiting) -> None:
        queue = self._queues[pool]
        if self._take_out(waiting, queue):
            # Its fence falls: others may fit now.
            self.wake()
        if not queue:
            del self._queues[pool]

    def _end_waits(self) -> None:
        """Look who has waited for too long. One look at all now and then costs less than a timer for each."""
        self._look, now = None, time.monotonic()
        for pool, queue in self._queues.items():
            is_ready = self._table.has_ready_decode(pool, now)
            for waiting in queue:
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
        self._is_pump_due = False
        now = time.monotonic()
        for pool, queue in list(self._queues.items()):
            head = [waiting for waiting in queue[:MAX_ASSIGNED_TOGETHER] if not waiting.placed.done()]
            decision = self._policy.assign([waiting.pending for waiting in head], self._table.snapshot(pool, now))
            placed = list(zip(head, decision.placements, strict=True))
            # Those of which one has to wait.
            torn = {waiting.together for waiting, placement in placed if placement is None} - {None}
            for waiting, placement in placed:
                together = waiting.together
                if together in torn and together is not None and (placement is not None or together.holds_room):
                    waiting.placed.set_exception(PlaceTooLargeError("there is no room for all choices at once"))
                elif placement is not None:
                    self._place(waiting, placement, now)
                    self._take_out(waiting, queue)

    def _place(self, waiting: _Waiting, placement: Placement, now: float) -> None:
        reservation = self._table.book(placement, waiting.pending, waited_s=now - waiting.since)
        waiting.placed.set_result(reservation)
        if waiting.together is not None:
            waiting.together.booked(reservation)

    def _take_out(self, waiting: _Waiting, queue: list[_Waiting]) -> bool:
        """Take ``waiting`` out of the sorted ``queue``; return whether it was in there."""
        index = bisect_left(queue, waiting.rank, key=_by_rank)
        if index == len(queue) or queue[index] is not waiting:
            return False
        del queue[index]
        self._length -= 1
        return True
