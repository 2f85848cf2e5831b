"""Starts that are too long for one message: taking them apart into chunks, and putting them together again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from quartet.errors import (
    InvalidRequestError,
    MediaTooLargeError,
    MessageTooLargeError,
    PromptTooLongError,
    ProtocolError,
    QueueFullError,
    RequestTimeoutError,
    ServingError,
)
from quartet.rpc.channels import MAX_API_MESSAGE_BYTES, MAX_STREAM_MESSAGE_BYTES
from quartet.v1 import decode_pb2, encode_pb2, prefill_pb2, types_pb2

#: A start that has a slot on a stream of many.
StartMessage: TypeAlias = decode_pb2.DecodeStart | prefill_pb2.PrefillStart
StartRest: TypeAlias = types_pb2.StartChunk | types_pb2.StartDone
#: An `EncodeStart` is alone on its stream: its slot is 0.
StartT = TypeVar("StartT", bound=StartMessage | encode_pb2.EncodeStart)

# Room for the frame around a start or a chunk.
_MAX_PART_BYTES = MAX_STREAM_MESSAGE_BYTES - 64
# Far more than routers let a request have. Each costs microseconds to convert.
_MAX_MEDIA = 1024
# Callers send the chunks of one start without others between; so many incomplete ones are nonsense.
_MAX_INCOMPLETE = 8
_TOKEN_FIELDS = {
    types_pb2.CHUNK_TARGET_PROMPT_TOKEN_IDS: "prompt_token_ids",
    types_pb2.CHUNK_TARGET_GENERATED_TOKEN_IDS: "generated_token_ids",
}


def check_num_media(start: StartMessage | encode_pb2.EncodeStart) -> None:
    """Refuse more media items than any start has, without a look at them. Raises ``InvalidRequestError``."""
    if isinstance(start, encode_pb2.EncodeStart):
        num_items, field = len(start.items), "items"
    else:
        num_items, field = max(len(start.media), len(start.generation.media)), "media"
    if num_items > _MAX_MEDIA:
        raise InvalidRequestError(f"a start has at most {_MAX_MEDIA} media items, not {num_items}", field=field)


def take_chunks(start: StartMessage | encode_pb2.EncodeStart) -> list[StartRest]:
    """Take token ids and media out of a ``start`` that does not fit into a message: what is to follow it.

    Empty where it fits; it is left whole then.

    Raises:
        MessageTooLargeError: it is too long even without them.
    """
    if start.ByteSize() <= _MAX_PART_BYTES:
        return []
    chunks: list[StartRest] = []
    slot = _slot(start)
    if not isinstance(start, encode_pb2.EncodeStart):
        for target, name in _TOKEN_FIELDS.items():
            chunks += _chunks(slot, target, getattr(start.generation, name))
            start.generation.ClearField(name)  # type: ignore[arg-type]
    for item, file in enumerate(_files(start)):
        if file is not None:
            chunks += _chunks(slot, types_pb2.CHUNK_TARGET_MEDIA, file.data, item)
            file.ClearField("data")
    start.chunked = True
    if start.ByteSize() > _MAX_PART_BYTES:
        raise MessageTooLargeError("a start exceeds 1 MiB even without its token ids and media")
    return [*chunks, types_pb2.StartDone(slot=slot)]


@dataclass
class _Incomplete(Generic[StartT]):
    """A start, and what came of its parts: tokens by target, media by item; both only once a chunk came for them."""

    start: StartT
    timer: asyncio.TimerHandle
    num_token_bytes: int
    num_media_bytes: int
    tokens: dict[types_pb2.ChunkTarget.ValueType, bytearray] = field(default_factory=dict)
    media: dict[int, bytearray] = field(default_factory=dict)


class ChunkedStarts(Generic[StartT]):
    """The incomplete starts of one stream by slot. Chunks for other slots are ignored."""

    def __init__(
        self,
        *,
        timeout_s: float,
        max_size_bytes: int,
        on_failed: Callable[[int, ServingError], None],
        max_media_bytes: int = MAX_API_MESSAGE_BYTES,
    ) -> None:
        """``on_failed`` is called with each start that fails here.

        Of one start, ``max_size_bytes`` of token ids are taken and ``max_media_bytes`` of media.
        """
        self._timeout_s = timeout_s
        self._max_size_bytes = max_size_bytes
        self._max_media_bytes = max_media_bytes
        self._on_failed = on_failed
        self._starts: dict[int, _Incomplete[StartT]] = {}

    def __len__(self) -> int:
        """Starts that are incomplete."""
        return len(self._starts)

    def __contains__(self, slot: int) -> bool:
        return slot in self._starts

    def begin(self, start: StartT) -> None:
        """Wait for the chunks of ``start``, but not for ever."""
        slot = _slot(start)
        try:
            if len(self._starts) >= _MAX_INCOMPLETE:
                raise QueueFullError("too many starts of this stream are incomplete")
            check_num_media(start)
        except ServingError as error:
            self._on_failed(slot, error)
            return
        late = RequestTimeoutError("the chunks of a start took too long")
        timer = asyncio.get_running_loop().call_later(self._timeout_s, self.end, slot, late)
        num_media_bytes = sum(len(file.data) for file in _files(start) if file is not None)
        self._starts[slot] = _Incomplete(start, timer, _num_token_bytes(start), num_media_bytes)

    def append(self, chunk: types_pb2.StartChunk) -> None:
        """Continue a start."""
        incomplete = self._starts.get(chunk.slot)
        if incomplete is None:
            return
        try:
            if chunk.target == types_pb2.CHUNK_TARGET_MEDIA:
                self._append_media(incomplete, chunk)
            else:
                self._append_tokens(incomplete, chunk)
        except ServingError as error:
            self.end(chunk.slot, error)

    def complete(self, slot: int) -> StartT | None:
        """The whole start, which is no longer here; ``None`` for an unknown slot."""
        incomplete = self._starts.pop(slot, None)
        if incomplete is None:
            return None
        incomplete.timer.cancel()
        start = incomplete.start
        if not isinstance(start, encode_pb2.EncodeStart):
            for target, token_ids in incomplete.tokens.items():
                setattr(start.generation, _TOKEN_FIELDS[target], bytes(token_ids))
        files = _files(start)
        for item, data in incomplete.media.items():
            file = files[item]
            assert file is not None, "only files are continued"
            file.data = bytes(data)
        return start

    def end(self, slot: int, error: ServingError) -> None:
        """Fail one."""
        incomplete = self._starts.pop(slot, None)
        if incomplete is not None:
            incomplete.timer.cancel()
            self._on_failed(slot, error)

    def end_all(self, error: ServingError) -> None:
        """Fail all."""
        for slot in list(self._starts):
            self.end(slot, error)

    def forget_all(self) -> None:
        """Drop all, without ``on_failed``."""
        for incomplete in self._starts.values():
            incomplete.timer.cancel()
        self._starts.clear()

    def _append_tokens(self, incomplete: _Incomplete[StartT], chunk: types_pb2.StartChunk) -> None:
        start, name = incomplete.start, _TOKEN_FIELDS.get(chunk.target)
        if name is None or isinstance(start, encode_pb2.EncodeStart):
            raise ProtocolError("this worker takes no such chunk", field="chunk.target")
        incomplete.num_token_bytes += len(chunk.data)
        if incomplete.num_token_bytes > self._max_size_bytes:
            message = f"the token ids of a start exceed {self._max_size_bytes} bytes"
            raise PromptTooLongError(message, field="generation.prompt_token_ids")
        if chunk.target not in incomplete.tokens:
            incomplete.tokens[chunk.target] = bytearray(getattr(start.generation, name))
        incomplete.tokens[chunk.target] += chunk.data

    def _append_media(self, incomplete: _Incomplete[StartT], chunk: types_pb2.StartChunk) -> None:
        files = _files(incomplete.start)
        file = files[chunk.item] if chunk.item < len(files) else None
        if file is None:
            raise ProtocolError("the start has no media file of this number", field="chunk.item")
        incomplete.num_media_bytes += len(chunk.data)
        if incomplete.num_media_bytes > self._max_media_bytes:
            what = "items" if isinstance(incomplete.start, encode_pb2.EncodeStart) else "media"
            message = f"the media files of a start exceed {self._max_media_bytes} bytes"
            raise MediaTooLargeError(message, field=f"{what}[{chunk.item}].file.data")
        if chunk.item not in incomplete.media:
            incomplete.media[chunk.item] = bytearray(file.data)
        incomplete.media[chunk.item] += chunk.data


def _slot(start: StartMessage | encode_pb2.EncodeStart) -> int:
    return 0 if isinstance(start, encode_pb2.EncodeStart) else start.slot


def _files(start: StartMessage | encode_pb2.EncodeStart) -> Sequence[types_pb2.MediaFile | None]:
    """By item; ``None`` where there is none."""
    items = start.items if isinstance(start, encode_pb2.EncodeStart) else start.media
    return [item.file if item.HasField("file") else None for item in items]


def _num_token_bytes(start: StartMessage | encode_pb2.EncodeStart) -> int:
    if isinstance(start, encode_pb2.EncodeStart):
        return 0
    return len(start.generation.prompt_token_ids) + len(start.generation.generated_token_ids)


def _chunks(
    slot: int, target: types_pb2.ChunkTarget.ValueType, data: bytes, item: int = 0
) -> Iterator[types_pb2.StartChunk]:
    for begin in range(0, len(data), _MAX_PART_BYTES):
        part = data[begin : begin + _MAX_PART_BYTES]
        yield types_pb2.StartChunk(slot=slot, target=target, item=item, data=part)
