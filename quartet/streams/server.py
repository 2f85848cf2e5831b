"""A worker's side of a worker stream: many requests by slot, one writer, exactly one terminal output a start."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeAlias, TypeVar

import grpc
from google.protobuf.message import Message

from quartet.errors import (
    ConfigError,
    NoSigningKeyError,
    PermissionDeniedError,
    ProtocolError,
    RequestCancelledError,
    ServingError,
    StalledStreamError,
)
from quartet.streams import convert
from quartet.streams.chunks import MAX_START_MEDIA_BYTES, ChunkedStarts, StartMessage
from quartet.streams.messages import WorkerStart
from quartet.streams.outbox import Outbox
from quartet.v1 import decode_pb2, prefill_pb2

OutboxT = TypeVar("OutboxT", bound=Outbox[Message])
OutboxT_contra = TypeVar("OutboxT_contra", contravariant=True)

_Request: TypeAlias = decode_pb2.DecodeRequest | prefill_pb2.PrefillRequest
# A reader that takes what it started takes these at once: a few hundred kB. Past them nothing more is read.
_MAX_OWED_ENDS = 4096
# Of either RPC; what it reads and writes is checked where it is read and made.
_Context: TypeAlias = "grpc.aio.ServicerContext[object, object]"


class Work(Protocol[OutboxT_contra]):
    """What runs the requests of streams."""

    def submit(self, start: WorkerStart, outbox: OutboxT_contra, slot: int, on_end: Callable[[], None]) -> int:
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

    def abandon(self, ids: list[int]) -> None:
        """The stream is gone: end these requests; what they would still bring goes nowhere."""
        ...


@dataclass(frozen=True, kw_only=True)
class StreamLimits:
    """Bounds of one worker stream.

    Attributes:
        stall_timeout_s: a reader that takes nothing for so long loses its requests.
        chunks_timeout_s: a chunked start must be complete within it.
        max_prompt_bytes: packed token ids of one start at most.
        max_media_bytes: media files of one start at most.

    Raises:
        ConfigError: naming the field.
    """

    stall_timeout_s: float = 10.0
    chunks_timeout_s: float = 30.0
    max_prompt_bytes: int = 64 << 20
    max_media_bytes: int = MAX_START_MEDIA_BYTES

    def __post_init__(self) -> None:
        for name in ("stall_timeout_s", "chunks_timeout_s", "max_prompt_bytes", "max_media_bytes"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: must be above 0")


class StartVerifier(Protocol):
    """Opens signed starts (``quartet.streams.signed_start.SignedStartVerifier``)."""

    def open(self, message: decode_pb2.SignedDecodeStart) -> decode_pb2.DecodeStart:
        """The start inside, in the message's slot. Raises ``ServingError``: it is refused."""
        ...


class WorkerStream(Generic[OutboxT]):
    """Serves one call of Decode or Prefill until both sides are done."""

    def __init__(
        self,
        work: Work[OutboxT],
        outbox: OutboxT,
        limits: StreamLimits,
        *,
        verifier: StartVerifier | None = None,
        takes_unsigned: bool = True,
    ) -> None:
        """Serve with ``work``, which brings its outputs to ``outbox``.

        ``verifier`` opens signed starts. ``takes_unsigned``: this caller may start whatever it likes.
        """
        self._work = work
        self._outbox = outbox
        self._limits = limits
        self._verifier = verifier
        self._takes_unsigned = takes_unsigned
        self._ids: dict[int, int] = {}
        self._chunked: ChunkedStarts[StartMessage] = ChunkedStarts(
            timeout_s=limits.chunks_timeout_s,
            max_size_bytes=limits.max_prompt_bytes,
            max_media_bytes=limits.max_media_bytes,
            on_failed=outbox.failed,
        )
        self._is_half_closed = False
        self._taken = asyncio.Event()
        self._writing_since: float | None = None

    async def serve(self, context: _Context) -> None:
        """Read and write until the caller has half-closed and every request has ended.

        Raises:
            ProtocolError: messages in a wrong order. It comes in an ``ExceptionGroup``, as the next one does.
            StalledStreamError: the caller reads nothing.
        """
        # Else it goes out with the first message, and while that is being written gRPC can send no status.
        await context.send_initial_metadata(())
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read(context))
                watcher = group.create_task(self._watch_stall())
                await self._write(context)
                watcher.cancel()
        finally:
            self._abandon_all()

    async def _read(self, context: _Context) -> None:
        while True:
            await self._room()
            request: object = await context.read()
            if not isinstance(request, _Request):
                break  # end of stream
            self._handle(request)
        self._is_half_closed = True
        self._chunked.end_all(ProtocolError("the stream was half-closed within a chunked start"))
        self._outbox.ready.set()

    async def _room(self) -> None:
        # A refused start costs its caller next to nothing, its end here memory: who takes no ends starts no more.
        while self._outbox.num_ended > _MAX_OWED_ENDS:
            self._taken.clear()
            await self._taken.wait()

    def _handle(self, request: _Request) -> None:
        match request.WhichOneof("message"):
            case "start":
                self._start(request.start)
            case "chunk":
                self._chunked.append(request.chunk)
            case "start_done":
                self._complete(request.start_done.slot)
            case "cancel":
                self._cancel(request.cancel.slot)
            case "signed_start":
                assert isinstance(request, decode_pb2.DecodeRequest), "only Decode has it"
                self._start_signed(request.signed_start)
            case _:
                raise ProtocolError("a message must hold a start, chunk, start_done or cancel", field="message")

    def _check_unused(self, slot: int) -> None:
        # A slot is free only once its end was sent: whoever reuses it earlier can't tell the two requests apart.
        if slot in self._ids or slot in self._chunked or self._outbox.owes(slot):
            raise ProtocolError(f"slot {slot} is still in use", field="start.slot")

    def _start(self, start: StartMessage) -> None:
        self._check_unused(start.slot)
        if not self._takes_unsigned:
            # Chunks that follow are for a slot that is unknown by then: they are ignored like all such.
            error = PermissionDeniedError("a start that no router signed takes a router's or worker's identity")
            self._outbox.failed(start.slot, error)
        elif start.chunked:
            self._chunked.begin(start)
        else:
            self._submit(start)

    def _start_signed(self, signed: decode_pb2.SignedDecodeStart) -> None:
        self._check_unused(signed.slot)
        try:
            if self._verifier is None:
                raise NoSigningKeyError("this worker has no key for signed starts")
            start = self._verifier.open(signed)
        except ServingError as error:
            self._outbox.failed(signed.slot, error)
        else:
            self._submit(start, is_signed=True)

    def _complete(self, slot: int) -> None:
        start = self._chunked.complete(slot)
        if start is not None:
            self._submit(start)

    def _submit(self, start: StartMessage, *, is_signed: bool = False) -> None:
        slot = start.slot
        try:
            parsed = _parse(start)
            if is_signed:
                parsed = replace(parsed, is_signed=True)
            id = self._work.submit(parsed, self._outbox, slot, lambda: self._ended(slot))
        except ServingError as error:
            self._outbox.failed(slot, error)
        else:
            self._ids[slot] = id

    def _ended(self, slot: int) -> None:
        self._ids.pop(slot, None)

    def _cancel(self, slot: int) -> None:
        if slot in self._ids:
            self._work.cancel(self._ids[slot])
        elif slot in self._chunked:
            self._chunked.end(slot, RequestCancelledError("cancelled by the caller"))
        else:
            self._outbox.recall(slot)

    async def _write(self, context: _Context) -> None:
        while not (self._is_half_closed and not self._ids and not self._outbox.ready.is_set()):
            await self._outbox.ready.wait()
            while (message := self._outbox.take()) is not None:
                self._taken.set()
                self._writing_since = time.monotonic()
                await context.write(message)
                self._writing_since = None

    async def _watch_stall(self) -> None:
        # One look now and then costs less than a timer for each message.
        while True:
            await asyncio.sleep(min(1.0, self._limits.stall_timeout_s / 4))
            since = self._writing_since
            if since is not None and time.monotonic() - since > self._limits.stall_timeout_s:
                raise StalledStreamError("the reader of this stream took nothing for too long")

    def _abandon_all(self) -> None:
        ids, self._ids = list(self._ids.values()), {}
        self._work.abandon(ids)
        self._chunked.forget_all()
        self._outbox.close()


def _parse(start: StartMessage) -> WorkerStart:
    if isinstance(start, decode_pb2.DecodeStart):
        return convert.from_decode_start(start)
    return convert.from_prefill_start(start)
