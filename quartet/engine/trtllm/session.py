"""One loaded LLM at work, from its warm-up until it is stopped or dies. Lives on the event loop of the LLM's thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from quartet.engine.base import StepOutput
from quartet.engine.trtllm.book import engine_stats
from quartet.engine.trtllm.canary import Canary
from quartet.engine.trtllm.loading import LoadedLlm
from quartet.engine.trtllm.requests import LlmRequests, OutputCollector
from quartet.engine.trtllm.times import TrtllmTimes
from quartet.errors import EngineError


class LlmSession:
    """An LLM's requests and its canary.

    Attributes:
        loaded: the LLM.
        requests: runs requests.
        num_blocks: KV blocks of a rank, known when it is ready.
    """

    def __init__(
        self,
        loaded: LoadedLlm,
        sampling_fields: frozenset[str],
        times: TrtllmTimes,
        *,
        on_ready: Callable[[LlmSession], None],
        on_output: Callable[[StepOutput], None],
        on_lost: Callable[[Exception], None],
    ) -> None:
        """Create the session on the event loop that it lives on, and where it calls back.

        Args:
            loaded: the LLM.
            sampling_fields: names of the fields that it honours.
            times: bounds of its waits.
            on_ready: the LLM has answered its first request.
            on_output: there is new output.
            on_lost: the LLM is unusable from now on; called once.
        """
        self.loaded = loaded
        self.num_blocks = loaded.num_blocks()
        self._times = times
        self._on_ready, self._on_output, self._on_lost = on_ready, on_output, on_lost
        self._is_lost = False
        self._outputs = OutputCollector(self._deliver)
        self._canary = Canary(loaded, times, self._num_moves)
        self.requests = LlmRequests(loaded, sampling_fields, self._outputs, times, self._lose)

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
            self._on_output(StepOutput(kv_events=events))
        self.num_blocks = self.requests.num_blocks = self.loaded.num_blocks()
        self.loaded.book.assume_num_blocks(self.num_blocks)
        self._on_ready(self)
        watching = [asyncio.create_task(self._run_canary()), asyncio.create_task(self._look())]
        try:
            await stop.wait()
        finally:
            for task in watching:
                task.cancel()
            await asyncio.wait(watching)
            await self.requests.close()

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
        self._on_output(output)

    def _lose(self, error: Exception) -> None:
        if not self._is_lost:
            self._is_lost = True
            self.loaded.feeds.stop()
            self._on_lost(error)
