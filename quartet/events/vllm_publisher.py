"""A PUB socket for KV events in vLLM's form, and a ROUTER that replays the last of them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import zmq

from quartet.errors import ConfigError
from quartet.events.curve import EventsKey
from quartet.events.vllm import (
    END_NUMBER,
    AllBlocksCleared,
    BlockStored,
    EventForm,
    VllmBatch,
    VllmEvent,
    decode_number,
    encode_batch,
    encode_number,
)
from quartet.events.wire import MalformedFrameError
from quartet.supervision import vital

#: Batches that are kept for replays, and their bytes; the oldest go first.
MAX_KEPT_BATCHES, MAX_KEPT_BYTES = 10_000, 64 << 20

# For each reader; of a replay few, because it goes on when these are taken.
_MAX_PENDING_MESSAGES, _MAX_PENDING_REPLAYED = 10_000, 64
# Longer batches are halved; readers take several times as much.
_LONG_BATCH_BYTES = 2 << 20
# Replays under way; of more, the first ones end without an end.
_MAX_REPLAYS = 16
# Also bounds the messages of a handshake with a key, which are some 300 bytes.
_MAX_REQUEST_BYTES = 4096
# After so many messages others on the event loop get their turn; a reader that takes no more is tried again after this.
_MAX_MESSAGES_A_TURN = 64
_RETRY_S = 0.02


class VllmPublisher:
    """One PUB socket, and one ROUTER if replays are wanted. Lives on the running event loop.

    Attributes:
        port, replay_port: as bound; 0: there are no replays.
        num_batches: batches published, which is the number of the next one.
    """

    def __init__(
        self,
        host: str,
        port: int = 0,
        *,
        setting: str,
        replay_port: int | None = None,
        topic: str = "",
        form: EventForm = EventForm.MAP,
        key: EventsKey | None = None,
        max_kept_batches: int = MAX_KEPT_BATCHES,
        max_kept_bytes: int = MAX_KEPT_BYTES,
    ) -> None:
        """Bind ``tcp://host:port``.

        Args:
            host: a name or address of this host, or ``*``.
            port: 0 takes a free one.
            setting: what to name where an address can't be bound.
            replay_port: of the ROUTER, on the same host; ``None``: there are no replays.
            topic: first frame of every message.
            form: of the events.
            key: only holders of it can listen; ``None``: in the clear, for all.
            max_kept_batches: for replays, at most.
            max_kept_bytes: of these.

        Raises:
            ConfigError: an address can't be bound.
        """
        self.num_batches = 0
        self._loop = asyncio.get_running_loop()
        self._topic, self._form = topic.encode(), form
        self._max_kept_batches = max_kept_batches if replay_port is not None else 0
        self._max_kept_bytes = max_kept_bytes
        self._kept: deque[bytes] = deque()  # the last batches, without a gap
        self._kept_bytes = 0
        self._replays: deque[_Replay] = deque()
        self._is_retrying = False
        self._context = zmq.Context()
        self._guard = None if key is None else key.guard(self._context)
        self._socket, self.port = self._bind(zmq.PUB, host, port, key, setting)
        self._router, self.replay_port = None, 0
        if replay_port is not None:
            self._router, self.replay_port = self._bind(zmq.ROUTER, host, replay_port, key, setting)
            self._loop.add_reader(self._router.fileno(), self._serve)

    def publish(self, events: Sequence[VllmEvent], data_parallel_rank: int) -> None:
        """Send events of a rank. Never blocks: a slow reader sees a gap in the numbers."""
        batch = VllmBatch(time_s=time.time(), events=events, data_parallel_rank=data_parallel_rank)
        for payload in _payloads(batch, self._form):
            self._socket.send_multipart([self._topic, encode_number(self.num_batches), payload], zmq.NOBLOCK)
            self.num_batches += 1
            self._keep(payload)

    def close(self) -> None:
        """Close the sockets; what was not sent yet is dropped. May be called twice."""
        if self._guard is not None:
            self._guard.stop()
            self._guard = None
        if self._context.closed:
            return
        if self._router is not None:
            self._loop.remove_reader(self._router.fileno())
        self._context.destroy(linger=0)

    def _bind(
        self, kind: int, host: str, port: int, key: EventsKey | None, setting: str
    ) -> tuple[zmq.Socket[bytes], int]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, _MAX_PENDING_REPLAYED if kind == zmq.ROUTER else _MAX_PENDING_MESSAGES)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        if kind == zmq.ROUTER:
            # A reader that takes no more is tried again, and not passed over; one that is gone is forgotten.
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            socket.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
        if key is not None:
            key.serve_with(socket)
        try:
            socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self._router = None
            self.close()
            raise ConfigError(f"{setting}: cannot listen on {host}:{port}: {error.strerror}") from error
        endpoint = str(socket.getsockopt_string(zmq.LAST_ENDPOINT)).rstrip("\0")
        return socket, int(endpoint.rpartition(":")[2])

    def _keep(self, payload: bytes) -> None:
        self._kept.append(payload)
        self._kept_bytes += len(payload)
        while len(self._kept) > self._max_kept_batches or self._kept_bytes > self._max_kept_bytes:
            self._kept_bytes -= len(self._kept.popleft())

    @vital
    def _serve(self) -> None:
        """Take requests, and send what they ask for."""
        router = self._router
        if router is None or self._context.closed:
            return
        for _ in range(_MAX_MESSAGES_A_TURN):
            try:
                self._take_request(router.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                break
        num_stalled = 0
        for _ in range(_MAX_MESSAGES_A_TURN):
            if num_stalled == len(self._replays):
                break
            num_stalled = 0 if self._send_next(router) else num_stalled + 1
        if num_stalled:
            self._retry_after(_RETRY_S)
            return
        # The descriptor is edge-triggered, and any call on the socket may swallow an edge.
        if self._replays or int(router.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self._serve)

    def _take_request(self, frames: Sequence[bytes]) -> None:
        # A REQ socket puts an empty frame before the number.
        if len(frames) not in (2, 3) or any(frames[1:-1]):
            return
        with suppress(MalformedFrameError):
            self._replays.append(_Replay(frames[0], decode_number(frames[-1])))
        if len(self._replays) > _MAX_REPLAYS:
            self._replays.popleft()

    def _send_next(self, router: zmq.Socket[bytes]) -> bool:
        """Send the next batch of the first replay; false if its reader takes nothing now. Replays take turns."""
        replay = self._replays.popleft()
        first_kept = self.num_batches - len(self._kept)
        number = max(replay.next_number, first_kept)
        is_end = number >= self.num_batches
        frames = (END_NUMBER, b"") if is_end else (number, self._kept[number - first_kept])
        try:
            router.send_multipart([replay.reader, b"", encode_number(frames[0]), frames[1]], zmq.NOBLOCK)
        except zmq.Again:
            self._replays.append(replay)
            return False
        except zmq.ZMQError:
            return True  # the reader is gone
        if not is_end:
            self._replays.append(replace(replay, next_number=number + 1))
        return True

    def _retry_after(self, pause_s: float) -> None:
        if not self._is_retrying:
            self._is_retrying = True
            self._loop.call_later(pause_s, self._retry)

    def _retry(self) -> None:
        self._is_retrying = False
        self._serve()


@dataclass(frozen=True)
class _Replay:
    """What a reader, by its identity at the ROUTER, is still to get: all from this number on."""

    reader: bytes
    next_number: int


def _payloads(batch: VllmBatch, form: EventForm) -> Iterator[bytes]:
    """``batch`` as one payload, or in pieces, in order, where it is long."""
    payload = encode_batch(batch, form)
    halves = _halves(batch.events) if len(payload) > _LONG_BATCH_BYTES else []
    if not halves:
        yield payload
    for events in halves:
        yield from _payloads(replace(batch, events=events), form)


def _halves(events: Sequence[VllmEvent]) -> list[Sequence[VllmEvent]]:
    """The same changes in two parts; none for what can't be divided."""
    if len(events) > 1:
        middle = len(events) // 2
        return [events[:middle], events[middle:]]
    [event] = events
    if isinstance(event, AllBlocksCleared) or len(event.block_hashes) < 2:
        return []
    middle = len(event.block_hashes) // 2
    first, second = event.block_hashes[:middle], event.block_hashes[middle:]
    if not isinstance(event, BlockStored):
        return [[replace(event, block_hashes=first)], [replace(event, block_hashes=second)]]
    num_tokens, keys = middle * event.block_size if event.token_ids else 0, event.extra_keys
    head = replace(
        event,
        block_hashes=first,
        token_ids=event.token_ids[:num_tokens],
        extra_keys=None if keys is None else keys[:middle],
    )
    tail = replace(
        event,
        block_hashes=second,
        parent_hash=first[-1],
        token_ids=event.token_ids[num_tokens:],
        extra_keys=None if keys is None else keys[middle:],
    )
    return [[head], [tail]]
