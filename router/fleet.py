"""The router's fleet: discovery, connections and events brought together in the worker table."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from quartet.api.fleet import WorkerState
from quartet.api.text_cache import MAX_FILES_BYTES, TextCache
from quartet.discovery.base import (
    Rank,
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
from quartet.errors import (
    ConfigError,
    DrainingError,
    ModelFilesError,
    ServingError,
    TransferError,
    WorkerUnavailableError,
)
from quartet.events.bookings import RouterBookings
from quartet.events.curve import EventsKey
from quartet.events.load import NumberedLoad
from quartet.events.subscriber import EventSubscriber
from quartet.kvcache.layout import HandOff
from quartet.media.items import MediaSize
from quartet.rpc.channels import Dialer, TlsConfig, watch_connection
from quartet.streams.client import DecodeCall, DecodeClient, PrefillCall, PrefillClient, RunningDecode
from quartet.streams.encode_client import EncodeCall, EncodeClient
from quartet.streams.messages import DecodeSink, EncodeStart, PrefillOutcome, WorkerStart
from quartet.streams.worker_client import WorkerClient
from quartet.supervision import report_failure
from quartet.telemetry.metrics import RouterMetrics
from quartet.text.chat_template import read_template_file
from quartet.text.model_files import CHAT_TEMPLATE, TEXT_FILE_NAMES
from quartet.text.model_text import ModelText
from quartet.transfer.config import TransferConfig
from quartet.transfer.grpc.puller import PullClaim, TransferPuller
from router.kv_index.feed import KvJoins
from router.workers import PoolKey, WorkerTable, with_addresses_of

logger = logging.getLogger(__name__)

RequestsT = TypeVar("RequestsT", DecodeClient, PrefillClient, EncodeClient)

_WORKER_ROLES = frozenset({Role.ENCODE, Role.PREFILL, Role.DECODE})

_TICK_S = 0.5

# After a longer pause between two ticks this process was stopped, or got no CPU.
_AWAY_S = 2.0

_PROBE_TIMEOUT_S = 2.0

_WATCH_AGAIN_S = 1.0

_FILES_TIMEOUT_S = 30.0


class Fleet:
    """All workers that discovery lists, as ``Hops``; ``texts`` has the text side of their models.

    The fleet enters everything that happens to a worker in ``table``. It probes a worker (``GetInfo``) that is new,
    whose stream broke, or that has been silent for long.
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
        on_worker: Callable[[WorkerRecord], None] | None = None,
        fetch_files: FetchFiles | None = None,
    ) -> None:
        """Connect to no worker yet; needs a running event loop.

        Args:
            table: the fleet keeps it up to date.
            metrics: the router's.
            tls: to dial workers with.
            events_key: the key with which workers serve their events; ``None``: without encryption.
            kv: gets the workers and the KV events that they publish; ``None``: the fleet ignores KV events.
            chat_template: the source of every model's template; ``None``: each model has its own.
            on_worker: called with each worker that appears or has started again.
            fetch_files: gets the files of models; ``None``: from the fleet's own workers.
        """
        self.texts = FetchedTexts(fetch_files or self._fetch_files, chat_template=chat_template)
        self._table = table
        self._metrics = metrics
        self._dialer = Dialer(tls)
        self._kv = kv
        self._on_worker = on_worker
        on_kv = None if kv is None else kv.take_batch
        self._subscriber = EventSubscriber(
            self._take_load, metrics.malformed_events.inc, on_kv, self._take_bookings, key=events_key
        )
        self._router_endpoints: frozenset[str] = frozenset()
        self._connections: dict[WorkerKey, WorkerConnection] = {}
        self._probes: dict[WorkerKey, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._must_tend = asyncio.Event()
        self._is_draining = False
        self._shown_states: Counter[tuple[Role, WorkerState]] = Counter()
        # Only keeps and releases hand-offs: it has no pool to pull into.
        self._puller = TransferPuller(self._dialer.open, host=host_identity(), config=TransferConfig())

    # Requests on workers.

    def encode(self, rank: Rank, start: EncodeStart, on_encoded: Callable[[HandOff], None]) -> EncodeCall:
        """Start to encode. Raises ``WorkerUnavailableError`` when the worker is gone."""
        return self._requests(Role.ENCODE, rank.worker_id, EncodeClient).start(start, on_encoded)

    def prefill(self, rank: Rank, start: WorkerStart) -> PrefillCall:
        """Start a prefill. Raises ``WorkerUnavailableError`` when the worker is gone."""
        return self._requests(Role.PREFILL, rank.worker_id, PrefillClient).start(start)

    def decode(self, rank: Rank, start: WorkerStart, sink: DecodeSink) -> DecodeCall:
        """Start a decode. Raises ``WorkerUnavailableError`` when the worker is gone."""
        return self._requests(Role.DECODE, rank.worker_id, DecodeClient).start(start, sink)

    def renew(self, hand_off: HandOff) -> PullClaim:
        """Renew ``hand_off`` until stopped. Raises ``TransferError`` when closing."""
        return self._puller.claim_for_another(hand_off)

    def drop(self, hand_off: HandOff) -> None:
        """Notify the source that no worker will take ``hand_off``; if that fails, the hand-off expires."""
        try:
            claim = self._puller.claim_for_another(hand_off)
        except TransferError:
            return  # closing: the hand-off expires
        self._spawn("release-hand-off", claim.release())

    def _requests(self, role: Role, worker_id: str, kind: type[RequestsT]) -> RequestsT:
        connection = self._connections.get(WorkerKey(role, worker_id))
        if connection is None or connection.is_closed or not isinstance(connection.requests, kind):
            raise WorkerUnavailableError(f"worker {worker_id} is gone")
        return connection.requests

    # Following the workers.

    async def watch(self, watch: Watch) -> None:
        """Follow discovery until ``watch`` is closed."""
        async for event in watch:
            self._follow(event)

    def listen_to_routers(self, endpoints: frozenset[str]) -> None:
        """Be told what other routers send, by those that publish at these ``tcp://host:port`` and no others."""
        for endpoint in self._router_endpoints - endpoints:
            self._subscriber.disconnect(endpoint)
        for endpoint in endpoints - self._router_endpoints:
            self._connect(endpoint, "a router")
        self._router_endpoints = endpoints

    async def tend(self) -> None:
        """Probe workers that need it, and forget those that are gone. Runs until cancelled."""
        last = time.monotonic()
        while True:
            now = time.monotonic()
            if now - last > _AWAY_S:
                self._table.was_away(now - last)
            last = now
            for record in self._table.forget_gone(now):
                self._leave(record.key)
            for record in self._table.to_probe(now):
                self._probe(record)
            for record in self._table.hanging(now):
                self._spawn(f"reset-{record.worker_id}", self._reset(record))
            self.texts.retain({pool.key for pool in self._table.pools(now)})
            self._table.set_clock(time.time() - now)
            self._table.tick(now)
            self.show_states(now)
            self._must_tend.clear()
            try:
                async with asyncio.timeout(_TICK_S):
                    await self._must_tend.wait()
            except TimeoutError:
                continue

    def drain(self) -> None:
        """The router shuts down: log no more broken streams, since workers also stop when a deployment ends."""
        self._is_draining = True

    def certificate_end(self) -> float | None:
        """When the first certificate ends with which it dials workers; see ``Dialer``."""
        return self._dialer.certificate_end()

    async def close(self) -> None:
        """Leave all workers; requests still on them fail. Ends in bounded time."""
        tasks = list(self._probes.values())
        for task in tasks:
            task.cancel()
        self._subscriber.close()
        if self._kv is not None:
            await self._kv.close()
        await self.texts.close()
        # The sources must still learn of the hand-offs that were just dropped: each takes a second at most.
        await asyncio.gather(*tasks, *self._background, return_exceptions=True)
        await asyncio.gather(*(connection.close() for connection in self._connections.values()))
        await self._puller.close()

    def _follow(self, event: WorkerEvent) -> None:
        if isinstance(event, WorkerAdded | WorkerChanged):
            self._adopt(event.record)
        elif isinstance(event, WorkerRemoved):
            logger.info("worker %s left discovery", event.worker_id)
            self._table.unlist(WorkerKey(role=event.role, worker_id=event.worker_id))
            self._must_tend.set()
        elif isinstance(event, Synchronised):
            self._table.is_synchronised = True
            self._must_tend.set()

    def _adopt(self, record: WorkerRecord) -> bool:
        """Connect to a worker that is new here or has moved. Returns whether it is new, as ``WorkerTable.put`` does."""
        if record.role not in _WORKER_ROLES:
            return False
        known = self._connections.get(record.key)
        for key in self._table.other_roles(record.key):
            self._leave(key)
        is_new = self._table.put(record, time.monotonic())
        record = self._table.record(record.key)
        # Behind another proxy, a worker may also get another address within one epoch.
        if known is not None and (is_new or _addresses(known.record) != _addresses(record)):
            self._leave(record.key)
        if not self._table.can_use(record):
            if is_new:
                logger.warning(
                    "worker %s is not used: it speaks %r, and this router does not",
                    record.worker_id,
                    record.contract_version,
                )
        elif record.key not in self._connections:
            logger.info("worker %s at %s, epoch %x", record.worker_id, record.grpc_address, record.epoch)
            self._connections[record.key] = WorkerConnection(record, self._dialer, self._lost, self._broken, self.drop)
            if self._kv is not None:
                self._kv.enter(record, self._connections[record.key].client)
            self._listen(record)
            if self._on_worker is not None:
                self._on_worker(record)
        self._must_tend.set()
        return is_new

    def _listen(self, record: WorkerRecord) -> None:
        if record.events_address:
            self._connect(record.events_address, f"worker {record.worker_id}")

    def _connect(self, endpoint: str, whose: str) -> None:
        try:
            self._subscriber.connect(endpoint)
        except ValueError as error:
            logger.warning("%s: %s", whose, error)

    def _leave(self, key: WorkerKey) -> None:
        probe = self._probes.pop(key, None)
        if probe is not None:
            probe.cancel()
        connection = self._connections.pop(key, None)
        if connection is None:
            return
        if self._kv is not None:
            self._kv.leave(connection.record)
        address = connection.record.events_address
        if all(other.record.events_address != address for other in self._connections.values()):
            self._subscriber.disconnect(address)
        self._spawn(f"leave-{key.worker_id}", connection.close())

    def _broken(self, record: WorkerRecord, error: ServingError) -> None:
        is_expected = (
            self._is_draining or isinstance(error, DrainingError) or self._table.is_draining(record.key, record.epoch)
        )
        level = logging.INFO if is_expected else logging.WARNING
        logger.log(level, "the stream to worker %s broke: %s", record.worker_id, error)
        self._table.broken(record.key, record.epoch)
        self._must_tend.set()

    def _lost(self, record: WorkerRecord) -> None:
        self._table.cut(record.key, record.epoch, time.monotonic())

    def _take_load(self, report: NumberedLoad) -> None:
        self._table.report(report.load, time.monotonic())
        if self._kv is not None:
            self._kv.take_load(report)

    def _take_bookings(self, bookings: RouterBookings) -> None:
        self._table.hear(bookings, time.monotonic())

    def _probe(self, record: WorkerRecord) -> None:
        connection = self._connections.get(record.key)
        if connection is None or record.key in self._probes:
            return
        task = asyncio.create_task(self._ask(connection), name=f"probe-{record.worker_id}")
        self._probes[record.key] = task
        task.add_done_callback(report_failure)
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
            if self._table.is_silent(record.key, record.epoch, time.monotonic()):
                # Its host may still answer gRPC's pings, which its event loop does not.
                await self._reset(record)
            return
        if report.record.key == record.key and report.record.epoch != record.epoch:
            # The worker restarted, and discovery can't report it, or not yet. Adopting it ends this probe.
            self._adopt(report.record)
            return
        own = with_addresses_of(record, report.record)
        if own.key != record.key:
            logger.debug("worker %s does not answer: %s does, at its address", record.worker_id, own.worker_id)
            self._table.broken(record.key, record.epoch)
            return
        if own != record and self._adopt(own):
            # The next probe lets it join.
            logger.warning("worker %s says otherwise than its record in discovery; its own word counts", own.worker_id)
            return
        self._table.connected(record.key, report.load, time.monotonic())
        pool = PoolKey(record.model_name, record.model_fingerprint)
        if self.texts.known(pool) is None:
            self._spawn("prefetch-texts", self.texts.prefetch(pool))

    async def _reset(self, record: WorkerRecord) -> None:
        """Let the requests at that worker continue elsewhere; nothing happens if it has none."""
        connection = self._connections.get(record.key)
        if connection is not None and connection.record.epoch == record.epoch:
            await connection.requests.reset()

    async def _fetch_files(self, pool: PoolKey, names: Collection[str]) -> Mapping[str, bytes]:
        last: ServingError = WorkerUnavailableError("no worker of this model is known")
        connections = list(self._connections.values())
        # One that never answered may keep silent for the whole timeout.
        connections.sort(key=lambda one: self._table.has_joined(one.record.key), reverse=True)
        for connection in connections:
            if PoolKey(connection.record.model_name, connection.record.model_fingerprint) != pool:
                continue
            try:
                return await connection.client.model_files(
                    names,
                    # The address may be old: another worker may now listen there.
                    model_fingerprint=pool.fingerprint,
                    max_size_bytes=MAX_FILES_BYTES,
                    timeout_s=_FILES_TIMEOUT_S,
                )
            except ServingError as error:
                last = error
        raise last

    def show_states(self, now: float) -> None:
        """Bring the metrics up to date that count workers by role and state; models have theirs before a request."""
        statuses = self._table.statuses(now)
        for model in {status.record.model_name for status in statuses}:
            self._metrics.for_model(model)
        states = Counter((status.record.role, status.state) for status in statuses)
        for role, state in states.keys() | self._shown_states.keys():
            self._metrics.set_workers(role.value, state.value, states[role, state])
        self._shown_states = states

    def _spawn(self, name: str, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(report_failure)
        task.add_done_callback(self._background.discard)


def _addresses(record: WorkerRecord) -> tuple[str, str]:
    return record.grpc_address, record.events_address


class WorkerConnection:
    """One channel to one epoch of one worker.

    Attributes:
        record: of the epoch to which this connects.
        client: asks the worker about itself.
        requests: starts requests there. Its stream opens with the first one; each encode has a stream of its own.
        is_closed: ``close`` was called.
    """

    def __init__(
        self,
        record: WorkerRecord,
        dialer: Dialer,
        on_lost: Callable[[WorkerRecord], None],
        on_broken: Callable[[WorkerRecord, ServingError], None],
        drop: Callable[[HandOff], None],
    ) -> None:
        """Connect at the first use.

        Args:
            record: what discovery says of the worker.
            dialer: opens the channel to it.
            on_lost: called when the connection is lost while no stream is open on it, so the router also notices the
                death of a worker that serves only clients.
            on_broken: called when the stream breaks, unless ``close`` broke it.
            drop: gets hand-offs whose requests have ended.
        """
        self.record = record
        self.is_closed = False
        self._channel = dialer.open(record.grpc_address)
        self.client = WorkerClient(self._channel)
        self.requests: DecodeClient | PrefillClient | EncodeClient
        if record.role is Role.DECODE:
            self.requests = DecodeClient(record.worker_id, self._channel, self._broken)
        elif record.role is Role.PREFILL:
            self.requests = PrefillClient(record.worker_id, self._channel, self._broken, drop)
        else:
            self.requests = EncodeClient(record.worker_id, self._channel, drop)
        self._on_lost = on_lost
        self._on_broken = on_broken
        self._watching = asyncio.create_task(self._watch(), name=f"connection to {record.worker_id}")

    async def close(self) -> None:
        """Break the stream: requests on it fail with ``WorkerUnavailableError`` and continue on other workers."""
        self.is_closed = True
        self._watching.cancel()
        await asyncio.wait([self._watching])
        await self.requests.close()
        await self._channel.close()

    async def _watch(self) -> None:
        """Report lost connections until cancelled, whatever goes wrong meanwhile."""
        while True:
            try:
                await watch_connection(self._channel, self._lost)
            except Exception:  # the watch ends here, and another one begins
                logger.exception("the connection to worker %s can't be watched", self.record.worker_id)
                self._lost()
                await asyncio.sleep(_WATCH_AGAIN_S)

    def _lost(self) -> None:
        # An open stream reports by itself when it breaks, and may stay open after new ones are no longer accepted.
        # Without one, a lost connection's encodes fail by themselves.
        if isinstance(self.requests, EncodeClient) or not self.requests.is_open:
            self._on_lost(self.record)

    def _broken(self, error: ServingError) -> None:
        if not self.is_closed:
            self._on_broken(self.record, error)


# The seam of the pipeline: hops to workers, and the text side of models.


class PrefillHop(Protocol):
    """One prefill under way."""

    async def outcome(self) -> PrefillOutcome:
        """Wait for its output. If the caller is cancelled here, nothing is left behind.

        Raises:
            ServingError: it failed.
        """
        ...


class DecodeHop(RunningDecode, Protocol):
    """One decode under way."""

    @property
    def first_sent_at_unix_ns(self) -> int:
        """When the worker had its first token; 0: it does not say, or has none."""
        ...

    def cancel(self) -> None:
        """End it early: its sink gets nothing more. Harmless after its end."""
        ...


class EncodeHop(Protocol):
    """The encoding of one request's media."""

    async def sizes(self) -> Sequence[MediaSize]:
        """Wait for the size of each item, in order. Raises ``ServingError``: it failed before all came."""
        ...

    async def hand_offs(self) -> Sequence[HandOff]:
        """Wait for the hand-off of each item, in order; the caller then owns them.

        Raises:
            ServingError: it failed; no hand-off is left.
        """
        ...

    def cancel(self) -> None:
        """End it early and drop the hand-offs that were not taken; harmless if all were."""
        ...


class RenewedHandOff(Protocol):
    """A hand-off that is renewed."""

    def stop(self) -> None:
        """Stop renewing; the hand-off expires in time. May be called twice."""
        ...


class Hops(Protocol):
    """The ways to workers. No method here waits."""

    def encode(self, rank: Rank, start: EncodeStart, on_encoded: Callable[[HandOff], None]) -> EncodeHop:
        """Start to encode; ``on_encoded`` is called with each hand-off as it comes.

        Raises ``WorkerUnavailableError`` when the worker is gone.
        """
        ...

    def prefill(self, rank: Rank, start: WorkerStart) -> PrefillHop:
        """Start a prefill. Raises ``WorkerUnavailableError`` when the worker is gone."""
        ...

    def decode(self, rank: Rank, start: WorkerStart, sink: DecodeSink) -> DecodeHop:
        """Start a decode with outputs to ``sink``. Raises ``WorkerUnavailableError`` when the worker is gone."""
        ...

    def renew(self, hand_off: HandOff) -> RenewedHandOff:
        """Renew a hand-off until stopped. Raises ``TransferError`` when this is closing."""
        ...

    def drop(self, hand_off: HandOff) -> None:
        """Notify the source of a hand-off that no worker will take it; harmless if one did."""
        ...


class ModelTexts(Protocol):
    """The text side of models."""

    async def model_text(self, pool: PoolKey) -> ModelText:
        """Tokenizer and chat template of a pool.

        Raises:
            WorkerUnavailableError: no worker gave the files in time.
            ModelFilesError: the files are invalid.
        """
        ...


# The text side of every model served: fetched from a worker once, kept while the pool lives.

#: Asks one worker after another for the named files; raises ``ServingError`` if none gives them.
FetchFiles = Callable[[PoolKey, Collection[str]], Awaitable[Mapping[str, bytes]]]


def read_chat_template(file: Path) -> str:
    """The Jinja source in ``file``. Raises ``ConfigError``: the file can't be read, or is no template."""
    try:
        return read_template_file(file)
    except ModelFilesError as error:
        raise ConfigError(f"custom_chat_template: {error}") from error


class FetchedTexts:
    """``ModelTexts`` from workers. Requests that wait for the same model share one fetch."""

    def __init__(self, fetch: FetchFiles, *, chat_template: str | None = None) -> None:
        """``chat_template`` is the source of every model's template; ``None``: each model has its own."""
        self._fetch = fetch
        self._chat_template = chat_template
        self._cache: TextCache[PoolKey] = TextCache()

    def known(self, pool: PoolKey) -> ModelText | None:
        """The text side, if it is already here."""
        return self._cache.known(pool)

    async def model_text(self, pool: PoolKey) -> ModelText:
        """The text side of ``pool``.

        Raises:
            WorkerUnavailableError: no worker gave the files.
            ModelFilesError: the files are invalid.
        """
        return await self._cache.get(pool, lambda: self._files(pool))

    async def prefetch(self, pool: PoolKey) -> None:
        """Fetch the text side before a request needs it. A failure is only logged: the next request tries again."""
        try:
            await self.model_text(pool)
        except ServingError as error:
            logger.warning("no tokenizer for %s yet: %s", pool.model_name, error)

    def retain(self, pools: Collection[PoolKey]) -> None:
        """Forget all pools except ``pools``."""
        self._cache.retain(pools)

    async def close(self) -> None:
        """Cancel the running fetches."""
        await self._cache.close()

    async def _files(self, pool: PoolKey) -> Mapping[str, bytes]:
        files = await self._fetch(pool, TEXT_FILE_NAMES)
        return files if self._chat_template is None else {**files, CHAT_TEMPLATE: self._chat_template.encode()}
