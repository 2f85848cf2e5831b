"""Between streams and engine: each request's outputs find the stream that waits for them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic

from quartet.engine.base import Engine, EngineStats, Failed, RequestKind, StepOutput
from quartet.errors import (
    DrainingError,
    DuplicateRequestError,
    EngineError,
    RequestCancelledError,
    RequestTimeoutError,
    ServingError,
)
from quartet.events.load import PlacementProgress
from quartet.rpc.context import RequestContext
from quartet.rpc.convert import to_engine_request
from quartet.rpc.inner import InnerStart
from quartet.telemetry.logging import FinishedRequest, log_request
from quartet.telemetry.metrics import WorkerMetrics
from services.workers.counted_placements import CountedPlacements
from services.workers.counted_starts import CountedStarts
from services.workers.media import MediaStage, ReadyMedia
from services.workers.media_gate import MediaGate
from services.workers.requests import Progress
from services.workers.running import OutboxT, Running

logger = logging.getLogger(__name__)


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

    def submit(self, start: InnerStart, outbox: OutboxT, slot: int, on_end: Callable[[], None]) -> int:
        """Run ``start``; see ``quartet.rpc.inner_server.Work``.

        Raises:
            DrainingError: this worker takes nothing new.
            DuplicateRequestError: the same attempt runs already.
            EngineError, WorkerUnavailableError: the engine is dead or closed.
        """
        context = start.context
        if not start.is_sealed:
            self._counted.arrive(context.router_id, context.router_request_number)
        try:
            id = self._submit(_named(context), start, outbox, slot, on_end)
        except ServingError:
            # Also what is refused is counted in, and has ended: the router must not keep it booked.
            self._count_end(context, is_sealed=start.is_sealed)
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
        self, context: RequestContext, start: InnerStart, outbox: OutboxT, slot: int, on_end: Callable[[], None]
    ) -> int:
        self._check_takes()
        key = _key(context)
        if key in self._keys:
            raise DuplicateRequestError(f"request {context.request_id} attempt {context.attempt} runs already")
        id = next(self._next_id)
        request = to_engine_request(id, self._kind, start)
        num_prompt_tokens = len(start.generation.prompt_token_ids)
        running = Running(context, num_prompt_tokens, start.is_sealed, slot, outbox, on_end)
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
        counted_in = self._placements.start if running.is_sealed else self._counted.count_in
        counted_in(running.context.router_id, running.context.router_request_number)

    def _count_end(self, context: RequestContext, *, is_sealed: bool) -> None:
        counted_end = self._placements.end if is_sealed else self._counted.count_in
        counted_end(context.router_id, context.router_request_number)

    def _end(self, id: int, outcome: str, *, has_ended_well: bool = True) -> Running[OutboxT] | None:
        running = self._running.pop(id, None)
        if running is None:
            return None
        self._keys.discard(_key(running.context))
        if running.has_media:
            self._media.end(id, has_ended_well=has_ended_well)
        self._count_end(running.context, is_sealed=running.is_sealed)
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
