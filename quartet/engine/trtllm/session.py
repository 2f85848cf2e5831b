"""One loaded LLM at work, from its warm-up until it is stopped or dies. Lives on the event loop of the LLM's thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from quartet.engine.base import EngineRequest, StepOutput
from quartet.engine.trtllm.book import engine_stats
from quartet.engine.trtllm.canary import Canary
from quartet.engine.trtllm.hand_off import HandOffState
from quartet.engine.trtllm.loading import LoadedLlm
from quartet.engine.trtllm.requests import LlmRequests, OutputCollector
from quartet.engine.trtllm.times import TrtllmTimes
from quartet.errors import EngineError


@dataclass(frozen=True, kw_only=True)
class SessionListener:
    """Callbacks of a session, called on its thread.

    Attributes:
        on_ready: the LLM has answered its first request.
        on_output: there is new output.
        on_lost: the LLM is unusable from now on; called once.
    """

    on_ready: Callable[[LlmSession], None]
    on_output: Callable[[StepOutput], None]
    on_lost: Callable[[Exception], None]


class LlmSession:
    """An LLM's requests and its canary.

    Attributes:
        loaded: the LLM.
        num_blocks: KV blocks of a rank, known when it is ready.
    """

    def __init__(
        self, loaded: LoadedLlm, sampling_fields: frozenset[str], times: TrtllmTimes, listener: SessionListener
    ) -> None:
        """Create the session on the event loop that it lives on."""
        self.loaded = loaded
        self.num_blocks = loaded.num_blocks()
        self._times = times
        self._listener = listener
        self._is_lost = False
        self._outputs = OutputCollector(self._deliver)
        self._canary = Canary(loaded, times, self._num_moves)
        self._requests = LlmRequests(loaded, sampling_fields, self._outputs, times, self._lose)

    @property
    def is_hanging(self) -> bool:
        """Whether the engine owes an answer to a canary, which any engine can answer. Any thread may ask."""
        return self._canary.is_overdue

    @property
    def num_canaries(self) -> int:
        """Canaries that came back. Any thread may ask."""
        return self._canary.num_ended

    async def run(self, stop: asyncio.Event) -> None:
        """Warm up and serve until ``stop``.

        Raises:
            EngineError: the LLM did not warm up in time.
        """
        try:
            await self._canary.warm_up()
        except TimeoutError:
            raise EngineError(f"no first answer within {self._times.warm_up_timeout_s} s") from None
        events = await asyncio.to_thread(self.loaded.wait_for_figures, self._times.figures_timeout_s)
        if events:
            self._listener.on_output(StepOutput(kv_events=events))
        self.num_blocks = self._requests.num_blocks = self.loaded.num_blocks()
        self.loaded.book.assume_num_blocks(self.num_blocks)
        self._listener.on_ready(self)
        watching = [asyncio.create_task(self._run_canary()), asyncio.create_task(self._look())]
        try:
            await stop.wait()
        finally:
            for task in watching:
                task.cancel()
            await asyncio.wait(watching)
            await self._requests.close()

    def submit(self, request: EngineRequest, state: HandOffState | None, submitted_at: float) -> None:
        """Run ``request``, from ``state`` if there is a hand-off; its end, or its refusal, comes out as an output."""
        self._requests.submit(request, state, submitted_at)

    def cancel(self, id: int) -> None:
        """End a request; unknown ids are ignored."""
        self._requests.cancel(id)

    def release(self, id: int) -> None:
        """Free the blocks that a completed prefill holds; unknown ids are ignored."""
        self._requests.release(id)

    async def _look(self) -> None:
        """Check whether the engine is dead: without requests, an engine dies without a sign."""
        while not self._is_lost:
            await asyncio.sleep(self._times.look_interval_s)
            if self.loaded.is_gone:
                self._lose(EngineError("the engine has shut down by itself"))

    async def _run_canary(self) -> None:
        try:
            await self._canary.run()
        except Exception as error:  # noqa: BLE001 - any error here ends the engine; the listener logs it
            self._lose(error)

    def _num_moves(self) -> int:
        return sum(stats.num_steps for stats in engine_stats(self.loaded.book, self.loaded.feeds))

    def _deliver(self, output: StepOutput) -> None:
        self.loaded.book.finish_turn()
        self._listener.on_output(output)

    def _lose(self, error: Exception) -> None:
        if not self._is_lost:
            self._is_lost = True
            self.loaded.feeds.stop()
            self._listener.on_lost(error)
