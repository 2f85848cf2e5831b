"""A router's ear: every worker's load over one ZMQ SUB socket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import zmq

from quartet.events.load import WorkerLoad
from quartet.events.wire import LOAD_TOPIC, MalformedFrameError, decode_load

logger = logging.getLogger(__name__)

_MAX_PENDING_MESSAGES = 10_000
_MAX_MESSAGE_BYTES = 1 << 20
# After so many messages others on the event loop get their turn.
_MAX_MESSAGES_A_TURN = 256
# A peer whose host vanished is noticed, and dialled again, after this.
_PING_INTERVAL_MS, _PING_TIMEOUT_MS = 5_000, 15_000
_MIN_RECONNECT_MS, _MAX_RECONNECT_MS = 100, 2_000


class LoadSubscriber:
    """One SUB socket, drained by a reader callback of the running event loop (a third of ``zmq.asyncio``'s cost)."""

    def __init__(self, on_load: Callable[[WorkerLoad], None], on_malformed: Callable[[], None]) -> None:
        """Call ``on_load`` for each report, ``on_malformed`` for each message that makes no sense.

        Connected to nobody yet. Needs a running event loop.
        """
        self._on_load = on_load
        self._on_malformed = on_malformed
        self._endpoints: set[str] = set()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        for option, value in (
            (zmq.RCVHWM, _MAX_PENDING_MESSAGES),
            (zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES),
            (zmq.LINGER, 0),
            (zmq.IPV6, 1),
            (zmq.HEARTBEAT_IVL, _PING_INTERVAL_MS),
            (zmq.HEARTBEAT_TIMEOUT, _PING_TIMEOUT_MS),
            (zmq.RECONNECT_IVL, _MIN_RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, _MAX_RECONNECT_MS),
        ):
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.SUBSCRIBE, LOAD_TOPIC)
        self._fd: int = self._socket.fileno()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._drain)

    def connect(self, endpoint: str) -> None:
        """Listen to the worker at ``tcp://host:port`` too, also when it comes back; twice is once.

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
        self._look_again()

    def disconnect(self, endpoint: str) -> None:
        """Listen to that worker no more; an unknown endpoint is ignored."""
        if endpoint not in self._endpoints:
            return
        self._endpoints.remove(endpoint)
        self._socket.disconnect(endpoint)
        self._look_again()

    def close(self) -> None:
        """Listen to nobody. May be called twice."""
        if not self._context.closed:
            self._loop.remove_reader(self._fd)
            self._context.destroy(linger=0)

    def _look_again(self) -> None:
        # The descriptor tells edges, and any call on the socket may swallow one.
        self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        if self._context.closed:
            return
        for _ in range(_MAX_MESSAGES_A_TURN):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(frames)
        self._look_again()

    def _take(self, frames: list[bytes]) -> None:
        try:
            load = decode_load(frames)
        except MalformedFrameError as error:
            logger.debug("ignored what a worker published: %s", error)
            self._on_malformed()
            return
        self._on_load(load)
