"""The router's queue: choices wait here, by fair share and priority, until the policy assigns them a placement."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from quartet.api.reuse import ExpectedReuse
from quartet.discovery.base import Rank
from quartet.errors import PlaceTooLargeError, QueueFullError, ServingError, WorkerUnavailableError
from quartet.streams.wakeable import result_if_done
from quartet.supervision import vital
from quartet.telemetry.metrics import AdmissionOutcome, RouterMetrics
from router.book import Reservation
from router.config import AdmissionConfig
from router.fair_queue import FIXED_TOKENS, FairQueue, FairShare, Lane, Position, Standing
from router.kv_index.index import LowerMatches, PrefixIndex, PromptMatches
from router.policy.base import Pending, Placement, Policy, Snapshot
from router.policy.room import with_way
from router.prompt_memory import HeldPrompt
from router.signing import Gang
from router.tenants import Tenants
from router.workers import PoolKey

#: The policy sees at most this many requests from the head of the queue: those behind would hardly find room.
MAX_ASSIGNED_TOGETHER = 256

# A wait that reached its limit ends late by at most this share of the limit, and by at most this many seconds.
_LATENESS, _MAX_POLL_INTERVAL_S = 0.1, 1.0

# The policy and the tokens share one event loop. A policy that computes longer than this twice in a row gets a fifth of
# the time: it rests four times as long after each run. Once may be the garbage collector's doing.
_LONG_PUMP_S, _REST = 0.002, 4.0

# Priorities of one tenant that the policy tells apart, from the highest on; it may compute once for each.
_MAX_LEVELS = 8


class RankTable(Protocol):
    """What the queue needs of workers; ``WorkerTable`` has it."""

    def snapshot(self, pool: PoolKey, now: float) -> Snapshot:
        """The ranks of ``pool`` that take requests now."""
        ...

    def block_size(self, pool: PoolKey, now: float) -> int:
        """Tokens of a block of ``pool``; 0: it has none."""
        ...

    def has_ready_decode(self, pool: PoolKey, now: float) -> bool:
        """Whether anything of ``pool`` takes requests."""
        ...

    def is_of(self, rank: Rank, pool: PoolKey) -> bool:
        """Whether ``rank`` is of a worker of ``pool``."""
        ...

    def reserve(self, placement: Placement, pending: Pending, *, waited_s: float = 0.0) -> Reservation:
        """Reserve the room for ``placement``, which comes from a snapshot of this moment."""
        ...


class Admission:
    """Holds choices back until they fit, but no longer than allowed.

    The policy assigns together all choices that arrive, or become possible, within one turn of the event loop; it never
    runs twice in one turn. A full queue refuses the last request of the tenant that fills it, so a tenant that floods
    the queue refuses its own requests and keeps no other tenant out. Priorities order only a tenant's own requests.

    Attributes:
        share: the tenants' shares of the work.
    """

    def __init__(
        self,
        table: RankTable,
        policy: Policy,
        config: AdmissionConfig,
        index: PrefixIndex,
        metrics: RouterMetrics,
        tenants: Tenants | None = None,
        *,
        share: FairShare | None = None,
    ) -> None:
        """Start with an empty queue.

        ``index`` knows the workers' cached blocks and learns which requests they get; ``tenants`` have the weights.
        ``share`` is that of another queue, in which tenants pay for this one too; ``None``: this queue has its own.
        """
        self._table = table
        self._policy = policy
        self._config = config
        self._index = index
        self._metrics = metrics
        self.share = share or FairShare(tenants, num_fixed_tokens=FIXED_TOKENS)
        self._queue: FairQueue[QueuedRequest] = FairQueue(self.share)
        self._num_standings = 0
        self._num_coming = 0  # choices of admitted requests that have still to be queued
        # Before the policy runs again, so many may come on top of those that may stay: it may place as many at once.
        self._most = config.max_queue_length + MAX_ASSIGNED_TOGETHER
        self._poll_interval_s = min(
            _MAX_POLL_INTERVAL_S, min(config.queue_timeout_s, config.unavailable_timeout_s) * _LATENESS
        )
        self._poll: asyncio.TimerHandle | None = None
        self._due_pump: asyncio.Handle | None = None
        self._next_pump: asyncio.TimerHandle | None = None
        self._rests_until = 0.0  # by the loop's clock
        self._last_spent_s = 0.0  # by the last run of the policy, if that was long

    @property
    def policy(self) -> Policy:
        """The policy that assigns placements."""
        return self._policy

    @property
    def length(self) -> int:
        """Choices that wait now. Any thread may read it."""
        return len(self._queue) + self._num_coming

    @property
    def usage(self) -> float:
        """The share of ``max_queue_length`` that is taken; retries take nothing of it. Any thread may read it."""
        return self._queue.num_new / self._config.max_queue_length

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
        """Admit a request to the queue as one unit: ``num_choices`` choices of ``num_tokens`` tokens of work each.

        Several choices count as queued from now on: the caller calls ``leave`` when none of them can come any more.

        Raises:
            QueueFullError: the queue has no room for all of them.
        """
        self._num_standings += 1
        standing = Standing(
            pool=pool,
            tenant=tenant,
            priority=priority,
            number=self._num_standings,
            num_tokens=num_tokens,
            deadline=deadline,
        )
        if num_choices > 1:
            if not self._shorten(self._most, standing, num_choices):
                self._metrics.admissions.labels(AdmissionOutcome.REFUSED).inc(num_choices)
                raise self._full_error()
            self._expect(standing, num_choices)
        return standing

    def leave(self, standing: Standing) -> None:
        """No choice of this request will be queued any more, other than those that were. May be called again."""
        if standing.num_coming:
            self._expect(standing, -standing.num_coming)

    def charge(self, standing: Standing, num_tokens: int) -> None:
        """A choice of the request, once placed, takes ``num_tokens`` more than was charged so far; less if negative."""
        self.share.charge(standing.tenant, num_tokens)

    def wake(self) -> None:
        """Run the policy soon: room, a worker or a report may have made a placement possible."""
        if self._due_pump is None and self._queue:
            loop = asyncio.get_running_loop()
            rests = self._rests_until > loop.time()
            self._due_pump = loop.call_at(self._rests_until, self._pump) if rests else loop.call_soon(self._pump)

    def num_waiting(self, pool: PoolKey) -> int:
        """Choices that wait for a worker of ``pool``. Any thread may ask."""
        return self._queue.num_waiting(pool)

    def waiting_adapters(self) -> set[str]:
        """The adapters that waiting choices need. Any thread may ask."""
        return self._queue.adapters()

    def preview(self, queued: QueuedRequest) -> tuple[Pending, Snapshot]:
        """The input that the policy would get if ``queued`` waited; ``queued`` stays out of the queue."""
        now = time.monotonic()
        self._look_up(queued, now)
        snapshot = self._table.snapshot(queued.standing.pool, now)
        return with_way(queued, snapshot), snapshot

    def expected_reuse(self, queued: QueuedRequest, num_matched_tokens: int, now: float) -> ExpectedReuse:
        """What is known of its cached tokens, if so many match where it goes."""
        pool = queued.standing.pool
        block_size = self._table.block_size(pool, now)
        num_most_tokens = (queued.num_tokens - 1) // block_size * block_size if block_size else 0
        num_held_tokens = num_foreign_tokens = 0
        for rank, num_tokens in queued.matches.items():  # those that have most first
            if self._table.is_of(rank, pool):
                num_held_tokens = num_tokens
                break
            num_foreign_tokens = max(num_foreign_tokens, num_tokens)
        # The last token is always computed.
        num_held_tokens = min(max(num_held_tokens, num_matched_tokens), num_most_tokens)
        return ExpectedReuse(
            num_held_tokens=num_held_tokens,
            num_matched_tokens=min(num_matched_tokens, num_most_tokens),
            num_foreign_tokens=max(min(num_foreign_tokens, num_most_tokens) - num_held_tokens, 0),
        )

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
            if self._queue.num_new > self._config.max_queue_length and not queued.is_retry:
                self._bound()
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
            if self._queue.remove(queued):
                # A backfill reservation made for it ends, so other requests may fit now.
                self.wake()

    def _enqueue(self, queued: QueuedRequest) -> None:
        loop, now = asyncio.get_running_loop(), time.monotonic()
        self._look_up(queued, now)
        # The policy can't keep a choice of a gang for the best moment while other members hold room.
        queued.binds_at_once = queued.gang is not None and not queued.gang.is_alone
        queued.placed = loop.create_future()
        queued.since = queued.ready_at = now
        self._queue.add(queued)
        standing = queued.standing
        if standing.num_coming and not queued.is_retry:
            self._expect(standing, -1)
        if self._poll is None:
            self._poll = loop.call_later(self._poll_interval_s, self._end_waits)

    def _look_up(self, queued: QueuedRequest, now: float) -> None:
        block_size = self._table.block_size(queued.standing.pool, now)
        queued.num_cached_tokens = queued.matches = PromptMatches(self._index, queued.sequence_hashes, block_size)
        queued.lower_tokens = LowerMatches(queued.matches)

    def _expect(self, standing: Standing, num_choices: int) -> None:
        standing.num_coming += num_choices
        self._num_coming += num_choices
        self._queue.expect(standing, num_choices)

    def _bound(self) -> None:
        """There are too many: refuse the last ones, unless the policy, which runs soon, may place enough of them."""
        rests = asyncio.get_running_loop().time() < self._rests_until
        self._shorten(self._config.max_queue_length if rests else self._most)

    def _shorten(self, max_length: int, newcomer: Standing | None = None, num_choices: int = 0) -> bool:
        return self._queue.shorten(max_length, self._full_error, newcomer, num_choices)

    def _note_unserved(self, queued: QueuedRequest, error: BaseException) -> None:
        if isinstance(error, QueueFullError):
            is_late = time.monotonic() - queued.since >= self._config.queue_timeout_s
            outcome = AdmissionOutcome.EXPIRED if is_late else AdmissionOutcome.REFUSED
        elif isinstance(error, WorkerUnavailableError):
            outcome = AdmissionOutcome.UNAVAILABLE
        elif isinstance(error, PlaceTooLargeError) or (queued.held is not None and queued.held.is_refused):
            outcome = AdmissionOutcome.REFUSED
        else:
            is_late = time.monotonic() >= queued.standing.deadline
            outcome = AdmissionOutcome.EXPIRED if is_late else AdmissionOutcome.CANCELLED
        self._metrics.admissions.labels(outcome).inc()

    @vital
    def _end_waits(self) -> None:
        """End the waits that took too long. Polling all requests sometimes costs less than a timer for each."""
        self._poll, now = None, time.monotonic()
        is_ready = {pool: self._table.has_ready_decode(pool, now) for pool in self._queue.pools()}
        for queued in self._queue:
            can_run = is_ready[queued.standing.pool]
            if can_run:
                queued.ready_at = now
            is_too_long = now - queued.since >= self._config.queue_timeout_s
            is_too_long |= now - queued.ready_at >= self._config.unavailable_timeout_s
            if is_too_long and not queued.placed.done():
                queued.placed.set_exception(self._give_up_error(is_ready=can_run))
        if self._queue:
            self._poll = asyncio.get_running_loop().call_later(self._poll_interval_s, self._end_waits)

    def _give_up_error(self, *, is_ready: bool) -> ServingError:
        if is_ready:
            return self._refusal("no worker had room in time")
        message = "no decode worker of this model is ready"
        return WorkerUnavailableError(message, retry_delay_s=self._config.retry_delay_s)

    def _full_error(self) -> QueueFullError:
        return self._refusal("the router's queue is full")

    def _refusal(self, message: str) -> QueueFullError:
        return QueueFullError(message, retry_delay_s=self._config.retry_delay_s)

    @vital
    def _pump(self) -> None:
        """Let the policy assign requests, and run it again when it asks for that."""
        for pump in (self._due_pump, self._next_pump):
            if pump is not None:
                pump.cancel()
        self._due_pump = self._next_pump = None
        loop, now = asyncio.get_running_loop(), time.monotonic()
        began_s = time.thread_time()  # thread time: CPU time that other threads took is no reason to rest
        again_s: list[float] = []
        for pool in self._queue.pools():
            if (after_s := self._assign(pool, now)) is not None:
                again_s.append(after_s)
        if self._due_pump is None and self._queue.num_new > self._config.max_queue_length:
            # A pump that is due may place more of them.
            self._shorten(self._config.max_queue_length)
        # Asking for thread time is a system call, and it is never more than the time that passed.
        is_long, ended = time.monotonic() - now > _LONG_PUMP_S, loop.time()
        spent_s = time.thread_time() - began_s if is_long else 0.0
        usual_s, self._last_spent_s = min(spent_s, self._last_spent_s), spent_s
        self._rests_until = ended + _REST * usual_s if usual_s > _LONG_PUMP_S else 0.0
        if again_s and self._queue:
            self._next_pump = loop.call_at(max(ended + min(again_s), self._rests_until), self._pump)

    def _assign(self, pool: PoolKey, now: float) -> float | None:
        """Place choices that wait for one pool; returns ``Decision.poll_again_in_s``."""
        snapshot = self._table.snapshot(pool, now)
        head = self._head(pool, snapshot)
        if not head:
            return None
        note_levels(head)
        waiting: list[Pending] = []
        for queued in head:
            queued.matches.renew()
            waiting.append(with_way(queued, snapshot))
        decision = self._policy.assign(waiting, snapshot)
        placed = list(zip(head, decision.placements, strict=True))
        note_overtaken(placed, self.share)
        # Gangs with a member that must wait.
        torn = {queued.gang for queued, placement in placed if placement is None and queued.gang is not None}
        for queued, placement in placed:
            gang = queued.gang
            if gang is not None and gang in torn and (placement is not None or gang.holds_room):
                queued.placed.set_exception(PlaceTooLargeError("there is no room for all choices at once"))
            elif placement is not None:
                self._commit(queued, placement, now)
                self._queue.serve(queued)
        if len(head) == MAX_ASSIGNED_TOGETHER and None not in decision.placements:
            self.wake()  # there may be room for more
        return decision.poll_again_in_s

    def _head(self, pool: PoolKey, snapshot: Snapshot) -> list[QueuedRequest]:
        """The first that wait for ``pool`` and whose adapter at least one of its decode ranks serves."""

        def is_kept(lane: Lane[QueuedRequest]) -> bool:
            return bool(lane.adapter) and not any(lane.adapter in worker.adapters for worker in snapshot.decode)

        return list(islice(self._queue.in_order(is_kept, pool), MAX_ASSIGNED_TOGETHER))

    def _commit(self, queued: QueuedRequest, placement: Placement, now: float) -> None:
        if queued.sequence_hashes:
            placement.expected = self.expected_reuse(queued, placement.num_cached_tokens, now)
        reservation = self._table.reserve(placement, queued, waited_s=now - queued.since)
        self._index.predict(placement.prefills_at, queued.sequence_hashes, now + self._config.prediction_life_s)
        self._metrics.admissions.labels(AdmissionOutcome.PLACED).inc()
        self._metrics.matched_tokens.inc(placement.num_cached_tokens)
        queued.placed.set_result(reservation)
        if queued.gang is not None:
            queued.gang.booked(reservation)


@dataclass(eq=False, kw_only=True)
class QueuedRequest(Pending):
    """One choice on its way through the queue: what the policy sees of it, and how it waits.

    ``Admission`` sets ``num_cached_tokens``, ``lower_tokens``, ``binds_at_once``, ``priority``, ``is_overtaken`` and
    the fields without a default here.

    Attributes:
        is_retry: an attempt was made before, so a full queue never refuses it.
        gang: choices that get room together or are all refused; ``None``: the choice gets room alone.
        held: counts its request's prompt; ``None``: nothing does.
        matches: the same object as ``num_cached_tokens``.
        placed: the result of its wait, or its error.
        since: when it arrived, in monotonic seconds.
        ready_at: when a decode worker was last ready, in monotonic seconds.
        overtaken_by: work of other tenants' requests that went before it from behind it, as ``FairShare`` has it.
        lane, position: see ``router.fair_queue.Entry``.
    """

    standing: Standing
    is_retry: bool = False
    gang: Gang | None = None
    held: HeldPrompt | None = None
    matches: PromptMatches = field(init=False, repr=False)
    placed: asyncio.Future[Reservation] = field(init=False, repr=False)
    since: float = field(init=False, repr=False)
    ready_at: float = field(init=False, repr=False)
    overtaken_by: float = field(default=0.0, init=False, repr=False)
    lane: Lane[QueuedRequest] | None = field(default=None, init=False, repr=False)
    position: Position = field(init=False, repr=False)


def note_levels(head: Sequence[QueuedRequest]) -> None:
    """Tell the policy which of ``head`` come before others of their tenant.

    ``priority`` becomes 0 for each tenant's most urgent ones, whatever number the tenant gave them, -1 for its next
    ones, and so on: a tenant's priority puts back only its own requests.
    """
    if len(head) == 1:
        head[0].priority = 0
        return
    given: dict[str, set[int]] = {}
    for queued in head:
        given.setdefault(queued.standing.tenant, set()).add(queued.standing.priority)
    levels: dict[tuple[str, int], int] = {}
    for tenant, priorities in given.items():
        for level, priority in enumerate(sorted(priorities, reverse=True)):
            levels[tenant, priority] = -min(level, _MAX_LEVELS - 1)
    for queued in head:
        queued.priority = levels[queued.standing.tenant, queued.standing.priority]


def note_overtaken(placed: Sequence[tuple[QueuedRequest, Placement | None]], share: FairShare) -> None:
    """Note what the policy did with the head of the queue, ``placed``, to those that it kept waiting.

    One that choices of other tenants behind it have overtaken with as much work as its own is to go before those behind
    it. Else the short requests of one tenant would go before a long one of another for as long as they keep coming.
    """
    behind = 0.0
    behind_of: defaultdict[str, float] = defaultdict(float)
    for queued, placement in reversed(placed):
        standing = queued.standing
        if placement is not None and not queued.is_retry:
            length = share.request_length(standing.tenant, standing.num_tokens)
            behind += length
            behind_of[standing.tenant] += length
        elif placement is None and behind > behind_of[standing.tenant]:
            queued.overtaken_by += behind - behind_of[standing.tenant]
            queued.is_overtaken = queued.overtaken_by >= share.request_length(standing.tenant, standing.num_tokens)
