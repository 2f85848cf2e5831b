"""The stream of states that open pages read: one sample for all of them, and none when nobody looks."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

from aiohttp import web

from quartet.errors import QueueFullError
from router.http.connections import Connections
from router.http.errors import HttpError
from router.http.events import EventStream, EventWriter

logger = logging.getLogger(__name__)

#: Time between two states, in seconds.
INTERVAL_S = 0.5
#: Pages that may look at a time. Each costs a write a state.
MAX_VIEWERS = 32

# A viewer that has not read one state gets no other, so this bounds the length of a state, some 400 bytes a worker.
_MAX_STATE_BYTES = 8 << 20
_RETRY_DELAY_S = 5.0


class StateFeed:
    """Sends states to whoever looks, from the first viewer to the last."""

    def __init__(
        self,
        read: Callable[[], dict[str, Any]],
        connections: Connections,
        *,
        on_begin: Callable[[], None] = lambda: None,
        on_end: Callable[[], None] = lambda: None,
        interval_s: float = INTERVAL_S,
        max_viewers: int = MAX_VIEWERS,
    ) -> None:
        """Do nothing before the first viewer.

        Args:
            read: the present state, as JSON can have it.
            connections: look after the viewers' streams.
            on_begin: called before the first state is read for the first viewer.
            on_end: called when the last viewer has gone.
            interval_s: between two states.
            max_viewers: of more, each is refused.
        """
        self._read = read
        self._connections = connections
        self._on_begin, self._on_end = on_begin, on_end
        self._interval_s = interval_s
        self._max_viewers = max_viewers
        self._writer = EventWriter()
        self._viewers: set[_Viewer] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._event = ""

    @property
    def num_viewers(self) -> int:
        """Pages that look."""
        return len(self._viewers)

    @property
    def is_running(self) -> bool:
        """Whether states are read."""
        return self._timer is not None

    async def serve(self, request: web.BaseRequest, may_look: Callable[[], bool]) -> web.StreamResponse:
        """Send a state at once, and then each one that the viewer has taken the last one before, until it leaves.

        ``may_look`` is asked before each: a key may be revoked meanwhile.

        Raises:
            HttpError: it is a HEAD.
            QueueFullError: too many look already.
        """
        if request.method == "HEAD":
            raise HttpError(405, "a stream has no end to tell of", headers={"Allow": "GET"})
        if len(self._viewers) >= self._max_viewers:
            message = f"{self._max_viewers} pages look at this router already: close one of them"
            raise QueueFullError(message, retry_delay_s=_RETRY_DELAY_S)
        stream = EventStream(request, self._writer, max_unread_bytes=_MAX_STATE_BYTES)
        viewer = _Viewer(stream, may_look)
        self._viewers.add(viewer)
        try:
            response = await stream.open(request, {})
            self._connections.watch(stream)
            if self._timer is None:
                self._on_begin()
                self._sample()
            else:
                stream.send(self._event)
            await viewer.ended
        finally:
            self._viewers.discard(viewer)
            self._connections.forget(stream)
            stream.close()
            if not self._viewers:
                self._stop()
        return response

    def close(self) -> None:
        """End all streams: the router is going away."""
        for viewer in self._viewers:
            viewer.end()

    def _sample(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._sample)
        try:
            self._event = f"data: {json.dumps(self._read(), separators=(',', ':'))}\n\n"
        except Exception:  # a page that shows nothing must stop no request
            logger.exception("the state of the fleet can't be read")
            self.close()
            return
        for viewer in self._viewers:
            viewer.show(self._event)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._event = None, ""
            self._on_end()


class _Viewer:
    """One open page."""

    def __init__(self, stream: EventStream, may_look: Callable[[], bool]) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stream = stream
        self._may_look = may_look
        stream.on_slow = self.end

    def show(self, event: str) -> None:
        """Send ``event``, unless the one before is not read yet."""
        transport = self._stream.transport
        if transport is None:  # its head is on its way
            return
        if not self._may_look():
            self.end()
        elif not transport.get_write_buffer_size():
            self._stream.send(event)

    def end(self) -> None:
        """Send nothing more."""
        if not self.ended.done():
            self.ended.set_result(None)
