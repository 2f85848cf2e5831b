"""The router's end of encode streams against workers that do as the test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from quartet.errors import InvalidMediaError, RequestCancelledError, ServingError, WorkerUnavailableError
from quartet.kvcache.layout import HandOff
from quartet.media.items import MediaFile, MediaItem, MediaKind, MediaSize
from quartet.rpc.channels import create_channel
from quartet.rpc.errors import abort
from quartet.streams.convert.messages import to_encode_sized, to_encoded_item
from quartet.streams.encode_client import EncodeClient
from quartet.streams.messages import EncodedItem, EncodeStart, RequestContext
from quartet.v1 import encode_pb2
from tests.rpc.conftest import StartServer
from tests.rpc.services import generic_service
from tests.streams.test_convert_encode import HAND_OFF

WAIT_S = 30.0
FILES = [MediaFile(MediaKind.IMAGE, bytes([number]) * (1_500_000 * number + 10)) for number in range(2)]
START = EncodeStart(
    context=RequestContext(timeout_s=WAIT_S), items=tuple(MediaItem(bytes([n]) * 32, f) for n, f in enumerate(FILES))
)
SIZES = tuple(MediaSize(media_id=bytes([number]) * 32, num_tokens=64) for number in range(2))
HAND_OFFS = [replace(HAND_OFF, hand_off_id=bytes([number]) * 16) for number in range(2)]


class ScriptedEncoder:
    """Answers as the test says: a message, an error, or ``None`` for the end."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[encode_pb2.EncodeRequest] = asyncio.Queue()
        self.answers: asyncio.Queue[encode_pb2.EncodeResponse | ServingError | None] = asyncio.Queue()
        self.has_ended = asyncio.Event()

    async def serve(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[bytes]:
        reader = asyncio.create_task(self._read(requests))
        try:
            while (answer := await self.answers.get()) is not None:
                if isinstance(answer, ServingError):
                    await abort(context, answer)
                else:
                    yield answer.SerializeToString()
        finally:
            reader.cancel()
            self.has_ended.set()

    async def _read(self, requests: AsyncIterator[bytes]) -> None:
        async for request in requests:
            self.requests.put_nowait(encode_pb2.EncodeRequest.FromString(request))

    async def request(self) -> encode_pb2.EncodeRequest:
        async with asyncio.timeout(WAIT_S):
            return await self.requests.get()

    def size(self, *sizes: MediaSize) -> None:
        self.answers.put_nowait(encode_pb2.EncodeResponse(sized=to_encode_sized(sizes)))

    def encode(self, item: int) -> None:
        encoded = EncodedItem(item=item, hand_off=HAND_OFFS[item % 2])
        self.answers.put_nowait(encode_pb2.EncodeResponse(encoded=to_encoded_item(encoded)))


class Encoding:
    """A client of one scripted worker, and what it dropped."""

    def __init__(self, channel: grpc.aio.Channel, worker: ScriptedEncoder) -> None:
        self.worker, self.dropped, self.has_dropped = worker, list[HandOff](), asyncio.Event()
        self.client = EncodeClient("encode-0", channel, self._drop)

    def _drop(self, hand_off: HandOff) -> None:
        self.dropped.append(hand_off)
        self.has_dropped.set()


@pytest.fixture
async def encoding(start_server: StartServer) -> AsyncIterator[Encoding]:
    worker = ScriptedEncoder()
    handlers = {"Encode": grpc.stream_stream_rpc_method_handler(worker.serve)}
    _server, address = await start_server([generic_service("quartet.v1.EncodeService", handlers)])
    channel = create_channel(address, None)
    encoding = Encoding(channel, worker)
    yield encoding
    await encoding.client.close()
    await channel.close()


async def test_sizes_come_first_and_hand_offs_in_the_order_of_items(encoding: Encoding) -> None:
    worker, told = encoding.worker, list[HandOff]()
    call = encoding.client.start(START, told.append)
    start = (await worker.request()).start
    assert [item.media_id for item in start.items] == [item.media_id for item in START.items] and start.chunked
    data = [bytearray(item.file.data) for item in start.items]
    while (request := await worker.request()).WhichOneof("message") == "chunk":
        data[request.chunk.item] += request.chunk.data
    assert [bytes(part) for part in data] == [file.data for file in FILES]
    worker.size(*SIZES)
    async with asyncio.timeout(WAIT_S):
        assert await call.sizes() == SIZES
        worker.encode(1)
        worker.encode(0)
        worker.answers.put_nowait(None)
        assert await call.hand_offs() == HAND_OFFS
    call.cancel()
    assert told == HAND_OFFS[::-1] and encoding.dropped == []


async def test_a_cancelled_call_drops_hand_offs_that_came_and_those_still_to_come(encoding: Encoding) -> None:
    worker, first = encoding.worker, asyncio.Event()
    call = encoding.client.start(START, lambda _hand_off: first.set())
    worker.size(*SIZES)
    worker.encode(0)
    async with asyncio.timeout(WAIT_S):
        await first.wait()
        call.cancel()
        assert encoding.dropped == HAND_OFFS[:1]
        encoding.has_dropped.clear()
        with pytest.raises(RequestCancelledError):
            await call.hand_offs()
        while (await worker.request()).WhichOneof("message") != "cancel":
            pass
        worker.encode(1)  # it was on its way
        worker.answers.put_nowait(RequestCancelledError("cancelled"))
        await encoding.has_dropped.wait()
    assert encoding.dropped == HAND_OFFS


async def test_untaken_hand_offs_are_dropped_by_a_late_cancel(encoding: Encoding) -> None:
    worker, seen = encoding.worker, asyncio.Event()
    call = encoding.client.start(replace(START, items=START.items[:1]), lambda _hand_off: seen.set())
    worker.size(SIZES[0])
    worker.encode(0)
    worker.answers.put_nowait(None)
    async with asyncio.timeout(WAIT_S):
        await seen.wait()
        await worker.has_ended.wait()
    call.cancel()
    call.cancel()
    assert encoding.dropped == HAND_OFFS[:1]


@pytest.mark.parametrize("after_sizes", [False, True])
async def test_a_refusal_keeps_its_type_and_field(encoding: Encoding, after_sizes: bool) -> None:
    call = encoding.client.start(START)
    if after_sizes:
        encoding.worker.size(*SIZES)
        encoding.worker.encode(1)
    while (await encoding.worker.request()).WhichOneof("message") != "start_done":
        pass
    encoding.worker.answers.put_nowait(InvalidMediaError("no picture", field="items[1].file"))
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(InvalidMediaError) as raised:
            await (call.hand_offs() if after_sizes else call.sizes())
    assert raised.value.field == "items[1].file"
    assert encoding.dropped == (HAND_OFFS[1:] if after_sizes else [])


async def test_nonsense_is_the_workers_fault_and_leaves_nothing(encoding: Encoding) -> None:
    def twice(worker: ScriptedEncoder) -> None:
        worker.size(*SIZES)
        worker.encode(0)
        worker.encode(0)

    def missing(worker: ScriptedEncoder) -> None:
        worker.size(*SIZES)
        worker.encode(0)
        worker.answers.put_nowait(None)

    scripts = [
        twice,
        missing,
        lambda worker: worker.size(SIZES[0]),
        lambda worker: worker.encode(0),
        lambda worker: worker.answers.put_nowait(encode_pb2.EncodeResponse()),
        lambda worker: worker.answers.put_nowait(encode_pb2.EncodeResponse(encoded=encode_pb2.EncodedItem())),
    ]
    for num_dropped, script in zip((2, 1, 0, 1, 0, 0), scripts, strict=True):
        encoding.worker.has_ended.clear()
        encoding.dropped.clear()
        encoding.worker.answers = asyncio.Queue()
        small = MediaItem(b"", MediaFile(MediaKind.IMAGE, b"png"))
        call = encoding.client.start(replace(START, items=(small, small)))
        script(encoding.worker)
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(WorkerUnavailableError, match="protocol"):
                await call.hand_offs()
            encoding.worker.answers.put_nowait(None)
            await encoding.worker.has_ended.wait()
        assert len(encoding.dropped) == num_dropped


async def test_closing_fails_running_and_later_calls(encoding: Encoding) -> None:
    running = encoding.client.start(START)
    await encoding.worker.request()
    never_ran = encoding.client.start(START)
    await encoding.client.close()
    for call in (running, never_ran, encoding.client.start(START)):
        with pytest.raises(WorkerUnavailableError, match="closed"):
            await call.sizes()


async def test_a_stream_that_breaks_after_the_last_item_has_given_all(encoding: Encoding) -> None:
    worker = encoding.worker
    call = encoding.client.start(replace(START, items=START.items[:1]))
    worker.size(SIZES[0])
    worker.encode(0)
    worker.answers.put_nowait(WorkerUnavailableError("going"))
    async with asyncio.timeout(WAIT_S):
        await worker.has_ended.wait()
        assert await call.hand_offs() == HAND_OFFS[:1]
    assert encoding.dropped == []
