"""Between streams and engine: each request's outputs find the stream that waits for them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from abc import abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

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
    DrainingError,
    DuplicateRequestError,
    EngineError,
    MessageTooLargeError,
    RequestCancelledError,
    RequestTimeoutError,
    ServingError,
)
from quartet.events.load import PlacementProgress
from quartet.kvcache.layout import BlocksPayload, HandOff, OpaquePayload, Payload
from quartet.streams.convert import to_engine_request
from quartet.streams.messages import MAX_OPAQUE_STATE_BYTES, RequestContext, WorkerStart
from quartet.streams.outbox import DecodeOutbox, PrefillOutbox
from quartet.telemetry.logging import FinishedRequest, log_request
from quartet.telemetry.metrics import WorkerMetrics
from services.workers.media import MediaGate, MediaStage, ReadyMedia
from services.workers.requests import Progress

logger = logging.getLogger(__name__)


# What a dispatcher knows of one request.

OutboxT = TypeVar("OutboxT", DecodeOutbox, PrefillOutbox)


class Dispatcher(Generic[OutboxT]):
    """Runs the requests of one RPC's streams on one engine. Lives on the event loop.

    A worker knows a request by (request id, choice, attempt); streams know it by slot; the engine by an id drawn here.
    """

    def __init__(
        self, engine: Engine, kind: RequestKind, metrics: WorkerMetrics, media: MediaStage | None = None
    ) -> None:
        """Run requests of ``kind`` on ``engine``, which is started already; those with media by way of ``media``."""
        self._engine = engine
        self._kind = kind
        self._metrics = metrics
        self._media = MediaGate(media, self._media_ready, lambda id, error: self._route_failed(Failed(id, error)))
        self._running: dict[int, Running[OutboxT]] = {}
        self._keys: set[tuple[str, int, int]] = set()
        self._next_id = itertools.count(1)
        self._counted = CountedStarts()
        self._placements = CountedPlacements()
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_draining = False

    @property
    def num_running(self) -> int:
        """Requests whose terminal output is still to come."""
        return len(self._running)

    @property
    def progress(self) -> Progress:
        """Whether something moves, be it only a request's media."""
        num_steps = sum(rank.num_steps for rank in self._engine.stats())
        return Progress(num_steps + self._media.num_steps, len(self._running))

    @property
    def router_progress(self) -> dict[str, int]:
        """By router, the last request number up to which the engine's load counts everything in."""
        return self._counted.watermarks()

    @property
    def router_arrivals(self) -> dict[str, int]:
        """By router, the last request number that arrived: its tokens are in the engine's load."""
        return self._counted.arrivals()

    @property
    def placements(self) -> dict[str, PlacementProgress]:
        """By router, what became lately of the starts that it placed for clients: all that is still known."""
        return self._placements.progress()

    def stats(self) -> Sequence[EngineStats]:
        """The engine's load, and in it the requests that wait for their media here."""
        return self._media.add_to(self._engine.stats())

    def placement_news(self) -> dict[str, PlacementProgress]:
        """As much of it as the next load is to tell; call ``placements_told`` once that is out."""
        return self._placements.news()

    def placements_told(self) -> None:
        """The load with the last ``placement_news`` is out."""
        self._placements.told()

    @abstractmethod
    def new_outbox(self) -> OutboxT:
        """An outbox for a new stream."""

    def submit(self, start: WorkerStart, outbox: OutboxT, slot: int, on_end: Callable[[], None]) -> int:
        """Run ``start``; see ``quartet.streams.server.Work``.

        Raises:
            DrainingError: this worker takes nothing new.
            DuplicateRequestError: the same attempt runs already.
            EngineError, WorkerUnavailableError: the engine is dead or closed.
        """
        context = start.context
        if not start.is_signed:
            self._counted.arrive(context.router_id, context.router_request_number)
        try:
            id = self._submit(_named(context), start, outbox, slot, on_end)
        except ServingError:
            # Also what is refused is counted in, and has ended: the router must not keep it booked.
            self._count_end(context, is_signed=start.is_signed)
            raise
        if self._kind is RequestKind.PREFILL:
            # Nobody books blocks for a prefill, and the load has its tokens from the first moment on.
            self._counted.count_in(context.router_id, context.router_request_number)
        return id

    def cancel(self, id: int) -> None:
        """End a request early; its terminal output still comes."""
        if id in self._running:
            self._stop(id)

    def abandon(self, ids: list[int]) -> None:
        """The stream is gone: end these requests; what they would still bring goes nowhere."""
        for id in ids:
            if id in self._running:
                self._running[id].outbox = None
                self._stop(id)

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
        for id in self._running:
            self._stop(id)
        return len(self._running)

    def route(self, step: StepOutput) -> None:
        """Bring one step's outputs to their streams."""
        self._route_results(step)
        for failed in step.failed:
            self._route_failed(failed)

    @abstractmethod
    def _route_results(self, step: StepOutput) -> None:
        """Bring what went well to its streams."""

    def _route_failed(self, failed: Failed) -> None:
        running = self._running.get(failed.id)
        error = failed.error
        if running is not None and running.is_timed_out and isinstance(error, RequestCancelledError):
            error = RequestTimeoutError("the request's timeout ran out")
        self._end(failed.id, error.reason.lower(), has_ended_well=False)
        if running is not None and running.outbox is not None:
            running.outbox.failed(running.slot, error)

    def _submit(
        self, context: RequestContext, start: WorkerStart, outbox: OutboxT, slot: int, on_end: Callable[[], None]
    ) -> int:
        self._check_takes()
        key = _key(context)
        if key in self._keys:
            raise DuplicateRequestError(f"request {context.request_id} attempt {context.attempt} runs already")
        id = next(self._next_id)
        request = to_engine_request(id, self._kind, start)
        num_prompt_tokens = len(start.generation.prompt_token_ids)
        running = Running(context, num_prompt_tokens, start.is_signed, slot, outbox, on_end)
        if start.media:
            self._media.begin(id, start)
            running.has_media, running.request = True, request
        else:
            self._engine.submit(request)
        self._running[id] = running
        self._keys.add(key)
        self._idle.clear()
        if context.timeout_s is not None:
            running.timer = asyncio.get_running_loop().call_later(context.timeout_s, self._time_out, id)
        return id

    def _media_ready(self, id: int, ready: ReadyMedia) -> None:
        running = self._running[id]
        request, running.request = running.request, None
        assert request is not None, "the engine has nothing of it yet"
        running.media_s = time.monotonic() - running.submitted_at
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
        if not self._media.cancel(id):
            self._engine.cancel(id)

    def _count_in(self, running: Running[OutboxT]) -> None:
        """The load shows it from now on."""
        counted_in = self._placements.start if running.is_signed else self._counted.count_in
        counted_in(running.context.router_id, running.context.router_request_number)

    def _count_end(self, context: RequestContext, *, is_signed: bool) -> None:
        counted_end = self._placements.end if is_signed else self._counted.count_in
        counted_end(context.router_id, context.router_request_number)

    def _end(self, id: int, outcome: str, *, has_ended_well: bool = True) -> Running[OutboxT] | None:
        running = self._running.pop(id, None)
        if running is None:
            return None
        self._keys.discard(_key(running.context))
        if running.has_media:
            self._media.end(id, has_ended_well=has_ended_well)
        self._count_end(running.context, is_signed=running.is_signed)
        if running.timer is not None:
            running.timer.cancel()
        if not self._running:
            self._idle.set()
        self._tell_end(running, outcome)
        running.on_end()
        return running

    def _tell_end(self, running: Running[OutboxT], outcome: str) -> None:
        self._metrics.count_request(outcome)
        log_request(
            logger,
            FinishedRequest(
                request_id=running.context.request_id,
                outcome=outcome,
                tenant=running.context.tenant,
                num_prompt_tokens=running.num_prompt_tokens,
                total_s=time.monotonic() - running.submitted_at,
            ),
        )

    def _check_takes(self) -> None:
        if self._is_draining:
            raise DrainingError("this worker is draining and takes nothing new", retry_delay_s=1.0)
        if not self._engine.is_alive:
            raise EngineError("the engine of this worker is dead")

    def _time_out(self, id: int) -> None:
        running = self._running.get(id)
        if running is not None:
            running.is_timed_out = True
            self._stop(id)


def _named(context: RequestContext) -> RequestContext:
    return context if context.request_id else replace(context, request_id=secrets.token_hex(16))


def _key(context: RequestContext) -> tuple[str, int, int]:
    return context.request_id, context.choice, context.attempt


# Prefill and Decode on one engine: what their steps bring, and for prefills, where it is held.


class Holds(Protocol):
    """Where completed prefills are held for whoever pulls them (``quartet.transfer.source.TransferSource``)."""

    def offer(self, holder: int, block_ids: tuple[int, ...], payload: Payload) -> HandOff:
        """Hold ``holder``'s blocks under a ticket."""
        ...

    def withdraw(self, holder: int) -> None:
        """End ``holder``'s hand-off; nothing happens where it has none."""
        ...


class DecodeDispatcher(Dispatcher[DecodeOutbox]):
    """Requests of Decode streams."""

    def __init__(self, engine: Engine, metrics: WorkerMetrics, media: MediaStage | None = None) -> None:
        """Decode on ``engine``, which is started already; requests with media by way of ``media``."""
        super().__init__(engine, RequestKind.DECODE, metrics, media)

    def new_outbox(self) -> DecodeOutbox:
        """An outbox for a new stream."""
        return DecodeOutbox()

    def _route_results(self, step: StepOutput) -> None:
        for started in step.started:
            self._route_started(started)
        self._route_tokens(step)
        for finished in step.finished:
            running = self._end(finished.id, finished.reason.value)
            if running is not None and running.outbox is not None:
                running.outbox.finished(running.slot, finished)

    def _route_started(self, started: Started) -> None:
        running = self._running.get(started.id)
        if running is None:
            return
        # The blocks of a request that waits are in no figure of the load; from its first step on they all are.
        self._count_in(running)
        if running.media_s:
            started = replace(started, queue_s=started.queue_s + running.media_s)
        self._metrics.observe_queue(started.queue_s)
        if running.outbox is not None:
            num_prompt_tokens = 0 if running.expanded is None else running.num_prompt_tokens
            running.outbox.started(running.slot, started, num_prompt_tokens or started.num_prompt_tokens)

    def _route_tokens(self, step: StepOutput) -> None:
        if step.logprobs or not self._route_whole(step):
            self._route_parts(step)

    def _route_whole(self, step: StepOutput) -> bool:
        """Bring all tokens to the one stream that has asked for them; false where it isn't that simple."""
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
    """Requests of Prefill streams: what they compute is held until it is pulled."""

    def __init__(
        self,
        engine: Engine,
        holds: Holds,
        engine_name: str,
        metrics: WorkerMetrics,
        media: MediaStage | None = None,
    ) -> None:
        """Prefill on ``engine``, which is started already; ``engine_name`` goes into opaque hand-offs.

        Requests with media go by way of ``media``.
        """
        super().__init__(engine, RequestKind.PREFILL, metrics, media)
        self._holds = holds
        self._engine_name = engine_name

    def new_outbox(self) -> PrefillOutbox:
        """An outbox for a new stream."""
        return PrefillOutbox(self._holds.withdraw)

    def _route_results(self, step: StepOutput) -> None:
        for prefilled in step.prefilled:
            self._metrics.observe_prefill(prefilled.compute_s)
            self._route_prefilled(prefilled)

    def _route_prefilled(self, prefilled: Prefilled) -> None:
        running = self._end(prefilled.id, "prefilled")
        if running is not None and running.media_s:
            prefilled = replace(prefilled, queue_s=prefilled.queue_s + running.media_s)
        self._metrics.observe_queue(prefilled.queue_s)
        if running is None or running.outbox is None:
            self._engine.release(prefilled.id)
            return
        try:
            hand_off = None if prefilled.finished is not None else self._offer(prefilled)
        except ServingError as error:
            self._engine.release(prefilled.id)
            running.outbox.failed(running.slot, error)
        else:
            running.outbox.prefilled(running.slot, prefilled, hand_off, _expanded(running, prefilled))

    def _offer(self, prefilled: Prefilled) -> HandOff:
        payload: Payload
        if prefilled.opaque is not None:
            if len(prefilled.opaque) > MAX_OPAQUE_STATE_BYTES:
                raise MessageTooLargeError(f"the engine's state exceeds {MAX_OPAQUE_STATE_BYTES} bytes")
            payload = OpaquePayload(self._engine_name, prefilled.opaque)
        else:
            layout = self._engine.capabilities.layout
            assert layout is not None, "an engine without a layout gives opaque state"
            payload = BlocksPayload(layout, prefilled.num_tokens)
        return self._holds.offer(prefilled.id, prefilled.block_ids, payload)


def _expanded(running: Running[PrefillOutbox], prefilled: Prefilled) -> Generation | None:
    """With the prompt that is to be told; ``None``: it is as it came."""
    laid_out = prefilled.laid_out
    if laid_out is None:
        return running.expanded
    named = [replace(span, media_id=name) for span, name in zip(laid_out.media, running.media_ids, strict=True)]
    return replace(laid_out, media=tuple(named))


@dataclass
class Running(Generic[OutboxT]):
    """A request between its start and its terminal output.

    Attributes:
        request: what the engine is asked for, while that waits for media; it has taken it else.
        expanded: with the prompt that is to be told, where media files came with the start.
        media_s: seconds from its arrival until its media were here.
        media_ids: of its items.
        outbox: ``None`` once its stream is gone.
    """

    context: RequestContext
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
    timer: asyncio.TimerHandle | None = None
    is_timed_out: bool = False
    submitted_at: float = field(default_factory=time.monotonic)


# How far each router's starts are counted in the load that its worker reports.

# Routers that came and went; one that is forgotten only keeps its own bookings in full a little longer.
_MAX_ROUTERS = 1024

# By then a router that lives has long heard, many times over, that its last start is counted in.
_FORGET_AFTER_S = 600.0


@dataclass
class _Router:
    highest: int = 0
    heard_at: float = 0.0
    outstanding: set[int] = field(default_factory=set)


class CountedStarts:
    """Watermarks by router: all starts up to one are counted in.

    Numbers rise, but some never arrive: those of starts that a broken stream lost. So the watermark is the highest
    number that arrived, held back by those that arrived and are not counted in yet.

    They ride in every load that is sent, and each start of a router brings a new name: a router with no start left to
    count in that has been quiet for ten minutes is left out.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Know no router; ``clock`` gives seconds."""
        self._clock = clock
        self._routers: OrderedDict[str, _Router] = OrderedDict()

    def arrive(self, router_id: str, number: int) -> None:
        """A start arrived, whatever becomes of it; it holds the watermark back until ``count_in``.

        Starts without a router, or without a number, are nobody's to count.
        """
        if not (router_id and number):
            return
        router = self._routers.setdefault(router_id, _Router())
        self._routers.move_to_end(router_id)
        router.heard_at = self._clock()
        router.highest = max(router.highest, number)
        router.outstanding.add(number)
        if len(self._routers) > _MAX_ROUTERS:
            self._routers.popitem(last=False)

    def count_in(self, router_id: str, number: int) -> None:
        """The load shows that start, or it has ended. May be called twice."""
        router = self._routers.get(router_id)
        if router is not None:
            router.heard_at = self._clock()
            router.outstanding.discard(number)

    def watermarks(self) -> dict[str, int]:
        """By router, the last number up to which every start is counted in."""
        self._forget_quiet()
        return {
            router_id: min(router.outstanding, default=router.highest + 1) - 1
            for router_id, router in self._routers.items()
        }

    def arrivals(self) -> dict[str, int]:
        """By router, the highest number that arrived."""
        return {router_id: router.highest for router_id, router in self._routers.items()}

    def _forget_quiet(self) -> None:
        oldest = self._clock() - _FORGET_AFTER_S
        for router_id, router in list(self._routers.items()):
            if router.heard_at < oldest and not router.outstanding:
                del self._routers[router_id]


# What became of the starts that routers placed for clients, told for some seconds to whoever booked them.

# Loads come once a second or more, and some are lost.
_TELL_FOR_S = 3.5

# Under load they come 20 times a second. To tell everything each time would cost router and worker more than the
# starts themselves: what is older than this comes only in every so many seconds' recapitulation.
_FRESH_S = 0.2

_RECAP_INTERVAL_S = 0.5

# What is told no more is found out by the router's own clock. 10,000 are 30 kB of a load.
_MAX_TOLD = 10_000


@dataclass(frozen=True)
class _News:
    router_id: str
    number: int
    at: float


class CountedPlacements:
    """Numbers of placed starts that were counted in, and of those that ended. They come in any order, or never."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Know of none; ``clock`` gives seconds."""
        self._clock = clock
        self._recap_at = -_RECAP_INTERVAL_S
        self._recap_given_at: float | None = None
        self._started: deque[_News] = deque()
        self._ended: deque[_News] = deque()

    def start(self, router_id: str, number: int) -> None:
        """From the next load on it is counted in."""
        self._add(self._started, router_id, number)

    def end(self, router_id: str, number: int) -> None:
        """It is counted no more; it may never have been."""
        self._add(self._ended, router_id, number)

    def progress(self) -> dict[str, PlacementProgress]:
        """Everything of the last seconds, by router, for one who asks; that changes nothing for those who listen."""
        return self._since(self._clock() - _TELL_FOR_S)

    def news(self) -> dict[str, PlacementProgress]:
        """For the next load, by router; call ``told`` once it is out. Each is told three times or more."""
        now = self._clock()
        is_recap = now - self._recap_at >= _RECAP_INTERVAL_S
        self._recap_given_at = now if is_recap else None
        return self._since(now - (_TELL_FOR_S if is_recap else _FRESH_S))

    def told(self) -> None:
        """The last news are out: not all that are made come to that."""
        if self._recap_given_at is not None:
            self._recap_at = self._recap_given_at

    def _since(self, since: float) -> dict[str, PlacementProgress]:
        started, ended = _by_router(self._started, since), _by_router(self._ended, since)
        return {
            router_id: PlacementProgress(tuple(started.get(router_id, ())), tuple(ended.get(router_id, ())))
            for router_id in {**started, **ended}
        }

    def _add(self, told: deque[_News], router_id: str, number: int) -> None:
        if not (router_id and number):
            return
        now = self._clock()
        told.append(_News(router_id, number, now))
        while len(told) > _MAX_TOLD or told[0].at <= now - _TELL_FOR_S:
            told.popleft()


def _by_router(told: deque[_News], since: float) -> dict[str, list[int]]:
    numbers: dict[str, list[int]] = {}
    for news in reversed(told):
        if news.at <= since:
            break
        numbers.setdefault(news.router_id, []).append(news.number)
    return numbers
