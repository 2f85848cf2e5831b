"""A worker process, from its command line to its exit code: all parts are made, wired, run and closed here."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from typing import NoReturn

import uvloop
from prometheus_client import CollectorRegistry

from quartet.config import build
from quartet.discovery.base import CONTRACT_VERSION, Abilities, Registry, Role, WorkerRecord
from quartet.discovery.create import create_registry
from quartet.discovery.host import host_identity, new_epoch
from quartet.engine.settings import EngineKind
from quartet.engine.trtllm.environment import become_other_rank, end_other_ranks, is_other_rank, set_log_level
from quartet.errors import ConfigError, ServingError, WorkerReplacedError
from quartet.events.curve import EventsKey, read_events_key
from quartet.events.kv import RankEvents
from quartet.events.load import WorkerLoad
from quartet.events.publisher import EventPublisher, LoadPacer
from quartet.events.vllm_publisher import VllmPublisher
from quartet.kvcache.hand_off import HandOffState
from quartet.rpc.channels import MAX_STREAM_MESSAGE_BYTES
from quartet.rpc.server import RpcServer, Service
from quartet.supervision import LoopWatch, Supervisor, TaskEndedError, end_process_within
from quartet.telemetry.gpus import watch_gpus
from quartet.telemetry.http import Probes, TelemetryServer
from quartet.telemetry.logging import configure
from quartet.telemetry.metrics import (
    CertificateMetrics,
    CertificateUse,
    ProcessMetrics,
    ReloadedFile,
    ReloadMetrics,
    WorkerMetrics,
    monitor_event_loop_lag,
)
from quartet.telemetry.tracing import open_tracer
from quartet.telemetry.vllm_names import show_worker_as_vllm
from quartet.transfer.base import BlockMemory, PoolMemory, TransferWay
from quartet.transfer.cuda.lent import CudaServer
from quartet.transfer.cuda.memory import DeviceMemory
from quartet.transfer.cuda.staging import StagingArea, StagingServer
from quartet.transfer.grpc.messages import SERVICE as TRANSFER_SERVICE
from quartet.transfer.grpc.servicer import TransferServicer, add_transfer_servicer
from quartet.transfer.shm import ShmServer
from quartet.transfer.source import TransferSource
from services.encode.encode import EncodeParts
from services.workers.config import EXIT_REPLACED, Advertised, WorkerConfig
from services.workers.engine_parts import EngineParts
from services.workers.flags import CommandLine
from services.workers.kv_events import KvEvents, VllmEvents
from services.workers.model import ServedModel, find_model
from services.workers.parts import (
    EncoderFactory,
    EngineFactory,
    Parts,
    Serving,
    Surroundings,
    create_engine,
    create_media_encoder,
)
from services.workers.servicer import WorkerServicer, worker_service
from services.workers.worker import Worker

logger = logging.getLogger(__name__)

# Streams of routers never end by themselves; no request runs on them any more when they are cut.
_STREAMS_GRACE_S = 0.2

# By then the engine's thread has freed the blocks and its statistics show it.
_RELEASE_SEEN_S = 0.02

_SWITCH_INTERVAL_S = 0.0005

# As in the router: reference counts free most of what requests make.
_COLLECTED_AT_NUM_OBJECTS = 10_000

# A worker that failed has its drain and this long to close everything.
_CLOSE_TIMEOUT_S = 20.0


def main(role: Role, engine_factory: EngineFactory | None = None) -> None:
    """Run one worker from the command line; exits with 1 and one line if it can't start or its engine died.

    With ``EXIT_REPLACED`` it exits if another process has taken its id: it has then finished its requests. On a rank of
    ``trtllm-llmapi-launch`` other than 0 it becomes a process that works for rank 0, without serving.
    ``engine_factory`` makes another engine than the one that the configuration names.
    """
    try:
        command_line = CommandLine(role, sys.argv[1:])
    except SystemExit as leaving:
        if leaving.code:
            end_other_ranks(os.environ)
        raise
    try:
        config = build(WorkerConfig, command_line.settings())
        config = replace(config, tracing=config.tracing.with_variables(os.environ))
        configure(config.log)
        for note in command_line.notes():
            logger.info("%s: %s", role, note)
        if config.engine.kind is EngineKind.TRTLLM:
            # Before anything imports the package, which reads it then.
            set_log_level(config.log.level, os.environ)
            if is_other_rank(os.environ):
                become_other_rank(os.environ)
        # The engine's thread runs Python too: with the default of 5 ms the event loop lags behind it.
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        uvloop.run(_run(config, role, engine_factory))
    except (ConfigError, ServingError, TaskEndedError) as error:
        logger.error("%s: %s", role, command_line.named(_with_field(error)))
        _leave(EXIT_REPLACED if isinstance(error, WorkerReplacedError) else 1)
    except Exception:  # the process ends here
        logger.exception("%s: ended by an unexpected error", role)
        _leave(1)
    _leave(0)


@dataclass
class PoolServers:
    """What lends a pool to other workers; ``None``: not by that way."""

    shm: ShmServer | None = None
    cuda: CudaServer | None = None
    staging: StagingArea | None = None
    staging_server: StagingServer | None = None


class WorkerProcess:
    """One worker, from ``start`` to the end of ``run``."""

    def __init__(
        self,
        config: WorkerConfig,
        role: Role,
        engine_factory: EngineFactory | None = None,
        encoder_factory: EncoderFactory | None = None,
        on_failure: Callable[[], None] = lambda: None,
        on_loaded: Callable[[], None] = lambda: None,
    ) -> None:
        """Nothing is opened before ``run``; ``role`` is encode, prefill or decode.

        The factories make another engine or encoder than the one that ``config`` names. ``on_failure`` is called if the
        worker can't go on, before it closes everything; ``on_loaded`` once its model is loaded, before it serves.
        """
        self._config = config
        self._on_failure = on_failure
        self._on_loaded = on_loaded
        self._has_failed = False
        self._loop_watch = LoopWatch()
        self._role = role
        self._engine_factory = engine_factory
        self._encoder_factory = encoder_factory
        self._registry = CollectorRegistry()
        self._surroundings = Surroundings(
            config=config,
            role=role,
            worker_id=config.worker_id or f"{role}-{socket.gethostname()}-{os.getpid()}",
            epoch=new_epoch(),
            host=host_identity(),
            registry=self._registry,
            metrics=WorkerMetrics(self._registry),
            certificates=CertificateMetrics(self._registry),
            reloads=ReloadMetrics(self._registry),
        )
        self._model: ServedModel | None = None
        self._worker: Worker | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop`` is set, which may be during the start, then drain and close everything.

        It drains also when one of its background tasks has ended, unless the engine is dead, and then raises that.

        Raises:
            ConfigError, ServingError: it can't start; the message says why.
            EngineError: the engine or the vision tower died.
            WorkerReplacedError: another process has taken the worker's id; it has drained.
            ServingError, TaskEndedError: another background task has ended.
        """
        async with AsyncExitStack() as stack:
            telemetry = TelemetryServer(self._config.http_address, self._registry, self._probes())
            http_port = telemetry.start()
            stack.push_async_callback(telemetry.close)
            self._watch_gpus()
            self._open_tracer(stack)
            if not await is_done_before(stop, self._find_model()):
                return
            parts = self._make_parts()
            stack.push_async_callback(parts.close)
            if await is_done_before(stop, parts.start()):
                self._on_loaded()
                await self._serve(stack, parts, http_port, stop)

    def _watch_gpus(self) -> None:
        engine = self._config.engine
        if engine.kind.uses_gpu(engine.device):
            # TensorRT-LLM runs on all GPUs that it sees.
            number = engine.device.partition(":")[2] if engine.kind is EngineKind.TORCH else ""
            watch_gpus(self._registry, os.environ.get("CUDA_VISIBLE_DEVICES"), int(number) if number else None)

    def _open_tracer(self, stack: AsyncExitStack) -> None:
        config, surroundings = self._config, self._surroundings
        tracer = open_tracer(
            config.tracing,
            os.environ,
            role=self._role,
            namespace=config.server.namespace,
            instance=surroundings.worker_id,
        )
        if tracer is not None:
            stack.push_async_callback(tracer.close)
            self._surroundings = replace(surroundings, tracer=tracer)

    async def _find_model(self) -> None:
        began = time.monotonic()
        self._model = await find_model(self._config)
        self._surroundings.metrics.fetch_time.set(time.monotonic() - began)
        self._config = replace(self._config, model_path=str(self._model.path))
        self._surroundings = replace(self._surroundings, config=self._config)

    @property
    def _served_model(self) -> ServedModel:
        assert self._model is not None, "it is found before the worker serves"
        return self._model

    def _make_parts(self) -> Parts:
        encoder_factory = self._encoder_factory or create_media_encoder
        if self._role is Role.ENCODE:
            if self._config.vllm_events is not None:
                raise ConfigError("vllm_events: an Encode worker has no KV blocks")
            return EncodeParts(self._surroundings, encoder_factory)
        return EngineParts(self._surroundings, self._engine_factory or create_engine, encoder_factory)

    async def _serve(self, stack: AsyncExitStack, parts: Parts, http_port: int, stop: asyncio.Event) -> None:
        source = self._source(parts)
        stack.callback(source.close)
        pools = await self._pool_servers(stack, parts.memory)
        self._surroundings.metrics.expect_transfers(self._config.transfer.announced_ways(parts.memory))
        serving = parts.serve(source)
        servicer = WorkerServicer(self._served_model.text_files)
        services = [serving.service, worker_service(servicer), self._transfer_service(source, pools)]
        # A longer message would delay all requests on a shared stream, so it ends its stream.
        server = RpcServer(
            replace(self._config.server, max_receive_message_bytes=MAX_STREAM_MESSAGE_BYTES),
            services,
            count_reload=self._surroundings.reloads.counter(ReloadedFile.GRPC_CERTIFICATE),
        )
        grpc_port = await server.start()
        self._surroundings.certificates.watch(CertificateUse.GRPC, server.certificate_end)
        stack.push_async_callback(server.drain, _STREAMS_GRACE_S)
        publisher = self._publisher()
        stack.callback(publisher.close)
        addresses = self._config.listening.advertise(
            grpc_port=grpc_port, events_port=publisher.port, http_port=http_port
        )
        source.advertise(addresses.grpc)
        worker = self._worker = Worker(
            self._record(serving.abilities, addresses, parts.memory),
            serving.computing,
            serving.requests,
            source,
            server,
            KvEvents(serving.snapshots, publisher, self._vllm_events(stack, serving.abilities.block_size)),
            drain_timeout_s=self._config.drain_timeout_s,
            stall_timeout_s=self._config.stall_timeout_s,
            transfers=self._surroundings.transfers,
        )
        servicer.serve(worker)
        if self._role is not Role.ENCODE:
            self._show_as_vllm(serving)
        await self._run_worker(worker, publisher, serving, stop)

    def _show_as_vllm(self, serving: Serving) -> None:
        show_worker_as_vllm(
            self._registry,
            self._surroundings.metrics,
            serving.requests.stats,
            model=self._served_model.name,
            block_size=serving.abilities.block_size,
            num_blocks=serving.abilities.num_blocks,
            prefills=self._role is Role.PREFILL,
        )

    async def _run_worker(
        self, worker: Worker, publisher: EventPublisher, serving: Serving, stop: asyncio.Event
    ) -> None:
        def publish(load: WorkerLoad) -> None:
            publisher.publish_load(load)
            worker.load_sent()

        pacer = LoadPacer(worker.next_load, publish, worker.prompt_queues)
        registry = create_registry(self._config.discovery)
        self._surroundings.certificates.watch(CertificateUse.ETCD, registry.certificate_end)
        async with Supervisor(self._fail, expected=(ServingError,)) as tasks:
            tasks.start("outputs", worker.consume(pacer))
            tasks.start("health", worker.watch_health())
            tasks.start("load", pacer.run())
            tasks.start("lag", monitor_event_loop_lag(ProcessMetrics(self._registry)))
            tasks.start("loop-watch", self._loop_watch.run())
            for watch in serving.watches:
                tasks.start("watch", watch())
            tasks.start("registration", self._announce(worker, registry))
            try:
                await tasks.run_until(stop)
                if worker.is_alive:
                    await worker.drain()
            finally:
                await registry.close()

    async def _announce(self, worker: Worker, registry: Registry) -> None:
        registration = await registry.register(worker.record)
        await worker.announce(registration, registry)
        logger.info("%s %s serves on %s", self._role, worker.record.worker_id, worker.record.grpc_address)
        await registration.ended()

    def _fail(self) -> None:
        self._has_failed = True
        self._on_failure()

    def _probes(self) -> Probes:
        return Probes(is_alive=lambda: self._is_alive, is_ready=lambda: self._is_ready)

    @property
    def _is_alive(self) -> bool:
        is_dead = self._worker is not None and not self._worker.is_alive
        return not is_dead and not self._loop_watch.is_dead

    @property
    def _is_ready(self) -> bool:
        is_ready = self._worker is not None and self._worker.is_ready
        return is_ready and not self._has_failed and not self._loop_watch.is_blocked

    def _source(self, parts: Parts) -> TransferSource:
        loop = asyncio.get_running_loop()

        def ended(holder: int, state: HandOffState) -> None:
            parts.hand_off_ended(holder, was_taken=state is HandOffState.TAKEN)
            self._surroundings.metrics.hand_offs.labels(state).inc()
            # A release gives no output, and a router may wait for this room.
            loop.call_later(_RELEASE_SEEN_S, self._poke)

        return TransferSource(
            worker_id=self._surroundings.worker_id,
            epoch=self._surroundings.epoch,
            config=self._config.transfer,
            on_end=ended,
            memory=parts.memory,
        )

    def _poke(self) -> None:
        if self._worker is not None:
            self._worker.poke()

    async def _pool_servers(self, stack: AsyncExitStack, memory: BlockMemory | None) -> PoolServers:
        """What lends the pool to other workers, with its servers started."""
        config = self._config.transfer
        ways = config.ways_of(memory)
        servers = PoolServers()
        if isinstance(memory, PoolMemory) and TransferWay.SHM in ways:
            servers.shm = ShmServer(memory)
        if isinstance(memory, DeviceMemory) and TransferWay.CUDA_IPC in ways:
            servers.cuda = CudaServer(memory, self._surroundings.epoch)
        if isinstance(memory, DeviceMemory) and TransferWay.GRPC in ways:
            servers.staging = StagingArea(memory, config.staging_size_bytes)
            stack.push_async_callback(servers.staging.close)
            if TransferWay.SHM in ways:
                servers.staging_server = StagingServer(servers.staging)
        for server in (servers.shm, servers.cuda, servers.staging_server):
            if server is not None:
                await server.start()
                stack.push_async_callback(server.close)
        return servers

    def _transfer_service(self, source: TransferSource, servers: PoolServers) -> Service:
        servicer = TransferServicer(
            source,
            host=self._surroundings.host,
            config=self._config.transfer,
            shm=servers.shm,
            cuda=servers.cuda,
            staging=servers.staging,
            staging_server=servers.staging_server,
        )
        return Service(TRANSFER_SERVICE, lambda server: add_transfer_servicer(servicer, server))

    def _publisher(self) -> EventPublisher:
        events, surroundings = self._config.listening.events, self._surroundings
        return EventPublisher(
            events.host,
            events.port,
            worker_id=surroundings.worker_id,
            epoch=surroundings.epoch,
            key=self._events_key(),
        )

    def _vllm_events(self, stack: AsyncExitStack, block_size: int) -> Callable[[RankEvents], None] | None:
        """What publishes changes in vLLM's form, if that is configured; ``stack`` closes it."""
        feed = self._config.vllm_events
        if feed is None:
            return None
        publisher = VllmPublisher(
            feed.listening.host,
            feed.listening.port,
            setting="vllm_events.address",
            replay_port=feed.replay_port,
            topic=feed.topic,
            form=feed.form,
            key=self._events_key(),
        )
        stack.callback(publisher.close)
        replays = f", replays on port {publisher.replay_port}" if publisher.replay_port else ""
        logger.info("KV events in vLLM's form on port %d%s", publisher.port, replays)
        return VllmEvents(publisher, block_size).publish_kv

    def _events_key(self) -> EventsKey | None:
        key_file = self._config.events_key_file
        return None if key_file is None else read_events_key(key_file)

    def _record(self, abilities: Abilities, addresses: Advertised, memory: BlockMemory | None) -> WorkerRecord:
        config, surroundings = self._config, self._surroundings
        own_fingerprint = self._served_model.fingerprint(abilities.model_fingerprint)
        try:
            return WorkerRecord(
                **asdict(replace(abilities, model_fingerprint=own_fingerprint)),
                worker_id=surroundings.worker_id,
                role=self._role,
                epoch=surroundings.epoch,
                grpc_address=addresses.grpc,
                events_address=addresses.events,
                http_address=addresses.http,
                model_name=self._served_model.name,
                host=surroundings.host,
                transfer_ways=config.transfer.announced_ways(memory),
                contract_version=CONTRACT_VERSION,
            )
        except ValueError as error:
            raise ConfigError(f"the worker can't be announced: {error}") from error


async def is_done_before(stop: asyncio.Event, work: Coroutine[object, object, None]) -> bool:
    """Run ``work``. If ``stop`` is set first, cancel it, wait until it has ended, and return false.

    Raises what ``work`` raises, unless it was cancelled here.
    """
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        working.cancel()  # does nothing if it is done
        await asyncio.wait({working, stopping})
    if working.cancelled():
        return False
    working.result()
    return True


def _with_field(error: ConfigError | ServingError | TaskEndedError) -> str:
    field = error.field if isinstance(error, ServingError) else None
    return str(error) if field is None else f"{field}: {error}"


def _leave(code: int) -> NoReturn:
    # Everything is closed by now. An orderly exit would take a second of CPU to unload torch and a model. An engine
    # that could not be closed in time has logged it; the parent of this process ends what is left of it.
    if code:
        end_other_ranks(os.environ)
    logging.shutdown()
    os._exit(code)


async def _run(config: WorkerConfig, role: Role, engine_factory: EngineFactory | None) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    limit_s = config.drain_timeout_s + _CLOSE_TIMEOUT_S
    process = WorkerProcess(
        config,
        role,
        engine_factory,
        on_failure=lambda: end_process_within(limit_s),
        on_loaded=_keep_from_collector,
    )
    await process.run(stop)


def _keep_from_collector() -> None:
    """A loaded model's objects stay for ever: a walk over them would stop the engine and all tokens."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECTED_AT_NUM_OBJECTS)
