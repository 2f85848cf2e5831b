"""Workers as the processes wire them, but on a model runner of digests: real engine, streams, servers and transfers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from quartet.discovery.host import host_identity
from quartet.engine.base import EngineStats, FinishReason, Generation, RequestKind
from quartet.engine.sampling import OutputOptions, Sampling
from quartet.engine.scheduler import SchedulerConfig
from quartet.engine.step_engine import StepEngine
from quartet.errors import ServingError
from quartet.kvcache.layout import HandOff
from quartet.rpc.channels import MAX_STREAM_MESSAGE_BYTES, create_channel
from quartet.rpc.server import RpcServer, ServerConfig, Service
from quartet.streams.client import DecodeClient, PrefillClient
from quartet.streams.messages import RequestContext, WorkerStart
from quartet.streams.server import StreamLimits
from quartet.telemetry.metrics import WorkerMetrics
from quartet.transfer.base import TransferWay
from quartet.transfer.config import TransferConfig
from quartet.transfer.grpc.puller import TransferPuller
from quartet.transfer.grpc.servicer import TransferServicer, add_transfer_servicer
from quartet.transfer.shm import ShmServer
from quartet.transfer.source import HandOffTicket, TransferSource
from services.decode.servicer import decode_service
from services.prefill.servicer import prefill_service
from services.workers.dispatch import DecodeDispatcher, PrefillDispatcher
from tests.engine.fakes import FakeRunner, expected_output
from tests.streams.pulled import DecodeProgress, PulledDecode, PullingDecodeClient

WAIT_S = 30.0
EPOCH = 7
DECODE_METHOD = "/quartet.v1.DecodeService/Decode"
PREFILL_METHOD = "/quartet.v1.PrefillService/Prefill"

_request_ids = itertools.count(1)


class GatedTransfers(TransferServicer):
    """Serves pulls, renewals and aborts once it may."""

    may_serve: asyncio.Event

    async def Pull(self, request_iterator: Any, context: Any) -> None:
        await self.may_serve.wait()
        await super().Pull(request_iterator, context)


@dataclass
class StreamWorker:
    """One worker, serving. ``may_transfer``, cleared, holds up everything that others want of its hand-offs."""

    engine: StepEngine
    runner: FakeRunner
    source: TransferSource
    dispatcher: DecodeDispatcher | PrefillDispatcher
    server: RpcServer
    channel: grpc.aio.Channel
    broken: list[ServingError]
    dropped: list[HandOff]
    may_transfer: asyncio.Event

    @property
    def stats(self) -> EngineStats:
        return self.engine.stats()[0]

    def is_clean(self) -> bool:
        stats = self.stats
        is_free = stats.num_free_blocks + stats.num_cached_blocks == stats.num_total_blocks
        return is_free and not stats.num_running and not stats.num_waiting and not self.dispatcher.num_running

    async def wait_clean(self) -> None:
        """Until no request runs and no block is used or held."""
        await until(self.is_clean)

    def decodes(self) -> PullingDecodeClient:
        """A new stream of decodes."""
        return PullingDecodeClient(DecodeClient("worker", self.channel, self.broken.append))

    def prefills(self) -> PrefillClient:
        """A new stream of prefills; the hand-offs that it drops are aborted, as a router does."""
        return PrefillClient("worker", self.channel, self.broken.append, self._abort)

    def _abort(self, hand_off: HandOff) -> None:
        self.dropped.append(hand_off)
        self.source.abort(HandOffTicket(hand_off.hand_off_id, hand_off.secret, hand_off.epoch))

    def raw(self, method: str) -> grpc.aio.StreamStreamCall[bytes, bytes]:
        """A new stream of bytes."""
        return self.channel.stream_stream(method)()


@asynccontextmanager
async def stream_worker(
    kind: RequestKind,
    runner: FakeRunner | None = None,
    *,
    limits: StreamLimits | None = None,
    transfer: TransferConfig | None = None,
    scheduler: SchedulerConfig | None = None,
) -> AsyncIterator[StreamWorker]:
    """A worker of ``kind`` on loopback; everything is taken down in the end."""
    runner = runner or FakeRunner()
    transfer = transfer or TransferConfig(hand_off_ttl_s=10.0)
    host, memory = host_identity(), runner.memory
    assert memory is not None
    puller = TransferPuller(lambda address: create_channel(address, None), host=host, config=transfer)
    engine = StepEngine(
        lambda: runner, scheduler or SchedulerConfig(), puller=puller, kinds=frozenset({kind}), close_timeout_s=WAIT_S
    )
    await engine.start()
    source = TransferSource(
        worker_id="worker",
        epoch=EPOCH,
        config=transfer,
        on_end=lambda holder, _state: engine.release(holder),
        memory=memory,
    )
    shm = ShmServer(memory)
    await shm.start()
    dispatcher, service = _dispatching(kind, engine, source, limits or StreamLimits())
    pulls = GatedTransfers(source, host=host, config=transfer, shm=shm)
    pulls.may_serve = asyncio.Event()
    pulls.may_serve.set()
    transfers = Service("quartet.v1.TransferService", lambda server: add_transfer_servicer(pulls, server))
    server = RpcServer(ServerConfig(max_receive_message_bytes=MAX_STREAM_MESSAGE_BYTES), [service, transfers])
    address = f"127.0.0.1:{await server.start()}"
    source.advertise(address)
    channel = create_channel(address, None)
    consumer = asyncio.create_task(_consume(engine, dispatcher))
    try:
        yield StreamWorker(engine, runner, source, dispatcher, server, channel, [], [], pulls.may_serve)
    finally:
        pulls.may_serve.set()
        if runner.step_gate is not None:
            runner.step_gate.release(100_000)
        await channel.close()
        await server.drain(0.0)
        source.close()
        await engine.close()
        await consumer
        await puller.close()
        await shm.close()


def _dispatching(
    kind: RequestKind, engine: StepEngine, source: TransferSource, limits: StreamLimits
) -> tuple[DecodeDispatcher | PrefillDispatcher, Service]:
    metrics = WorkerMetrics(CollectorRegistry())
    if kind is RequestKind.PREFILL:
        prefills = PrefillDispatcher(engine, source, "fake", metrics)
        return prefills, prefill_service(prefills, limits)
    decodes = DecodeDispatcher(engine, metrics)
    return decodes, decode_service(decodes, limits)


@asynccontextmanager
async def prefill_and_decode(
    *,
    ways: tuple[TransferWay, ...] = (TransferWay.SHM, TransferWay.GRPC),
    prefill_runner: FakeRunner | None = None,
    decode_runner: FakeRunner | None = None,
    hand_off_ttl_s: float = 10.0,
) -> AsyncIterator[tuple[StreamWorker, StreamWorker]]:
    """One worker of each kind."""
    transfer = TransferConfig(ways=ways, hand_off_ttl_s=hand_off_ttl_s)
    async with (
        stream_worker(RequestKind.PREFILL, prefill_runner, transfer=transfer) as prefill,
        stream_worker(RequestKind.DECODE, decode_runner, transfer=transfer) as decode,
    ):
        yield prefill, decode


async def _consume(engine: StepEngine, dispatcher: DecodeDispatcher | PrefillDispatcher) -> None:
    try:
        async for step in engine.outputs():
            dispatcher.route(step)
    except ServingError:
        return  # a test killed it


async def until(is_met: Callable[[], bool]) -> None:
    """Wait for what another task or thread will bring about."""
    async with asyncio.timeout(WAIT_S):
        while not is_met():  # noqa: ASYNC110 - what is looked at has no event
            await asyncio.sleep(0.002)


def make_start(
    prompt: Sequence[int],
    *,
    generated: Sequence[int] = (),
    hand_off: HandOff | None = None,
    max_tokens: int = 8,
    logprobs: int | None = None,
    **context: object,
) -> WorkerStart:
    """A start with a request id of its own, unless ``context`` has one."""
    named = {"request_id": f"{next(_request_ids):032x}", **context}
    return WorkerStart(
        context=RequestContext(**named),  # type: ignore[arg-type]
        generation=Generation(
            prompt_token_ids=tuple(prompt),
            generated_token_ids=tuple(generated),
            sampling=Sampling(max_tokens=max_tokens),
            output=OutputOptions(logprobs=logprobs),
        ),
        hand_off=hand_off,
    )


def expected(start: WorkerStart, max_len: int = 256) -> list[int]:
    """All output tokens of ``start``, generated ones included."""
    return expected_output(start.generation, max_len=max_len)


async def collect_all(call: PulledDecode) -> DecodeProgress:
    """All that comes for the call until its good end, merged."""
    merged = DecodeProgress()
    async with asyncio.timeout(WAIT_S):
        while merged.finished is None:
            progress = await call.next()
            merged.merge_tokens(progress.token_offset, progress.token_ids)
            merged.logprobs += progress.logprobs
            merged.started = merged.started or progress.started
            merged.finished = progress.finished
    assert merged.finished.reason in (FinishReason.LENGTH, FinishReason.STOP_ID)
    assert merged.finished.num_output_tokens == merged.token_offset + len(merged.token_ids)
    return merged


async def collect(call: PulledDecode) -> list[int]:
    """The call's tokens until its good end."""
    return (await collect_all(call)).token_ids
