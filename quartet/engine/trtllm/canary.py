"""Small requests of the adapter's own, which prove that an engine works: before all others, and when it is quiet."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from quartet.engine.trtllm.loading import LoadedLlm
from quartet.engine.trtllm.times import TrtllmTimes

logger = logging.getLogger(__name__)

_NUM_WARM_UP_TOKENS = 4
_LOOKS_PER_TIMEOUT = 4


class Canary:
    """Sends canaries, and knows when one is overdue. Lives on the event loop that reads the handles."""

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
        except self._loaded.package.RequestError as error:
            logger.warning("the engine works, but failed a request for one token: %s", error)
        finally:
            watching.cancel()
            self._quiet_since = None
        self.num_ended += 1

    async def _watch(self, seen: int) -> None:
        """Count the time from the latest output, not from the canary: a busy engine may take the canary up late."""
        while True:
            await asyncio.sleep(self._times.canary_timeout_s / _LOOKS_PER_TIMEOUT)
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
        arguments: dict[str, Any] = {"sampling_params": params}
        if self._loaded.arguments.num_ranks > 1:
            arguments["scheduling_params"] = package.SchedulingParams(attention_dp_rank=rank, attention_dp_relax=False)
        handle = self._loaded.llm.generate_async({"prompt_token_ids": [token_id]}, **arguments)
        self._loaded.feeds.begin()
        try:
            await handle
        except asyncio.CancelledError:
            handle.abort()
            raise
