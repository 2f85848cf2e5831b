"""All that the router knows of workers: discovery, connections, load reports and its own book in one table. Pure.

``WorkerTable`` has a ``KnownWorker`` for each epoch of a worker. From these it describes pools (``Pool``): workers of a
pool have the same model and can stand in for each other. Policies see a ``Snapshot`` of a pool's ranks. ``PeerWatch``
finds the other routers that place requests at the same workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass, field, replace
from enum import Enum, auto
from functools import partial
from operator import attrgetter
from statistics import median_high, mode
from typing import NamedTuple

from quartet.api.fleet import WorkerState, WorkerStatus
from quartet.discovery.base import SPOKEN_VERSIONS, Rank, Role, WorkerKey, WorkerRecord
from quartet.errors import UnsupportedFieldError, WorkerUnavailableError
from quartet.events.bookings import BookedStart, RouterBookings
from quartet.events.load import OnboardTime, RankLoad, StepTime, WorkerLoad
from quartet.media.items import TAKES_HAND_OFF, MediaItem
from router.book import Booking, ItemsBooking, Reservation, WorkerBook, numbering
from router.policy.base import DEFAULT_MAX_STEP_TOKENS, Candidate, Peers, Pending, Placement, Snapshot
from router.policy.room import max_requests, with_step_times
from router.untaken import Capacity

#: Roles whose workers hold a model's KV: encode workers serve no requests of their own.
# Routers that tell what they send; what more say is not heard.
_MAX_PEERS = 64
_MODEL_ROLES = frozenset({Role.PREFILL, Role.DECODE})

# A worker's last reports may come after the router noticed its end, but not later than this.
_LAST_REPORTS_S = 0.5

# Of ranks that have not reported theirs.
_UNMEASURED, _NO_TIERS, _IDLE = StepTime(), OnboardTime(), RankLoad()

# Heartbeats come once a second. A worker whose events don't arrive is only probed now and then.
_QUIET_S = 3.0

# A router that has started nothing for this long has nothing to place, or is gone.
_ACTIVE_S = 10.0

# A model whose last worker has gone may come back within this time: its workers are being restarted.
_MODEL_RETURNS_S = 600.0

_HAND_OFF = frozenset({TAKES_HAND_OFF})

_NONE = frozenset[str]()


class PoolKey(NamedTuple):
    """Workers of one pool can stand in for each other; pools are never mixed."""

    model_name: str
    fingerprint: str


class WorkerTable:
    """All known workers. Times are monotonic seconds, given by the caller."""

    def __init__(
        self, router_id: str, *, heartbeat_timeout_s: float, versions: frozenset[str] = SPOKEN_VERSIONS
    ) -> None:
        """``router_id`` is new at each start, so workers' reports never include what an earlier process placed.

        Workers whose contract version is not among ``versions`` are only listed.
        """
        self.router_id = router_id
        #: Called with each start that goes to a worker that computes prompts or decodes; ``None``: nobody asks.
        self.on_sent: Callable[[BookedStart], None] | None = None
        self._versions = versions
        #: Discovery has listed every worker that it knew at the start.
        self.is_synchronised = False
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._workers: dict[WorkerKey, KnownWorker] = {}
        self._gone_at: dict[str, float] = {}  # by model, when a worker of it was last forgotten
        self._last_joined: dict[tuple[PoolKey, Role], KnownWorker] = {}  # the last that had joined and is gone
        self._peers = PeerWatch(router_id)
        self._listeners: list[Callable[[], None]] = []
        # Both are computed when next needed and kept until a state changes; only ``tick`` notices silence.
        self._pools: dict[PoolKey, Pool] | None = None
        self._ready: dict[PoolKey, _Ready] = {}

    def listen(self, on_change: Callable[[], None]) -> Callable[[], None]:
        """Call ``on_change`` after each change that may let more requests run, or that changes a status.

        Returns:
            A function that ends this.
        """
        self._listeners.append(on_change)
        return lambda: self._listeners.remove(on_change)

    def put(self, record: WorkerRecord, now: float) -> bool:
        """Add ``record`` from discovery. Returns whether it is a new worker, or a new epoch of one.

        It takes the place of a worker of another role that had its id: an id names one worker. Once a worker has
        joined, only addresses change within its epoch, as behind another proxy; what else differs is ignored.
        """
        known = self._workers.get(record.key)
        is_new = known is None or known.record.epoch != record.epoch or known.is_contradicted(record)
        replaced: list[KnownWorker] = []
        if known is None or is_new:
            replaced = [] if known is None else [known]
            replaced += [self._workers.pop(key) for key in self.other_roles(record.key)]
            self._workers[record.key] = KnownWorker(
                record, now, is_compatible=self.can_use(record), on_sent=partial(self._sent, record)
            )
        else:
            known.move(record)
            known.is_listed = True
        self._keep_abilities(replaced)
        self._changed()
        for worker in replaced:
            worker.book.placed.release_all()
        return is_new

    def record(self, key: WorkerKey) -> WorkerRecord:
        """What is kept of the records of a known worker."""
        return self._workers[key].record

    def has_joined(self, key: WorkerKey) -> bool:
        """Whether that worker, in its present epoch, has answered at least once."""
        return key in self._workers and self._workers[key].has_joined

    def can_use(self, record: WorkerRecord) -> bool:
        """Whether this router speaks the worker's contract version."""
        return record.contract_version in self._versions

    def other_roles(self, key: WorkerKey) -> list[WorkerKey]:
        """Known workers with the id of ``key`` and another role; there is one at most."""
        keys = [WorkerKey(role, key.worker_id) for role in Role if role is not key.role]
        return [other for other in keys if other in self._workers]

    def unlist(self, key: WorkerKey) -> None:
        """Discovery no longer has the record. That alone stops nothing."""
        if key in self._workers:
            self._workers[key].is_listed = False
            self._changed()

    def forget_gone(self, now: float) -> list[WorkerRecord]:
        """Drop and return the workers that are not listed, and either not connected or silent for too long."""
        gone = [worker for worker in self._workers.values() if not worker.is_listed and self._is_lost(worker, now)]
        for worker in gone:
            del self._workers[worker.record.key]
            self._gone_at[worker.record.model_name] = now
            self._peers.forget(worker.record.worker_id)
        if gone:
            self._gone_at = {name: at for name, at in self._gone_at.items() if now - at <= _MODEL_RETURNS_S}
            self._keep_abilities(gone)
            self._changed()
            for worker in gone:
                worker.book.placed.release_all()
        return [worker.record for worker in gone]

    def connected(self, key: WorkerKey, load: WorkerLoad, now: float) -> None:
        """The worker answered with ``load``; ignored if the worker's known epoch is another one."""
        worker = self._of_epoch(key, load.epoch)
        if worker is not None:
            worker.is_connected = worker.has_joined = True
            worker.cut_at = None
            self._forget_states()
            self._take(worker, load, now)

    def broken(self, key: WorkerKey, epoch: int) -> None:
        """A stream to the worker broke: suspect until it answers."""
        worker = self._of_epoch(key, epoch)
        if worker is not None and worker.is_connected:
            worker.is_connected = False
            self._changed()

    def cut(self, key: WorkerKey, epoch: int, now: float) -> None:
        """The connection to the worker was lost while it carried no stream of ours: suspect until it reports again."""
        worker = self._of_epoch(key, epoch)
        if worker is not None:
            worker.cut_at = now
            self._changed()

    def is_draining(self, key: WorkerKey, epoch: int) -> bool:
        """Whether the worker, in that epoch, reported that it only finishes its present work."""
        worker = self._of_epoch(key, epoch)
        return worker is not None and worker.load is not None and worker.load.is_draining

    def report(self, load: WorkerLoad, now: float) -> None:
        """Apply a load report; a report from an unknown worker or epoch is ignored."""
        for role in Role:
            worker = self._of_epoch(WorkerKey(role=role, worker_id=load.worker_id), load.epoch)
            if worker is not None:
                self._take(worker, load, now)
                return

    def hear(self, bookings: RouterBookings, now: float) -> None:
        """Another router told what it has sent. Starts at workers that are unknown here are ignored."""
        if bookings.router_id == self.router_id:
            return
        for start in bookings.starts:
            for role in _MODEL_ROLES:
                worker = self._of_epoch(WorkerKey(role, start.worker_id), start.worker_epoch)
                if worker is not None and start.data_parallel_rank < len(worker.book.accounts):
                    account = worker.book.accounts[start.data_parallel_rank]
                    name = numbering(bookings.router_id, start.worker_epoch)
                    worker.book.told.add(name, start, account, now)
        self._peers.on_told(bookings.router_id, now)

    def set_clock(self, ahead_s: float) -> None:
        """The clock that routers have in common is so much ahead of monotonic time."""
        self._peers.clock_ahead_s = ahead_s

    def tick(self, now: float) -> None:
        """Apply the passage of time: silence may have changed states, and placements may have lapsed."""
        is_same = True
        for worker in self._workers.values():
            worker.book.placed.poll(now)
            worker.book.told.poll(now)
            worker.poll(now)
            state = worker.state(now, self._heartbeat_timeout_s)
            is_same, worker.last_state = is_same and state is worker.last_state, state
        self._peers.poll(now)
        self._changed(keep_pools=is_same)

    def was_away(self, away_s: float) -> None:
        """This process did not run for ``away_s`` seconds: silence in that time means nothing."""
        for worker in self._workers.values():
            worker.known_at += away_s
            if worker.load_at is not None:
                worker.load_at += away_s

    def is_silent(self, key: WorkerKey, epoch: int, now: float) -> bool:
        """Whether the worker has been silent for so long that its requests are to continue elsewhere."""
        worker = self._of_epoch(key, epoch)
        return worker is not None and worker.silence_s(now) > self._heartbeat_timeout_s

    def is_well(self, key: WorkerKey, epoch: int, now: float) -> bool:
        """Whether the worker is there in that epoch, and ready or draining."""
        worker = self._of_epoch(key, epoch)
        state = None if worker is None else worker.state(now, self._heartbeat_timeout_s)
        return state in (WorkerState.READY, WorkerState.DRAINING)

    def hanging(self, now: float) -> list[WorkerRecord]:
        """Workers that report that their work does not move, if a ready one of their pool and role can take it."""
        stuck = [worker for worker in self._workers.values() if worker.is_stuck]
        if not stuck:
            return []
        ready = {(worker.pool, worker.record.role) for worker in self._workers.values() if self._is_ready(worker, now)}
        return [worker.record for worker in stuck if (worker.pool, worker.record.role) in ready]

    def pools(self, now: float) -> list[Pool]:
        """All pools, sorted."""
        return list(self._pools_by_key(now).values())

    def pool(self, model_name: str, now: float) -> Pool | None:
        """The pool that serves new requests for ``model_name``; an empty name means the only model.

        Several fingerprints may serve one name while a new version is being rolled out. The pool with the most ready
        decode workers then takes new requests; at a tie, the first by fingerprint. Running requests stay in their pool.
        """
        pools = [pool for pool in self._pools_by_key(now).values() if model_name in ("", pool.key.model_name)]
        if not pools or pools[0].key.model_name != pools[-1].key.model_name:  # they are sorted by it
            return None
        return max(pools, key=attrgetter("num_ready_decode"))

    def pool_of_adapter(self, name: str, now: float) -> Pool | None:
        """The pool whose model has an adapter of this name, unless a model is called so."""
        if not name or self.pool(name, now) is not None:
            return None
        return next((pool for pool in self.pools(now) if name in pool.adapters), None)

    def has_served(self, model_name: str, now: float) -> bool:
        """Whether a worker of that model has gone lately."""
        return now - self._gone_at.get(model_name, -math.inf) <= _MODEL_RETURNS_S

    def is_joining(self, model_name: str) -> bool:
        """Whether discovery lists a worker of that model that computes prompts or decodes, and can be used."""
        return any(
            worker.record.model_name == model_name and worker.is_compatible and worker.record.role in _MODEL_ROLES
            for worker in self._workers.values()
        )

    def ready_roles(self, now: float) -> frozenset[Role]:
        """The roles with a ready worker, of any model."""
        return frozenset(worker.record.role for worker in self._workers.values() if self._is_ready(worker, now))

    def has_ready_decode(self, pool: PoolKey, now: float) -> bool:
        """Whether any decode worker of ``pool`` is ready."""
        known = self._pools_by_key(now).get(pool)
        return known is not None and known.num_ready_decode > 0

    def is_of(self, rank: Rank, pool: PoolKey) -> bool:
        """Whether ``rank`` is of a worker of ``pool`` that computes prompts or decodes."""
        workers = [self._workers.get(WorkerKey(role, rank.worker_id)) for role in _MODEL_ROLES]
        return any(worker is not None and worker.pool == pool for worker in workers)

    def block_size(self, pool: PoolKey, now: float) -> int:
        """``Pool.block_size`` of ``pool``; 0 also if the pool is gone."""
        known = self._pools_by_key(now).get(pool)
        return 0 if known is None else known.block_size

    def media(self, pool: PoolKey, now: float) -> PoolMedia | None:
        """The media that ``pool`` takes; ``None``: the pool is gone."""
        known = self._pools_by_key(now).get(pool)
        return None if known is None else known.media

    def snapshot(self, pool: PoolKey, now: float) -> Snapshot:
        """The ranks of ``pool`` that take requests now."""
        ready = self._ready_of(pool, now)
        prefill = [candidate for worker in ready.prefill for candidate in worker.candidates()]
        decode = [candidate for worker in ready.decode for candidate in worker.candidates()]
        peers = self._peers.peers
        if peers.num_routers > 1:
            peers = replace(peers, ranks=sorted([candidate.rank for candidate in (*prefill, *decode)]))
        return Snapshot(
            prefill=with_step_times(prefill, decode), decode=with_step_times(decode, prefill), now=now, peers=peers
        )

    def decode_capacity(self, pool: PoolKey, now: float) -> Capacity:
        """What the ready decode workers of ``pool`` have together."""
        ranks = [candidate for worker in self._ready_of(pool, now).decode for candidate in worker.candidates()]
        is_known = all(rank.max_requests for rank in ranks)
        return Capacity(
            num_tokens=sum(rank.num_total_blocks * rank.block_size for rank in ranks),
            num_requests=sum(rank.max_requests for rank in ranks) if is_known else 0,
        )

    def encode_candidates(self, pool: PoolKey, kinds: frozenset[str], now: float) -> list[EncodeCandidate]:
        """The encode workers of ``pool`` that take files of all ``kinds`` now."""
        ready = self._ready_of(pool, now).encode
        return [worker.encode_candidate() for worker in ready if kinds <= frozenset(worker.record.media)]

    def num_encode_tokens(self, pool: PoolKey, now: float) -> int:
        """Tokens of embeddings that the ready encode workers of ``pool`` can hold."""
        ready = self._ready_of(pool, now).encode
        return sum(worker.record.num_blocks * worker.record.block_size for worker in ready)

    def reserve_encode(self, rank: Rank, num_items: int) -> ItemsBooking:
        """Count ``num_items`` to encode at ``rank``, one of ``encode_candidates``."""
        key = WorkerKey(role=Role.ENCODE, worker_id=rank.worker_id)
        return self._workers[key].book.reserve_items(num_items)

    def reserve(self, placement: Placement, pending: Pending, *, waited_s: float = 0.0) -> Reservation:
        """Reserve the room for ``placement`` of ``pending``, which must come from a snapshot of this moment."""
        prefill: Booking | None = None
        num_missing = placement.num_missing_tokens(pending)
        if placement.prefill is not None:
            rank = placement.prefill
            prefill = self._workers[WorkerKey(role=Role.PREFILL, worker_id=rank.worker_id)].book.reserve(
                rank.data_parallel_rank, num_queued_tokens=num_missing
            )
        rank = placement.decode
        decode = self._workers[WorkerKey(role=Role.DECODE, worker_id=rank.worker_id)].book.reserve(
            rank.data_parallel_rank,
            num_reserved_tokens=pending.num_reserved_tokens,
            num_queued_tokens=num_missing if placement.prefill is None else 0,
        )
        return Reservation(placement, prefill, decode, waited_s=waited_s)

    def reserve_prefill(self, placement: Placement, pending: Pending) -> Booking:
        """Reserve the room that ``pending`` takes at a prefill worker, for a router of another namespace."""
        rank = placement.prefills_at
        return self._workers[WorkerKey(role=Role.PREFILL, worker_id=rank.worker_id)].book.reserve_prompt(
            rank.data_parallel_rank,
            num_tokens=pending.num_reserved_tokens,
            num_queued_tokens=placement.num_missing_tokens(pending),
        )

    def ready_decode(self, rank: Rank, epoch: int, now: float) -> WorkerRecord:
        """The record of that epoch of a decode worker. Raises ``WorkerUnavailableError`` unless it is ready."""
        worker = self._of_epoch(WorkerKey(role=Role.DECODE, worker_id=rank.worker_id), epoch)
        if worker is None or not self._is_ready(worker, now):
            raise WorkerUnavailableError(f"worker {rank.worker_id} takes nothing any more")
        return worker.record

    def placed_at(self, request_id: str, choice: int) -> frozenset[str]:
        """Ids of workers where that choice was placed for its client and has not ended."""
        books = ((worker.record.worker_id, worker.book) for worker in self._workers.values())
        return frozenset(worker_id for worker_id, book in books if book.placed.has(request_id, choice))

    def statuses(self, now: float) -> list[WorkerStatus]:
        """All workers, sorted by role and id."""
        timeout_s = self._heartbeat_timeout_s
        return [worker.status(now, timeout_s) for _key, worker in sorted(self._workers.items())]

    def to_probe(self, now: float) -> list[WorkerRecord]:
        """Workers to probe: not connected, cut, not listed, or silent for half the heartbeat timeout."""
        limit_s = self._heartbeat_timeout_s / 2
        return [
            worker.record
            for worker in self._workers.values()
            if not (worker.is_connected and worker.cut_at is None and worker.is_listed)
            or worker.silence_s(now) > limit_s
            if worker.is_compatible
        ]

    def _sent(self, record: WorkerRecord, booking: Booking) -> None:
        if self.on_sent is not None and record.role in _MODEL_ROLES:
            self.on_sent(
                BookedStart(
                    record.worker_id,
                    record.epoch,
                    booking.data_parallel_rank,
                    booking.number,
                    booking.num_queued_tokens,
                    booking.num_reserved_blocks,
                )
            )

    def _of_epoch(self, key: WorkerKey, epoch: int) -> KnownWorker | None:
        worker = self._workers.get(key)
        return worker if worker is not None and worker.record.epoch == epoch else None

    def _take(self, worker: KnownWorker, load: WorkerLoad, now: float) -> None:
        # Pools are kept only if they still hold: the time that has passed may have changed the state too.
        before = worker.last_state, worker.state(now, self._heartbeat_timeout_s), worker.num_rank_tokens
        worker.on_load(load, now)
        self._peers.on_report(load, now)
        if worker.cut_at is not None and now - worker.cut_at > _LAST_REPORTS_S:
            worker.cut_at = None
        name = numbering(self.router_id, load.epoch)
        worker.book.on_report(
            load.router_progress.get(name, 0),
            load.placements.get(name),
            arrived_number=load.router_arrivals.get(name, 0),
            num_requests=[rank.num_running + rank.num_waiting for rank in load.ranks],
        )
        # Dozens of reports come each second; few of them change a pool.
        state = worker.last_state = worker.state(now, self._heartbeat_timeout_s)
        worker.book.told.on_report(load.router_arrivals)
        self._changed(keep_pools=before == (state, state, worker.num_rank_tokens))

    def _is_ready(self, worker: KnownWorker, now: float) -> bool:
        return worker.state(now, self._heartbeat_timeout_s) is WorkerState.READY

    def _is_lost(self, worker: KnownWorker, now: float) -> bool:
        return not worker.is_connected or worker.silence_s(now) > self._heartbeat_timeout_s

    def _pools_by_key(self, now: float) -> dict[PoolKey, Pool]:
        if self._pools is None:
            models = [worker for worker in self._workers.values() if worker.record.role in _MODEL_ROLES]
            keys = {worker.pool for worker in models if worker.is_compatible}
            described = {key: self._describe(key, now) for key in sorted(keys)}
            self._pools = {key: pool for key, pool in described.items() if pool is not None}
        return self._pools

    def _describe(self, key: PoolKey, now: float) -> Pool | None:
        """The pool; ``None``: no worker of it that computes prompts or decodes has ever answered."""
        speakers = [worker for role in Role for worker in self._speakers(key, role)]
        if not any(worker.record.role in _MODEL_ROLES for worker in speakers):
            return None
        return describe_pool(key, speakers, self._ready_of(key, now))

    def _speakers(self, key: PoolKey, role: Role) -> Sequence[KnownWorker]:
        """The workers whose records say what the pool can: a record alone says nothing before its worker answered.

        While none of those that discovery lists has answered, as after a restart, the last one that had speaks for all.
        """
        listed = [
            worker
            for worker in self._workers.values()
            if worker.pool == key and worker.record.role is role and worker.is_compatible
        ]
        joined = [worker for worker in listed if worker.has_joined]
        last = self._last_joined.get((key, role))
        return joined if joined or not listed or last is None else [last]

    def _keep_abilities(self, gone: Iterable[KnownWorker]) -> None:
        for worker in gone:
            if worker.has_joined:
                self._last_joined[worker.pool, worker.record.role] = worker
        kept = {worker.pool for worker in self._workers.values()}
        self._last_joined = {
            (pool, role): worker
            for (pool, role), worker in self._last_joined.items()
            if pool in kept or pool.model_name in self._gone_at
        }

    def _ready_of(self, pool: PoolKey, now: float) -> _Ready:
        ready = self._ready.get(pool)
        if ready is None:
            ready = self._ready[pool] = _Ready()
            by_role = {Role.PREFILL: ready.prefill, Role.DECODE: ready.decode, Role.ENCODE: ready.encode}
            for worker in self._workers.values():
                if worker.pool == pool and self._is_ready(worker, now):
                    by_role[worker.record.role].append(worker)
            models = [*ready.prefill, *ready.decode]
            honoured = frozenset().union(*[worker.record.sampling_fields for worker in models])
            for worker in models:
                worker.stand_among(honoured, is_fed=bool(ready.prefill) and worker.record.role is Role.DECODE)
        return ready

    def _forget_states(self) -> None:
        self._pools = None
        self._ready.clear()

    def _changed(self, *, keep_pools: bool = False) -> None:
        if not keep_pools:
            self._forget_states()
        for on_change in tuple(self._listeners):
            on_change()


@dataclass
class _Ready:
    """Workers of a pool that take requests."""

    prefill: list[KnownWorker] = field(default_factory=list)
    decode: list[KnownWorker] = field(default_factory=list)
    encode: list[KnownWorker] = field(default_factory=list)


@dataclass
class KnownWorker:
    """All that the router knows of one epoch of a worker.

    Attributes:
        pool: the pool that it belongs to.
        known_at: when discovery first had it, in monotonic seconds like all times here.
        is_compatible: the router speaks its contract version; if not, it is only listed.
        num_rank_tokens: tokens of KV that its largest rank holds.
        is_listed: discovery has its record.
        is_connected: it has answered since its stream last broke.
        has_joined: it has answered at least once.
        cut_at: when its connection was lost; ``None``: it has reported since.
        last_state: as of its last report or the table's last ``tick``.

    ``on_sent`` is called when a start goes to it.
    """

    record: WorkerRecord
    known_at: float
    is_compatible: bool = field(default=True, kw_only=True)
    on_sent: InitVar[Callable[[Booking], None] | None] = field(default=None, kw_only=True)
    book: WorkerBook = field(init=False)
    pool: PoolKey = field(init=False)
    num_rank_tokens: int = field(init=False)
    load: WorkerLoad | None = None
    load_at: float | None = None
    is_listed: bool = True
    is_connected: bool = False
    has_joined: bool = False
    cut_at: float | None = None
    last_state: WorkerState = WorkerState.JOINING

    def __post_init__(self, on_sent: Callable[[Booking], None] | None) -> None:
        self._is_quiet = self._is_fed = False
        self._lacks = _NONE
        record = self.record
        block_size = max(record.block_size, 1)
        self.book = WorkerBook(record.data_parallel_size, block_size, epoch=record.epoch, on_sent=on_sent)
        # Kept, because every snapshot of its pool needs them.
        self.pool = PoolKey(record.model_name, record.model_fingerprint)
        self._ranks = [Rank(record.worker_id, number) for number in range(record.data_parallel_size)]
        self._adapters, self._media = frozenset(record.adapters), frozenset(record.media)
        self._read_load()
        self._candidates = [self._candidate(number) for number in range(record.data_parallel_size)]
        self._shown_versions = [account.version for account in self.book.accounts]
        self._is_shown = True

    def move(self, record: WorkerRecord) -> None:
        """Take the addresses of ``record``."""
        self.record = with_addresses_of(record, self.record)

    def is_contradicted(self, record: WorkerRecord) -> bool:
        """Whether ``record`` says something else than its own, and it has not answered yet: then the newer counts."""
        return not self.has_joined and with_addresses_of(record, self.record) != record

    def on_load(self, load: WorkerLoad, now: float) -> None:
        """Apply a load report."""
        self.load, self.load_at = load, now
        self._read_load()
        self.poll(now)

    def stand_among(self, honoured: frozenset[str], *, is_fed: bool) -> None:
        """The ready workers of its pool honour these fields together; ``is_fed``: others prefill for it."""
        lacks = honoured.difference(self.record.sampling_fields)
        if is_fed is not self._is_fed or lacks != self._lacks:
            self._is_fed, self._lacks, self._is_shown = is_fed, lacks, False

    def poll(self, now: float) -> None:
        """Apply the passage of time. Once reports stop, the waiting prompts of old reports no longer count."""
        is_quiet = self.silence_s(now) > _QUIET_S
        if is_quiet is not self._is_quiet:
            self._is_quiet, self._is_shown = is_quiet, False

    def silence_s(self, now: float) -> float:
        """Seconds since its last report, or since discovery first had it."""
        return now - (self.known_at if self.load_at is None else self.load_at)

    def state(self, now: float, heartbeat_timeout_s: float) -> WorkerState:
        """Whether requests are placed here."""
        if not self.is_compatible:
            return WorkerState.INCOMPATIBLE
        if self.load is not None and self.load.is_draining:
            return WorkerState.DRAINING
        if not self.has_joined:
            return WorkerState.JOINING
        is_well = self.load is None or self.load.is_healthy
        is_reached = self.is_connected and self.cut_at is None
        if is_reached and is_well and self.silence_s(now) <= heartbeat_timeout_s:
            return WorkerState.READY
        return WorkerState.SUSPECT

    @property
    def is_stuck(self) -> bool:
        """Whether it reported that its work does not move. Its end is for others to report."""
        return self.load is not None and not self.load.is_healthy and not self.load.is_draining

    def status(self, now: float, heartbeat_timeout_s: float) -> WorkerStatus:
        """Its status for ListWorkers and WatchWorkers."""
        return WorkerStatus(
            record=self.record,
            state=self.state(now, heartbeat_timeout_s),
            load=self.load,
            load_age_s=None if self.load_at is None else now - self.load_at,
            num_requests=self.book.num_requests,
        )

    def candidates(self) -> Sequence[Candidate]:
        """Its ranks, for a policy. Until something changes, which is rare, these are the same objects."""
        for number, account in enumerate(self.book.accounts):
            if not self._is_shown or self._shown_versions[number] != account.version:
                self._shown_versions[number] = account.version
                self._candidates[number] = self._candidate(number)
        self._is_shown = True
        return self._candidates

    def encode_candidate(self) -> EncodeCandidate:
        """The worker as a candidate for encoding."""
        account = self.book.accounts[0]
        num_others = 0 if self._is_quiet else account.num_other_requests
        return EncodeCandidate(self._ranks[0], account.num_requests + num_others, self._rank_loads[0].max_running)

    def _read_load(self) -> None:
        """Read each rank's state from the load and the record; a rank that is in no report is idle."""
        size = self.record.data_parallel_size
        reported = () if self.load is None else self.load.ranks
        self._rank_loads = [*reported[:size], *[_IDLE] * (size - len(reported))]
        # As announced, as long as no report has come.
        self._num_blocks = [load.num_total_blocks or self.record.num_blocks for load in self._rank_loads]
        self.num_rank_tokens = max(self._num_blocks) * self.record.block_size
        self._is_shown = False

    def _candidate(self, number: int) -> Candidate:
        load, account = self._rank_loads[number], self.book.accounts[number]
        num_queued_tokens = 0 if self._is_quiet else load.num_queued_prefill_tokens
        num_unbegun_tokens = 0 if self._is_quiet else load.num_unbegun_prefill_tokens
        num_spare_tokens = 0 if self._is_quiet else load.num_spare_prefill_tokens
        return Candidate(
            rank=self._ranks[number],
            num_total_blocks=self._num_blocks[number],
            block_size=max(self.record.block_size, 1),
            max_model_len=self.record.max_model_len,
            lacks=self._lacks,
            num_used_blocks=load.num_used_blocks,
            num_promised_blocks=account.num_promised_blocks,
            num_requests=account.num_requests + (0 if self._is_quiet else account.num_other_requests),
            max_requests=max_requests(load.max_running, is_fed=self._is_fed),
            num_queued_tokens=num_queued_tokens + account.num_unreported_tokens + account.num_placed_tokens,
            adapters=self._adapters,
            media=self._media,
            num_unbegun_tokens=num_unbegun_tokens + account.num_unreported_tokens,
            num_spare_tokens=max(num_spare_tokens - account.num_unreported_tokens, 0),
            step_ends_at=(self.load_at or 0.0) + load.step_ends_in_s,
            num_decoding=load.num_decoding,
            num_context_tokens=load.num_context_tokens,
            max_step_tokens=load.max_step_tokens or DEFAULT_MAX_STEP_TOKENS,
            step_time=load.step_time or _UNMEASURED,
            is_measured=load.step_time is not None,
            onboard_time=load.onboard_time or _NO_TIERS,
        )


def with_addresses_of(record: WorkerRecord, other: WorkerRecord) -> WorkerRecord:
    """``other`` with the addresses of ``record``."""
    return replace(
        other,
        grpc_address=record.grpc_address,
        events_address=record.events_address,
        http_address=record.http_address,
    )


@dataclass(frozen=True)
class EncodeCandidate:
    """An encode worker.

    Attributes:
        num_items: items that wait or run there, this router's unreported ones included.
        max_items: most items that it takes at a time; 0: unknown.
    """

    rank: Rank
    num_items: int
    max_items: int = 0

    def has_room(self, num_items: int) -> bool:
        """Whether it takes so many more now. One without any takes every request, however many items that has."""
        return not (self.max_items and self.num_items) or self.num_items + num_items <= self.max_items


class MediaWay(Enum):
    """Which workers turn a request's media into embeddings."""

    ENCODE = auto()  # encode workers; the worker that computes the prompt pulls the embeddings
    FILES = auto()  # the worker that computes the prompt, from the files


@dataclass(frozen=True, kw_only=True)
class PoolMedia:
    """The media that a pool takes: the kinds of files of each worker, as in ``WorkerRecord.media``, without repeats.

    Attributes:
        encoded: kinds of ready encode workers; also empty if no ready worker pulls their hand-offs.
        filed: kinds of ready workers that compute prompts.
        known: kinds of both, ready or not.
        known_encoded: kinds of encode workers, ready or not, whose hand-offs some worker pulls.
        awaits_encode: workers that compute prompts pull encode workers' hand-offs, but no encode worker has answered.
        max_tokens: most tokens of one item, whichever worker encodes it; 0: no worker reports this.
    """

    encoded: frozenset[frozenset[str]] = frozenset()
    filed: frozenset[frozenset[str]] = frozenset()
    known: frozenset[frozenset[str]] = frozenset()
    known_encoded: frozenset[frozenset[str]] = frozenset()
    awaits_encode: bool = False
    max_tokens: int = 0

    @property
    def kinds(self) -> frozenset[str]:
        """All kinds that any worker takes, ready or not."""
        return frozenset().union(*self.known)

    def awaits(self, kinds: frozenset[str]) -> bool:
        """Whether files of ``kinds`` can get into a prompt only once an encode worker is back.

        No kinds: files of which nothing is known yet.
        """

        def has_taker(workers: Iterable[frozenset[str]]) -> bool:
            return any(taken and kinds <= taken for taken in workers)

        if has_taker(self.encoded) or has_taker(self.filed):
            return False
        return has_taker(self.known_encoded) if has_taker(self.known) else self.awaits_encode

    def way(self, items: Sequence[MediaItem], fields: Sequence[str]) -> MediaWay:
        """How ``items``, which the client knows by ``fields``, get into a prompt now, or once an encode worker is back.

        Raises:
            UnsupportedFieldError: no worker takes an item's kind, alone or with the others; names the item's field.
            WorkerUnavailableError: the workers that take them are not ready, and none of them is an encode worker.
        """
        kinds = frozenset[str]()
        for item, item_field in zip(items, fields, strict=True):
            kinds |= {item.file.kind.value}
            if not self.awaits_encode and not any(kinds <= taken for taken in self.known):
                message = f"no worker of this model takes media of kind {' and '.join(sorted(kinds))}"
                raise UnsupportedFieldError(message, field=item_field)
        if any(kinds <= taken for taken in self.encoded) or self.awaits(kinds):
            return MediaWay.ENCODE
        if any(kinds <= taken for taken in self.filed):
            return MediaWay.FILES
        raise WorkerUnavailableError("no worker that takes such media is ready")


def needs_of(way: MediaWay, items: Iterable[MediaItem]) -> frozenset[str]:
    """What a rank must support to compute a prompt with ``items``."""
    return _HAND_OFF if way is MediaWay.ENCODE else frozenset(item.file.kind.value for item in items)


@dataclass(frozen=True, kw_only=True)
class Pool:
    """The abilities of a pool, as its workers that have answered say; one that can less gets fewer requests.

    Attributes:
        max_model_len: tokens of prompt and output together that at least half of the decode workers take, or of the
            prefill workers where none decodes.
        num_rank_tokens: tokens of KV that the largest decode rank holds.
        num_prefill_tokens: tokens of KV for which every prefill worker has a rank; 0: there are no prefill workers.
        block_size: tokens of a block at more than half of the workers; 0: there are no such workers.
        sampling_fields: fields of ``Sampling`` and ``OutputOptions`` that at least one decode worker honours, or one
            prefill worker where none decodes; requests with them go only to workers that honour them.
        media: media that any of its workers takes.
        adapters: adapters that at least one decode worker serves, or one prefill worker where none decodes; requests
            for them go only there.
        reasoning_parser, tool_call_parser: those that most workers name; empty: none names one.
    """

    key: PoolKey
    max_model_len: int
    num_rank_tokens: int
    block_size: int
    sampling_fields: frozenset[str]
    media: PoolMedia
    adapters: frozenset[str]
    num_ready_prefill: int
    num_ready_decode: int
    num_ready_encode: int = 0
    num_prefill_tokens: int = 0
    reasoning_parser: str = ""
    tool_call_parser: str = ""


def describe_pool(key: PoolKey, workers: Sequence[KnownWorker], ready: _Ready) -> Pool:
    """The pool of ``workers``, which have answered; those in ``ready`` are ready.

    At least one must compute prompts or decode.
    """
    encode, prefill, decode = (
        [worker for worker in workers if worker.record.role is role]
        for role in (Role.ENCODE, Role.PREFILL, Role.DECODE)
    )
    # Encode workers have their own block size, and sample no tokens.
    models = [*prefill, *decode]
    # Decode ranks hold whole sequences, and can compute what no prefill worker does.
    holders = decode or prefill
    return Pool(
        key=key,
        max_model_len=median_high([worker.record.max_model_len for worker in holders]),
        num_rank_tokens=max([worker.num_rank_tokens for worker in decode], default=0),
        block_size=_usual([worker.record.block_size for worker in models]),
        sampling_fields=frozenset().union(*[worker.record.sampling_fields for worker in holders]),
        media=_describe_media(models, encode, [*ready.prefill, *ready.decode], ready.encode),
        adapters=frozenset().union(*[worker.record.adapters for worker in holders]),
        num_ready_prefill=len(ready.prefill),
        num_ready_decode=len(ready.decode),
        num_ready_encode=len(ready.encode),
        num_prefill_tokens=min([worker.num_rank_tokens for worker in prefill], default=0),
        reasoning_parser=_named_most([worker.record.reasoning_parser for worker in models]),
        tool_call_parser=_named_most([worker.record.tool_call_parser for worker in models]),
    )


def _named_most(names: Sequence[str]) -> str:
    """The name that comes most often; the first of several, by the alphabet, and empty if there is none."""
    given = sorted(filter(None, names))
    return mode(given) if given else ""


def _usual(values: Sequence[int]) -> int:
    """The value that more than half of ``values`` are; 0: there is none."""
    value = mode(values)
    return value if 2 * values.count(value) > len(values) else 0


def _describe_media(
    models: Sequence[KnownWorker],
    encode: Sequence[KnownWorker],
    ready_models: Sequence[KnownWorker],
    ready_encode: Sequence[KnownWorker],
) -> PoolMedia:
    takers = [worker for worker in (*models, *encode) if worker.record.media]
    if not takers:
        return _NO_MEDIA
    is_pulled = any(TAKES_HAND_OFF in worker.record.media for worker in models)
    is_pulled_now = any(TAKES_HAND_OFF in worker.record.media for worker in ready_models)
    return PoolMedia(
        encoded=_kinds(ready_encode if is_pulled_now else ()),
        filed=_kinds(ready_models),
        known=_kinds([*models, *encode] if is_pulled else models),
        known_encoded=_kinds(encode if is_pulled else ()),
        awaits_encode=is_pulled and not encode,
        max_tokens=max(worker.record.max_media_tokens for worker in takers),
    )


def _kinds(workers: Iterable[KnownWorker]) -> frozenset[frozenset[str]]:
    return frozenset(frozenset(worker.record.media) - _HAND_OFF for worker in workers)


_NO_MEDIA = PoolMedia()


class PeerWatch:
    """Finds the other routers by the starts that workers report, or that they tell of themselves.

    Attributes:
        peers: as of the last report or ``poll``.
        clock_ahead_s: as in ``Peers``.
    """

    def __init__(self, router_id: str) -> None:
        """Start with only this router known."""
        self._router_id = router_id
        self._last_numbers: dict[tuple[str, str], int] = {}  # by worker and router's numbering
        self._epochs: dict[str, int] = {}
        self._active_at: dict[str, float] = {}
        self._told_at: dict[str, float] = {}  # of those that tell what they send
        self.clock_ahead_s = 0.0
        self.peers = Peers()

    def on_report(self, load: WorkerLoad, now: float) -> None:
        """Apply a load report, which names the last start of each router."""
        has_new = False
        # The first report of an epoch may include starts that ended long ago.
        is_known = self._epochs.get(load.worker_id) == load.epoch
        self._epochs[load.worker_id] = load.epoch
        for name, number in load.router_arrivals.items():
            if number > self._last_numbers.get((load.worker_id, name), 0):
                self._last_numbers[load.worker_id, name] = number
                router_id = name.rpartition(".")[0]
                if is_known:
                    has_new |= router_id not in self._active_at
                    self._active_at[router_id] = now
        if has_new:
            self.poll(now)

    def on_told(self, router_id: str, now: float) -> None:
        """A router told what it has sent."""
        is_new = router_id not in self._told_at or router_id not in self._active_at
        if is_new and len(self._told_at) >= _MAX_PEERS:
            return
        self._told_at[router_id] = self._active_at[router_id] = now
        if is_new:
            self.poll(now)

    def forget(self, worker_id: str) -> None:
        """The worker is gone."""
        self._epochs.pop(worker_id, None)
        self._last_numbers = {key: number for key, number in self._last_numbers.items() if key[0] != worker_id}

    def poll(self, now: float) -> None:
        """Apply the passage of time: some routers may no longer be active."""
        self._active_at = {name: at for name, at in self._active_at.items() if now - at <= _ACTIVE_S}
        self._told_at = {name: at for name, at in self._told_at.items() if now - at <= _ACTIVE_S}
        others = self._active_at.keys() - {self._router_id}
        routers = sorted(others | {self._router_id})
        self.peers = Peers(
            number=routers.index(self._router_id),
            num_routers=len(routers),
            tell_bookings=bool(others) and others <= self._told_at.keys(),
            clock_ahead_s=self.clock_ahead_s,
        )
