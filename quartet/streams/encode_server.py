"""A worker's side of an encode stream: one request with its files, its items' sizes, then a hand-off an item."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import grpc

from quartet.errors import (
    MediaTooLargeError,
    ProtocolError,
    RequestCancelledError,
    RequestTimeoutError,
    ServingError,
    StalledStreamError,
)
from quartet.media.items import MediaSize
from quartet.streams.chunks import ChunkedStarts
from quartet.streams.convert.inner import from_encode_start, to_encode_sized, to_encoded_item
from quartet.streams.messages import EncodedItem, EncodeStart
from quartet.streams.server import StreamLimits
from quartet.v1 import encode_pb2

_Context: TypeAlias = "grpc.aio.ServicerContext[object, object]"


class EncodeWork(Protocol):
    """What encodes the items of requests."""

    async def encode(self, start: EncodeStart, outbox: EncodeOutbox) -> None:
        """Bring what ``start`` asks for to ``outbox``: sizes first, then every item. Raises ``ServingError``."""
        ...

    def withdraw(self, holder: int) -> None:
        """End the hand-off of ``holder``, of which nobody was told; nothing happens where it has none any more."""
        ...


class EncodeOutbox:
    """What is still to be written of one request."""

    def __init__(self, work: EncodeWork) -> None:
        """Start with nothing pending; hand-offs of ``work`` that are not written are withdrawn at the end."""
        self.ready = asyncio.Event()
        self._work = work
        self._pending: deque[tuple[encode_pb2.EncodeResponse, int | None]] = deque()
        self._being_written: int | None = None

    def sized(self, sizes: Sequence[MediaSize]) -> None:
        """Tell how much the items fill; first, once."""
        self._put(encode_pb2.EncodeResponse(sized=to_encode_sized(sizes)), None)

    def encoded(self, encoded: EncodedItem, holder: int) -> None:
        """Tell where an item can be pulled; ``holder`` has the hand-off."""
        self._put(encode_pb2.EncodeResponse(encoded=to_encoded_item(encoded)), holder)

    def take(self) -> encode_pb2.EncodeResponse | None:
        """The next message; ``None``, and ``ready`` cleared, when nothing is pending.

        Asking for the next one says that the one before was written.
        """
        self._being_written = None
        if not self._pending:
            self.ready.clear()
            return None
        message, self._being_written = self._pending.popleft()
        return message

    def close(self) -> None:
        """The stream has ended: let go of the hand-offs that nobody was told of."""
        holders = [self._being_written, *(holder for _, holder in self._pending)]
        self._being_written = None
        self._pending.clear()
        for holder in holders:
            if holder is not None:
                self._work.withdraw(holder)

    def _put(self, message: encode_pb2.EncodeResponse, holder: int | None) -> None:
        self._pending.append((message, holder))
        self.ready.set()


class EncodeStream:
    """Serves one call of Encode."""

    def __init__(self, work: EncodeWork, limits: StreamLimits) -> None:
        """Serve with ``work``; ``limits`` bound the stream."""
        self._work = work
        self._limits = limits
        self._outbox = EncodeOutbox(work)
        self._error: ServingError | None = None
        self._chunked: ChunkedStarts[encode_pb2.EncodeStart] = ChunkedStarts(
            timeout_s=limits.chunks_timeout_s,
            max_size_bytes=limits.max_prompt_bytes,
            max_media_bytes=limits.max_media_bytes,
            on_failed=self._start_failed,
        )

    async def serve(self, context: _Context) -> None:
        """Read the request, run it, and write what comes until all is written.

        Raises:
            ServingError: what the request failed with, ``RequestCancelledError`` after its ``cancel`` included, or
                ``ProtocolError`` for messages in a wrong order; it may come in an ``ExceptionGroup``.
            StalledStreamError: the caller reads nothing.
        """
        await context.send_initial_metadata(())
        try:
            start = await self._read_start(context)
            async with asyncio.TaskGroup() as group:
                reading = group.create_task(self._read_rest(context))
                working = group.create_task(self._work.encode(start, self._outbox))
                working.add_done_callback(lambda _: self._outbox.ready.set())
                await self._write(context, working)
                reading.cancel()
        finally:
            self._chunked.forget_all()
            self._outbox.close()

    async def _read_start(self, context: _Context) -> EncodeStart:
        try:
            async with asyncio.timeout(self._limits.chunks_timeout_s):
                while (start := self._take(await _read(context))) is None:
                    if self._error is not None:
                        raise self._error
        except TimeoutError:
            raise self._error or RequestTimeoutError("the start of a stream took too long") from None
        if sum(len(item.file.data) for item in start.items) > self._limits.max_media_bytes:
            message = f"the media files of a start exceed {self._limits.max_media_bytes} bytes"
            raise MediaTooLargeError(message, field="items")
        return from_encode_start(start)

    def _take(self, request: encode_pb2.EncodeRequest | None) -> encode_pb2.EncodeStart | None:
        """The start, once it is whole."""
        match None if request is None else request.WhichOneof("message"):
            case "start" if request is not None and 0 not in self._chunked:
                if not request.start.chunked:
                    return request.start
                self._chunked.begin(request.start)
            case "chunk" if request is not None and 0 in self._chunked:
                self._chunked.append(request.chunk)
            case "start_done" if 0 in self._chunked:
                return self._chunked.complete(0)
            case "cancel":
                raise _cancelled()
            case _:
                raise ProtocolError("a stream begins with one start, and its chunks if it says so", field="message")
        return None

    async def _read_rest(self, context: _Context) -> None:
        request = await _read(context)
        if request is None:  # half-closed
            return
        if request.WhichOneof("message") == "cancel":
            raise _cancelled()
        raise ProtocolError("only a cancel may follow a complete start", field="message")

    def _start_failed(self, _slot: int, error: ServingError) -> None:
        self._error = error

    async def _write(self, context: _Context, working: asyncio.Task[None]) -> None:
        while True:
            while (message := self._outbox.take()) is not None:
                try:
                    async with asyncio.timeout(self._limits.stall_timeout_s):
                        await context.write(message)
                except TimeoutError:
                    raise StalledStreamError("the reader of this stream took nothing for too long") from None
            if working.done():
                return
            await self._outbox.ready.wait()


async def _read(context: _Context) -> encode_pb2.EncodeRequest | None:
    request: object = await context.read()
    return request if isinstance(request, encode_pb2.EncodeRequest) else None


def _cancelled() -> RequestCancelledError:
    return RequestCancelledError("cancelled by the caller")
