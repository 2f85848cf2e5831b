"""ZMQ PUB sockets: a worker tells every change of its KV blocks, and its load when needed; a router what it booked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from quartet.errors import ConfigError
from quartet.events.bookings import BookedStart, RouterBookings
from quartet.events.curve import EventsKey
from quartet.events.kv import KvBatch, RankEvents
from quartet.events.load import WorkerLoad
from quartet.events.wire import MAX_BOOKED_STARTS, encode_bookings, encode_kv, encode_load, split_events

#: Without anything new a report goes out this often: silence then means something.
HEARTBEAT_INTERVAL_S = 1.0
#: Changes are reported at most this often.
MIN_INTERVAL_S = 0.05

_MAX_PENDING_MESSAGES = 10_000


class EventPublisher:
    """One PUB socket; use it from one thread.

    Attributes:
        endpoint: ``tcp://host:port`` as bound; one with a wildcard host can't be dialled.
        port: that of ``endpoint``.
        kv_number: number of the last KV batch published; 0: none was.
    """

    def __init__(
        self,
        host: str,
        port: int = 0,
        *,
        worker_id: str,
        epoch: int,
        key: EventsKey | None = None,
        max_pending_messages: int = _MAX_PENDING_MESSAGES,
    ) -> None:
        """Bind ``tcp://host:port``.

        Args:
            host: a name or address of this host, or ``*``.
            port: 0 takes a free one.
            worker_id: the worker that publishes.
            epoch: of this start of the worker.
            key: only holders of it can listen; ``None``: in the clear, for all.
            max_pending_messages: a subscriber for which more wait misses what comes.

        Raises:
            ConfigError: the address can't be bound.
        """
        self._worker_id = worker_id
        self._epoch = epoch
        self.kv_number = 0
        self._socket = _PublishSocket(host, port, key, max_pending_messages)
        self.endpoint, self.port = self._socket.endpoint, self._socket.port

    def publish_kv(self, changed: RankEvents) -> None:
        """Send what changed, in as many batches as it takes. Never blocks: a slow subscriber sees a gap in numbers."""
        for events in split_events(changed.events):
            self.kv_number += 1
            batch = KvBatch(
                worker_id=self._worker_id,
                epoch=self._epoch,
                number=self.kv_number,
                data_parallel_rank=changed.data_parallel_rank,
                events=events,
            )
            self._socket.send(encode_kv(batch))

    def publish_load(self, load: WorkerLoad) -> None:
        """Send ``load``. Never blocks: a subscriber that can't keep up misses it."""
        self._socket.send(encode_load(load, self.kv_number))

    def close(self) -> None:
        """Close the socket; what was not sent yet is dropped. May be called twice."""
        self._socket.close()


class BookingsPublisher:
    """A router's PUB socket; use it from one thread. Attributes are as in ``EventPublisher``."""

    def __init__(self, host: str, port: int = 0, *, router_id: str, key: EventsKey | None = None) -> None:
        """Bind ``tcp://host:port``; arguments and errors as in ``EventPublisher``."""
        self._router_id = router_id
        self._number = 0
        self._socket = _PublishSocket(host, port, key, _MAX_PENDING_MESSAGES)
        self.endpoint, self.port = self._socket.endpoint, self._socket.port

    def publish(self, starts: Sequence[BookedStart]) -> None:
        """Tell that ``starts`` were sent. Never blocks: a router that can't keep up misses it."""
        for begin in range(0, len(starts), MAX_BOOKED_STARTS):
            self._number += 1
            bookings = RouterBookings(self._router_id, starts[begin : begin + MAX_BOOKED_STARTS])
            self._socket.send(encode_bookings(bookings, self._number))

    def close(self) -> None:
        """As ``EventPublisher.close``."""
        self._socket.close()


class _PublishSocket:
    """One bound PUB socket with a context of its own."""

    def __init__(self, host: str, port: int, key: EventsKey | None, max_pending_messages: int) -> None:
        self._context = zmq.Context()
        self._guard = None if key is None else key.guard(self._context)
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, max_pending_messages)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, 1)
        if key is not None:
            key.serve_with(self._socket)
        try:
            self._socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"events: cannot listen on {host}:{port}: {error.strerror}") from error
        self.endpoint = str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT)).rstrip("\0")
        self.port = int(self.endpoint.rpartition(":")[2])

    def send(self, frames: list[bytes]) -> None:
        """Send to all subscribers that keep up. Never blocks."""
        self._socket.send_multipart(frames, zmq.NOBLOCK)

    def close(self) -> None:
        """May be called twice."""
        if self._guard is not None:
            self._guard.stop()
            self._guard = None
        self._context.destroy(linger=0)


@dataclass(frozen=True, slots=True)
class PromptQueue:
    """What one data-parallel rank has to prefill: the part of its load that routers wait for.

    Attributes:
        num_queued_tokens: prompt tokens not computed yet.
        num_unbegun_tokens: of these, those that no step has begun.
        num_steps: steps begun, ever, that compute prompt tokens.
    """

    num_queued_tokens: int
    num_unbegun_tokens: int
    num_steps: int

    def is_news(self, reported: PromptQueue) -> bool:
        """Whether it should be reported at once; ``reported`` was in the last report.

        It should when all prompt tokens are computed; when a step with prompt tokens has begun and none is left to
        begin after it (a router may be waiting for just that); or when none was left before it, so that routers know
        when it ends.
        """
        if reported.num_queued_tokens and not self.num_queued_tokens:
            return True
        has_begun = self.num_steps != reported.num_steps
        return has_begun and not (self.num_unbegun_tokens and reported.num_unbegun_tokens)


class LoadPacer:
    """Decides when a report goes out.

    At once where a rank's ``PromptQueue`` is news, at most every ``MIN_INTERVAL_S`` on other changes, every
    ``HEARTBEAT_INTERVAL_S`` otherwise.
    """

    def __init__(
        self,
        sample: Callable[[], WorkerLoad],
        publish: Callable[[WorkerLoad], None],
        prompt_queues: Callable[[], Sequence[PromptQueue]],
        *,
        min_interval_s: float = MIN_INTERVAL_S,
        heartbeat_interval_s: float = HEARTBEAT_INTERVAL_S,
    ) -> None:
        """Give ``publish`` some of what ``sample`` returns; all are called on the event loop.

        ``prompt_queues`` gives the part of the sample that is news, by rank: it is asked at every poke.
        """
        self._sample = sample
        self._publish = publish
        self._prompt_queues = prompt_queues
        self._min_interval_s = min_interval_s
        self._heartbeat_interval_s = heartbeat_interval_s
        self._last: WorkerLoad | None = None
        self._reported: Sequence[PromptQueue] = ()
        self._sent_at = 0.0
        self._is_change_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._is_due = asyncio.Event()

    def poke(self) -> None:
        """Something may have changed. Call it after each step and each arrival; it costs next to nothing."""
        if self._last is None:
            return
        if any(queue.is_news(last) for queue, last in zip(self._prompt_queues(), self._reported, strict=True)):
            self._is_due.set()
        elif not self._is_change_due:
            self._is_change_due = True
            self._wake_at(self._sent_at + self._min_interval_s)

    async def run(self) -> None:
        """Report until cancelled."""
        try:
            while True:
                self._is_due.clear()
                self._is_change_due = False
                # Before the sample: a step that begins in between is reported twice, but never missed.
                queues = self._prompt_queues()
                load, now = self._sample(), time.monotonic()
                if load != self._last or now >= self._sent_at + self._heartbeat_interval_s:
                    self._publish(load)
                    self._last, self._reported, self._sent_at = load, queues, now
                self._wake_at(self._sent_at + self._heartbeat_interval_s)
                await self._is_due.wait()
        finally:
            self._last = None
            if self._timer is not None:
                self._timer.cancel()

    def _wake_at(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(when - time.monotonic(), 0.0)
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._is_due.set)
