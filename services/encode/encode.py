"""Requests of encode streams: sized, encoded or found in the pool, and held for whoever pulls them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from quartet.engine.base import EngineStats, StepOutput
from quartet.engine.encoder import EncodeTimes, MediaEncoder
from quartet.engine.step_engine import OutputQueue
from quartet.errors import (
    DrainingError,
    EngineError,
    InvalidRequestError,
    MessageTooLargeError,
    RequestCancelledError,
    RequestTimeoutError,
    ServingError,
)
from quartet.events.kv import RankEvents, StoredBlocks
from quartet.kvcache.embedding_pool import EmbeddingPool
from quartet.kvcache.layout import EmbeddingsPayload, OpaquePayload, Payload
from quartet.streams.encode_server import EncodeOutbox
from quartet.streams.messages import EncodedItem, EncodeStart
from quartet.telemetry.encode_metrics import EncodeMetrics
from quartet.telemetry.logging import FinishedRequest, log_request
from quartet.telemetry.metrics import WorkerMetrics
from services.workers.dispatch import CountedStarts, Holds
from services.workers.embedding_store import EmbeddingStore, Hold
from services.workers.files import FileEncoder, SizedItem
from services.workers.media import MediaBacklog, WaitingMedia
from services.workers.requests import NoPlacements, Progress

logger = logging.getLogger(__name__)

#: Items of one start, at most.
MAX_ITEMS = 256

# Those of a request's items are sent to prefill together, in one message.
_MAX_STATE_BYTES = 4096


@dataclass(eq=False)
class _Running:
    """A request between its start and its end; ``times`` are of items that took the tower."""

    start: EncodeStart
    outbox: EncodeOutbox
    waiting: WaitingMedia
    task: asyncio.Task[object] | None = field(default_factory=asyncio.current_task)
    arrived_at: float = field(default_factory=time.monotonic)
    is_cut: bool = False
    sized: Sequence[SizedItem] = ()
    times: dict[int, EncodeTimes] = field(default_factory=dict)


class EncodeDispatcher(NoPlacements):
    """Runs the requests of Encode streams. Lives on the event loop."""

    def __init__(
        self,
        encoder: MediaEncoder,
        files: FileEncoder,
        store: EmbeddingStore,
        holds: Holds,
        metrics: WorkerMetrics,
        encode_metrics: EncodeMetrics,
        *,
        engine_name: str,
        backlog: MediaBacklog,
    ) -> None:
        """Encode with ``files``, into ``store``, whose items ``holds`` gives to others; ``encoder`` is behind it all.

        ``engine_name`` goes into hand-offs of what the encoder keeps itself. ``backlog`` counts what is not encoded
        yet, and bounds it.
        """
        self._encoder = encoder
        self._files = files
        self._store = store
        self._holds = holds
        self._metrics = metrics
        self._encode_metrics = encode_metrics
        self._engine_name = engine_name
        self._backlog = backlog
        self._running: set[_Running] = set()
        self._let_go: dict[int, Callable[[bool], None]] = {}  # what holders have, told whether it was taken
        self._next_holder = itertools.count(1)
        self._counted = CountedStarts()
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_draining = False

    @property
    def num_running(self) -> int:
        """Requests of which something is still to come."""
        return len(self._running)

    @property
    def progress(self) -> Progress:
        """Batches of the tower, and items that are in it or wait for it: room is others' to give."""
        stats = self._encoder.stats()
        return Progress(stats.num_steps, stats.num_running + stats.num_waiting)

    @property
    def router_progress(self) -> dict[str, int]:
        """By router, the last request number up to which the load counts everything in."""
        return self._counted.watermarks()

    @property
    def router_arrivals(self) -> dict[str, int]:
        """By router, the last request number that arrived."""
        return self._counted.arrivals()

    def stats(self) -> Sequence[EngineStats]:
        """Items and blocks of embeddings, in the words of an engine of one rank; batches are its steps."""
        stats, counts = self._encoder.stats(), self._store.counts
        return (
            EngineStats(
                num_running=stats.num_running,
                num_waiting=max(self._backlog.num_items - stats.num_running, 0),
                num_in_use_blocks=counts.in_use,
                num_held_blocks=counts.held,
                num_cached_blocks=counts.cached,
                num_free_blocks=counts.free,
                num_total_blocks=counts.total,
                num_steps=stats.num_steps,
            ),
        )

    async def encode(self, start: EncodeStart, outbox: EncodeOutbox) -> None:
        """Bring what ``start`` asks for to ``outbox``; see ``quartet.streams.encode_server.EncodeWork``.

        Raises:
            DrainingError: this worker takes nothing new.
            QueueFullError: too much waits already.
            RequestTimeoutError, RequestCancelledError: its time ran out, or that of the drain.
            EngineError: the vision tower is dead.
            ServingError: what is wrong with an item (``items[1].file``), or there is no room for it.
        """
        context = start.context
        self._counted.arrive(context.router_id, context.router_request_number)
        # The load shows its items from the first moment on.
        self._counted.count_in(context.router_id, context.router_request_number)
        self._check_takes(start)
        running = _Running(start, outbox, self._backlog.enter(len(start.items)))
        self._running.add(running)
        self._idle.clear()
        async with self._ending(running), asyncio.timeout(context.timeout_s):
            await self._run(running)

    def withdraw(self, holder: int) -> None:
        """End the hand-off of ``holder``, of which nobody was told."""
        self._holds.withdraw(holder)

    def release(self, holder: int, *, was_taken: bool) -> None:
        """The hand-off of ``holder`` has ended: what it held may go."""
        let_go = self._let_go.pop(holder, None)
        if let_go is not None:
            let_go(was_taken)

    def drain(self) -> None:
        """Take nothing new from now on."""
        self._is_draining = True

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing runs; False if something still does after ``timeout_s`` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def cancel_all(self) -> int:
        """End everything early, and say how many requests that was."""
        for running in self._running:
            running.is_cut = True
            if running.task is not None:
                running.task.cancel()
        return len(self._running)

    async def _run(self, running: _Running) -> None:
        running.sized = await self._files.size(running.start.items, "items")
        running.waiting.add_pixels([0 if item.size.is_cached else item.num_pixels for item in running.sized])
        running.outbox.sized([item.size for item in running.sized])
        states = {index for index, item in enumerate(running.sized) if self._files.has_state(item.file)}
        if not states:
            await self._fill_pool(running, range(len(running.sized)))
            return
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._fill_pool(running, sorted(set(range(len(running.sized))) - states)))
                for index in states:
                    group.create_task(self._keep_state(running, index))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _fill_pool(self, running: _Running, indices: Sequence[int]) -> None:
        """Have the items of ``indices`` in the pool, and hand them off."""
        wants = [
            self._files.want(running.sized[index], running.arrived_at, partial(running.times.__setitem__, index))
            for index in indices
        ]
        await self._store.obtain(wants, lambda nth, hold: self._hand_off_blocks(running, indices[nth], hold))

    async def _keep_state(self, running: _Running, index: int) -> None:
        """Have the encoder keep an item, and hand it off."""
        holder, item = next(self._next_holder), running.sized[index]
        encoded = await self._files.encode_state(item, running.arrived_at, holder)
        running.times[index] = encoded.times
        self._let_go[holder] = partial(self._release_state, holder)
        if len(encoded.state) > _MAX_STATE_BYTES:
            self.release(holder, was_taken=False)
            raise MessageTooLargeError(f"the encoder's state exceeds {_MAX_STATE_BYTES} bytes")
        self._hand_off(running, index, holder, (), OpaquePayload(self._engine_name, encoded.state))

    def _release_state(self, holder: int, was_taken: bool) -> None:
        states = self._encoder.states
        assert states is not None, "it keeps this one"
        states.release(holder, was_taken=was_taken)

    def _hand_off_blocks(self, running: _Running, index: int, hold: Hold) -> None:
        if index not in running.times:
            self._encode_metrics.count_item("cached")
        holder = next(self._next_holder)
        self._let_go[holder] = lambda _was_taken: hold.release()
        payload = EmbeddingsPayload(self._encoder.embeddings.layout, running.sized[index].size.num_tokens)
        self._hand_off(running, index, holder, hold.block_ids, payload)

    def _hand_off(
        self, running: _Running, index: int, holder: int, block_ids: tuple[int, ...], payload: Payload
    ) -> None:
        try:
            hand_off = self._holds.offer(holder, block_ids, payload)
        except ServingError:
            self.release(holder, was_taken=False)
            raise
        running.waiting.leave(index)
        times = running.times.get(index)
        queue_s, compute_s = (0.0, 0.0) if times is None else (times.queue_s, times.compute_s)
        encoded = EncodedItem(item=index, hand_off=hand_off, queue_s=queue_s, compute_s=compute_s)
        running.outbox.encoded(encoded, holder)

    def _check_takes(self, start: EncodeStart) -> None:
        if self._is_draining:
            raise DrainingError("this worker is draining and takes nothing new", retry_delay_s=1.0)
        if not self._encoder.is_alive:
            raise EngineError("the vision tower of this worker is dead")
        if len(start.items) > MAX_ITEMS:
            raise InvalidRequestError(f"a request has at most {MAX_ITEMS} items", field="items")

    @asynccontextmanager
    async def _ending(self, running: _Running) -> AsyncIterator[None]:
        outcome = "encoded"
        try:
            yield
        except TimeoutError:
            outcome = RequestTimeoutError.reason.lower()
            raise RequestTimeoutError("the request's timeout ran out") from None
        except asyncio.CancelledError:
            outcome = RequestCancelledError.reason.lower()
            if running.is_cut:
                raise RequestCancelledError("the worker's drain took too long") from None
            raise
        except ServingError as error:
            outcome = error.reason.lower()
            raise
        finally:
            self._end(running, outcome)

    def _end(self, running: _Running, outcome: str) -> None:
        self._running.discard(running)
        running.waiting.leave_all()
        if not self._running:
            self._idle.set()
        self._metrics.count_request(outcome)
        context = running.start.context
        log_request(
            logger,
            FinishedRequest(
                request_id=context.request_id or secrets.token_hex(16),
                outcome=outcome,
                tenant=context.tenant,
                total_s=time.monotonic() - running.arrived_at,
            ),
        )


# What a vision tower's worker tells of its pool, in the words of an engine: steps that carry events.


class PoolReports:
    """The outputs of an encoder, which has none: each item that can be found is a first block of rank 0."""

    def __init__(self, encoder: MediaEncoder, pool: EmbeddingPool) -> None:
        """Report on ``pool``, which takes note of events."""
        self._encoder = encoder
        self._pool = pool
        self._outputs = OutputQueue()

    @property
    def is_alive(self) -> bool:
        """Whether the encoder lives."""
        return self._encoder.is_alive

    def changed(self) -> None:
        """The pool has changed: report what came and went. Also where nothing did, since the load is another one."""
        events = self._pool.take_events()
        self._outputs.put(StepOutput(kv_events=(RankEvents(0, events),) if events else ()))

    def request_kv_snapshot(self) -> None:
        """Have the next output carry a ``kv_snapshot``."""
        self.changed()
        self._outputs.put(StepOutput(kv_snapshot=(StoredBlocks(0, self._pool.stored_items()),)))

    def outputs(self) -> AsyncIterator[StepOutput]:
        """The reports, in order, for one consumer, until ``close``."""
        return self._outputs.read()

    def close(self) -> None:
        """End the outputs."""
        self._outputs.end()
