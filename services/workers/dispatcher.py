"""Prefill and Decode on one engine: what their steps bring, and for prefills, where it is held."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from quartet.engine.base import Engine, Generation, Prefilled, RequestKind, Started, StepOutput
from quartet.errors import MessageTooLargeError, ServingError
from quartet.kvcache.layout import BlocksPayload, HandOff, OpaquePayload, Payload
from quartet.rpc.inner import MAX_OPAQUE_STATE_BYTES
from quartet.rpc.outbox import DecodeOutbox
from quartet.rpc.prefill_outbox import PrefillOutbox
from quartet.telemetry.metrics import WorkerMetrics
from services.workers.base_dispatcher import Dispatcher
from services.workers.media import MediaStage
from services.workers.running import Running


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
