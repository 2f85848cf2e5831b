"""Starts too long for one message, put together from their chunks; how they are taken apart is here too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from quartet.errors import (
    MessageTooLargeError,
    PromptTooLongError,
    ProtocolError,
    QueueFullError,
    RequestTimeoutError,
    ServingError,
)
from quartet.rpc.inner import MAX_INNER_MESSAGE_BYTES
from quartet.v1 import decode_pb2, prefill_pb2, types_pb2

StartMessage: TypeAlias = decode_pb2.DecodeStart | prefill_pb2.PrefillStart
StartRest: TypeAlias = types_pb2.StartChunk | types_pb2.StartDone

# Room for the frame around a start or a chunk.
_MAX_PART_BYTES = MAX_INNER_MESSAGE_BYTES - 64
# Callers send the chunks of one start without others between; so many incomplete ones are nonsense.
_MAX_INCOMPLETE = 8


def take_chunks(start: StartMessage) -> list[StartRest]:
    """Take the token ids out of a ``start`` that does not fit into a message: what is to follow it.

    Empty where it fits; it is left whole then.

    Raises:
        MessageTooLargeError: it is too long even without them.
    """
    if start.ByteSize() <= _MAX_PART_BYTES:
        return []
    generation = start.generation
    prompt, generated = generation.prompt_token_ids, generation.generated_token_ids
    generation.ClearField("prompt_token_ids")
    generation.ClearField("generated_token_ids")
    start.chunked = True
    if start.ByteSize() > _MAX_PART_BYTES:
        raise MessageTooLargeError("a start exceeds 1 MiB even without its token ids")
    return [
        *_chunks(start.slot, types_pb2.CHUNK_TARGET_PROMPT_TOKEN_IDS, prompt),
        *_chunks(start.slot, types_pb2.CHUNK_TARGET_GENERATED_TOKEN_IDS, generated),
        types_pb2.StartDone(slot=start.slot),
    ]


@dataclass
class _Incomplete:
    start: StartMessage
    timer: asyncio.TimerHandle
    prompt: bytearray
    generated: bytearray


class ChunkedStarts:
    """The incomplete starts of one stream by slot. Whatever comes for other slots is ignored."""

    def __init__(
        self, *, timeout_s: float, max_size_bytes: int, on_failed: Callable[[int, ServingError], None]
    ) -> None:
        """``on_failed`` is told of each start that ends here; ``max_size_bytes`` of token ids are taken for one."""
        self._timeout_s = timeout_s
        self._max_size_bytes = max_size_bytes
        self._on_failed = on_failed
        self._starts: dict[int, _Incomplete] = {}

    def __contains__(self, slot: int) -> bool:
        return slot in self._starts

    def begin(self, start: StartMessage) -> None:
        """Wait for the chunks of ``start``, but not for ever."""
        if len(self._starts) >= _MAX_INCOMPLETE:
            self._on_failed(start.slot, QueueFullError("too many starts of this stream are incomplete"))
            return
        error = RequestTimeoutError("the chunks of a start took too long")
        timer = asyncio.get_running_loop().call_later(self._timeout_s, self.end, start.slot, error)
        prompt = bytearray(start.generation.prompt_token_ids)
        generated = bytearray(start.generation.generated_token_ids)
        self._starts[start.slot] = _Incomplete(start, timer, prompt, generated)

    def append(self, chunk: types_pb2.StartChunk) -> None:
        """Continue a start."""
        incomplete = self._starts.get(chunk.slot)
        if incomplete is None:
            return
        if chunk.target == types_pb2.CHUNK_TARGET_PROMPT_TOKEN_IDS:
            incomplete.prompt += chunk.data
        elif chunk.target == types_pb2.CHUNK_TARGET_GENERATED_TOKEN_IDS:
            incomplete.generated += chunk.data
        else:
            self.end(chunk.slot, ProtocolError("this worker takes no such chunk", field="chunk.target"))
            return
        if len(incomplete.prompt) + len(incomplete.generated) > self._max_size_bytes:
            message = f"the token ids of a start exceed {self._max_size_bytes} bytes"
            self.end(chunk.slot, PromptTooLongError(message, field="generation.prompt_token_ids"))

    def complete(self, slot: int) -> StartMessage | None:
        """The whole start, which is no longer here; ``None`` for an unknown slot."""
        incomplete = self._starts.pop(slot, None)
        if incomplete is None:
            return None
        incomplete.timer.cancel()
        incomplete.start.generation.prompt_token_ids = bytes(incomplete.prompt)
        incomplete.start.generation.generated_token_ids = bytes(incomplete.generated)
        return incomplete.start

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
        """Drop all; nobody is told."""
        for incomplete in self._starts.values():
            incomplete.timer.cancel()
        self._starts.clear()


def _chunks(slot: int, target: types_pb2.ChunkTarget.ValueType, data: bytes) -> Iterator[types_pb2.StartChunk]:
    for begin in range(0, len(data), _MAX_PART_BYTES):
        yield types_pb2.StartChunk(slot=slot, target=target, data=data[begin : begin + _MAX_PART_BYTES])
