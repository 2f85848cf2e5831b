"""A worker's side of an encode stream, against a caller that reads as it likes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import grpc
import pytest

from quartet.errors import (
    InvalidMediaError,
    InvalidRequestError,
    RequestCancelledError,
    RequestTimeoutError,
    ServingError,
    StalledStreamError,
)
from quartet.kvcache.layout import EmbeddingLayout, EmbeddingsPayload, HandOff
from quartet.media.items import MediaFile, MediaItem, MediaKind, MediaSize
from quartet.rpc.errors import public_error
from quartet.streams.convert.messages import from_encode_start, to_encode_start
from quartet.streams.encode_server import EncodeOutbox, EncodeStream
from quartet.streams.messages import EncodedItem, EncodeStart, RequestContext
from quartet.streams.server import StreamLimits
from quartet.v1 import encode_pb2, types_pb2

START = EncodeStart(context=RequestContext(), items=(MediaItem(b"", MediaFile(MediaKind.IMAGE, b"a picture")),))
SIZES = (MediaSize(media_id=bytes(32), num_tokens=5),)
WAIT_S = 30.0


def encoded(item: int) -> EncodedItem:
    layout = EmbeddingLayout(model_fingerprint="m", dtype="float32", hidden_size=2, block_size=4)
    hand_off = HandOff(
        hand_off_id=bytes([item]) * 16,
        secret=bytes(16),
        worker_id="w",
        epoch=1,
        address="a:1",
        time_to_live=timedelta(seconds=1),
        payload=EmbeddingsPayload(layout, 5),
    )
    return EncodedItem(item=item, hand_off=hand_off)


class Work:
    """Brings an item for each number in ``holders``, when it may, and then ends as it is told."""

    def __init__(self, holders: Sequence[int] = (), error: ServingError | None = None, *, ends: bool = True) -> None:
        self.holders, self.error, self.ends = holders, error, ends
        self.withdrawn: list[int] = []
        self.starts: list[EncodeStart] = []
        self.was_cancelled = False

    async def encode(self, start: EncodeStart, outbox: EncodeOutbox) -> None:
        self.starts.append(start)
        outbox.sized(SIZES)
        for item, holder in enumerate(self.holders):
            outbox.encoded(encoded(item), holder)
        try:
            if not self.ends:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        if self.error is not None:
            raise self.error

    def withdraw(self, holder: int) -> None:
        self.withdrawn.append(holder)


class Caller:
    """The caller's end of a call: what it sent, and how many messages it takes."""

    def __init__(self, sent: Sequence[encode_pb2.EncodeRequest], takes: int = 100, *, half_closes: bool = True) -> None:
        self.sent, self.takes, self.half_closes = list(sent), takes, half_closes
        self.received: list[encode_pb2.EncodeResponse] = []
        self.is_stuck = asyncio.Event()

    async def send_initial_metadata(self, _metadata: object) -> None:
        return

    async def read(self) -> object:
        if self.sent:
            return self.sent.pop(0)
        if not self.half_closes:
            await asyncio.Event().wait()
        return grpc.aio.EOF

    async def write(self, message: encode_pb2.EncodeResponse) -> None:
        if len(self.received) == self.takes:
            self.is_stuck.set()
            await asyncio.Event().wait()
        self.received.append(message)


def start_message(start: EncodeStart = START) -> encode_pb2.EncodeRequest:
    return encode_pb2.EncodeRequest(start=to_encode_start(start))


async def serve(work: Work, caller: Caller, limits: StreamLimits | None = None) -> None:
    """Until the end; raises what the caller is told."""
    async with asyncio.timeout(WAIT_S):
        try:
            await EncodeStream(work, limits or StreamLimits()).serve(caller)  # type: ignore[arg-type]
        except Exception as error:  # noqa: BLE001 - told by its type
            raise public_error(error) from None


async def test_all_outputs_are_written_in_order_and_then_the_call_ends_well() -> None:
    work, caller = Work([11, 12]), Caller([start_message()])
    await serve(work, caller)
    assert [message.WhichOneof("message") for message in caller.received] == ["sized", "encoded", "encoded"]
    assert [message.encoded.item for message in caller.received[1:]] == [0, 1]
    assert work.starts == [from_encode_start(to_encode_start(START))]
    assert work.withdrawn == []


async def test_a_caller_need_not_half_close() -> None:
    caller = Caller([start_message()], half_closes=False)
    await serve(Work([11]), caller)
    assert len(caller.received) == 2


async def test_hand_offs_that_were_not_written_are_withdrawn() -> None:
    """Also the one that was being written: whether it arrived nobody knows, and nobody else can free it."""
    work, caller = Work([11, 12, 13]), Caller([start_message()], takes=2)
    serving = asyncio.create_task(serve(work, caller))
    await caller.is_stuck.wait()
    serving.cancel()
    with suppress(asyncio.CancelledError):
        await serving
    assert work.withdrawn == [12, 13]


async def test_a_failure_is_what_the_call_ends_with() -> None:
    with pytest.raises(InvalidMediaError, match="no picture"):
        await serve(Work([11], InvalidMediaError("no picture", field="items[0].file")), Caller([start_message()]))


async def test_a_cancel_ends_the_work() -> None:
    work = Work(ends=False)
    caller = Caller([start_message(), encode_pb2.EncodeRequest(cancel=types_pb2.Cancel())], half_closes=False)
    with pytest.raises(RequestCancelledError):
        await serve(work, caller)
    assert work.was_cancelled


async def test_a_cancel_before_the_start_is_whole_starts_nothing() -> None:
    incomplete = encode_pb2.EncodeRequest(start=encode_pb2.EncodeStart(chunked=True))
    work = Work()
    with pytest.raises(RequestCancelledError):
        await serve(work, Caller([incomplete, encode_pb2.EncodeRequest(cancel=types_pb2.Cancel())]))
    assert work.starts == []


async def test_a_caller_that_reads_nothing_loses_its_request() -> None:
    work = Work([11, 12], ends=False)
    with pytest.raises(StalledStreamError):
        await serve(work, Caller([start_message()], takes=1), StreamLimits(stall_timeout_s=0.05))
    assert work.was_cancelled
    assert work.withdrawn == [11, 12]


@pytest.mark.parametrize("chunked", [False, True])
async def test_items_are_counted_before_they_are_read(chunked: bool) -> None:
    work = Work([])
    start = encode_pb2.EncodeStart(items=[encode_pb2.EncodeItem()] * 1025, chunked=chunked)
    with pytest.raises(InvalidRequestError, match="at most 1024") as caught:
        await serve(work, Caller([encode_pb2.EncodeRequest(start=start)], half_closes=False))
    assert caught.value.field == "items"


async def test_a_stream_on_which_nothing_comes_is_ended() -> None:
    with pytest.raises(RequestTimeoutError, match="no message came"):
        await serve(Work([]), Caller([], half_closes=False), StreamLimits(stall_timeout_s=0.1))
