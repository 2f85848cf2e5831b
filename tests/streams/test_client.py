"""The router's end of worker streams against workers that misbehave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import grpc
import pytest

from quartet.engine.base import FinishReason, Generation
from quartet.errors import InvalidRequestError, RequestCancelledError, ServingError, WorkerUnavailableError
from quartet.kvcache.layout import HandOff, OpaquePayload
from quartet.media.items import MediaFile, MediaKind
from quartet.rpc.channels import create_channel
from quartet.rpc.errors import to_failure
from quartet.streams.client import DecodeCall, DecodeClient, PrefillCall, take_tokens
from quartet.streams.convert.messages import unpack_token_ids
from quartet.streams.messages import (
    DecodeFinished,
    DecodeStarted,
    MediaInput,
    PrefillOutcome,
    RequestContext,
    WorkerStart,
)
from quartet.streams.slots import PeerLostError
from quartet.v1 import decode_pb2, types_pb2
from tests.rpc.conftest import StartServer
from tests.rpc.services import generic_service
from tests.streams.pulled import PulledDecode, PullingDecodeClient

WAIT_S = 30.0
START = WorkerStart(context=RequestContext(), generation=Generation(prompt_token_ids=[1, 2, 3]))
HAND_OFF = HandOff(
    hand_off_id=bytes(16),
    secret=bytes(16),
    worker_id="w",
    epoch=1,
    address="h:1",
    time_to_live=timedelta(seconds=1),
    payload=OpaquePayload("trtllm", b"state"),
)
OUTCOME = PrefillOutcome(
    token_id=1,
    logprobs=None,
    finish_reason=None,
    hand_off=HAND_OFF,
    num_cached_tokens=0,
    queue_s=0.0,
    compute_s=0.0,
)

FINISHED = DecodeFinished(reason=FinishReason.LENGTH, num_output_tokens=0)


class ScriptedWorker:
    """Answers as the test says, byte by byte."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[decode_pb2.DecodeRequest] = asyncio.Queue()
        self.answers: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.is_idle = asyncio.Event()

    async def serve(self, requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
        self.is_idle.clear()
        reader = asyncio.create_task(self._read(requests))
        try:
            while (answer := await self.answers.get()) is not None:
                yield answer
        finally:
            reader.cancel()
            self.is_idle.set()

    async def _read(self, requests: AsyncIterator[bytes]) -> None:
        async for request in requests:
            self.requests.put_nowait(decode_pb2.DecodeRequest.FromString(request))

    async def request(self) -> decode_pb2.DecodeRequest:
        async with asyncio.timeout(WAIT_S):
            return await self.requests.get()

    def answer(self, **fields: object) -> None:
        self.answers.put_nowait(decode_pb2.DecodeResponse(**fields).SerializeToString())  # type: ignore[arg-type]

    def tokens(self, slot: int, offset: int, *token_ids: int) -> None:
        self.answer(slots=[slot], num_tokens=[len(token_ids)], token_offsets=[offset], token_ids=token_ids)

    def finish(self, slot: int) -> None:
        finished = decode_pb2.SlotFinished(slot=slot, reason=types_pb2.FINISH_REASON_LENGTH, num_output_tokens=1)
        self.answer(finished=[finished])


@pytest.fixture
async def worker() -> ScriptedWorker:
    return ScriptedWorker()


@pytest.fixture
def broken() -> list[ServingError]:
    return []


@pytest.fixture
async def client(
    worker: ScriptedWorker, broken: list[ServingError], start_server: StartServer
) -> AsyncIterator[PullingDecodeClient]:
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Decode": grpc.stream_stream_rpc_method_handler(worker.serve)
    }
    _server, address = await start_server([generic_service("quartet.v1.DecodeService", handlers)])
    channel = create_channel(address, None)
    client = PullingDecodeClient(DecodeClient("w", channel, broken.append))
    yield client
    await client.close()
    await channel.close()


async def test_a_slot_is_used_again_only_after_its_terminal_output(
    worker: ScriptedWorker, client: PullingDecodeClient
) -> None:
    first, second = client.start(START), client.start(START)
    slots = [(await worker.request()).start.slot for _ in range(2)]
    assert len(set(slots)) == 2
    first.cancel()
    assert (await worker.request()).cancel.slot == slots[0]
    third = client.start(START)
    assert (await worker.request()).start.slot not in slots
    worker.answer(
        failures=[decode_pb2.SlotFailure(slot=slots[0], failure=to_failure(RequestCancelledError("cancelled")))]
    )
    with pytest.raises(RequestCancelledError):
        await first.next()
    client.start(START)
    assert (await worker.request()).start.slot == slots[0]
    worker.tokens(slots[1], 0, 5)
    assert (await second.next()).token_ids == [5]
    assert not third.is_over


async def test_a_hole_ends_that_attempt_only(worker: ScriptedWorker, client: PullingDecodeClient) -> None:
    torn, whole = client.start(START), client.start(START)
    await worker.request()
    await worker.request()
    worker.answer(slots=[0, 0, 1], num_tokens=[1, 1, 1], token_offsets=[0, 2, 0], token_ids=[7, 9, 7])
    assert (await torn.next()).token_ids == [7]
    with pytest.raises(WorkerUnavailableError, match="lost tokens"):
        await torn.next()
    assert (await worker.request()).cancel.slot == 0
    worker.tokens(0, 3, 1)  # what still comes for it matters no more
    worker.finish(0)
    worker.tokens(1, 1, 8)
    token_ids = (await whole.next()).token_ids
    while len(token_ids) < 2:
        token_ids += (await whole.next()).token_ids
    assert token_ids == [7, 8]


async def test_tokens_that_came_before_are_dropped(worker: ScriptedWorker, client: PullingDecodeClient) -> None:
    call = client.start(START)
    await worker.request()
    worker.answer(slots=[0, 0], num_tokens=[2, 3], token_offsets=[0, 0], token_ids=[1, 2, 1, 2, 3])
    assert (await call.next()).token_ids == [1, 2, 3]


@pytest.mark.parametrize(
    "nonsense",
    [
        b"\xff\xff\xff",
        decode_pb2.DecodeResponse(slots=[0], num_tokens=[1], token_offsets=[0]).SerializeToString(),
        decode_pb2.DecodeResponse(slots=[0], num_tokens=[1], token_ids=[1]).SerializeToString(),
        decode_pb2.DecodeResponse(slots=[9], num_tokens=[1], token_offsets=[0], token_ids=[1]).SerializeToString(),
        decode_pb2.DecodeResponse(finished=[decode_pb2.SlotFinished(slot=0)]).SerializeToString(),
        decode_pb2.DecodeResponse(finished=[decode_pb2.SlotFinished(slot=9)]).SerializeToString(),
        decode_pb2.DecodeResponse(token_ids=[4]).SerializeToString(),
    ],
)
async def test_a_malformed_message_breaks_the_stream_and_the_next_start_opens_another(
    nonsense: bytes, worker: ScriptedWorker, client: PullingDecodeClient, broken: list[ServingError]
) -> None:
    calls = [client.start(START), client.start(START)]
    await worker.request()
    worker.answers.put_nowait(nonsense)
    for call in calls:
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(WorkerUnavailableError, match="broke the protocol"):
                while True:
                    await call.next()
    assert len(broken) == 1
    async with asyncio.timeout(WAIT_S):
        await worker.is_idle.wait()
    worker.requests = asyncio.Queue()
    again = client.start(START)
    assert (await worker.request()).start.slot == 0
    calls[0].cancel()  # of the old stream: nobody is asked
    worker.tokens(0, 0, 5)
    assert (await again.next()).token_ids == [5]


async def test_a_worker_that_ends_its_stream_fails_the_calls(
    worker: ScriptedWorker, client: PullingDecodeClient, broken: list[ServingError]
) -> None:
    call = client.start(START)
    await worker.request()
    worker.tokens(0, 0, 5)
    worker.answers.put_nowait(None)
    # Tokens that came are given out first.
    assert (await call.next()).token_ids == [5]
    with pytest.raises(WorkerUnavailableError, match="ended its stream"):
        await call.next()
    assert [type(error) for error in broken] == [WorkerUnavailableError]


async def test_a_worker_that_is_not_there_is_unavailable(broken: list[ServingError]) -> None:
    channel = create_channel("127.0.0.1:1", None)
    client = PullingDecodeClient(DecodeClient("w", channel, broken.append))
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(WorkerUnavailableError):
            await client.start(START).next()
    assert [type(error) for error in broken] == [WorkerUnavailableError], "nothing ran there, so nothing is lost"
    await channel.close()


async def test_a_connection_that_breaks_under_a_call_may_have_lost_the_worker(
    worker: ScriptedWorker, broken: list[ServingError], start_server: StartServer
) -> None:
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Decode": grpc.stream_stream_rpc_method_handler(worker.serve)
    }
    _server, address = await start_server([generic_service("quartet.v1.DecodeService", handlers)])
    host, port = address.rsplit(":", 1)
    writers: list[asyncio.StreamWriter] = []

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        writers.extend((writer, far_writer))
        await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))

    async with await asyncio.start_server(relay, "127.0.0.1", 0) as between:
        channel = create_channel(f"127.0.0.1:{between.sockets[0].getsockname()[1]}", None)
        client = PullingDecodeClient(DecodeClient("w", channel, broken.append))
        call = client.start(START)
        await worker.request()
        for writer in writers:
            writer.transport.abort()
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(PeerLostError):
                await call.next()
        assert [type(error) for error in broken] == [PeerLostError]
        await client.close()
        await channel.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)


async def test_a_long_start_goes_in_chunks_and_arrives_whole(
    worker: ScriptedWorker, client: PullingDecodeClient
) -> None:
    generation = Generation(prompt_token_ids=range(600_000), generated_token_ids=range(10))
    client.start(replace(START, generation=generation))
    prompt = bytearray()
    generated = bytearray()
    request = await worker.request()
    assert request.start.chunked
    while (request := await worker.request()).WhichOneof("message") == "chunk":
        is_prompt = request.chunk.target == types_pb2.CHUNK_TARGET_PROMPT_TOKEN_IDS
        buffer = prompt if is_prompt else generated
        buffer += request.chunk.data
    assert request.WhichOneof("message") == "start_done"
    whole = unpack_token_ids(bytes(prompt), "prompt")
    assert list(whole) == list(range(600_000))
    assert list(unpack_token_ids(bytes(generated), "generated")) == list(range(10))


MEDIA_START = replace(START, media=(MediaInput(bytes(32), MediaFile(MediaKind.IMAGE, b"png")),))


async def test_media_files_never_ride_the_shared_stream(
    worker: ScriptedWorker, client: PullingDecodeClient, broken: list[ServingError]
) -> None:
    client.start(MEDIA_START)
    assert (await worker.request()).start.media[0].file.data == b"png"
    assert not client.client.is_open
    worker.tokens(0, 0, 5)
    worker.finish(0)
    # With its one call the stream ends, which is no break.
    async with asyncio.timeout(WAIT_S):
        await worker.is_idle.wait()
    assert broken == []


async def test_a_broken_stream_of_a_single_start_is_reported(
    worker: ScriptedWorker, client: PullingDecodeClient, broken: list[ServingError]
) -> None:
    call = client.start(MEDIA_START)
    await worker.request()
    worker.answers.put_nowait(None)
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(WorkerUnavailableError):
            await call.next()
    assert len(broken) == 1


@pytest.mark.parametrize("end", [DecodeClient.close, DecodeClient.reset])
async def test_closing_and_resetting_end_streams_of_single_starts_too(
    end: Callable[[DecodeClient], Awaitable[None]], worker: ScriptedWorker, client: PullingDecodeClient
) -> None:
    call = client.start(MEDIA_START)
    await worker.request()
    await end(client.client)
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(WorkerUnavailableError):
            await call.next()
        await worker.is_idle.wait()


async def test_media_hand_offs_ride_the_shared_stream(worker: ScriptedWorker, client: PullingDecodeClient) -> None:
    client.start(replace(START, media=(MediaInput(bytes(32), HAND_OFF),)))
    assert (await worker.request()).start.media[0].hand_off.worker_id == "w"
    assert client.client.is_open


async def test_a_hand_off_goes_to_exactly_one_of_taker_and_drop() -> None:
    for is_taken in (False, True):
        dropped: list[HandOff] = []
        call = PrefillCall(lambda _call: None, dropped.append)
        call.succeed(OUTCOME)
        if is_taken:
            assert await call.outcome() == OUTCOME
        call.cancel()
        call.cancel()
        assert dropped == ([] if is_taken else [HAND_OFF])
        if not is_taken:
            with pytest.raises(RequestCancelledError):
                await call.outcome()


async def test_a_cancelled_wait_drops_what_comes_later() -> None:
    dropped: list[HandOff] = []
    num_cancels = 0

    def count(_call: object) -> None:
        nonlocal num_cancels
        num_cancels += 1

    call = PrefillCall(count, dropped.append)
    waiting = asyncio.create_task(call.outcome())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert num_cancels == 1
    call.succeed(OUTCOME)
    assert dropped == [HAND_OFF]


async def test_a_cancelled_wait_for_the_end_loses_nothing() -> None:
    pulled = PulledDecode()
    call = pulled.call = DecodeCall(lambda _call: None, pulled)
    waiting = asyncio.create_task(call.outcome())
    await asyncio.sleep(0)
    take_tokens({0: call}, _one_token(offset=0, token_id=1), 1.0)
    call.finish(FINISHED)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert await call.outcome() == FINISHED
    assert (await pulled.next()).token_ids == [1]
    assert call.received_at == 1.0


async def test_a_sink_that_wants_no_more_ends_its_decode() -> None:
    class Contented(PulledDecode):
        def take(self, offset: int, token_ids: Sequence[int], logprobs: object, now: float) -> bool:
            taken.append([*token_ids])
            return False

    taken: list[list[int]] = []
    cancels: list[None] = []
    call = DecodeCall(lambda _call: cancels.append(None), Contented())
    take_tokens({0: call}, _one_token(offset=0, token_id=1), 1.0)
    take_tokens({0: call}, _one_token(offset=1, token_id=2), 2.0)
    call.fail(RequestCancelledError("as asked"))
    assert await call.outcome() is None
    assert (taken, len(cancels)) == ([[1]], 1)


async def test_a_cancelled_decode_brings_nothing_to_its_sink_which_another_attempt_may_use_by_then() -> None:
    class Unmoved(PulledDecode):
        def started(self, started: DecodeStarted) -> None:
            pytest.fail("it was cancelled")

        def take(self, offset: int, token_ids: Sequence[int], logprobs: object, now: float) -> bool:
            pytest.fail("it was cancelled")

    cancels: list[None] = []
    call = DecodeCall(lambda _call: cancels.append(None), Unmoved())
    call.cancel()
    call.start(DecodeStarted(num_cached_tokens=0, queue_s=0.0, transfer_s=0.0, transfer_bytes=0), 1.0)
    take_tokens({0: call}, _one_token(offset=0, token_id=1), 1.0)
    call.finish(FINISHED)
    assert (await call.outcome(), len(cancels)) == (FINISHED, 1)


async def test_the_first_end_counts() -> None:
    call = DecodeCall(lambda _call: pytest.fail("it is over"), PulledDecode())
    call.finish(FINISHED)
    call.fail(InvalidRequestError("too late"))
    call.cancel()
    assert await call.outcome() == FINISHED


def _one_token(*, offset: int, token_id: int) -> decode_pb2.DecodeResponse:
    return decode_pb2.DecodeResponse(slots=[0], num_tokens=[1], token_offsets=[offset], token_ids=[token_id])


async def test_a_message_that_cannot_be_written_ends_the_stream_instead_of_leaving_its_calls_waiting(
    client: PullingDecodeClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    open_rpc = DecodeClient._open

    def open_broken(self: DecodeClient) -> Any:
        rpc = open_rpc(self)

        async def write(_message: object) -> None:
            raise RuntimeError("out of paper")

        rpc.write = write  # type: ignore[method-assign]
        return rpc

    monkeypatch.setattr(DecodeClient, "_open", open_broken)
    first = client.start(START)
    with pytest.raises(WorkerUnavailableError):
        async with asyncio.timeout(WAIT_S):
            await first.next()
    assert "a message could not be written" in caplog.text


async def test_a_stream_that_was_reset_fails_its_calls_and_the_next_start_opens_another(
    worker: ScriptedWorker, client: PullingDecodeClient, broken: list[ServingError]
) -> None:
    first = client.start(START)
    await worker.request()
    await client.client.reset()
    with pytest.raises(WorkerUnavailableError):
        await first.next()
    assert len(broken) == 1
    async with asyncio.timeout(WAIT_S):
        await worker.is_idle.wait()
    second = client.start(START)
    slot = (await worker.request()).start.slot
    worker.tokens(slot, 0, 5)
    assert (await second.next()).token_ids == [5]


async def test_a_client_gives_up_a_stream_without_calls_before_the_worker_does_and_opens_another(
    worker: ScriptedWorker, client: PullingDecodeClient, broken: list[ServingError]
) -> None:
    def poll(times: int) -> None:
        """As its timer does, once a minute."""
        for _ in range(times):
            stream = client.client._stream
            assert stream is not None and stream.idle_timer is not None
            stream.idle_timer.cancel()
            client.client._poll_idle(stream)

    call = client.start(START)
    await worker.request()
    poll(20)
    worker.tokens(0, 0, 5)
    assert (await call.next()).token_ids == [5]
    worker.finish(0)
    assert (await call.next()).finished is not None
    poll(1)
    call = client.start(START)  # begins and ends between two polls
    await worker.request()
    worker.finish(0)
    assert (await call.next()).finished is not None
    poll(1)
    assert client.client.is_open
    poll(1)
    assert not client.client.is_open
    # The start meets no end of the old stream, though that one is just ending.
    again = client.start(START)
    async with asyncio.timeout(WAIT_S):
        await worker.is_idle.wait()
    assert (await worker.request()).start.slot == 0
    worker.tokens(0, 0, 6)
    assert (await again.next()).token_ids == [6]
    assert broken == []
