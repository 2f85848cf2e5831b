"""A router's ZMQ SUB socket: every worker's load, the changes of its KV blocks, and other routers' bookings."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import zmq

from quartet.events.bookings import RouterBookings
from quartet.events.curve import EventsKey
from quartet.events.kv import KvBatch
from quartet.events.load import NumberedLoad
from quartet.events.wire import (
    BOOKINGS_TOPIC,
    KV_TOPIC,
    LOAD_TOPIC,
    MAX_FRAME_BYTES,
    MalformedFrameError,
    decode_bookings,
    decode_kv,
    decode_load,
)
from quartet.limited_log import LimitedLog
from quartet.supervision import vital

logger = logging.getLogger(__name__)

_MAX_PENDING_MESSAGES = 10_000
# After so many messages, or bytes of them, others on the event loop get their turn.
_MAX_MESSAGES_A_TURN, _MAX_BYTES_A_TURN = 256, 1 << 16
# A peer whose host vanished is noticed, and dialled again, after this.
_PING_INTERVAL_MS, _PING_TIMEOUT_MS = 5_000, 15_000
_MIN_RECONNECT_MS, _MAX_RECONNECT_MS = 100, 2_000


class EventSubscriber:
    """One SUB socket, drained by a reader callback of the running event loop (a third of ``zmq.asyncio``'s cost)."""

    def __init__(
        self,
        on_load: Callable[[NumberedLoad], None],
        on_malformed: Callable[[], None],
        on_kv: Callable[[KvBatch], None] | None = None,
        on_bookings: Callable[[RouterBookings], None] | None = None,
        *,
        key: EventsKey | None = None,
        max_pending_messages: int = _MAX_PENDING_MESSAGES,
    ) -> None:
        """Begin without connections. Needs a running event loop.

        Args:
            on_load: called for each report.
            on_malformed: called for each malformed message.
            on_kv: called for each batch of KV events; ``None``: they are not listened to.
            on_bookings: called for what a router has booked; ``None``: it is not listened to.
            key: only workers that serve with it are received; ``None``: only those that serve in the clear.
            max_pending_messages: when more of a worker's wait, it soon drops what comes.
        """
        self._on_load = on_load
        self._on_kv = on_kv
        self._on_bookings = on_bookings
        self._on_malformed = on_malformed
        self._endpoints: set[str] = set()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        prepare_to_dial(self._socket, key, max_pending_messages=max_pending_messages, max_message_bytes=MAX_FRAME_BYTES)
        # In this order: a worker whose load arrives has known at least as long that its batches are wanted too.
        for topic, is_wanted in (
            (KV_TOPIC, on_kv is not None),
            (LOAD_TOPIC, True),
            (BOOKINGS_TOPIC, on_bookings is not None),
        ):
            if is_wanted:
                self._socket.setsockopt(zmq.SUBSCRIBE, topic)
        self._failure_log = LimitedLog(logger, max_per_minute=10)
        self._fd: int = self._socket.fileno()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._drain)

    def connect(self, endpoint: str) -> None:
        """Listen to the worker or router at ``tcp://host:port`` too, also when it comes back; twice is once.

        Raises:
            ValueError: ``endpoint`` is no ZMQ endpoint.
        """
        if endpoint in self._endpoints:
            return
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise ValueError(f"cannot listen to {endpoint!r}: {error.strerror}") from error
        self._endpoints.add(endpoint)
        self._drain_soon()

    def disconnect(self, endpoint: str) -> None:
        """Listen to that one no more; an unknown endpoint is ignored."""
        if endpoint not in self._endpoints:
            return
        self._endpoints.remove(endpoint)
        self._socket.disconnect(endpoint)
        self._drain_soon()

    def close(self) -> None:
        """Close the socket. May be called twice."""
        if not self._context.closed:
            self._loop.remove_reader(self._fd)
            self._context.destroy(linger=0)

    def _drain_soon(self) -> None:
        # The descriptor is edge-triggered, and any call on the socket may swallow an edge.
        self._loop.call_soon(self._drain)

    @vital
    def _drain(self) -> None:
        if self._context.closed:
            return
        num_bytes = 0
        for _ in range(_MAX_MESSAGES_A_TURN):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(frames)
            num_bytes += sum(map(len, frames))
            if num_bytes > _MAX_BYTES_A_TURN:
                break
        self._drain_soon()

    def _take(self, frames: list[bytes]) -> None:
        try:
            if self._on_kv is not None and frames[0] == KV_TOPIC:
                self._on_kv(decode_kv(frames))
            elif self._on_bookings is not None and frames[0] == BOOKINGS_TOPIC:
                self._on_bookings(decode_bookings(frames))
            else:
                self._on_load(decode_load(frames))
        except MalformedFrameError as error:
            logger.debug("ignored what a peer published: %s", error)
            self._on_malformed()
        except Exception:  # noqa: BLE001 - the message ends here; else nothing is read any more, and all look silent
            self._failure_log.exception("could not take what a peer published")
            self._on_malformed()


def prepare_to_dial(
    socket: zmq.Socket[bytes], key: EventsKey | None, *, max_pending_messages: int, max_message_bytes: int
) -> None:
    """Bound what waits in ``socket`` and one message, notice dead peers, and dial them again. Before it connects.

    ``key``: only peers that serve with it are reached; ``None``: only those that serve in the clear.
    """
    for option, value in (
        (zmq.RCVHWM, max_pending_messages),
        (zmq.MAXMSGSIZE, max_message_bytes),
        (zmq.LINGER, 0),
        (zmq.IPV6, 1),
        (zmq.HEARTBEAT_IVL, _PING_INTERVAL_MS),
        (zmq.HEARTBEAT_TIMEOUT, _PING_TIMEOUT_MS),
        (zmq.RECONNECT_IVL, _MIN_RECONNECT_MS),
        (zmq.RECONNECT_IVL_MAX, _MAX_RECONNECT_MS),
    ):
        socket.setsockopt(option, value)
    if key is not None:
        key.dial_with(socket)
