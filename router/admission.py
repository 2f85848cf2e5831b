"""The router's one queue: requests wait here, by priority and fair share, until the policy assigns them a placement."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TypeAlias

from quartet.errors import PlaceTooLargeError, QueueFullError, ServingError, WorkerUnavailableError
from quartet.streams.wakeable import result_if_done
from quartet.telemetry.metrics import AdmissionOutcome, RouterMetrics
from router.book import Reservation
from router.config import AdmissionConfig
from router.kv_index.index import PrefixIndex, PromptMatches
from router.policy.base import Candidate, Pending, Placement, Policy, Snapshot
from router.policy.room import with_way
from router.signing import Gang
from router.workers import PoolKey, WorkerTable

#: The policy sees at most this many requests from the head of the queue: those behind would hardly find room.
MAX_ASSIGNED_TOGETHER = 256

# A wait that reached its limit ends late by at most this share of the limit, and by at most this many seconds.
_LATENESS, _MAX_POLL_INTERVAL_S = 0.1, 1.0

# The policy and the tokens share one event loop. A policy that computes longer than this gets a fifth of the time: it
# rests four times as long after each run.
_LONG_PUMP_S, _REST = 0.002, 4.0

# Above this many tenants, forget those whose next request would begin at the present anyway.
_MAX_TENANTS = 4096


class Admission:
    """Holds requests back until they fit, but no longer than allowed.

    The policy assigns together all requests that arrive, or become possible, within one turn of the event loop. A full
    queue refuses its last request, so a tenant that floods it refuses its own requests and keeps no other tenant out.
    """

    def __init__(
        self, table: WorkerTable, policy: Policy, config: AdmissionConfig, index: PrefixIndex, metrics: RouterMetrics
    ) -> None:
        """Start with an empty queue; ``index`` knows the workers' cached blocks and learns which requests they get."""
        self._table = table
        self._policy = policy
        self._config = config
        self._index = index
        self._metrics = metrics
        self._share = FairShare(config.tenant_weights)
        self._queues: defaultdict[PoolKey, RequestQueue] = defaultdict(RequestQueue)
        self._num_standings = 0
        self._num_entries = 0
        self._length = 0
        self._poll_interval_s = min(
            _MAX_POLL_INTERVAL_S, min(config.queue_timeout_s, config.unavailable_timeout_s) * _LATENESS
        )
        self._poll: asyncio.TimerHandle | None = None
        self._due_pump: asyncio.Handle | None = None
        self._next_pump: asyncio.TimerHandle | None = None
        self._rests_until = 0.0  # by the loop's clock

    @property
    def policy(self) -> Policy:
        """The policy that assigns placements."""
        return self._policy

    @property
    def length(self) -> int:
        """Choices that wait now. Any thread may read it."""
        return self._length

    def standing(
        self,
        pool: PoolKey,
        *,
        priority: int = 0,
        tenant: str = "",
        num_tokens: int = 1,
        num_choices: int = 1,
        deadline: float = float("inf"),
    ) -> Standing:
        """A new request's standing in the queue, for ``num_choices`` choices of ``num_tokens`` tokens of work each."""
        self._num_standings += 1
        return Standing(
            pool=pool,
            tenant=tenant,
            priority=priority,
            start=self._share.start(tenant, num_tokens * num_choices),
            number=self._num_standings,
            num_tokens=num_tokens,
            deadline=deadline,
        )

    def wake(self) -> None:
        """Run the policy soon: room, a worker or a report may have made a placement possible."""
        if self._due_pump is None and self._length:
            loop = asyncio.get_running_loop()
            rests = self._rests_until > loop.time()
            self._due_pump = loop.call_at(self._rests_until, self._pump) if rests else loop.call_soon(self._pump)

    def num_waiting(self, pool: PoolKey) -> int:
        """Choices that wait for a worker of ``pool``."""
        return len(self._queues[pool]) if pool in self._queues else 0

    def preview(self, queued: QueuedRequest) -> tuple[Pending, Snapshot]:
        """The input that the policy would get if ``queued`` waited; ``queued`` stays out of the queue."""
        now = time.monotonic()
        self._look_up(queued, now)
        snapshot = self._table.snapshot(queued.standing.pool, now)
        return with_way(queued, snapshot), snapshot

    async def admit(self, queued: QueuedRequest) -> Reservation:
        """Wait for a placement; the caller must release the reservation. Leaves nothing behind when cancelled.

        A member of a gang does not wait while another member holds room.

        Raises:
            PlaceTooLargeError: it would have to wait while another member holds room.
            QueueFullError: the queue is full of requests that come first, or no room came up in time.
            WorkerUnavailableError: no decode worker was ready for too long.
        """
        self._enqueue(queued)
        placed = queued.placed
        try:
            if self._length > self._config.max_queue_length and not queued.is_retry:
                self._make_room(queued)
            self.wake()
            return await placed
        except BaseException as error:
            # The policy may have placed the request at the moment when its wait ended for another reason.
            if (reservation := result_if_done(placed)) is not None:
                reservation.release()
                self.wake()
            self._note_unserved(queued, error)
            raise
        finally:
            if self._take_out(queued):
                # A backfill reservation made for it ends, so other requests may fit now.
                self.wake()

    def _enqueue(self, queued: QueuedRequest) -> None:
        loop, now = asyncio.get_running_loop(), time.monotonic()
        self._look_up(queued, now)
        # The policy can't keep a choice of a gang for the best moment while other members hold room.
        queued.binds_at_once = queued.gang is not None and not queued.gang.is_alone
        self._num_entries += 1
        standing = queued.standing
        queued.position = (-standing.priority, standing.start, standing.number, self._num_entries)
        queued.placed = loop.create_future()
        queued.since = queued.ready_at = now
        self._queues[standing.pool].add(queued)
        self._length += 1
        if self._poll is None:
            self._poll = loop.call_later(self._poll_interval_s, self._end_waits)

    def _look_up(self, queued: QueuedRequest, now: float) -> None:
        block_size = self._table.block_size(queued.standing.pool, now)
        queued.num_cached_tokens = queued.matches = PromptMatches(self._index, queued.sequence_hashes, block_size)

    def _make_room(self, newcomer: QueuedRequest) -> None:
        """Shorten a queue that is too long: place what can be placed now, else refuse the last request."""
        if asyncio.get_running_loop().time() >= self._rests_until:
            self._pump()
        if self._length <= self._config.max_queue_length or newcomer.placed.done():
            return
        lasts = [queue.last_refusable() for queue in self._queues.values()]
        last = max((queued for queued in lasts if queued is not None), key=_by_position)
        self._take_out(last)
        last.placed.set_exception(self._refusal("the router's queue is full"))

    def _note_unserved(self, queued: QueuedRequest, error: BaseException) -> None:
        standing = queued.standing
        if not queued.is_retry:
            self._share.give_back(standing.tenant, standing.num_tokens)
        if isinstance(error, QueueFullError):
            is_late = time.monotonic() - queued.since >= self._config.queue_timeout_s
            outcome = AdmissionOutcome.EXPIRED if is_late else AdmissionOutcome.REFUSED
        elif isinstance(error, WorkerUnavailableError):
            outcome = AdmissionOutcome.UNAVAILABLE
        elif isinstance(error, PlaceTooLargeError):
            outcome = AdmissionOutcome.REFUSED
        else:
            is_late = time.monotonic() >= standing.deadline
            outcome = AdmissionOutcome.EXPIRED if is_late else AdmissionOutcome.CANCELLED
        self._metrics.admissions.labels(outcome).inc()

    def _end_waits(self) -> None:
        """End the waits that took too long. Polling all requests sometimes costs less than a timer for each."""
        self._poll, now = None, time.monotonic()
        for pool, queue in self._queues.items():
            is_ready = self._table.has_ready_decode(pool, now)
            for queued in queue:
                if is_ready:
                    queued.ready_at = now
                is_too_long = now - queued.since >= self._config.queue_timeout_s
                is_too_long |= now - queued.ready_at >= self._config.unavailable_timeout_s
                if is_too_long and not queued.placed.done():
                    queued.placed.set_exception(self._give_up_error(is_ready=is_ready))
        if self._length:
            self._poll = asyncio.get_running_loop().call_later(self._poll_interval_s, self._end_waits)

    def _give_up_error(self, *, is_ready: bool) -> ServingError:
        if is_ready:
            return self._refusal("no worker had room in time")
        message = "no decode worker of this model is ready"
        return WorkerUnavailableError(message, retry_delay_s=self._config.retry_delay_s)

    def _refusal(self, message: str) -> QueueFullError:
        return QueueFullError(message, retry_delay_s=self._config.retry_delay_s)

    def _pump(self) -> None:
        """Let the policy assign requests, and run it again when it asks for that."""
        for pump in (self._due_pump, self._next_pump):
            if pump is not None:
                pump.cancel()
        self._due_pump = self._next_pump = None
        loop, now = asyncio.get_running_loop(), time.monotonic()
        began_s = time.thread_time()  # thread time: CPU time that other threads took is no reason to rest
        again_s: list[float] = []
        for pool, queue in list(self._queues.items()):
            if (after_s := self._assign(pool, queue, now)) is not None:
                again_s.append(after_s)
        # Asking for thread time is a system call, and it is never more than the time that passed.
        is_long, ended = time.monotonic() - now > _LONG_PUMP_S, loop.time()
        spent_s = time.thread_time() - began_s if is_long else 0.0
        self._rests_until = ended + _REST * spent_s if spent_s > _LONG_PUMP_S else 0.0
        if again_s and self._length:
            self._next_pump = loop.call_at(max(ended + min(again_s), self._rests_until), self._pump)

    def _assign(self, pool: PoolKey, queue: RequestQueue, now: float) -> float | None:
        """Place requests of one pool; returns ``Decision.poll_again_in_s``."""
        snapshot = self._table.snapshot(pool, now)
        head = queue.head(MAX_ASSIGNED_TOGETHER, snapshot.decode)
        if not head:
            return None
        waiting: list[Pending] = []
        for queued in head:
            queued.matches.renew()
            waiting.append(with_way(queued, snapshot))
        decision = self._policy.assign(waiting, snapshot)
        placed = list(zip(head, decision.placements, strict=True))
        # Gangs with a member that must wait.
        torn = {queued.gang for queued, placement in placed if placement is None and queued.gang is not None}
        for queued, placement in placed:
            gang = queued.gang
            if gang is not None and gang in torn and (placement is not None or gang.holds_room):
                queued.placed.set_exception(PlaceTooLargeError("there is no room for all choices at once"))
            elif placement is not None:
                self._commit(queued, placement, now)
                self._take_out(queued)
        if len(head) == MAX_ASSIGNED_TOGETHER and None not in decision.placements:
            self.wake()  # there may be room for more
        return decision.poll_again_in_s

    def _commit(self, queued: QueuedRequest, placement: Placement, now: float) -> None:
        reservation = self._table.reserve(placement, queued, waited_s=now - queued.since)
        self._index.predict(placement.prefills_at, queued.sequence_hashes, now + self._config.prediction_life_s)
        self._share.served(queued.standing.start)
        self._metrics.admissions.labels(AdmissionOutcome.PLACED).inc()
        self._metrics.matched_tokens.inc(placement.num_cached_tokens)
        queued.placed.set_result(reservation)
        if queued.gang is not None:
            queued.gang.booked(reservation)

    def _take_out(self, queued: QueuedRequest) -> bool:
        """Take ``queued`` out of its queue; return whether it was in there."""
        pool = queued.standing.pool
        queue = self._queues.get(pool)
        if queue is None or not queue.remove(queued):
            return False
        self._length -= 1
        if not queue:
            del self._queues[pool]
        return True


@dataclass(slots=True, kw_only=True)
class Standing:
    """A request's standing in the queue; all its choices and their retries share it.

    Not frozen: each request makes one, and freezing triples its price.

    Attributes:
        tenant: the tenant that the request is accounted to.
        priority: higher first.
        start: among equals, lower first (see ``FairShare``).
        number: arrival at this router; lower first among those that start together.
        num_tokens: tokens of work in each of its choices.
        deadline: when the request ends at the latest, in monotonic seconds.
    """

    pool: PoolKey
    tenant: str = ""
    priority: int = 0
    start: float = 0.0
    number: int = 0
    num_tokens: int = 1
    deadline: float = float("inf")


#: Orders a queue; lower comes first. Priority, start, number of the request, and number of the entry.
QueuePosition: TypeAlias = tuple[int, float, int, int]


@dataclass(eq=False, kw_only=True)
class QueuedRequest(Pending):
    """One choice on its way through the queue: what the policy sees of it, and how it waits.

    ``Admission`` sets ``num_cached_tokens``, ``binds_at_once`` and the fields without a default here.

    Attributes:
        is_retry: an attempt was made before, so a full queue never refuses it.
        gang: choices that get room together or are all refused; ``None``: the choice gets room alone.
        matches: the same object as ``num_cached_tokens``.
        placed: the result of its wait, or its error.
        since: when it arrived, in monotonic seconds.
        ready_at: when a decode worker was last ready, in monotonic seconds.
        position: its position in the queue.
    """

    standing: Standing
    is_retry: bool = False
    gang: Gang | None = None
    matches: PromptMatches = field(init=False, repr=False)
    placed: asyncio.Future[Reservation] = field(init=False, repr=False)
    since: float = field(init=False, repr=False)
    ready_at: float = field(init=False, repr=False)
    position: QueuePosition = field(init=False, repr=False)


_by_position: Callable[[QueuedRequest], QueuePosition] = attrgetter("position")


class RequestQueue:
    """The requests that wait for one pool, in the order of their positions."""

    def __init__(self) -> None:
        self._queue: list[QueuedRequest] = []

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[QueuedRequest]:
        return iter(self._queue)

    def head(self, length: int, decode: Sequence[Candidate]) -> list[QueuedRequest]:
        """The first ``length`` requests that still wait and whose adapter at least one of ``decode`` serves."""
        adapters: frozenset[str] | None = None
        found: list[QueuedRequest] = []
        for queued in self._queue:
            if queued.placed.done():
                continue
            if queued.adapter:
                if adapters is None:
                    adapters = frozenset[str]().union(*(worker.adapters for worker in decode))
                if queued.adapter not in adapters:
                    continue
            found.append(queued)
            if len(found) == length:
                break
        return found

    def add(self, queued: QueuedRequest) -> None:
        """Insert ``queued`` at its position."""
        insort(self._queue, queued, key=_by_position)

    def remove(self, queued: QueuedRequest) -> bool:
        """Take ``queued`` out; return whether it was in there."""
        index = bisect_left(self._queue, queued.position, key=_by_position)
        if index == len(self._queue) or self._queue[index] is not queued:
            return False
        del self._queue[index]
        return True

    def last_refusable(self) -> QueuedRequest | None:
        """The last request that may be refused to make room: one that still waits and is not a retry."""
        return next((queued for queued in reversed(self._queue) if not (queued.is_retry or queued.placed.done())), None)


class FairShare:
    """Which tenant comes first: start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996), in tokens.

    It is a clock that counts work, not time.

    Each request gets a start on it: the present, or the end of its tenant's last request if that is later. Serving
    requests in the order of their starts gives each busy tenant a share of the work: its weight over the weights of all
    busy tenants. A tenant alone gets everything, and an idle tenant saves nothing up.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        """Tenants without an entry in ``weights`` weigh 1."""
        self._weights = weights
        self._now = 0.0
        self._ends: dict[str, float] = {}
        self._max_ends = _MAX_TENANTS

    def start(self, tenant: str, num_tokens: int) -> float:
        """The start of a request of ``num_tokens`` tokens."""
        start = max(self._now, self._ends.get(tenant, 0.0))
        self._ends[tenant] = start + num_tokens / self._weights.get(tenant, 1.0)
        if len(self._ends) > self._max_ends:
            self._ends = {name: end for name, end in self._ends.items() if end > self._now}
            self._max_ends = max(_MAX_TENANTS, 2 * len(self._ends))
        return start

    def served(self, start: float) -> None:
        """A request with that start is served, so the present moves at least to it."""
        self._now = max(self._now, start)

    def give_back(self, tenant: str, num_tokens: int) -> None:
        """``num_tokens`` of the tenant's tokens will not be served."""
        if tenant in self._ends:
            self._ends[tenant] = max(self._now, self._ends[tenant] - num_tokens / self._weights.get(tenant, 1.0))
