"""The router's fleet: discovery, connections and events brought together in the worker table."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping

from quartet.discovery.base import (
    Role,
    Synchronised,
    Watch,
    WorkerAdded,
    WorkerChanged,
    WorkerEvent,
    WorkerKey,
    WorkerRecord,
    WorkerRemoved,
)
from quartet.discovery.host import host_identity
from quartet.discovery.place import Place
from quartet.errors import DrainingError, ServingError, TransferError, WorkerUnavailableError
from quartet.events.curve import EventsKey
from quartet.events.load import NumberedLoad
from quartet.events.subscriber import EventSubscriber
from quartet.kvcache.layout import HandOff
from quartet.rpc.channels import create_channel
from quartet.rpc.encode import EncodeStart
from quartet.rpc.encode_client import EncodeCall
from quartet.rpc.fleet import WorkerState
from quartet.rpc.inner import DecodeSink, InnerStart
from quartet.rpc.inner_client import DecodeCall, PrefillCall
from quartet.rpc.text_cache import MAX_FILES_BYTES
from quartet.rpc.tls import TlsConfig
from quartet.telemetry.metrics import RouterMetrics
from quartet.transfer.config import TransferConfig
from quartet.transfer.grpc.lease import HandOffLease
from quartet.transfer.grpc.puller import TransferPuller
from router.connections import WorkerConnection
from router.kv_join import KvJoins
from router.model_texts import FetchedTexts
from router.worker import PoolKey
from router.worker_table import WorkerTable

logger = logging.getLogger(__name__)

_WORKER_ROLES = frozenset({Role.ENCODE, Role.PREFILL, Role.DECODE})
_TICK_S = 0.5
_PROBE_TIMEOUT_S = 2.0
_FILES_TIMEOUT_S = 30.0


class Fleet:
    """All workers that discovery tells of, as ``Hops``; ``texts`` has the text side of their models.

    Whatever happens to a worker ends up in ``table``. A worker is asked how it is (``GetInfo``) when it is new, when
    its stream broke, and when it has been silent for long.
    """

    def __init__(
        self,
        table: WorkerTable,
        metrics: RouterMetrics,
        tls: TlsConfig | None,
        *,
        events_key: EventsKey | None = None,
        kv: KvJoins | None = None,
        chat_template: str | None = None,
    ) -> None:
        """Connect to nobody yet; needs a running event loop.

        Args:
            table: kept up to date.
            metrics: of the router.
            tls: to dial workers with.
            events_key: that workers serve their events with; ``None``: in the clear.
            kv: told of workers and of what they publish; ``None``: their KV events are not listened to.
            chat_template: the source of every model's; ``None``: each has its own.
        """
        self.texts = FetchedTexts(self._fetch_files, chat_template=chat_template)
        #: Set once discovery has told of every worker that it knew at the start.
        self.is_synchronised = asyncio.Event()
        self._table = table
        self._metrics = metrics
        self._tls = tls
        self._kv = kv
        on_kv = None if kv is None else kv.take_batch
        self._subscriber = EventSubscriber(self._take_load, metrics.count_malformed_event, on_kv, key=events_key)
        self._connections: dict[WorkerKey, WorkerConnection] = {}
        self._probes: dict[WorkerKey, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._must_look = asyncio.Event()
        self._is_draining = False
        self._shown_states: Counter[tuple[Role, WorkerState]] = Counter()
        # Only to keep hand-offs and to let go of them: it has no pool to pull into.
        self._puller = TransferPuller(
            lambda address: create_channel(address, tls), host=host_identity(), config=TransferConfig()
        )

    # Hops.

    def encode(self, place: Place, start: EncodeStart, on_encoded: Callable[[HandOff], None]) -> EncodeCall:
        """Start to encode. Raises ``WorkerUnavailableError`` when the worker is gone."""
        return self._connection(Role.ENCODE, place).encode(start, on_encoded)

    def prefill(self, place: Place, start: InnerStart) -> PrefillCall:
        """Start a prefill. Raises ``WorkerUnavailableError`` when the worker is gone."""
        return self._connection(Role.PREFILL, place).prefill(start)

    def decode(self, place: Place, start: InnerStart, sink: DecodeSink) -> DecodeCall:
        """Start a decode. Raises ``WorkerUnavailableError`` when the worker is gone."""
        return self._connection(Role.DECODE, place).decode(start, sink)

    def keep(self, hand_off: HandOff) -> HandOffLease:
        """Renew the lease of ``hand_off`` until told to stop. Raises ``TransferError`` when closing."""
        return self._puller.keep(hand_off)

    def drop(self, hand_off: HandOff) -> None:
        """Let the source know that nobody will take ``hand_off``; what can't be told is left to the lease."""
        try:
            lease = self._puller.keep(hand_off)
        except TransferError:
            return  # closing: its lease ends it
        self._spawn(lease.abort())

    # Life.

    async def watch(self, watch: Watch) -> None:
        """Follow discovery until ``watch`` is closed."""
        async for event in watch:
            self._follow(event)

    async def tend(self) -> None:
        """Ask after workers that need it, forget those that are gone. Runs until cancelled."""
        while True:
            now = time.monotonic()
            for record in self._table.forget_gone(now):
                self._leave(record)
            for record in self._table.to_probe(now):
                self._probe(record)
            self.texts.keep({pool.key for pool in self._table.pools(now)})
            self._table.tick(now)
            self._show_states(now)
            self._must_look.clear()
            try:
                async with asyncio.timeout(_TICK_S):
                    await self._must_look.wait()
            except TimeoutError:
                continue

    def drain(self) -> None:
        """The router goes away: that workers do too, as at the end of a whole deployment, is worth no warning."""
        self._is_draining = True

    async def close(self) -> None:
        """Leave all workers; requests still on them fail. Ends in bounded time."""
        tasks = list(self._probes.values())
        for task in tasks:
            task.cancel()
        self._subscriber.close()
        if self._kv is not None:
            await self._kv.close()
        await self.texts.close()
        # Hand-offs that were just dropped are still told: each takes a second at most.
        await asyncio.gather(*tasks, *self._background, return_exceptions=True)
        await asyncio.gather(*(connection.close() for connection in self._connections.values()))
        await self._puller.close()

    def _follow(self, event: WorkerEvent) -> None:
        if isinstance(event, WorkerAdded | WorkerChanged):
            self._adopt(event.record)
        elif isinstance(event, WorkerRemoved):
            logger.info("worker %s left discovery", event.worker_id)
            self._table.unlist(WorkerKey(role=event.role, worker_id=event.worker_id))
            self._must_look.set()
        elif isinstance(event, Synchronised):
            self.is_synchronised.set()

    def _adopt(self, record: WorkerRecord) -> None:
        if record.role not in _WORKER_ROLES:
            return
        known = self._connections.get(record.key)
        is_new = self._table.put(record, time.monotonic())
        # A worker may also come back to another address without a new life, behind another proxy.
        if known is not None and (is_new or known.record.grpc_address != record.grpc_address):
            self._leave(known.record)
        if record.key not in self._connections:
            logger.info("worker %s at %s, epoch %x", record.worker_id, record.grpc_address, record.epoch)
            self._connections[record.key] = WorkerConnection(record, self._tls, self._broken, self._lost, self.drop)
            if self._kv is not None:
                self._kv.enter(record, self._connections[record.key].client)
            self._listen(record)
        self._must_look.set()

    def _listen(self, record: WorkerRecord) -> None:
        if not record.events_address:
            return
        try:
            self._subscriber.connect(record.events_address)
        except ValueError as error:
            logger.warning("worker %s: %s", record.worker_id, error)

    def _leave(self, record: WorkerRecord) -> None:
        probe = self._probes.pop(record.key, None)
        if probe is not None:
            probe.cancel()
        connection = self._connections.pop(record.key, None)
        if connection is None:
            return
        if self._kv is not None:
            self._kv.leave(connection.record)
        address = connection.record.events_address
        if all(other.record.events_address != address for other in self._connections.values()):
            self._subscriber.disconnect(address)
        self._spawn(connection.close())

    def _broken(self, record: WorkerRecord, error: ServingError) -> None:
        is_expected = (
            self._is_draining or isinstance(error, DrainingError) or self._table.is_draining(record.key, record.epoch)
        )
        level = logging.INFO if is_expected else logging.WARNING
        logger.log(level, "the stream to worker %s broke: %s", record.worker_id, error)
        self._table.broken(record.key, record.epoch)
        self._must_look.set()

    def _lost(self, record: WorkerRecord) -> None:
        self._table.cut(record.key, record.epoch, time.monotonic())

    def _take_load(self, report: NumberedLoad) -> None:
        self._table.report(report.load, time.monotonic())
        if self._kv is not None:
            self._kv.take_load(report)

    def _probe(self, record: WorkerRecord) -> None:
        connection = self._connections.get(record.key)
        if connection is None or record.key in self._probes:
            return
        task = asyncio.create_task(self._ask(connection), name=f"probe-{record.worker_id}")
        self._probes[record.key] = task
        task.add_done_callback(lambda done: self._end_probe(record.key, done))

    def _end_probe(self, key: WorkerKey, task: asyncio.Task[None]) -> None:
        if self._probes.get(key) is task:
            del self._probes[key]

    async def _ask(self, connection: WorkerConnection) -> None:
        record = connection.record
        try:
            report = await connection.client.info(_PROBE_TIMEOUT_S)
        except ServingError as error:
            logger.debug("worker %s does not answer: %s", record.worker_id, error)
            self._table.broken(record.key, record.epoch)
            return
        if report.record.key == record.key and report.record.epoch != record.epoch:
            # It started anew and discovery has not told yet, or can't. Adopting it ends this probe.
            self._adopt(report.record)
            return
        self._table.connected(record.key, report.load, time.monotonic())
        pool = PoolKey(record.model_name, record.model_fingerprint)
        if self.texts.known(pool) is None:
            self._spawn(self.texts.prefetch(pool))

    async def _fetch_files(self, pool: PoolKey, names: Collection[str]) -> Mapping[str, bytes]:
        last: ServingError = WorkerUnavailableError("no worker of this model is known")
        for connection in list(self._connections.values()):
            if PoolKey(connection.record.model_name, connection.record.model_fingerprint) != pool:
                continue
            try:
                return await connection.client.model_files(
                    names,
                    # What is known of it may be old: another worker may listen there by now.
                    model_fingerprint=pool.fingerprint,
                    max_size_bytes=MAX_FILES_BYTES,
                    timeout_s=_FILES_TIMEOUT_S,
                )
            except ServingError as error:
                last = error
        raise last

    def _connection(self, role: Role, place: Place) -> WorkerConnection:
        connection = self._connections.get(WorkerKey(role=role, worker_id=place.worker_id))
        if connection is None:
            raise WorkerUnavailableError(f"worker {place.worker_id} is gone")
        return connection

    def _show_states(self, now: float) -> None:
        states = Counter((status.record.role, status.state) for status in self._table.statuses(now))
        for role, state in states.keys() | self._shown_states.keys():
            self._metrics.set_workers(role.value, state.value, states[role, state])
        self._shown_states = states

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
