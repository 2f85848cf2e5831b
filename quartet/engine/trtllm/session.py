"""One loaded LLM at work, from its warm-up until it is stopped or dies. Lives on the event loop of the LLM's thread."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from quartet.engine.base import StepOutput
from quartet.engine.trtllm.book import engine_stats
from quartet.engine.trtllm.loading import LoadedLlm
from quartet.engine.trtllm.requests import LlmRequests, OutputCollector
from quartet.engine.trtllm.times import TrtllmTimes
from quartet.engine.trtllm.watchdog import Watchdog
from quartet.errors import EngineError

logger = logging.getLogger(__name__)

_NUM_WARM_UP_TOKENS = 4
_CANARY_SALT = "quartet-canary"
_CHECKS_PER_TIMEOUT = 4


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
            on_lost: the LLM is unusable from now on; called once, on whatever thread noticed it.
        """
        self.loaded = loaded
        self.num_blocks = loaded.num_blocks()
        self._times = times
        self._on_ready, self._on_output, self._on_lost = on_ready, on_output, on_lost
        self._is_lost = False
        self._loss_lock = threading.Lock()
        self._watchdog = Watchdog(loaded.llm, self._lose, times.watchdog_interval_s)
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
        self._watchdog.start()
        try:
            await self._run(stop)
        finally:
            self._watchdog.stop()

    async def _run(self, stop: asyncio.Event) -> None:
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
        watching = [asyncio.create_task(self._run_canary()), asyncio.create_task(self._watch_engine())]
        try:
            await stop.wait()
        finally:
            for task in watching:
                task.cancel()
            await asyncio.wait(watching)
            await self.requests.close()

    async def _watch_engine(self) -> None:
        """Check whether the engine is dead: without requests, an engine dies without a sign."""
        try:
            while not self._is_lost:
                await asyncio.sleep(self._times.check_interval_s)
                if self.loaded.is_gone:
                    self._lose(EngineError("the engine has shut down by itself"))
        except Exception as error:  # noqa: BLE001 - its death would go unnoticed; the listener logs the error
            self._lose(error)

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
        """Any thread may call it: the event loop's may be blocked in the engine that is lost."""
        with self._loss_lock:
            if self._is_lost:
                return
            self._is_lost = True
        self.loaded.feeds.stop()
        self._on_lost(error)


class Canary:
    """Small requests of the adapter's own, which prove that an engine works: before all others, and when it is quiet.

    Sends them, and knows when one is overdue. Lives on the event loop that reads the handles.
    """

    def __init__(self, loaded: LoadedLlm, times: TrtllmTimes, progress: Callable[[], int]) -> None:
        """``progress`` counts what the engine has given out for other requests."""
        self._loaded = loaded
        self._times = times
        self._progress = progress
        self._clock = time.monotonic
        self._quiet_since: float | None = None
        self.num_ended = 0

    @property
    def is_overdue(self) -> bool:
        """Whether a canary is out, and the engine has given out nothing for too long. Any thread may ask."""
        quiet_since = self._quiet_since
        return quiet_since is not None and self._clock() - quiet_since > self._times.canary_timeout_s

    async def warm_up(self) -> None:
        """Send a first request, with which the engine makes its kernels and reserves memory.

        Raises whatever the request raises, and ``TimeoutError``.
        """
        async with asyncio.timeout(self._times.warm_up_timeout_s):
            await self._send(_NUM_WARM_UP_TOKENS)

    async def run(self) -> None:
        """Send a canary to each rank whenever nothing has come out for a while. Raises the error of a dead engine."""
        while True:
            seen = self._progress()
            await asyncio.sleep(self._times.canary_interval_s)
            if self._progress() == seen:
                await self._prove(seen)

    async def _prove(self, seen: int) -> None:
        """Wait for a canary however long it takes. Meanwhile it is overdue whenever nothing comes for too long."""
        self._quiet_since = self._clock()
        watching = asyncio.create_task(self._watch(seen))
        try:
            await self._send(1)
        except (self._loaded.package.RequestError, AssertionError) as error:
            if isinstance(error, AssertionError) and self._loaded.is_gone:
                raise
            logger.warning("the engine works, but failed a request for one token: %s", error)
        finally:
            watching.cancel()
            self._quiet_since = None
        self.num_ended += 1

    async def _watch(self, seen: int) -> None:
        """Count the time from the latest output, not from the canary: a busy engine may take the canary up late."""
        while True:
            await asyncio.sleep(self._times.canary_timeout_s / _CHECKS_PER_TIMEOUT)
            now, progress = self._clock(), self._progress()
            if progress != seen:
                seen, self._quiet_since = progress, now

    async def _send(self, num_tokens: int) -> None:
        """Send a request to each rank, at the same time. Raises the error of the first one that fails."""
        ranks = range(self._loaded.arguments.num_ranks)
        sending = [asyncio.create_task(self._send_to(rank, num_tokens)) for rank in ranks]
        try:
            await asyncio.gather(*sending)
        finally:
            for task in sending:
                task.cancel()
            await asyncio.gather(*sending, return_exceptions=True)

    async def _send_to(self, rank: int, num_tokens: int) -> None:
        facts, package = self._loaded.facts, self._loaded.package
        token_id = next(token_id for token_id in range(facts.vocab_size) if token_id not in facts.eos_token_ids)
        end_id = facts.eos_token_ids[0] if facts.eos_token_ids else None
        params = package.SamplingParams(
            max_tokens=num_tokens, temperature=0.0, end_id=end_id, pad_id=end_id, ignore_eos=True, detokenize=False
        )
        # A salt of its own: with attention data parallelism TensorRT-LLM has requests of its own, of the prompt [1],
        # and a rank ends when another request shares their blocks.
        arguments: dict[str, Any] = {"sampling_params": params, "cache_salt": _CANARY_SALT}
        if package.takes_priority:
            arguments["priority"] = 1.0  # behind a long queue it would prove nothing for long
        if self._loaded.arguments.num_ranks > 1:
            arguments["scheduling_params"] = package.SchedulingParams(attention_dp_rank=rank, attention_dp_relax=False)
        # Its blocks need not be kept from being reported: so few tokens fill none.
        handle = self._loaded.llm.generate_async({"prompt_token_ids": [token_id]}, **arguments)
        self._loaded.feeds.begin()
        try:
            await handle
        except asyncio.CancelledError:
            handle.abort()
            raise
