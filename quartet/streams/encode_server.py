"""A worker's end of an Encode stream: one request with its files in, its items' sizes and their hand-offs out."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from quartet.errors import (
    MediaTooLargeError,
    ProtocolError,
    RequestCancelledError,
    RequestTimeoutError,
    ServingError,
)
from quartet.media.items import MediaSize
from quartet.rpc.server import StalledCalls
from quartet.streams.base import Context, ServerStream
from quartet.streams.chunks import ChunkedStarts, check_num_media
from quartet.streams.convert.messages import from_encode_start, to_encode_sized, to_encoded_item
from quartet.streams.messages import EncodedItem, EncodeStart
from quartet.streams.server import StreamLimits
from quartet.v1 import encode_pb2


class EncodeWork(Protocol):
    """What encodes the items of requests."""

    async def encode(self, start: EncodeStart, outbox: EncodeOutbox) -> None:
        """Bring what ``start`` asks for to ``outbox``: sizes first, then every item. Raises ``ServingError``."""
        ...

    def withdraw(self, holder: int) -> None:
        """End the hand-off of ``holder``, which was not reported to the caller; no-op where it has none any more."""
        ...


class EncodeOutbox:
    """What is still to be written of one request."""

    def __init__(self, work: EncodeWork) -> None:
        """Start with nothing pending; hand-offs of ``work`` that are not written are withdrawn at the end."""
        self.ready = asyncio.Event()
        self._work = work
        self._pending: deque[tuple[encode_pb2.EncodeResponse, int | None]] = deque()
        self._being_written: int | None = None

    @property
    def num_ended(self) -> int:
        """None: the end of the one request is that of the call."""
        return 0

    def sized(self, sizes: Sequence[MediaSize]) -> None:
        """Send how many tokens each item fills; first, once."""
        self._put(encode_pb2.EncodeResponse(sized=to_encode_sized(sizes)), None)

    def encoded(self, encoded: EncodedItem, holder: int) -> None:
        """Send where an item can be pulled; ``holder`` has the hand-off."""
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
        """The stream has ended: withdraw the hand-offs that were not written."""
        holders = [self._being_written, *(holder for _, holder in self._pending)]
        self._being_written = None
        self._pending.clear()
        for holder in holders:
            if holder is not None:
                self._work.withdraw(holder)

    def _put(self, message: encode_pb2.EncodeResponse, holder: int | None) -> None:
        self._pending.append((message, holder))
        self.ready.set()


class EncodeStream(ServerStream[encode_pb2.EncodeRequest, encode_pb2.EncodeResponse]):
    """Serves one call of Encode: one request, until all that came of it is written."""

    def __init__(self, work: EncodeWork, limits: StreamLimits) -> None:
        """Serve with ``work``; ``limits`` bound the stream."""
        outbox = EncodeOutbox(work)
        super().__init__(outbox, StalledCalls(limits.stall_timeout_s), max_owed_ends=0)
        self._work = work
        self._limits = limits
        self._outbox = outbox
        self._working: asyncio.Task[None] | None = None
        self._start_error: ServingError | None = None
        self._chunked: ChunkedStarts[encode_pb2.EncodeStart] = ChunkedStarts(
            timeout_s=limits.chunks_timeout_s,
            max_size_bytes=limits.max_prompt_bytes,
            max_media_bytes=limits.max_media_bytes,
            on_failed=lambda _slot, error: self._fail_start(error),
        )

    async def serve(self, context: Context) -> None:
        """Read the request, run it, and write what comes until all is written.

        Raises:
            ServingError: what the request failed with, ``RequestCancelledError`` after its ``cancel`` included, or
                ``ProtocolError`` for messages in a wrong order; it may come in an ``ExceptionGroup``.
            StalledStreamError: the caller reads nothing.
        """
        error = RequestTimeoutError("the start of a stream took too long")
        timer = asyncio.get_running_loop().call_later(self._limits.chunks_timeout_s, self._fail_start, error)
        try:
            await super().serve(context)
        finally:
            timer.cancel()

    def _handle(self, request: encode_pb2.EncodeRequest, group: asyncio.TaskGroup) -> None:
        kind = request.WhichOneof("message")
        if kind == "cancel":
            raise RequestCancelledError("cancelled by the caller")
        if self._working is not None:
            raise ProtocolError("only a cancel may follow a complete start", field="message")
        if self._start_error is not None:
            return  # the writer is about to end the call with it
        start: encode_pb2.EncodeStart | None = None
        if kind == "start" and 0 not in self._chunked:
            if request.start.chunked:
                self._chunked.begin(request.start)
            else:
                start = request.start
        elif kind == "chunk" and 0 in self._chunked:
            self._chunked.append(request.chunk)
        elif kind == "start_done" and 0 in self._chunked:
            start = self._chunked.complete(0)
        else:
            raise _not_a_start()
        if start is not None:
            self._run(start, group)

    def _half_closed(self) -> None:
        if self._working is None and self._start_error is None:
            raise _not_a_start()

    async def _next(self) -> encode_pb2.EncodeResponse | None:
        while (message := self._outbox.take()) is None:
            if self._start_error is not None:
                raise self._start_error
            if self._working is not None and self._working.done():
                return None
            await self._outbox.ready.wait()
        return message

    async def _end(self) -> None:
        self._chunked.forget_all()
        self._outbox.close()

    def _run(self, start: encode_pb2.EncodeStart, group: asyncio.TaskGroup) -> None:
        check_num_media(start)
        if sum(len(item.file.data) for item in start.items) > self._limits.max_media_bytes:
            message = f"the media files of a start exceed {self._limits.max_media_bytes} bytes"
            raise MediaTooLargeError(message, field="items")
        self._working = group.create_task(self._work.encode(from_encode_start(start), self._outbox))
        self._working.add_done_callback(lambda _: self._outbox.ready.set())

    def _fail_start(self, error: ServingError) -> None:
        """The start can't become whole any more; the first error counts."""
        if self._working is None and self._start_error is None:
            self._start_error = error
            self._outbox.ready.set()


def _not_a_start() -> ProtocolError:
    return ProtocolError("a stream begins with one start, and its chunks if it says so", field="message")
