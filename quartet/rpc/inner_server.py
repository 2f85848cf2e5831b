"""A worker's side of an inner stream: many requests by slot, one writer, exactly one terminal output a start."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import grpc
from google.protobuf.message import Message

from quartet.errors import (
    PromptTooLongError,
    ProtocolError,
    RequestCancelledError,
    RequestTimeoutError,
    ServingError,
    StalledStreamError,
    UnimplementedError,
)
from quartet.rpc.inner import InnerStart
from quartet.rpc.outbox import Outbox
from quartet.v1 import decode_pb2, prefill_pb2, types_pb2

logger = logging.getLogger(__name__)

StartMessage = decode_pb2.DecodeStart | prefill_pb2.PrefillStart
OutboxT = TypeVar("OutboxT", bound=Outbox[Message])
OutboxT_contra = TypeVar("OutboxT_contra", contravariant=True)

_CHUNK_TARGETS = {
    types_pb2.CHUNK_TARGET_PROMPT_TOKEN_IDS: "prompt_token_ids",
    types_pb2.CHUNK_TARGET_GENERATED_TOKEN_IDS: "generated_token_ids",
}


class Work(Protocol[OutboxT_contra]):
    """What runs the requests of streams."""

    def submit(self, start: InnerStart, outbox: OutboxT_contra, slot: int, on_end: Callable[[], None]) -> int:
        """Run ``start``; its outputs go to ``outbox`` under ``slot``, and ``on_end`` is called at the terminal one.

        Returns:
            The id to cancel it by.

        Raises:
            ServingError: it can't run; nothing was started and ``outbox`` got nothing.
        """
        ...

    def cancel(self, id: int) -> None:
        """End a request early; its terminal output still comes. Unknown ids are ignored."""
        ...

    def abandon(self, ids: list[int], outbox: OutboxT_contra) -> None:
        """The stream is gone: end these requests and let go of what ``outbox`` never sent."""
        ...


@dataclass(frozen=True, kw_only=True)
class StreamLimits:
    """Bounds of one inner stream.

    Attributes:
        stall_timeout_s: a reader that takes nothing for so long loses its requests.
        chunks_timeout_s: a chunked start must be complete within it.
        max_prompt_bytes: packed token ids of one start at most.
    """

    stall_timeout_s: float = 10.0
    chunks_timeout_s: float = 30.0
    max_prompt_bytes: int = 64 << 20


@dataclass
class _Partial:
    start: StartMessage
    timer: asyncio.TimerHandle
    prompt: bytearray
    generated: bytearray


class InnerStream(Generic[OutboxT]):
    """Serves one call of Decode or Prefill until both sides are done."""

    def __init__(
        self,
        work: Work[OutboxT],
        outbox: OutboxT,
        parse: Callable[[StartMessage], InnerStart],
        limits: StreamLimits,
    ) -> None:
        """Serve with ``work``; ``parse`` turns a complete start into domain terms or raises ``ServingError``."""
        self._work = work
        self._outbox = outbox
        self._parse = parse
        self._limits = limits
        self._ids: dict[int, int] = {}
        self._partials: dict[int, _Partial] = {}
        self._is_half_closed = False
        self._writing_since: float | None = None

    async def serve(self, context: grpc.aio.ServicerContext) -> None:  # type: ignore[type-arg]
        """Read and write until the caller has half-closed and every request has ended.

        Raises:
            ProtocolError: messages in a wrong order.
            StalledStreamError: the caller reads nothing.
        """
        tasks = [
            asyncio.create_task(self._read(context)),
            asyncio.create_task(self._write(context)),
            asyncio.create_task(self._watch_stall()),
        ]
        pending: set[asyncio.Task[None]] = set(tasks)
        try:
            # The writer ends last in a good end; the other two cut it short by raising.
            while tasks[1] in pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            self._abandon_all()

    async def _read(self, context: grpc.aio.ServicerContext) -> None:  # type: ignore[type-arg]
        while (request := await context.read()) is not grpc.aio.EOF:
            self._handle(request)
        self._is_half_closed = True
        for slot in list(self._partials):
            self._end_partial(slot, ProtocolError("the stream was half-closed within a chunked start"))
        self._outbox.ready.set()

    def _handle(self, request: decode_pb2.DecodeRequest | prefill_pb2.PrefillRequest) -> None:
        kind = request.WhichOneof("message")
        if kind == "start":
            self._start(request.start)
        elif kind == "chunk":
            self._append(request.chunk)
        elif kind == "start_done":
            self._complete(request.start_done.slot)
        elif kind == "cancel":
            self._cancel(request.cancel.slot)
        elif kind == "sealed_start":
            slot = request.sealed_start.slot  # type: ignore[union-attr]
            self._check_unused(slot)
            self._outbox.failed(slot, UnimplementedError("this worker has no key for sealed starts"))
        else:
            raise ProtocolError("a message must hold a start, chunk, start_done or cancel", field="message")

    def _check_unused(self, slot: int) -> None:
        if slot in self._ids or slot in self._partials:
            raise ProtocolError(f"slot {slot} is still in use", field="start.slot")

    def _start(self, start: StartMessage) -> None:
        self._check_unused(start.slot)
        if not start.chunked:
            self._submit(start)
            return
        loop = asyncio.get_running_loop()
        timeout = RequestTimeoutError("the chunks of a start took too long")
        timer = loop.call_later(self._limits.chunks_timeout_s, self._end_partial, start.slot, timeout)
        prompt = bytearray(start.generation.prompt_token_ids)
        self._partials[start.slot] = _Partial(start, timer, prompt, bytearray(start.generation.generated_token_ids))

    def _append(self, chunk: types_pb2.StartChunk) -> None:
        partial = self._partials.get(chunk.slot)
        if partial is None:
            return  # its start has failed already, or never was: unknown slots are ignored
        target = _CHUNK_TARGETS.get(chunk.target)
        if target is None:
            self._end_partial(chunk.slot, ProtocolError("this worker takes no such chunk", field="chunk.target"))
            return
        buffer = partial.prompt if target == "prompt_token_ids" else partial.generated
        buffer += chunk.data
        if len(partial.prompt) + len(partial.generated) > self._limits.max_prompt_bytes:
            error = PromptTooLongError("the chunks exceed the model's longest sequence", field=f"generation.{target}")
            self._end_partial(chunk.slot, error)

    def _complete(self, slot: int) -> None:
        partial = self._partials.pop(slot, None)
        if partial is None:
            return
        partial.timer.cancel()
        partial.start.generation.prompt_token_ids = bytes(partial.prompt)
        partial.start.generation.generated_token_ids = bytes(partial.generated)
        self._submit(partial.start)

    def _end_partial(self, slot: int, error: ServingError) -> None:
        partial = self._partials.pop(slot, None)
        if partial is not None:
            partial.timer.cancel()
            self._outbox.failed(slot, error)

    def _submit(self, start: StartMessage) -> None:
        slot = start.slot
        try:
            self._ids[slot] = self._work.submit(self._parse(start), self._outbox, slot, lambda: self._ended(slot))
        except ServingError as error:
            self._outbox.failed(slot, error)

    def _ended(self, slot: int) -> None:
        self._ids.pop(slot, None)

    def _cancel(self, slot: int) -> None:
        if slot in self._ids:
            self._work.cancel(self._ids[slot])
        else:
            self._end_partial(slot, RequestCancelledError("cancelled by the caller"))

    async def _write(self, context: grpc.aio.ServicerContext) -> None:  # type: ignore[type-arg]
        while True:
            await self._outbox.ready.wait()
            while (message := self._outbox.take()) is not None:
                self._writing_since = time.monotonic()
                await context.write(message)
                self._writing_since = None
            if self._is_half_closed and not self._ids and not self._partials:
                return

    async def _watch_stall(self) -> None:
        # One look a second costs less than a timer for each message.
        while True:
            await asyncio.sleep(min(1.0, self._limits.stall_timeout_s / 4))
            since = self._writing_since
            if since is not None and time.monotonic() - since > self._limits.stall_timeout_s:
                raise StalledStreamError("the reader of this stream took nothing for too long")

    def _abandon_all(self) -> None:
        for partial in self._partials.values():
            partial.timer.cancel()
        self._partials.clear()
        ids = list(self._ids.values())
        self._ids.clear()
        self._work.abandon(ids, self._outbox)
