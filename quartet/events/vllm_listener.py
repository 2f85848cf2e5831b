"""A SUB socket for one source's KV events in vLLM's form, and a DEALER that asks for what was lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

from quartet.events.curve import EventsKey
from quartet.events.ordered_feed import OrderedFeed
from quartet.events.subscriber import prepare_to_dial
from quartet.events.vllm import END_NUMBER, MAX_BATCH_BYTES, VllmBatch, decode_batch, decode_number, encode_number
from quartet.events.wire import MalformedFrameError
from quartet.limited_log import LimitedLog
from quartet.supervision import vital

logger = logging.getLogger(__name__)

#: A replay of which nothing came for so long is over.
REPLAY_TIMEOUT_S = 5.0

# Of a feed, whose source keeps what this can't take yet; and of a replay, of which sources drop what can't be taken.
_MAX_PENDING_MESSAGES, _MAX_PENDING_REPLAYED = 256, 10_000
# After so many messages, or bytes of them, others on the event loop get their turn.
_MAX_MESSAGES_A_TURN, _MAX_BYTES_A_TURN = 256, 1 << 16
_NUM_FRAMES = 3


class VllmListener:
    """Listens to one source. Lives on the running event loop.

    A source whose connection ends is taken for dead: what it had is dropped. When it can be reached again, it is asked
    for all that it has kept, if it can replay.

    Attributes:
        feed: its counts of gaps, restarts and drops.
        num_malformed: messages that could not be read.
        num_replays: times that the source was asked.
        is_connected: whether it can be reached.
    """

    def __init__(
        self,
        name: str,
        endpoint: str,
        on_batch: Callable[[VllmBatch], None],
        on_drop: Callable[[], None],
        *,
        replay_endpoint: str | None = None,
        topic: str = "",
        key: EventsKey | None = None,
        replay_timeout_s: float = REPLAY_TIMEOUT_S,
    ) -> None:
        """Begin to listen.

        Args:
            name: of the source, for the log.
            endpoint: ``tcp://host:port`` of its PUB socket.
            on_batch: called with each batch, in order.
            on_drop: called where nothing that the source said before counts any more.
            replay_endpoint: of its ROUTER; ``None``: it can't replay.
            topic: messages whose first frame begins so are read.
            key: only a source that serves with it is heard; ``None``: only one that serves in the clear.
            replay_timeout_s: a replay of which nothing came for so long is over.

        Raises:
            ValueError: an endpoint is none of ZMQ's.
        """
        self.num_malformed = self.num_replays = 0
        self.is_connected = False
        self._name, self._key = name, key
        self._on_batch, self._on_drop = on_batch, on_drop
        self._replay_endpoint, self._replay_timeout_s = replay_endpoint, replay_timeout_s
        self.feed = OrderedFeed(self, can_replay=replay_endpoint is not None)
        self._log = LimitedLog(logger, max_per_minute=10)
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._dealer: zmq.Socket[bytes] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._socket = self._dial(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        try:
            self._socket.connect(endpoint)
            if replay_endpoint is not None:
                with self._dial(zmq.DEALER) as probe:
                    probe.connect(replay_endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ValueError(f"cannot listen to {endpoint!r}, {replay_endpoint!r}: {error.strerror}") from error
        self._fds = (self._socket.fileno(), self._monitor.fileno())
        for fd in self._fds:
            self._loop.add_reader(fd, self._drain)
        self._drain_soon()

    def close(self) -> None:
        """Close the sockets. May be called twice."""
        if self._context.closed:
            return
        self._end_asking()
        for fd in self._fds:
            self._loop.remove_reader(fd)
        self._context.destroy(linger=0)

    def apply(self, batch: VllmBatch) -> None:
        """For ``OrderedFeed``."""
        self._on_batch(batch)

    def drop(self) -> None:
        """For ``OrderedFeed``."""
        self._on_drop()

    def ask(self, first_number: int) -> None:
        """For ``OrderedFeed``."""
        assert self._replay_endpoint is not None, "a feed asks only where there are replays"
        self._end_asking()
        self.num_replays += 1
        # A new socket: what still comes of an earlier replay must not be taken for this one's.
        dealer = self._dealer = self._dial(zmq.DEALER)
        dealer.connect(self._replay_endpoint)
        dealer.send_multipart([b"", encode_number(first_number)], zmq.NOBLOCK)
        self._loop.add_reader(dealer.fileno(), self._drain)
        self._wait_for_replay()
        self._drain_soon()

    def _dial(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        max_pending = _MAX_PENDING_REPLAYED if kind == zmq.DEALER else _MAX_PENDING_MESSAGES
        prepare_to_dial(socket, self._key, max_pending_messages=max_pending, max_message_bytes=MAX_BATCH_BYTES)
        return socket

    def _drain_soon(self) -> None:
        # Descriptors are edge-triggered, and any call on a socket may swallow an edge.
        self._loop.call_soon(self._drain)

    @vital
    def _drain(self) -> None:
        if self._context.closed:
            return
        # What a source sent before its connection ended comes first.
        is_empty = self._drain_batches()
        is_empty &= self._drain_replay()
        if is_empty:
            is_empty = self._drain_monitor()
        if not is_empty:
            self._drain_soon()

    def _drain_batches(self) -> bool:
        """Take some of what the source has sent; true if that was all."""
        num_bytes = 0
        for _ in range(_MAX_MESSAGES_A_TURN):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return True
            self._take(frames)
            num_bytes += sum(map(len, frames))
            if num_bytes > _MAX_BYTES_A_TURN:
                break
        return False

    def _take(self, frames: Sequence[bytes]) -> None:
        read = self._read(frames)
        if read is not None:
            self.feed.take(*read, len(frames[-1]))

    def _read(self, frames: Sequence[bytes]) -> tuple[int, VllmBatch] | None:
        """Number and batch; ``None`` for what can't be read: the next number then shows a gap."""
        try:
            if len(frames) != _NUM_FRAMES:
                raise MalformedFrameError(f"a message of {len(frames)} frames, not {_NUM_FRAMES}")
            return decode_number(frames[1]), decode_batch(frames[2])
        except MalformedFrameError as error:
            self.num_malformed += 1
            self._log.warning("ignored what %s has sent: %s", self._name, error)
            return None

    def _drain_replay(self) -> bool:
        """Take some of the replay; true if that was all for now."""
        num_bytes = 0
        for _ in range(_MAX_MESSAGES_A_TURN):
            dealer = self._dealer
            if dealer is None:
                return True
            try:
                frames = dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return True
            self._take_replayed(frames)
            num_bytes += sum(map(len, frames))
            if num_bytes > _MAX_BYTES_A_TURN:
                break
        return False

    def _take_replayed(self, frames: Sequence[bytes]) -> None:
        if len(frames) == _NUM_FRAMES and (frames[1] == encode_number(END_NUMBER) or not frames[2]):
            self._end_replay()
            return
        self._wait_for_replay()
        read = self._read(frames)
        if read is not None:
            self.feed.take_replayed(*read)

    def _wait_for_replay(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(self._replay_timeout_s, self._give_up)

    @vital
    def _give_up(self) -> None:
        self._log.warning("%s has not replayed its KV events within %g s", self._name, self._replay_timeout_s)
        self._end_replay()

    def _end_replay(self) -> None:
        self._end_asking()
        self.feed.end_replay()

    def _end_asking(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        dealer, self._dealer = self._dealer, None
        if dealer is not None:
            self._loop.remove_reader(dealer.fileno())
            dealer.close(linger=0)

    def _drain_monitor(self) -> bool:
        """Take one event of the connection; true if there was none."""
        try:
            frames = self._monitor.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return True
        self.is_connected = parse_monitor_message(frames)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if self.is_connected:
            logger.info("listens to the KV events of %s", self._name)
            self.feed.begin()
        else:
            logger.warning("%s can't be reached: its KV blocks count no more", self._name)
            self._end_asking()
            self.feed.lose()
        return False
