"""What the router knows of all workers: discovery, connections, load reports and its own book, put together. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from quartet.discovery.base import Role, WorkerKey, WorkerRecord
from quartet.discovery.place import Place
from quartet.errors import WorkerUnavailableError
from quartet.events.load import PlacementProgress, WorkerLoad
from quartet.rpc.fleet import WorkerState, WorkerStatus
from router.book import Booking, Reservation, numbering
from router.encode_choice import EncodeCandidate
from router.peer_watch import PeerWatch
from router.policy.base import Pending, Placement, Snapshot
from router.policy.step_times import with_step_times
from router.pools import Pool, describe_pool
from router.worker import KnownWorker, PoolKey

#: Roles whose workers hold a model's KV: encoders serve no requests of their own.
_MODEL_ROLES = frozenset({Role.PREFILL, Role.DECODE})
_NO_PLACEMENTS = PlacementProgress()
# A worker's last reports may come after its end was noticed, but not later than that.
_LAST_REPORTS_S = 0.5


@dataclass(frozen=True)
class _Ready:
    """Workers of a pool that take requests."""

    prefill: Sequence[KnownWorker]
    decode: Sequence[KnownWorker]
    encode: Sequence[KnownWorker]


class WorkerTable:
    """All known workers. Times are monotonic seconds, given by the caller."""

    def __init__(self, router_id: str, *, heartbeat_timeout_s: float) -> None:
        """``router_id`` is new at each start: workers' reports then never count in what another life placed."""
        self.router_id = router_id
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._workers: dict[WorkerKey, KnownWorker] = {}
        self._peers = PeerWatch(router_id)
        self._listeners: list[Callable[[], None]] = []
        # Both are worked out when next asked for, and hold until a state changes; silence changes one at a tick.
        self._pools: list[Pool] | None = None
        self._ready: dict[PoolKey, _Ready] = {}

    def listen(self, on_change: Callable[[], None]) -> Callable[[], None]:
        """Call ``on_change`` after whatever may let more requests run or changes a status; returns how to stop it."""
        self._listeners.append(on_change)
        return lambda: self._listeners.remove(on_change)

    # What discovery says.

    def put(self, record: WorkerRecord, now: float) -> bool:
        """Discovery has ``record``. Returns whether it is a new worker, or a new life of one."""
        known = self._workers.get(record.key)
        is_new = known is None or known.record.epoch != record.epoch
        if known is None or is_new:
            self._workers[record.key] = KnownWorker(record, now)
        else:
            known.describe(record)
            known.is_listed = True
        self._changed()
        return is_new

    def unlist(self, key: WorkerKey) -> None:
        """Discovery has the record no more. That alone stops nothing."""
        if key in self._workers:
            self._workers[key].is_listed = False
            self._changed()

    def forget_gone(self, now: float) -> list[WorkerRecord]:
        """Drop the workers that are neither listed nor heard nor connected; return them."""
        gone = [worker for worker in self._workers.values() if not worker.is_listed and self._is_lost(worker, now)]
        for worker in gone:
            del self._workers[worker.record.key]
            self._peers.forget(worker.record.worker_id)
        if gone:
            self._changed()
        return [worker.record for worker in gone]

    # What connections and events say.

    def connected(self, key: WorkerKey, load: WorkerLoad, now: float) -> None:
        """The worker answered with ``load``; ignored for another epoch than the known one."""
        worker = self._life(key, load.epoch)
        if worker is not None:
            worker.is_connected = worker.has_joined = True
            worker.cut_at = None
            self._forget_states()
            self._take(worker, load, now)

    def broken(self, key: WorkerKey, epoch: int) -> None:
        """A stream to the worker broke: suspect until it answers."""
        worker = self._life(key, epoch)
        if worker is not None and worker.is_connected:
            worker.is_connected = False
            self._changed()

    def cut(self, key: WorkerKey, epoch: int, now: float) -> None:
        """The connection to the worker was lost, and nothing of ours was on it: suspect until it is heard again."""
        worker = self._life(key, epoch)
        if worker is not None:
            worker.cut_at = now
            self._changed()

    def is_draining(self, key: WorkerKey, epoch: int) -> bool:
        """Whether that life of the worker said that it lets its work run out."""
        worker = self._life(key, epoch)
        return worker is not None and worker.load is not None and worker.load.is_draining

    def report(self, load: WorkerLoad, now: float) -> None:
        """A load report came; ignored when it is from an unknown worker or life."""
        for role in Role:
            worker = self._life(WorkerKey(role=role, worker_id=load.worker_id), load.epoch)
            if worker is not None:
                self._take(worker, load, now)
                return

    def tick(self, now: float) -> None:
        """Time has passed: states that hang on silence may have changed, and placements may have lapsed."""
        for worker in self._workers.values():
            worker.book.placed.look(now)
            worker.look(now)
        self._peers.look(now)
        self._changed()

    # What others want to know.

    def pools(self, now: float) -> list[Pool]:
        """All pools, sorted."""
        if self._pools is None:
            keys = sorted({worker.pool for worker in self._workers.values() if worker.record.role in _MODEL_ROLES})
            self._pools = [self._describe(key, now) for key in keys]
        return self._pools

    def pool(self, model_name: str, now: float) -> Pool | None:
        """The pool that serves new requests for ``model_name``; an empty name means the only model.

        Where workers of several fingerprints serve one name (a new version is being rolled out), the pool with the
        most ready decode workers takes what comes; at a tie the first by fingerprint. Running requests stay in theirs.
        """
        pools = [pool for pool in self.pools(now) if model_name in ("", pool.key.model_name)]
        if not pools or (not model_name and len({pool.key.model_name for pool in pools}) > 1):
            return None
        return max(pools, key=lambda pool: pool.num_ready_decode)

    def has_ready_decode(self, pool: PoolKey, now: float) -> bool:
        """Whether any decode worker of ``pool`` is ready."""
        return any(known.num_ready_decode for known in self.pools(now) if known.key == pool)

    def block_size(self, pool: PoolKey, now: float) -> int:
        """``Pool.block_size`` of ``pool``; 0 also where it is gone."""
        return next((known.block_size for known in self.pools(now) if known.key == pool), 0)

    def snapshot(self, pool: PoolKey, now: float) -> Snapshot:
        """The places of ``pool`` that take requests now."""
        ready = self._ready_of(pool, now)
        prefill = [place for worker in ready.prefill for place in worker.candidates()]
        decode = [place for worker in ready.decode for place in worker.candidates()]
        peers = self._peers.peers
        if peers.num_routers > 1:
            peers = replace(peers, places=sorted([place.place for place in (*prefill, *decode)]))
        return Snapshot(
            prefill=with_step_times(prefill, decode), decode=with_step_times(decode, prefill), now=now, peers=peers
        )

    def encode_candidates(self, pool: PoolKey, kinds: frozenset[str], now: float) -> list[EncodeCandidate]:
        """The encode workers of ``pool`` that take files of all ``kinds`` now."""
        ready = self._ready_of(pool, now).encode
        return [worker.encode_candidate() for worker in ready if kinds <= frozenset(worker.record.media)]

    def num_encode_tokens(self, pool: PoolKey, now: float) -> int:
        """Tokens whose embeddings the encode workers of ``pool`` that are ready hold at most."""
        ready = self._ready_of(pool, now).encode
        return sum(worker.record.num_blocks * worker.record.block_size for worker in ready)

    def book_encode(self, place: Place, num_items: int) -> Booking:
        """Count ``num_items`` to encode at an encode worker that was seen just now."""
        key = WorkerKey(role=Role.ENCODE, worker_id=place.worker_id)
        return self._workers[key].book.book(place.data_parallel_rank, num_queued_tokens=num_items)

    def book(self, placement: Placement, pending: Pending, *, waited_s: float = 0.0) -> Reservation:
        """Enter ``placement`` of ``pending``, which was made on a snapshot of just now."""
        is_local = placement.prefill is None
        prefill: Booking | None = None
        if placement.prefill is not None:
            place = placement.prefill
            book = self._workers[WorkerKey(role=Role.PREFILL, worker_id=place.worker_id)].book
            prefill = book.book(place.data_parallel_rank, num_queued_tokens=pending.num_missing_tokens(place))
        place = placement.decode
        decode = self._workers[WorkerKey(role=Role.DECODE, worker_id=place.worker_id)].book.book(
            place.data_parallel_rank,
            num_reserved_tokens=pending.num_reserved_tokens,
            num_queued_tokens=pending.num_missing_tokens(place) if is_local else 0,
        )
        return Reservation(placement, prefill, decode, waited_s=waited_s)

    def ready_decode(self, place: Place, epoch: int, now: float) -> WorkerRecord:
        """The record of that life of a decode worker. Raises ``WorkerUnavailableError`` unless it is ready."""
        worker = self._life(WorkerKey(role=Role.DECODE, worker_id=place.worker_id), epoch)
        if worker is None or not self._is_ready(worker, now):
            raise WorkerUnavailableError(f"worker {place.worker_id} takes nothing any more")
        return worker.record

    def placed_at(self, request_id: str, choice: int) -> frozenset[str]:
        """Ids of workers where that choice of that request was placed for its client, and has not ended."""
        books = ((worker.record.worker_id, worker.book) for worker in self._workers.values())
        return frozenset(worker_id for worker_id, book in books if book.placed.has(request_id, choice))

    def statuses(self, now: float) -> list[WorkerStatus]:
        """All workers, sorted by role and id."""
        timeout_s = self._heartbeat_timeout_s
        return [worker.status(now, timeout_s) for _key, worker in sorted(self._workers.items())]

    def to_probe(self, now: float) -> list[WorkerRecord]:
        """Workers that should be asked how they are: not connected, cut or not listed, or silent for half the limit."""
        limit_s = self._heartbeat_timeout_s / 2
        return [
            worker.record
            for worker in self._workers.values()
            if not (worker.is_connected and worker.cut_at is None and worker.is_listed)
            or worker.silence_s(now) > limit_s
        ]

    def _life(self, key: WorkerKey, epoch: int) -> KnownWorker | None:
        worker = self._workers.get(key)
        return worker if worker is not None and worker.record.epoch == epoch else None

    def _take(self, worker: KnownWorker, load: WorkerLoad, now: float) -> None:
        state, num_tokens = worker.state(now, self._heartbeat_timeout_s), worker.num_place_tokens
        worker.load, worker.load_at = load, now
        worker.look(now)
        self._peers.report(load, now)
        if worker.cut_at is not None and now - worker.cut_at > _LAST_REPORTS_S:
            worker.cut_at = None
        name = numbering(self.router_id, load.epoch)
        worker.book.reported(
            load.router_progress.get(name, 0),
            load.placements.get(name, _NO_PLACEMENTS),
            arrived_number=load.router_arrivals.get(name, 0),
        )
        # Reports come by the dozen a second; few of them change what a pool is.
        is_same = (state, num_tokens) == (worker.state(now, self._heartbeat_timeout_s), worker.num_place_tokens)
        self._changed(keep_pools=is_same)

    def _is_ready(self, worker: KnownWorker, now: float) -> bool:
        return worker.state(now, self._heartbeat_timeout_s) is WorkerState.READY

    def _is_lost(self, worker: KnownWorker, now: float) -> bool:
        return not worker.is_connected or worker.silence_s(now) > self._heartbeat_timeout_s

    def _describe(self, key: PoolKey, now: float) -> Pool:
        workers = [worker for worker in self._workers.values() if worker.pool == key]
        return describe_pool(key, workers, lambda worker: self._is_ready(worker, now))

    def _ready_of(self, pool: PoolKey, now: float) -> _Ready:
        ready = self._ready.get(pool)
        if ready is None:
            ready = self._ready[pool] = self._find_ready(pool, now)
        return ready

    def _find_ready(self, pool: PoolKey, now: float) -> _Ready:
        ready = [worker for worker in self._workers.values() if worker.pool == pool and self._is_ready(worker, now)]
        return _Ready(
            prefill=[worker for worker in ready if worker.record.role is Role.PREFILL],
            decode=[worker for worker in ready if worker.record.role is Role.DECODE],
            encode=[worker for worker in ready if worker.record.role is Role.ENCODE],
        )

    def _forget_states(self) -> None:
        self._pools = None
        self._ready.clear()

    def _changed(self, *, keep_pools: bool = False) -> None:
        if not keep_pools:
            self._forget_states()
        for on_change in tuple(self._listeners):
            on_change()
