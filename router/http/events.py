"""Server-sent events, pushed straight to a connection's transport: a token's event waits for no task and no drain.

aiohttp's own writer would cost a coroutine and half as much again for each token (decision 090). It bounds slow readers
by waiting for them; here nothing waits, so what a reader leaves unread has a bound of bytes, and `Connections` looks
once a second for readers that take nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from aiohttp import HttpVersion11, web

logger = logging.getLogger(__name__)

#: What the server calls itself; aiohttp would tell versions.
SERVER_NAME = "quartet"

_HEADERS = {
    "Server": SERVER_NAME,
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would gather events
}
_COMMENT = ": keep-alive\n\n"

# How chunks of each length begin, for nearly all of them: a third of the price of formatting the number.
_CHUNK_HEADS = tuple(f"{size:x}\r\n" for size in range(1024))


class EventWriter:
    """Writes what streams have sent, at the end of the turn of the event loop in which they sent it.

    Written one by one, between the work for one token and that for the next, each event would wake its reader by
    itself. Side by side, a reader of several takes them together, and the kernel's part of a token is smaller.
    """

    def __init__(self) -> None:
        #: Streams that have something to write.
        self.due: list[EventStream] = []

    def begin(self) -> None:
        """There is one now: have all write soon."""
        asyncio.get_running_loop().call_soon(self._write)

    def _write(self) -> None:
        due = self.due.copy()
        self.due.clear()
        for stream in due:
            try:
                stream.write()
            except Exception:
                logger.exception("an HTTP stream failed")
                stream.close()


class EventStream:
    """The events of one response. Events are ASCII, with their ``data:`` and their empty line."""

    __slots__ = (
        "_due",
        "_early",
        "_is_chunked",
        "_max_unread_bytes",
        "_num_early_bytes",
        "_num_quiet_polls",
        "_unwritten",
        "_writer",
        "is_due",
        "num_written",
        "on_slow",
        "transport",
    )

    def __init__(self, request: web.BaseRequest, writer: EventWriter, *, max_unread_bytes: int) -> None:
        """Keep events until ``open``. A reader that leaves more than ``max_unread_bytes`` unread is too slow.

        Whoever opens it must not wait beyond ``is_due``: half of that is kept, or nothing came for long.
        """
        self._writer = writer
        self._due = writer.due
        self._unwritten = ""
        self._max_unread_bytes = max_unread_bytes
        self._early: list[str] | None = []
        self._num_early_bytes = 0
        self._is_chunked = request.version >= HttpVersion11
        #: Where events go while it is open.
        self.transport: asyncio.Transport | None = None
        #: Bytes that went there.
        self.num_written = 0
        self._num_quiet_polls = 0
        #: Done once it should be opened, whatever its opening waits for.
        self.is_due: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        #: Called once the reader is too slow; nothing more is sent then.
        self.on_slow: Callable[[], None] = _ignore

    async def open(self, request: web.BaseRequest, headers: Mapping[str, str]) -> web.StreamResponse:
        """Send the head and all events so far to ``request``; from now on events go out as they come.

        ``request`` is not kept: that would be a cycle when writing fails, since the error's traceback refers to this.
        """
        response = web.StreamResponse(headers={**_HEADERS, **headers})
        await response.prepare(request)  # sends the head
        early, self._early = "".join(self._early or ()), None
        self.transport = request.transport
        if early:
            self.send(early)
        return response

    def send(self, event: str) -> None:
        """Send ``event`` in this turn of the event loop. Never waits."""
        if self.transport is None:
            self._keep(event)
            return
        if self._unwritten:
            self._unwritten += event
            return
        self._unwritten = event
        due = self._due
        if not due:
            self._writer.begin()
        due.append(self)

    def repeat(self, event: str) -> None:
        """Send ``event``, which repeats what others brought: a reader may leave so many more bytes unread."""
        self._max_unread_bytes += len(event)
        self.send(event)

    def write(self) -> None:
        """Write what was sent."""
        events, transport = self._unwritten, self.transport
        self._unwritten = ""
        if not events or transport is None or transport.is_closing():  # uvloop's raise if they are written to then
            return
        self._num_quiet_polls = 0
        if self._is_chunked:
            size = len(events)
            head = _CHUNK_HEADS[size] if size < len(_CHUNK_HEADS) else f"{size:x}\r\n"
            events = f"{head}{events}\r\n"
        self.num_written += len(events)
        transport.write(events.encode())
        if transport.get_write_buffer_size() > self._max_unread_bytes:
            self.transport = None
            self.on_slow()

    def make_due(self) -> None:
        """Have it opened soon."""
        if not self.is_due.done():
            self.is_due.set_result(None)

    def poll(self, max_quiet_polls: int) -> None:
        """Send a comment if there was nothing else for so many polls, for proxies that end silent connections."""
        self._num_quiet_polls += 1
        if self._num_quiet_polls < max_quiet_polls:
            return
        if self.transport is not None:
            self.send(_COMMENT)
        else:
            self.make_due()

    def close(self) -> None:
        """Write what was sent; send nothing more."""
        self.write()
        self.transport = self._early = None
        self.on_slow = _ignore  # else a cycle: what it was refers to the request's runs, and they to this

    def _keep(self, event: str) -> None:
        if self._early is None:  # closed
            return
        self._early.append(event)
        self._num_early_bytes += len(event)
        if self._num_early_bytes > self._max_unread_bytes // 2:
            self.make_due()


def _ignore() -> None:
    """Nobody wants to know."""
