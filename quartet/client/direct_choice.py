"""One choice of a direct request: decoded at one worker after the other, until one ends it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from quartet.client.retries import Retries
from quartet.client.workers import DecodeWorkers
from quartet.engine.base import FinishReason
from quartet.engine.sampling import TokenLogprobs
from quartet.errors import ServingError, WorkerUnavailableError
from quartet.rpc.choice_output import ChoiceOutput
from quartet.rpc.edge import ChoiceFinished
from quartet.rpc.inner import DecodeStarted
from quartet.rpc.outcome_in_time import outcome_in_time
from quartet.rpc.placement import PlacedChoice, SealedPlacement

# As a router's: the worker's queue and the transfer come before its first word.
_START_TIMEOUT_S = 120.0
_STALL_TIMEOUT_S = 60.0

#: Asks a router to place a choice again, given the tokens that it has.
PlaceAgain = Callable[[Sequence[int]], Awaitable[PlacedChoice]]


class DirectChoice:
    """Runs one choice. Whatever way ``run`` ends, nothing of it is left at a worker."""

    def __init__(self, output: ChoiceOutput, workers: DecodeWorkers, place_again: PlaceAgain) -> None:
        """``output`` takes its tokens."""
        self._output = output
        self._workers = workers
        self._place_again = place_again
        self._retries = Retries()

    async def run(self, placed: PlacedChoice) -> ChoiceFinished:
        """Generate from ``placed`` to the end.

        Raises:
            ServingError: the last attempt's error, or the router's where it placed it no more.
        """
        while True:
            try:
                return self._output.finish(await self._attempt(placed))
            except _AttemptFailedError as failure:
                await asyncio.sleep(self._retries.note(failure.error))
            placed = await self._next_placement()

    async def _next_placement(self) -> PlacedChoice:
        while True:
            try:
                return await self._place_again(self._output.token_ids)
            except ServingError as error:
                pause_s = self._retries.note_refusal(error)
            await asyncio.sleep(pause_s)

    async def _attempt(self, placed: PlacedChoice) -> FinishReason:
        self._note(placed)
        if isinstance(placed.next, ChoiceFinished):
            return placed.next.reason
        is_handed_off = placed.placement is not None and placed.placement.prefill is not None
        return await self._decode(placed.next, _Sink(self._output, is_handed_off=is_handed_off))

    def _note(self, placed: PlacedChoice) -> None:
        output = self._output
        output.num_attempts += placed.num_attempts
        if placed.router_queue_s is not None:
            output.note_wait(placed.router_queue_s)
        if placed.prefill_s is not None:
            output.note_prefill(placed.prefill_s)
            output.note_prefilled(placed.num_cached_tokens, placed.prefill_queue_s or 0.0)
        if placed.token_ids:
            output.take(len(output.token_ids), placed.token_ids, placed.logprobs, time.monotonic())

    async def _decode(self, placement: SealedPlacement, sink: _Sink) -> FinishReason:
        with self._workers.use(placement.address) as worker:
            # Also of a choice that its first token ended: so the worker lets go of what is handed off to it.
            call = worker.decode.start_sealed(placement, sink)
            try:
                if self._output.has_stopped:
                    return FinishReason.STOP_STRING
                finished = await outcome_in_time(
                    call, start_timeout_s=_START_TIMEOUT_S, stall_timeout_s=_STALL_TIMEOUT_S
                )
            except TimeoutError as error:
                silent = WorkerUnavailableError(f"the worker at {placement.address} gave no token in time")
                raise _AttemptFailedError(silent) from error
            except ServingError as error:
                raise _AttemptFailedError(error) from error
            finally:
                call.cancel()
        return FinishReason.STOP_STRING if finished is None else finished.reason


class _AttemptFailedError(Exception):
    """A decode worker ended an attempt with ``error``."""

    def __init__(self, error: ServingError) -> None:
        super().__init__(str(error))
        self.error = error


class _Sink:
    """Brings what a decode gives to the choice's output."""

    def __init__(self, output: ChoiceOutput, *, is_handed_off: bool) -> None:
        self._output = output
        self._is_handed_off = is_handed_off

    def started(self, started: DecodeStarted) -> None:
        self._output.note_started(started, is_handed_off=self._is_handed_off)

    def take(self, offset: int, token_ids: list[int], logprobs: Sequence[TokenLogprobs], now: float) -> bool:
        return self._output.take(offset, token_ids, logprobs, now)
