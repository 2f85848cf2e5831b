"""Nonsense on one worker stream is that stream's own trouble: the server serves on, other streams go on unharmed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta

import grpc
import pytest
from prometheus_client import CollectorRegistry

from quartet.engine.base import RequestKind, StepLogprobs, StepOutput
from quartet.engine.sampling import TokenLogprobs
from quartet.errors import MessageTooLargeError, ServingError
from quartet.kvcache.layout import BlocksPayload, HandOff, OpaquePayload
from quartet.rpc.channels import MAX_STREAM_MESSAGE_BYTES, create_channel
from quartet.rpc.server import RpcServer, ServerConfig
from quartet.streams.client import DecodeClient
from quartet.streams.server import StreamLimits
from quartet.telemetry.metrics import WorkerMetrics
from quartet.v1 import decode_pb2, types_pb2
from services.decode.servicer import decode_service
from services.workers.dispatch import DecodeDispatcher
from tests.engine.fakes import FakeRunner, fake_layout
from tests.services.stream_workers import (
    DECODE_METHOD,
    PREFILL_METHOD,
    WAIT_S,
    StreamWorker,
    collect,
    expected,
    make_start,
    stream_worker,
    until,
)
from tests.services.stub_engine import StubEngine
from tests.streams.pulled import PullingDecodeClient
from tests.streams.starts import decode_start

PROMPT = tuple(range(1, 11))
METHODS = {RequestKind.DECODE: DECODE_METHOD, RequestKind.PREFILL: PREFILL_METHOD}
RawCall = grpc.aio.StreamStreamCall[bytes, bytes]


def decode_request(slot: int, *, chunked: bool = False) -> bytes:
    start = decode_start(slot, make_start(PROMPT))
    start.chunked = chunked
    return decode_pb2.DecodeRequest(start=start).SerializeToString()


async def status(call: RawCall) -> grpc.StatusCode:
    """How the stream ended, whatever came before."""
    async with asyncio.timeout(WAIT_S):
        try:
            while await call.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError:
            pass
        return await call.code()


async def failure(call: RawCall) -> types_pb2.Failure:
    """The failure in the next message."""
    async with asyncio.timeout(WAIT_S):
        message = await call.read()
    assert isinstance(message, bytes)
    return decode_pb2.DecodeResponse.FromString(message).failures[0].failure


async def assert_serves(worker: StreamWorker) -> None:
    """A new stream does what it should."""
    if isinstance(worker.dispatcher, DecodeDispatcher):
        client = worker.decodes()
        start = make_start(PROMPT)
        assert await collect(client.start(start)) == expected(start)
        await client.close()
    else:
        prefills = worker.prefills()
        call = prefills.start(make_start(PROMPT))
        await call.outcome()
        await prefills.close()


@asynccontextmanager
async def beside_a_good_stream() -> AsyncIterator[StreamWorker]:
    """A decode worker with a stream that is busy all the time, and in the end has its tokens."""
    async with stream_worker(RequestKind.DECODE, FakeRunner(num_blocks=512)) as worker:
        client = worker.decodes()
        is_over = asyncio.Event()

        async def keep_busy() -> None:
            while not is_over.is_set():
                start = make_start(PROMPT, max_tokens=40)
                assert await collect(client.start(start)) == expected(start)

        busy = asyncio.create_task(keep_busy())
        yield worker
        is_over.set()
        async with asyncio.timeout(WAIT_S):
            await busy
        await client.close()
        await worker.wait_clean()


def malformed_bodies(seed: int, number: int) -> list[bytes]:
    """Starts cut off somewhere, starts with bytes changed, and noise."""
    draw = random.Random(seed)
    bodies = []
    for index in range(number):
        whole = bytearray(decode_request(0))
        kind = index % 3
        if kind == 0:
            del whole[draw.randrange(1, len(whole)) :]
        elif kind == 1:
            for _ in range(3):
                whole[draw.randrange(len(whole))] = draw.randrange(256)
        else:
            whole = bytearray(draw.randbytes(draw.randrange(1, 100)))
        bodies.append(bytes(whole))
    return bodies


@pytest.mark.parametrize("kind", list(RequestKind))
async def test_a_hundred_malformed_bodies_leave_the_server_serving(kind: RequestKind) -> None:
    async with stream_worker(kind) as worker:
        codes = []
        for body in malformed_bodies(seed=5, number=100):
            call = worker.raw(METHODS[kind])
            await call.write(body)
            await call.done_writing()
            codes.append(await status(call))
        # What still parses is a request like others, or fails alone.
        assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}
        assert codes.count(grpc.StatusCode.INVALID_ARGUMENT) > 50
        await assert_serves(worker)


async def write_empty(call: RawCall) -> None:
    await call.write(b"")


async def write_used_slot(call: RawCall) -> None:
    await call.write(decode_request(3, chunked=True))
    await call.write(decode_request(3))


async def write_noise(call: RawCall) -> None:
    await call.write(b"\xff" * 10)


async def write_too_much(call: RawCall) -> None:
    chunk = types_pb2.StartChunk(slot=1, target=types_pb2.CHUNK_TARGET_PROMPT_TOKEN_IDS, data=bytes(1 << 20))
    await call.write(decode_pb2.DecodeRequest(chunk=chunk).SerializeToString())


@pytest.mark.parametrize(
    ("write", "code"),
    [
        (write_empty, grpc.StatusCode.INVALID_ARGUMENT),
        (write_used_slot, grpc.StatusCode.INVALID_ARGUMENT),
        (write_noise, grpc.StatusCode.INVALID_ARGUMENT),
        (write_too_much, grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
)
async def test_nonsense_ends_its_own_stream_only(
    write: Callable[[RawCall], Awaitable[None]], code: grpc.StatusCode
) -> None:
    async with beside_a_good_stream() as worker:
        call = worker.raw(DECODE_METHOD)
        for slot in (1000, 1001):
            start = decode_start(slot, make_start(PROMPT, max_tokens=200))
            await call.write(decode_pb2.DecodeRequest(start=start).SerializeToString())
        await write(call)
        assert await status(call) is code
        await assert_serves(worker)


async def test_an_order_that_makes_no_sense_is_ignored_by_slot() -> None:
    async with beside_a_good_stream() as worker:
        call = worker.raw(DECODE_METHOD)
        for message in (
            decode_pb2.DecodeRequest(chunk=types_pb2.StartChunk(slot=9, data=b"x")),
            decode_pb2.DecodeRequest(start_done=types_pb2.StartDone(slot=9)),
            decode_pb2.DecodeRequest(cancel=types_pb2.Cancel(slot=2**32 - 1)),
        ):
            await call.write(message.SerializeToString())
        await call.write(decode_request(9))
        await call.done_writing()
        assert await status(call) is grpc.StatusCode.OK


async def test_a_cancel_does_not_reach_a_request_of_another_stream() -> None:
    async with beside_a_good_stream() as worker:
        call = worker.raw(DECODE_METHOD)
        for slot in range(100):
            cancel = decode_pb2.DecodeRequest(cancel=types_pb2.Cancel(slot=slot))
            await call.write(cancel.SerializeToString())
        await call.done_writing()
        assert await status(call) is grpc.StatusCode.OK


async def test_impossible_fields_fail_in_their_slots() -> None:
    async with beside_a_good_stream() as worker:
        call = worker.raw(DECODE_METHOD)
        for change, field in (
            (decode_pb2.DecodeStart(slot=1), "generation"),
            (decode_pb2.DecodeStart(slot=1, generation=types_pb2.Generation()), "generation.prompt_token_ids"),
            (
                decode_pb2.DecodeStart(
                    slot=1,
                    context=types_pb2.RequestContext(request_id="x"),
                    generation=types_pb2.Generation(prompt_token_ids=b"\1\0\0\0"),
                ),
                "context.request_id",
            ),
        ):
            await call.write(decode_pb2.DecodeRequest(start=change).SerializeToString())
            failed = await failure(call)
            assert (failed.code, failed.field) == (grpc.StatusCode.INVALID_ARGUMENT.value[0], field)


@pytest.mark.parametrize("address", ["nowhere", "\0", "127.0.0.1:1", "[::1", "dns:///x", "unix:/etc/passwd", "ü:9"])
async def test_hand_offs_with_impossible_addresses_fail_in_their_slots(address: str) -> None:
    async with beside_a_good_stream() as worker:
        hand_off = HandOff(
            hand_off_id=bytes(16),
            secret=bytes(16),
            worker_id="w",
            epoch=1,
            address=address,
            time_to_live=timedelta(seconds=1),
            payload=BlocksPayload(fake_layout(), len(PROMPT)),
        )
        call = worker.decodes().start(make_start(PROMPT, generated=[1], hand_off=hand_off))
        with pytest.raises(ServingError):
            await collect(call)
        assert not worker.broken


async def test_a_start_too_long_for_any_message_fails_before_it_is_sent() -> None:
    async with beside_a_good_stream() as worker:
        start = make_start(PROMPT)
        hand_off = HandOff(
            hand_off_id=bytes(16),
            secret=bytes(16),
            worker_id="w",
            epoch=1,
            address="127.0.0.1:1",
            time_to_live=timedelta(seconds=1),
            payload=OpaquePayload("trtllm", bytes(MAX_STREAM_MESSAGE_BYTES)),
        )
        client = worker.decodes()
        with pytest.raises(MessageTooLargeError):
            await client.start(replace(start, hand_off=hand_off)).next()
        assert await collect(client.start(start)) == expected(start)
        assert not worker.broken


async def test_a_stream_whose_client_reads_nothing_ends_and_other_streams_do_not() -> None:
    engine = StubEngine()
    dispatcher = DecodeDispatcher(engine, WorkerMetrics(CollectorRegistry()))
    server = RpcServer(ServerConfig(), [decode_service(dispatcher, StreamLimits(stall_timeout_s=0.4))])
    channel = create_channel(f"127.0.0.1:{await server.start()}", None)
    stuck: RawCall = channel.stream_stream(DECODE_METHOD)()
    await stuck.write(decode_request(0))
    await until(lambda: dispatcher.num_running == 1)
    broken: list[ServingError] = []
    client = PullingDecodeClient(DecodeClient("worker", channel, broken.append))
    call = client.start(make_start(PROMPT))
    await until(lambda: dispatcher.num_running == 2)
    logprobs = (TokenLogprobs(1, -1.0, tuple(range(20)), (-1.0,) * 20),) * 1000
    for offset in range(0, 100_000, 1000):
        step = StepOutput(
            ids=[1],
            num_tokens=[1000],
            token_offsets=[offset],
            token_ids=[7] * 1000,
            logprobs=[StepLogprobs(1, logprobs)],
        )
        dispatcher.route(step)
    await until(lambda: engine.cancelled == [1])
    dispatcher.route(StepOutput(ids=[2], num_tokens=[1], token_offsets=[0], token_ids=[5]))
    assert (await call.next()).token_ids == [5]
    assert not broken
    assert await status(stuck) is grpc.StatusCode.ABORTED
    await channel.close()
    await server.drain(0)


async def test_a_stream_on_which_nothing_runs_ends_and_is_no_break_for_its_client() -> None:
    limits = StreamLimits(idle_timeout_s=0.05)
    async with stream_worker(RequestKind.DECODE, FakeRunner(num_blocks=512), limits=limits) as worker:
        raw: RawCall = worker.channel.stream_stream(DECODE_METHOD)()
        await raw.write(decode_request(0))
        assert await status(raw) is grpc.StatusCode.UNAVAILABLE
        assert "no request ran" in str(await raw.details())
        client = worker.decodes()
        for _ in range(2):
            start = make_start(PROMPT)
            assert await collect(client.start(start)) == expected(start)
            await until(lambda: not client.client.is_open)
        assert not worker.broken
        await client.close()
