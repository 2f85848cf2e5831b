"""The connections of the HTTP server: how many there may be, and the end of those whose client takes too little."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from aiohttp import web
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader

from router.client_address import client_address
from router.http.config import HttpConfig
from router.http.errors import HttpError, error_body, error_response
from router.http.events import SERVER_NAME, EventStream

logger = logging.getLogger(__name__)

_POLL_INTERVAL_S = 1.0
# Polls in a row after which a client that took nothing is cut; time in which this process got no CPU has no polls.
_MIN_POLLS = 4
# What a connection reads ahead of its request; it may read twice as much.
_READ_AHEAD_BYTES = 32 << 10
_MAX_LINE_BYTES, _MAX_HEADERS = 8190, 64
#: A head may have so many bytes in all. aiohttp holds twice as many for as long as the request runs.
MAX_HEAD_BYTES = 32 << 10
# After a refusal, what still comes of a body is read for so long, so that the client sees the refusal.
_LINGER_S = 2.0


class Connections:
    """Counts connections by address, makes the protocol of each, and polls them."""

    def __init__(self, config: HttpConfig, *, stall_timeout_s: float) -> None:
        """A client that takes nothing of what waits for it for ``stall_timeout_s`` loses its connection.

        So does one that has not taken a whole answer, or the end of a stream, within ``config.body_timeout_s``.
        """
        self._config = config
        self.max_stalled_polls = max(_MIN_POLLS, math.ceil(stall_timeout_s / _POLL_INTERVAL_S))
        self._interval_s = stall_timeout_s / self.max_stalled_polls
        self.max_answer_polls = max(_MIN_POLLS, math.ceil(config.body_timeout_s / self._interval_s))
        self._max_quiet_polls = max(1, round(config.keepalive_s / self._interval_s))
        self._open: dict[_Connection, str] = {}
        self._of_address: Counter[str] = Counter()
        self._streams: set[EventStream] = set()

    def __len__(self) -> int:
        """Connections that are open."""
        return len(self._open)

    def protocol(self, server: web.Server) -> Callable[[], web.RequestHandler]:
        """What makes the protocol of each connection of ``server``."""
        loop = asyncio.get_running_loop()
        return lambda: _Connection(
            self,
            server,
            loop=loop,
            keepalive_timeout=self._config.idle_timeout_s,
            access_log=None,
            logger=logger,
            max_line_size=_MAX_LINE_BYTES,
            max_field_size=_MAX_LINE_BYTES,
            max_headers=_MAX_HEADERS,
            lingering_time=_LINGER_S,
            read_bufsize=_READ_AHEAD_BYTES,
            auto_decompress=False,
        )

    async def poll(self) -> None:
        """Look after connections and streams until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            self.look()

    def look(self) -> None:
        """Look after connections and streams once."""
        for stream in tuple(self._streams):
            stream.poll(self._max_quiet_polls)
        num_written = {stream.transport: stream.num_written for stream in self._streams}
        for connection in tuple(self._open):
            connection.poll(num_written)

    def watch(self, stream: EventStream) -> None:
        """Poll ``stream``, too."""
        self._streams.add(stream)

    def forget(self, stream: EventStream) -> None:
        """Poll ``stream`` no more."""
        self._streams.discard(stream)

    def cut(self) -> None:
        """End all connections at once, whatever was not sent yet."""
        for connection in tuple(self._open):
            connection.cut()

    def enter(self, connection: _Connection, address: str) -> str:
        """Count a connection; returns why there is no room for it, or nothing."""
        if len(self._open) >= self._config.max_connections:
            return f"this server has {self._config.max_connections} connections (http.max_connections)"
        if self._of_address[address] >= self._config.max_connections_of_address:
            limit = self._config.max_connections_of_address
            return f"an address may have {limit} connections (http.max_connections_of_address)"
        self._open[connection] = address
        self._of_address[address] += 1
        return ""

    def leave(self, connection: _Connection) -> None:
        """The connection is over."""
        address = self._open.pop(connection, None)
        if address is None:
            return
        self._of_address[address] -= 1
        if not self._of_address[address]:
            del self._of_address[address]


class _Connection(web.RequestHandler):
    """aiohttp's protocol of one connection, with bounds."""

    __slots__ = ("_asked", "_connections", "_io", "_late", "_num_head_bytes", "_payload", "_stalled", "_taken")

    def __init__(self, connections: Connections, server: web.Server, **settings: Any) -> None:
        super().__init__(server, **settings)
        self._connections = connections
        self._io: asyncio.Transport | None = None  # kept until the connection is lost, as aiohttp's own is not
        self._taken = self._asked = 0  # bytes that left, and the identity of the request whose answer waits
        self._stalled = self._late = 0  # polls
        self._num_head_bytes = 0  # of a head that is not whole yet
        self._payload: StreamReader = EMPTY_PAYLOAD  # of the last head that was

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection, or refuse it at once."""
        io: asyncio.Transport = transport  # type: ignore[assignment]  # uvloop's are of no such class
        refusal = self._connections.enter(self, client_address(io))
        if refusal:
            io.write(_refusal(HttpError(503, refusal)))
            io.close()
            return
        self._io = io
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """The connection is over."""
        self._connections.leave(self)
        if self._io is not None:
            self._io = None
            super().connection_lost(exc)
        self._payload = EMPTY_PAYLOAD  # else a cycle: a payload refers to its connection

    def data_received(self, data: bytes) -> None:
        """Read what came; of a refused connection nothing."""
        if self._io is None:
            return
        num_before, is_head = self._request_count, self._payload.is_eof()
        super().data_received(data)
        if self._request_count > num_before:
            self._num_head_bytes, self._payload = 0, self._messages[-1][1]
        elif is_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                if self._current_request is None:
                    self._io.write(_refusal(HttpError(431, f"a head may have {MAX_HEAD_BYTES} bytes")))
                self._io.close()

    def poll(self, num_written: Mapping[asyncio.Transport | None, int]) -> None:
        """Cut the connection if its client takes too little. ``num_written``: bytes, by the transports of streams."""
        if self._io is None:
            return
        unread, is_stream = self._io.get_write_buffer_size(), self._io in num_written
        # What waits of a stream may grow while its client reads; a whole answer was written at once.
        num_taken = num_written.get(self._io, 0) - unread
        is_stalled = unread > 0 and num_taken <= self._taken
        asked = id(self._current_request) if unread and not is_stream else 0
        is_late = asked != 0 and asked == self._asked
        self._taken, self._asked = num_taken, asked
        self._stalled = self._stalled + 1 if is_stalled else 0
        self._late = self._late + 1 if is_late else 0
        limits = self._connections
        if self._stalled > limits.max_stalled_polls or self._late >= limits.max_answer_polls:
            logger.info("cut an HTTP client that took too little of its answer: %d bytes are left", unread)
            self._io.abort()

    def cut(self) -> None:
        """End the connection at once, whatever was not sent yet."""
        if self._io is not None:
            self._io.abort()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """The answer to what is no HTTP, or to a bug of ours."""
        if status >= 500:
            logger.error("an HTTP request failed", exc_info=exc)
        else:
            logger.debug("no HTTP: %s", exc)
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun already")
        what = "internal error" if status >= 500 else "this is no HTTP request"
        response = error_response(HttpError(status, what))
        response.headers["Server"] = SERVER_NAME
        response.force_close()
        return response


def _refusal(error: HttpError) -> bytes:
    body = json.dumps(error_body(error)).encode()
    head = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\nContent-Type: application/json\r\n"
        f"Retry-After: 1\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
