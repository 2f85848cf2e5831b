"""Between streams and engine: each request's outputs find the stream that waits for them."""

from __future__ import annotations

import asyncio
import itertools
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from quartet.engine.base import Engine, Failed, Prefilled, RequestKind, StepOutput
from quartet.errors import (
    DrainingError,
    DuplicateRequestError,
    EngineError,
    RequestCancelledError,
    RequestTimeoutError,
    ServingError,
)
from quartet.kvcache.layout import BlocksPayload, HandOff, OpaquePayload
from quartet.rpc.convert import to_engine_request
from quartet.rpc.inner import InnerStart
from quartet.rpc.outbox import DecodeOutbox, PrefillOutbox
from quartet.telemetry.metrics import WorkerMetrics

OutboxT = TypeVar("OutboxT", DecodeOutbox, PrefillOutbox)


class Holds(Protocol):
    """Where completed prefills are held for whoever pulls them (``quartet.transfer.source.TransferSource``)."""

    def offer(self, holder: int, block_ids: tuple[int, ...], payload: BlocksPayload | OpaquePayload) -> HandOff:
        """Hold ``holder``'s blocks under a ticket."""
        ...

    def withdraw(self, holder: int) -> None:
        """End ``holder``'s hand-off; nothing happens where it has none."""
        ...


@dataclass
class _Running(Generic[OutboxT]):
    """A request between its start and its terminal output; ``outbox`` is ``None`` once its stream is gone."""

    key: tuple[str, int, int]
    slot: int
    outbox: OutboxT | None
    on_end: Callable[[], None]
    timer: asyncio.TimerHandle | None = None
    is_timed_out: bool = False


class Dispatcher(Generic[OutboxT]):
    """Runs the requests of one RPC's streams on one engine. Lives on the event loop.

    A worker knows a request by (request id, choice, attempt); streams know it by slot; the engine by an id drawn here.
    """

    def __init__(self, engine: Engine, kind: RequestKind, metrics: WorkerMetrics) -> None:
        """Run requests of ``kind`` on ``engine``, which is started already."""
        self._engine = engine
        self._kind = kind
        self._metrics = metrics
        self._running: dict[int, _Running[OutboxT]] = {}
        self._keys: set[tuple[str, int, int]] = set()
        self._next_id = itertools.count(1)
        self._router_progress: dict[str, int] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_draining = False

    @property
    def num_running(self) -> int:
        """Requests whose terminal output is still to come."""
        return len(self._running)

    @property
    def router_progress(self) -> dict[str, int]:
        """The last request number that arrived from each router."""
        return dict(self._router_progress)

    def submit(self, start: InnerStart, outbox: OutboxT, slot: int, on_end: Callable[[], None]) -> int:
        """Run ``start``; see ``quartet.rpc.inner_server.Work``.

        Raises:
            DrainingError: this worker takes nothing new.
            DuplicateRequestError: the same attempt runs already.
            EngineError: the engine is dead.
        """
        context = start.context
        if context.router_id:
            # Also what is refused is counted in: the router must not keep it booked.
            self._router_progress[context.router_id] = context.router_request_number
        self._check_takes()
        key = (context.request_id, context.choice, context.attempt)
        if context.request_id and key in self._keys:
            raise DuplicateRequestError(f"request {context.request_id} attempt {context.attempt} runs already")
        id = next(self._next_id)
        running = self._running[id] = _Running(key, slot, outbox, on_end)
        self._keys.add(key)
        self._idle.clear()
        if context.timeout_s is not None:
            running.timer = asyncio.get_running_loop().call_later(max(context.timeout_s, 0), self._time_out, id)
        self._engine.submit(to_engine_request(id, self._kind, start))
        return id

    def cancel(self, id: int) -> None:
        """End a request early; its terminal output still comes."""
        if id in self._running:
            self._engine.cancel(id)

    def abandon(self, ids: list[int], outbox: OutboxT) -> None:
        """The stream is gone: end these requests; what they would still bring goes nowhere."""
        for id in ids:
            if id in self._running:
                self._running[id].outbox = None
                self._engine.cancel(id)

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
            self._engine.cancel(id)
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
        self._end(failed.id, error.reason.lower())
        if running is not None and running.outbox is not None:
            running.outbox.failed(running.slot, error)

    def _end(self, id: int, outcome: str) -> _Running[OutboxT] | None:
        running = self._running.pop(id, None)
        if running is None:
            return None
        self._keys.discard(running.key)
        if running.timer is not None:
            running.timer.cancel()
        if not self._running:
            self._idle.set()
        self._metrics.count_request(outcome)
        running.on_end()
        return running

    def _check_takes(self) -> None:
        if self._is_draining:
            raise DrainingError("this worker is draining and takes nothing new", retry_delay_s=1.0)
        if not self._engine.is_alive:
            raise EngineError("the engine of this worker is dead")

    def _time_out(self, id: int) -> None:
        running = self._running.get(id)
        if running is not None:
            running.is_timed_out = True
            self._engine.cancel(id)


class DecodeDispatcher(Dispatcher[DecodeOutbox]):
    """Requests of Decode streams."""

    def __init__(self, engine: Engine, metrics: WorkerMetrics) -> None:
        """Decode on ``engine``, which is started already."""
        super().__init__(engine, RequestKind.DECODE, metrics)

    def _route_results(self, step: StepOutput) -> None:
        for started in step.started:
            running = self._running.get(started.id)
            if running is not None and running.outbox is not None:
                running.outbox.started(running.slot, started)
        self._route_tokens(step)
        for finished in step.finished:
            running = self._end(finished.id, finished.reason.value)
            if running is not None and running.outbox is not None:
                running.outbox.finished(running.slot, finished)

    def _route_tokens(self, step: StepOutput) -> None:
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

    def __init__(self, engine: Engine, holds: Holds, engine_name: str, metrics: WorkerMetrics) -> None:
        """Prefill on ``engine``, which is started already; ``engine_name`` goes into opaque hand-offs."""
        super().__init__(engine, RequestKind.PREFILL, metrics)
        self._holds = holds
        self._engine_name = engine_name

    def abandon(self, ids: list[int], outbox: PrefillOutbox) -> None:
        """The stream is gone: hand-offs that nobody was told of are let go too."""
        super().abandon(ids, outbox)
        for holder in outbox.unsent_holders():
            self._holds.withdraw(holder)

    def _route_results(self, step: StepOutput) -> None:
        for prefilled in step.prefilled:
            running = self._end(prefilled.id, "prefilled")
            if running is None or running.outbox is None:
                self._engine.release(prefilled.id)
                continue
            try:
                hand_off = None if prefilled.finished is not None else self._offer(prefilled)
            except ServingError as error:
                self._engine.release(prefilled.id)
                running.outbox.failed(running.slot, error)
                continue
            running.outbox.prefilled(running.slot, prefilled, hand_off)

    def _offer(self, prefilled: Prefilled) -> HandOff:
        payload: BlocksPayload | OpaquePayload
        if prefilled.opaque is not None:
            payload = OpaquePayload(self._engine_name, prefilled.opaque)
        else:
            layout = self._engine.capabilities.layout
            assert layout is not None, "an engine without a layout gives opaque state"
            payload = BlocksPayload(layout, prefilled.num_tokens)
        return self._holds.offer(prefilled.id, prefilled.block_ids, payload)
