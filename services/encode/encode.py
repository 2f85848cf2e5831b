"""What an Encode worker has: a vision tower, a pool of embeddings, and the dispatcher between them and the streams.

The dispatcher sizes the items of a request, encodes them or finds them in the pool, and offers the results to other
workers. ``PoolReports`` gives the pool's events in the form that ``Worker`` and ``KvEvents`` expect of an engine.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from quartet.discovery.base import Abilities
from quartet.engine.base import EngineStats, StepOutput, Turn
from quartet.engine.encoder import EncodeTimes, MediaEncoder
from quartet.engine.life_cycle import OutputQueue
from quartet.engine.settings import EncoderSettings, Modality
from quartet.errors import (
    ConfigError,
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
from quartet.streams.messages import EncodedItem, EncodeStart, RequestContext
from quartet.telemetry import span_names as names
from quartet.telemetry.encode_metrics import EncodeMetrics
from quartet.telemetry.metrics import WorkerMetrics
from quartet.telemetry.tracing import Tracer
from quartet.transfer.base import BlockMemory
from quartet.transfer.source import TransferSource
from services.encode.servicer import encode_service
from services.workers.embedding_store import EmbeddingStore, Hold
from services.workers.files import FileEncoder, SizedItem
from services.workers.media import TowerQueue, WaitingMedia
from services.workers.parts import EncoderFactory, Serving, Surroundings
from services.workers.request_trace import WorkerTrace, begin_trace
from services.workers.requests import BookedRequest, HandOffSource, Progress, RequestBook, named

#: Items of one start, at most.
MAX_ITEMS = 256

# The router sends the states of all items of a request to prefill in one message.
_MAX_STATE_BYTES = 4096


def max_running(settings: EncoderSettings) -> int:
    """How many items routers may have at a worker of these settings at a time, at least one.

    Enough to prepare one run of the tower while another one runs, and so few that the worker need not refuse any, even
    if each is as large as may be.
    """
    max_large = settings.max_waiting_pixels // settings.max_pixels
    return max(min(2 * settings.max_batch_size, settings.max_waiting_items, max_large), 1)


class EncodeParts:
    """The ``Parts`` of one Encode worker; nothing is opened before ``start``."""

    def __init__(self, surroundings: Surroundings, encoder_factory: EncoderFactory) -> None:
        """Make an encoder with a pool of its own. Raises ``ConfigError``."""
        self._surroundings = surroundings
        if surroundings.config.engine.modality is Modality.TEXT:
            raise ConfigError("engine.modality: an encode worker takes media files; text is for the others")
        self._encoder = encoder_factory(surroundings.config, None)
        self._dispatcher: EncodeDispatcher | None = None
        self._reports: PoolReports | None = None

    async def start(self) -> None:
        """Load the vision tower."""
        began = time.monotonic()
        await self._encoder.start()
        self._surroundings.metrics.load_time.set(time.monotonic() - began)

    @property
    def memory(self) -> BlockMemory:
        """The pool of embeddings."""
        return self._encoder.embeddings.memory

    def serve(self, source: TransferSource) -> Serving:
        """Wire all parts."""
        config, metrics = self._surroundings.config, EncodeMetrics(self._surroundings.registry)
        capabilities, layout = self._encoder.capabilities, self._encoder.embeddings.layout
        pool = EmbeddingPool(self.memory.num_blocks, layout.block_size, has_events=True)
        reports = self._reports = PoolReports(self._encoder, pool)
        store = EmbeddingStore(pool, field="items", on_change=reports.changed)
        files = FileEncoder(self._encoder, store, metrics, max_size_bytes=config.max_file_size_bytes)
        dispatcher = self._dispatcher = EncodeDispatcher(
            self._encoder,
            files,
            store,
            source,
            self._surroundings.metrics,
            metrics,
            engine_name=config.engine.kind,
            tower_queue=TowerQueue(
                max_items=config.encoder.max_waiting_items, max_pixels=config.encoder.max_waiting_pixels
            ),
            max_running=max_running(config.encoder),
            on_change=reports.changed,
            tracer=self._surroundings.tracer,
        )
        metrics.watch_tower(self._encoder.stats)
        metrics.watch_pool(lambda: pool.counts)
        self._surroundings.metrics.watch_engine(dispatcher.stats)
        return Serving(
            computing=reports,
            snapshots=reports,
            requests=dispatcher,
            service=encode_service(dispatcher, config.streams),
            abilities=Abilities(
                model_fingerprint=capabilities.model_fingerprint,
                num_blocks=self.memory.num_blocks,
                block_size=layout.block_size,
                max_model_len=0,
                sampling_fields=(),
                media=files.takes,
                max_media_tokens=capabilities.max_item_tokens,
            ),
            watches=[files.watch],
        )

    def hand_off_ended(self, holder: int, *, was_taken: bool) -> None:
        """Free an item's embeddings."""
        if self._dispatcher is not None:
            self._dispatcher.release(holder, was_taken=was_taken)

    async def close(self) -> None:
        """Free everything."""
        if self._reports is not None:
            self._reports.close()
        await self._encoder.close()


@dataclass(eq=False, kw_only=True)
class _Running(BookedRequest):
    """A request between its start and its end.

    Attributes:
        waiting: its items that are not handed off yet.
        task: runs it.
        sized: one entry an item, once all are sized.
        times: of the items that were encoded for it, by index.
    """

    start: EncodeStart
    outbox: EncodeOutbox
    waiting: WaitingMedia
    task: asyncio.Task[object] | None = field(default_factory=asyncio.current_task)
    sized: Sequence[SizedItem] = ()
    times: dict[int, EncodeTimes] = field(default_factory=dict)


class EncodeDispatcher(RequestBook[_Running]):
    """Runs the requests of Encode streams. Lives on the event loop."""

    def __init__(
        self,
        encoder: MediaEncoder,
        files: FileEncoder,
        store: EmbeddingStore,
        source: HandOffSource,
        metrics: WorkerMetrics,
        encode_metrics: EncodeMetrics,
        *,
        engine_name: str,
        tower_queue: TowerQueue,
        max_running: int = 0,
        on_change: Callable[[], None] = lambda: None,
        tracer: Tracer | None = None,
    ) -> None:
        """Encode on ``encoder`` by way of ``files``, into ``store``, and offer the results by ``source``.

        Args:
            encoder: computes embeddings.
            files: names and sizes files, and gives them to the encoder.
            store: of the pool of embeddings.
            source: offers what is encoded.
            metrics: counts requests.
            encode_metrics: counts items.
            engine_name: that hand-offs of states that the encoder keeps carry.
            tower_queue: counts and bounds the items that are not encoded yet.
            max_running: how many of them routers may send at a time, for the load report; 0: it does not say.
            on_change: called when the load has changed by more than the pool.
            tracer: traces requests; ``None``: nothing does.
        """
        super().__init__(metrics, tracer)
        self._encoder = encoder
        self._files = files
        self._store = store
        self._source = source
        self._encode_metrics = encode_metrics
        self._engine_name = engine_name
        self._tower_queue = tower_queue
        self._max_running = max_running
        self._on_change = on_change
        self._releases: dict[int, Callable[[bool], None]] = {}  # by holder; called with whether a worker took it
        self._next_holder = itertools.count(1)

    @property
    def progress(self) -> Progress:
        """Batches of the vision tower, and items in it or queued for it.

        Items that wait for room in the pool do not count: other workers make that room.
        """
        stats = self._encoder.stats()
        return Progress(stats.num_steps, stats.num_running + stats.num_waiting)

    def stats(self) -> Sequence[EngineStats]:
        """Items and blocks of embeddings as the load of an engine with one rank; batches are its steps."""
        stats, counts = self._encoder.stats(), self._store.counts
        return (
            EngineStats(
                num_running=stats.num_running,
                num_waiting=max(self._tower_queue.num_items - stats.num_running, 0),
                max_running=self._max_running,
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
            DrainingError: this worker refuses new requests, or its drain ends running ones.
            QueueFullError: too many items are queued already.
            RequestTimeoutError: its time ran out.
            EngineError: the vision tower is dead.
            ServingError: an item is wrong (``items[1].file``), or there is no room for it.
        """
        context = start.context
        self.starts.arrive(context.router_id, context.router_request_number)
        # The load shows its items at once.
        self.starts.count_in(context.router_id, context.router_request_number)
        self._check_takes(start)
        context = named(context)
        running = _Running(
            context=context,
            trace=self._begin_trace(context, len(start.items)),
            num_prompt_tokens=None,
            arrived_at=time.monotonic(),
            start=start,
            outbox=outbox,
            waiting=self._tower_queue.enter(len(start.items)),
        )
        id = next(self._ids)
        self._begin(id, running)
        self._on_change()
        async with self._ending(id, running), asyncio.timeout(context.timeout_s):
            await self._run(running)

    def _begin_trace(self, context: RequestContext, num_items: int) -> WorkerTrace | None:
        if self._tracer is None or (trace := begin_trace(self._tracer, "encode", context)) is None:
            return None
        worker_trace = WorkerTrace(trace, context, time.monotonic())
        worker_trace.note({names.NUM_ITEMS: num_items})
        return worker_trace

    def withdraw(self, holder: int) -> None:
        """End the hand-off of ``holder``: its ticket was not sent."""
        self._source.withdraw(holder)

    def release(self, holder: int, *, was_taken: bool) -> None:
        """The hand-off of ``holder`` has ended: free what it held."""
        release = self._releases.pop(holder, None)
        if release is not None:
            release(was_taken)

    def route(self, step: StepOutput) -> None:
        """Do nothing: steps carry the pool's events only, and results reach their streams directly."""

    def _stop(self, id: int) -> None:
        running = self._running[id]
        if running.task is not None:
            running.task.cancel()

    async def _run(self, running: _Running) -> None:
        start = running.start
        running.sized = await self._files.size(start.items, "items", trust_domain=start.context.trust_domain)
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
        """Get the items of ``indices`` into the pool, and hand them off."""
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
        self._releases[holder] = partial(self._release_state, holder)
        if len(encoded.state) > _MAX_STATE_BYTES:
            self.release(holder, was_taken=False)
            raise MessageTooLargeError(f"the encoder's state exceeds {_MAX_STATE_BYTES} bytes")
        self._hand_off(running, index, holder, (), OpaquePayload(self._engine_name, encoded.state))

    def _release_state(self, holder: int, was_taken: bool) -> None:
        states = self._encoder.states
        assert states is not None, "it keeps this state"
        states.release(holder, was_taken=was_taken)

    def _hand_off_blocks(self, running: _Running, index: int, hold: Hold) -> None:
        if index not in running.times:
            self._encode_metrics.count_item("cached")
        holder = next(self._next_holder)
        self._releases[holder] = lambda _was_taken: hold.release()
        payload = EmbeddingsPayload(self._encoder.embeddings.layout, running.sized[index].size.num_tokens)
        self._hand_off(running, index, holder, hold.block_ids, payload)

    def _hand_off(
        self, running: _Running, index: int, holder: int, block_ids: tuple[int, ...], payload: Payload
    ) -> None:
        try:
            hand_off = self._source.offer(holder, block_ids, payload)
        except ServingError:
            self.release(holder, was_taken=False)
            raise
        running.waiting.leave(index)
        times = running.times.get(index)
        queue_s, compute_s = (0.0, 0.0) if times is None else (times.queue_s, times.compute_s)
        encoded = EncodedItem(item=index, hand_off=hand_off, queue_s=queue_s, compute_s=compute_s)
        running.outbox.encoded(encoded, holder)

    def _check_takes(self, start: EncodeStart) -> None:
        self._check_draining()
        if not self._encoder.is_alive:
            raise EngineError("the vision tower of this worker is dead")
        if len(start.items) > MAX_ITEMS:
            raise InvalidRequestError(f"a request has at most {MAX_ITEMS} items", field="items")

    @asynccontextmanager
    async def _ending(self, id: int, running: _Running) -> AsyncIterator[None]:
        failure: ServingError | None = None
        try:
            yield
        except TimeoutError:
            failure = RequestTimeoutError("the request's timeout ran out")
            raise failure from None
        except asyncio.CancelledError:
            failure = RequestCancelledError("cancelled by the caller")
            if running.ends_with is not None:
                raise running.ends_with from None
            raise
        except ServingError as error:
            failure = error
            raise
        finally:
            running.waiting.leave_all()
            if running.trace is not None:
                running.trace.note({names.NUM_ENCODED_ITEMS: len(running.times)})
            self._finish(id, "encoded" if failure is None else failure.reason.lower(), failure)
            del failure  # its frames know this one
            self._on_change()


class PoolReports:
    """The outputs of an Encode worker: steps that carry events only. Each cached item is a first block of rank 0."""

    def __init__(self, encoder: MediaEncoder, pool: EmbeddingPool) -> None:
        """Report on ``pool``, which records events."""
        self._encoder = encoder
        self._pool = pool
        self._outputs = OutputQueue()

    @property
    def is_alive(self) -> bool:
        """Whether the encoder lives."""
        return self._encoder.is_alive

    def changed(self) -> None:
        """The pool has changed: put its events into an output. An output without events says that the load changed."""
        events = self._pool.take_events()
        self._outputs.put(StepOutput(kv_events=(RankEvents(0, events),) if events else ()))

    def request_kv_snapshot(self) -> None:
        """Have the next output carry a ``kv_snapshot``."""
        self.changed()
        self._outputs.put(StepOutput(kv_snapshot=(StoredBlocks(0, self._pool.stored_items()),)))

    def outputs(self) -> AsyncIterator[StepOutput]:
        """The reports, in order, for one consumer, until ``close``."""
        return self._outputs.read()

    def turns(self) -> Sequence[Turn]:
        """The batch in the vision tower."""
        stats = self._encoder.stats()
        if not stats.num_running:
            return []
        return [Turn(0, stats.num_steps, stats.num_running * stats.slowest_item_s or None)]

    def close(self) -> None:
        """End the outputs."""
        self._outputs.end()
