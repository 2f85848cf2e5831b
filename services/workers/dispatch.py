"""Dispatchers of Prefill and Decode: they bring requests from streams to the engine, and its outputs back."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from quartet.engine.base import (
    Engine,
    EngineRequest,
    EngineStats,
    Failed,
    Generation,
    Prefilled,
    RequestKind,
    Started,
    StepOutput,
)
from quartet.errors import (
    DuplicateRequestError,
    EngineError,
    NoHandOffError,
    RequestCancelledError,
    RequestTimeoutError,
    ServingError,
    UnsupportedFieldError,
)
from quartet.kvcache.layout import BlocksPayload, HandOff, OpaquePayload, Payload
from quartet.streams.convert.messages import to_engine_request
from quartet.streams.messages import MAX_UNCHUNKED_BYTES, RequestContext, WorkerStart
from quartet.streams.outbox import DecodeOutbox, PrefillOutbox
from quartet.telemetry import span_names
from quartet.telemetry.metrics import WorkerMetrics
from quartet.telemetry.tracing import Tracer
from services.workers.media import MediaGate, MediaStage, ReadyMedia
from services.workers.request_trace import GenerationTrace, begin_trace
from services.workers.requests import BookedRequest, HandOffSource, Progress, RequestBook, named

OutboxT = TypeVar("OutboxT", DecodeOutbox, PrefillOutbox)


@dataclass(eq=False, kw_only=True)
class Running(BookedRequest, Generic[OutboxT]):
    """A request between its start and its terminal output.

    Attributes:
        num_prompt_tokens: with the tokens of its media, once they are known.
        outbox: ``None`` once its stream is gone.
        request: what to ask the engine for, as long as it waits for media; ``None`` once the engine has it.
        expanded: the generation with the prompt that is reported to the caller, if media files came with the start.
        media_s: seconds from its arrival until its media were ready.
        media_ids: of its items.
    """

    num_prompt_tokens: int
    is_signed: bool
    slot: int
    outbox: OutboxT | None
    on_end: Callable[[], None]
    has_media: bool = False
    request: EngineRequest | None = None
    expanded: Generation | None = None
    media_s: float = 0.0
    media_ids: tuple[bytes, ...] = ()
    trace: GenerationTrace | None = None
    timer: asyncio.TimerHandle | None = None


class Dispatcher(RequestBook[Running[OutboxT]]):
    """Runs the requests of one RPC's streams on one engine. Lives on the event loop.

    A worker knows a request by (request id, choice, attempt); streams know it by slot; the engine by an id drawn here.
    """

    def __init__(
        self,
        engine: Engine,
        kind: RequestKind,
        metrics: WorkerMetrics,
        media: MediaStage | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """Run requests of ``kind`` on ``engine``, which is started.

        ``media`` prepares media; ``None``: they are refused. ``tracer`` traces requests; ``None``: nothing does.
        """
        super().__init__(metrics, tracer)
        self._engine = engine
        self._kind = kind
        self._media = None
        if media is not None:
            self._media = MediaGate(media, self._media_ready, lambda id, error: self._route_failed(Failed(id, error)))
        self._keys: set[tuple[str, int, int]] = set()
        # Of signed requests, whose tokens no router sees: output tokens by id, those of earlier attempts included.
        self._num_signed_tokens: dict[int, int] = {}

    @property
    def progress(self) -> Progress:
        """Steps of the engine, batches encoded and items pulled; all requests are in flight."""
        num_steps = sum(rank.num_steps for rank in self._engine.stats())
        return Progress(num_steps + (0 if self._media is None else self._media.num_steps), len(self._running))

    def stats(self) -> Sequence[EngineStats]:
        """The engine's load, with the requests that wait here for their media."""
        stats = self._engine.stats()
        return stats if self._media is None else self._media.add_to(stats)

    @abstractmethod
    def new_outbox(self) -> OutboxT:
        """An outbox for a new stream."""

    def submit(self, start: WorkerStart, outbox: OutboxT, slot: int, on_end: Callable[[], None]) -> int:
        """Run ``start``; see ``quartet.streams.server.Work``.

        Raises:
            DrainingError: this worker refuses new requests.
            DuplicateRequestError: the same attempt runs already.
            EngineError, WorkerUnavailableError: the engine is dead or closed.
        """
        context = start.context
        if not start.is_signed:
            self.starts.arrive(context.router_id, context.router_request_number)
        try:
            id = self._submit(named(context), start, outbox, slot, on_end)
        except ServingError:
            # A refused start counts as arrived and ended: the router must not keep it booked.
            self._count_end(context, len(start.generation.generated_token_ids) if start.is_signed else None)
            raise
        if self._kind is RequestKind.PREFILL:
            # Routers book no blocks for a prefill, and the load shows its tokens at once.
            self.starts.count_in(context.router_id, context.router_request_number)
        return id

    def cancel(self, id: int) -> None:
        """End a request early; its terminal output still comes."""
        if id in self._running:
            self._stop(id)

    def abandon(self, ids: list[int]) -> None:
        """The stream is gone: end these requests and drop their outputs."""
        for id in ids:
            if id in self._running:
                self._running[id].outbox = None
                self._stop(id)

    def route(self, step: StepOutput) -> None:
        """Bring one step's outputs to their streams."""
        self._route_results(step)
        for failed in step.failed:
            self._route_failed(failed)

    @abstractmethod
    def _route_results(self, step: StepOutput) -> None:
        """Bring all outputs but failures to their streams."""

    def _route_failed(self, failed: Failed) -> None:
        running = self._running.get(failed.id)
        error = failed.error
        if running is not None and running.ends_with is not None and isinstance(error, RequestCancelledError):
            error = running.ends_with
        self._end(failed.id, error.reason.lower(), error)
        if running is not None and running.outbox is not None:
            running.outbox.failed(running.slot, error)

    def _submit(
        self, context: RequestContext, start: WorkerStart, outbox: OutboxT, slot: int, on_end: Callable[[], None]
    ) -> int:
        self._check_draining()
        if not self._engine.is_alive:
            raise EngineError("the engine of this worker is dead")
        key = _key(context)
        if key in self._keys:
            raise DuplicateRequestError(f"request {context.request_id} attempt {context.attempt} runs already")
        id = next(self._ids)
        trace = None if self._tracer is None else self._begin_trace(self._tracer, context, start)
        request = to_engine_request(id, self._kind, start)
        running = Running(
            context=context,
            trace=trace,
            num_prompt_tokens=len(start.generation.prompt_token_ids),
            arrived_at=time.monotonic(),
            is_signed=start.is_signed,
            slot=slot,
            outbox=outbox,
            on_end=on_end,
        )
        if start.media:
            if self._media is None:
                raise UnsupportedFieldError("the engine of this worker takes no media", field="media")
            self._media.begin(id, start)
            running.has_media, running.request = True, request
        else:
            self._engine.submit(request)
        self._begin(id, running)
        self._keys.add(key)
        if start.is_signed:
            self._num_signed_tokens[id] = len(start.generation.generated_token_ids)
        if context.timeout_s is not None:
            running.timer = asyncio.get_running_loop().call_later(context.timeout_s, self._time_out, id)
        return id

    def _begin_trace(self, tracer: Tracer, context: RequestContext, start: WorkerStart) -> GenerationTrace | None:
        start.context, arrived_at = context, time.monotonic()  # the engine may have spans of its own
        trace = begin_trace(tracer, self._kind.value, context)
        if trace is None:
            return None
        source, generation = "" if start.hand_off is None else start.hand_off.worker_id, start.generation
        num_given = len(generation.generated_token_ids)
        running_trace = GenerationTrace(trace, context, arrived_at, source, num_given, is_signed=start.is_signed)
        running_trace.note({span_names.NUM_TOKENS: len(generation.prompt_token_ids) + num_given})
        return running_trace

    def _media_ready(self, id: int, ready: ReadyMedia) -> None:
        running = self._running[id]
        request, running.request = running.request, None
        assert request is not None, "the engine does not have it yet"
        running.media_s = time.monotonic() - running.arrived_at
        if running.trace is not None:
            running.trace.media_ready()
        running.num_prompt_tokens = len(ready.generation.prompt_token_ids)
        running.media_ids = ready.media_ids
        if ready.is_expanded:
            running.expanded = ready.generation
        try:
            self._engine.submit(
                replace(
                    request,
                    generation=ready.generation,
                    media_blocks=ready.media_blocks,
                    media_inputs=ready.media_inputs,
                )
            )
        except ServingError as error:
            self._route_failed(Failed(id, error))

    def _stop(self, id: int) -> None:
        if self._media is None or not self._media.cancel(id):
            self._engine.cancel(id)

    def _time_out(self, id: int) -> None:
        running = self._running.get(id)
        if running is not None:
            running.ends_with = RequestTimeoutError("the request's timeout ran out")
            self._stop(id)

    def _end(self, id: int, outcome: str, error: ServingError | None = None) -> Running[OutboxT] | None:
        running = self._finish(id, outcome, error)
        if running is None:
            return None
        self._keys.discard(_key(running.context))
        if self._media is not None and running.has_media:
            self._media.end(id, has_ended_well=error is None)
        self._count_end(running.context, self._num_signed_tokens.pop(id, None))
        if running.timer is not None:
            running.timer.cancel()
        running.on_end()
        return running

    def _count_end(self, context: RequestContext, num_signed_tokens: int | None) -> None:
        """Note that it ended, if signed after so many output tokens; ``None``: it is not signed."""
        if num_signed_tokens is None:
            self.starts.count_in(context.router_id, context.router_request_number)
        else:
            self.placements.end(context.router_id, context.router_request_number, num_signed_tokens)


class DecodeDispatcher(Dispatcher[DecodeOutbox]):
    """Requests of Decode streams."""

    def __init__(
        self,
        engine: Engine,
        metrics: WorkerMetrics,
        media: MediaStage | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """Decode on ``engine``, which is started; ``media`` and ``tracer`` as for ``Dispatcher``."""
        super().__init__(engine, RequestKind.DECODE, metrics, media, tracer)
        # Traced requests that have started and have no token yet.
        self._awaited: dict[int, GenerationTrace] = {}

    def new_outbox(self) -> DecodeOutbox:
        """An outbox for a new stream."""
        return DecodeOutbox()

    def _route_results(self, step: StepOutput) -> None:
        for started in step.started:
            self._route_started(started)
        if self._num_signed_tokens:
            self._count_signed(step)
        for report in step.prompt_logprobs:
            running = self._running.get(report.id)
            if running is not None and running.outbox is not None:
                running.outbox.prompt_logprobs(running.slot, report.logprobs)
        if step.logprobs or not self._route_whole(step):
            self._route_parts(step)
        if self._awaited:
            self._route_first_tokens(step)
        for finished in step.finished:
            if (ending := self._running.get(finished.id)) is not None and ending.trace is not None:
                ending.trace.finished(finished.num_output_tokens)
            running = self._end(finished.id, finished.reason.value)
            if running is not None and running.outbox is not None:
                running.outbox.finished(running.slot, finished)

    def _count_signed(self, step: StepOutput) -> None:
        for id, num_tokens, offset in zip(step.ids, step.num_tokens, step.token_offsets, strict=True):
            if id in self._num_signed_tokens:
                self._num_signed_tokens[id] = offset + num_tokens

    def _route_first_tokens(self, step: StepOutput) -> None:
        for id in self._awaited.keys() & step.ids:
            trace, running = self._awaited.pop(id), self._running.get(id)
            at_unix_ns = trace.first_token()
            if running is not None and running.outbox is not None and trace.reports_first_token:
                running.outbox.first_token(running.slot, at_unix_ns)

    def _route_failed(self, failed: Failed) -> None:
        self._awaited.pop(failed.id, None)
        super()._route_failed(failed)

    def _route_started(self, started: Started) -> None:
        running = self._running.get(started.id)
        if running is None:
            return
        if running.trace is not None:
            running.trace.started(started)
            self._awaited[started.id] = running.trace
        # The load does not count the blocks of a waiting request. From its first step on it counts them all.
        counted_in = self.placements.start if running.is_signed else self.starts.count_in
        counted_in(running.context.router_id, running.context.router_request_number)
        if running.media_s:
            started = replace(started, queue_s=started.queue_s + running.media_s)
        self._metrics.queue_time.observe(started.queue_s)
        if running.outbox is not None:
            num_prompt_tokens = 0 if running.expanded is None else running.num_prompt_tokens
            running.outbox.started(running.slot, started, num_prompt_tokens or started.num_prompt_tokens)

    def _route_whole(self, step: StepOutput) -> bool:
        """Bring all tokens to one stream at once; false if they belong to several streams, or one is gone."""
        if not step.ids:
            return True
        running = [self._running.get(id) for id in step.ids]
        outbox = running[0].outbox if running[0] is not None else None
        slots = [entry.slot for entry in running if entry is not None and entry.outbox is outbox]
        if outbox is None or len(slots) < len(running):
            return False
        outbox.step(slots, step.num_tokens, step.token_offsets, step.token_ids)
        return True

    def _route_parts(self, step: StepOutput) -> None:
        logprobs = {entry.id: entry.tokens for entry in step.logprobs}
        begin = 0
        for id, num_tokens, offset in zip(step.ids, step.num_tokens, step.token_offsets, strict=True):
            end = begin + num_tokens
            running = self._running.get(id)
            if running is not None and running.outbox is not None:
                running.outbox.tokens(running.slot, offset, step.token_ids[begin:end], logprobs.get(id, ()))
            begin = end


class PrefillDispatcher(Dispatcher[PrefillOutbox]):
    """Requests of Prefill streams. The blocks that they compute are held until another worker has pulled them."""

    def __init__(
        self,
        engine: Engine,
        source: HandOffSource,
        engine_name: str,
        metrics: WorkerMetrics,
        media: MediaStage | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """Prefill on ``engine``, which is started, and offer the blocks by ``source``; the rest as for ``Dispatcher``.

        Opaque hand-offs carry ``engine_name``: only that engine can read them.
        """
        super().__init__(engine, RequestKind.PREFILL, metrics, media, tracer)
        self._source = source
        self._engine_name = engine_name

    def new_outbox(self) -> PrefillOutbox:
        """An outbox for a new stream."""
        return PrefillOutbox(self._source.withdraw)

    def _route_results(self, step: StepOutput) -> None:
        for prefilled in step.prefilled:
            self._metrics.prefill_time.observe(prefilled.compute_s)
            self._route_prefilled(prefilled)

    def _route_prefilled(self, prefilled: Prefilled) -> None:
        ending, sent_at_unix_ns = self._running.get(prefilled.id), 0
        if ending is not None and ending.trace is not None:
            sent_at_unix_ns = ending.trace.prefilled(prefilled)
        running = self._end(prefilled.id, "prefilled")
        if running is not None and running.media_s:
            prefilled = replace(prefilled, queue_s=prefilled.queue_s + running.media_s)
        self._metrics.queue_time.observe(prefilled.queue_s)
        if running is None or running.outbox is None:
            self._engine.release(prefilled.id)
            return
        try:
            hand_off = None if prefilled.finished is not None else self._offer(prefilled)
        except ServingError as error:
            self._engine.release(prefilled.id)
            running.outbox.failed(running.slot, error)
        else:
            expanded = _expanded(running, prefilled)
            running.outbox.prefilled(running.slot, prefilled, hand_off, expanded, sent_at_unix_ns=sent_at_unix_ns)

    def _offer(self, prefilled: Prefilled) -> HandOff:
        payload: Payload
        if prefilled.opaque is not None:
            if len(prefilled.opaque) > MAX_UNCHUNKED_BYTES:
                raise NoHandOffError(f"the engine's state exceeds {MAX_UNCHUNKED_BYTES} bytes")
            payload = OpaquePayload(self._engine_name, prefilled.opaque)
        else:
            layout = self._engine.capabilities.layout
            assert layout is not None, "an engine without a layout gives opaque state"
            payload = BlocksPayload(layout, prefilled.num_tokens)
        return self._source.offer(prefilled.id, prefilled.block_ids, payload)


def _key(context: RequestContext) -> tuple[str, int, int]:
    return context.request_id, context.choice, context.attempt


def _expanded(running: Running[PrefillOutbox], prefilled: Prefilled) -> Generation | None:
    """The generation with the prompt that is reported to the caller; ``None``: the prompt is as it came."""
    laid_out = prefilled.laid_out
    if laid_out is None:
        return running.expanded
    with_ids = [replace(span, media_id=id) for span, id in zip(laid_out.media, running.media_ids, strict=True)]
    return replace(laid_out, media=tuple(with_ids))
