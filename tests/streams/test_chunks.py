"""Long starts, taken apart and put together again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from quartet.errors import MediaTooLargeError, ProtocolError, ServingError
from quartet.rpc.channels import MAX_STREAM_MESSAGE_BYTES
from quartet.streams.chunks import ChunkedStarts, StartRest, take_chunks
from quartet.v1 import decode_pb2, encode_pb2, prefill_pb2, types_pb2

SIZES = (3, 2_500_000, 0, 1_048_576)


def file(size_bytes: int, begins: int = 0) -> types_pb2.MediaFile:
    return types_pb2.MediaFile(kind=types_pb2.MEDIA_KIND_IMAGE, data=bytes([begins]) * size_bytes)


def encode_start() -> encode_pb2.EncodeStart:
    items = [encode_pb2.EncodeItem(media_id=bytes(32), file=file(size, index)) for index, size in enumerate(SIZES)]
    return encode_pb2.EncodeStart(context=types_pb2.RequestContext(tenant="acme"), items=items)


def worker_start(kind: type[prefill_pb2.PrefillStart] | type[decode_pb2.DecodeStart], slot: int) -> object:
    return kind(
        slot=slot,
        generation=types_pb2.Generation(prompt_token_ids=bytes(1_500_000), generated_token_ids=b"\1\0\0\0", seed=7),
        media=[types_pb2.MediaInput(media_id=bytes(32), file=file(size, index)) for index, size in enumerate(SIZES)],
    )


class Receiver(ChunkedStarts[object]):  # type: ignore[type-var]
    def __init__(self, **limits: int) -> None:
        self.failed: list[tuple[int, ServingError]] = []
        super().__init__(
            timeout_s=10.0,
            max_size_bytes=limits.pop("max_size_bytes", 10**9),
            on_failed=lambda slot, error: self.failed.append((slot, error)),
            **limits,
        )

    def take(self, start: object, rest: Sequence[StartRest]) -> object:
        self.begin(start)
        for part in rest[:-1]:
            assert isinstance(part, types_pb2.StartChunk) and part.ByteSize() < MAX_STREAM_MESSAGE_BYTES
            self.append(part)
        assert isinstance(rest[-1], types_pb2.StartDone)
        return self.complete(rest[-1].slot)


@pytest.mark.parametrize(
    "whole", [encode_start(), worker_start(prefill_pb2.PrefillStart, 4), worker_start(decode_pb2.DecodeStart, 4)]
)
async def test_a_start_split_into_chunks_is_reassembled(whole: object) -> None:
    start = type(whole).FromString(whole.SerializeToString())
    rest = take_chunks(start)
    assert start.ByteSize() < 1000 and start.chunked
    assert len(rest) > 4
    receiver = Receiver()
    result = receiver.take(start, rest)
    result.chunked = False
    assert result == whole
    assert not receiver.failed


async def test_a_start_that_came_in_time_does_not_end_the_next_one_in_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, timers = asyncio.get_running_loop(), list[asyncio.TimerHandle]()
    call_later = loop.call_later

    def note(*args: object) -> asyncio.TimerHandle:
        timers.append(call_later(*args))  # type: ignore[arg-type]
        return timers[-1]

    monkeypatch.setattr(loop, "call_later", note)
    receiver = Receiver()
    for _ in range(2):
        receiver.begin(prefill_pb2.PrefillStart(slot=4))
        receiver.complete(4)
    receiver.begin(prefill_pb2.PrefillStart(slot=4))
    assert [timer.cancelled() for timer in timers] == [True, True, False]
    receiver.forget_all()


def test_a_start_that_fits_stays_whole() -> None:
    start = encode_pb2.EncodeStart(items=[encode_pb2.EncodeItem(file=file(1000))])
    assert take_chunks(start) == []
    assert len(start.items[0].file.data) == 1000


async def test_bytes_of_the_start_itself_come_before_those_of_its_chunks() -> None:
    start = encode_pb2.EncodeStart(items=[encode_pb2.EncodeItem(file=file(2, 5))], chunked=True)
    chunk = types_pb2.StartChunk(target=types_pb2.CHUNK_TARGET_MEDIA, data=b"\6")
    result = Receiver().take(start, [chunk, types_pb2.StartDone()])
    assert result.items[0].file.data == b"\5\5\6"


def media_chunk(item: int, size_bytes: int = 1) -> types_pb2.StartChunk:
    return types_pb2.StartChunk(target=types_pb2.CHUNK_TARGET_MEDIA, item=item, data=bytes(size_bytes))


async def test_media_have_a_bound_of_their_own_which_names_the_field() -> None:
    for start, field in (
        (encode_pb2.EncodeStart(items=[encode_pb2.EncodeItem(file=file(6))] * 2), "items[1].file.data"),
        (prefill_pb2.PrefillStart(media=[types_pb2.MediaInput(file=file(6))] * 2), "media[1].file.data"),
    ):
        receiver = Receiver(max_size_bytes=1, max_media_bytes=14)
        receiver.begin(start)
        receiver.append(media_chunk(1, 2))
        assert 0 in receiver and not receiver.failed
        receiver.append(media_chunk(1, 1))
        [(slot, error)] = receiver.failed
        assert (slot, type(error), error.field) == (0, MediaTooLargeError, field)
        assert 0 not in receiver


async def test_a_chunk_of_an_item_that_is_not_there_or_is_no_file_fails_the_start() -> None:
    hand_off = types_pb2.MediaInput(hand_off=types_pb2.HandOff(worker_id="encode-0"))
    for start, chunk in (
        (prefill_pb2.PrefillStart(media=[types_pb2.MediaInput(file=file(1))]), media_chunk(1)),
        (prefill_pb2.PrefillStart(media=[hand_off]), media_chunk(0)),
        (encode_pb2.EncodeStart(), media_chunk(0)),
        (encode_start(), types_pb2.StartChunk(target=types_pb2.CHUNK_TARGET_PROMPT_TOKEN_IDS, data=b"1")),
    ):
        receiver = Receiver()
        receiver.begin(start)
        receiver.append(chunk)
        assert [type(error) for _slot, error in receiver.failed] == [ProtocolError]
        await asyncio.sleep(0)
