"""The engine that ``benchmarks.gpu_engine`` measures, in a process of its own, with nothing of a server around it.

The parent gives orders, objects whose field ``do`` is the name of a method of ``_Side``; the other fields are its
arguments.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import uvloop

from benchmarks.children import answer, orders
from benchmarks.gpu_chunk import measure_chunk
from benchmarks.gpu_sampler import measure_sampler
from quartet.engine.base import EngineRequest, FinishReason, Generation, RequestKind
from quartet.engine.guided.compiler import GrammarCompiler
from quartet.engine.runner import ModelRunner
from quartet.engine.sampling import GrammarKind, GuidedDecoding, Sampling
from quartet.engine.scheduler import SchedulerConfig
from quartet.engine.step_engine import StepEngine
from quartet.engine.torch import TorchEngineConfig, create_runner

# What the loader says once it has the weights.
_LOADER, _LOADED = "quartet.engine.torch.loader", "loaded "
# Ids of prompts: any but the tokenizer's special ones, and few, which is enough to have no prefix in common.
_IDS = range(16, 1024)
_EOS_TOKEN_ID = 1


class _LoadedAt(logging.Handler):
    """Notes when the weights were loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.at: float | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith(_LOADED):
            self.at = time.perf_counter()


def _compiler(config: TorchEngineConfig, runner: ModelRunner) -> GrammarCompiler:
    tokenizer_json = (Path(config.model_path) / "tokenizer.json").read_text(encoding="utf-8")
    # A model with random weights has no token that ends its answers; its tokenizer does.
    return GrammarCompiler(tokenizer_json, runner.vocab_size, runner.eos_token_ids or {_EOS_TOKEN_ID})


class _Side:
    """One engine, and requests that share no prefix."""

    def __init__(self) -> None:
        self._engine: StepEngine | None = None
        self._reading: asyncio.Task[None] | None = None
        self._ids = itertools.count()
        self._num_tokens = 0
        self._endings: dict[int, asyncio.Future[None]] = {}

    async def start(self, engine: Mapping[str, Any], bounds: Mapping[str, Any]) -> float:
        """Load the model and be ready; returns the seconds from when the weights were loaded."""
        loaded = _LoadedAt()
        logger = logging.getLogger(_LOADER)
        logger.addHandler(loaded)
        logger.setLevel(logging.INFO)
        if engine["device"] == "cpu":
            torch.set_num_threads(1)
        config = TorchEngineConfig(**engine)
        kinds = frozenset({RequestKind.DECODE})
        self._engine = StepEngine(
            lambda: create_runner(config), SchedulerConfig(**bounds), kinds=kinds, grammars=partial(_compiler, config)
        )
        await self._engine.start()
        self._reading = asyncio.create_task(self._read(self._engine))
        assert loaded.at is not None, "the loader has said it"
        return time.perf_counter() - loaded.at

    async def batch(
        self,
        num_requests: int,
        num_prompt_tokens: int,
        num_output_tokens: int,
        sampling: Mapping[str, Any],
        schema: Mapping[str, Any],
        num_guided: int,
    ) -> float:
        """Seconds from when all requests are submitted, at once, until the last one has ended.

        ``num_guided`` of them follow ``schema``.
        """
        guided = {"guided": GuidedDecoding(GrammarKind.JSON_SCHEMA, json.dumps(schema)), "ignore_eos": False}
        requests = [
            self._request(num_prompt_tokens, num_output_tokens, {**sampling, **(guided if number < num_guided else {})})
            for number in range(num_requests)
        ]
        began = time.perf_counter()
        await self._ended([self._submit(request) for request in requests])
        return time.perf_counter() - began

    async def streams(
        self, num_streams: int, num_prompt_tokens: int, num_output_tokens: int, warm_up_s: float, window_s: float
    ) -> float:
        """Tokens a second while so many streams decode, each followed by another."""
        tasks = [
            asyncio.create_task(self._stream(num_prompt_tokens, num_output_tokens, (number + 1) / num_streams))
            for number in range(num_streams)
        ]
        await asyncio.sleep(warm_up_s)
        num_before, began = self._num_tokens, time.perf_counter()
        await asyncio.sleep(window_s)
        tokens_per_s = (self._num_tokens - num_before) / (time.perf_counter() - began)
        for task in tasks:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in done:
            if not isinstance(outcome, asyncio.CancelledError):
                raise RuntimeError("a stream has ended") from (outcome if isinstance(outcome, Exception) else None)
        await self._ended(list(self._endings.values()))
        return tokens_per_s

    async def sampler(self, **case: Any) -> Mapping[str, Any]:
        """What a step's sampling takes: ``case`` as ``measure_sampler`` has it. Takes no engine."""
        return asdict(measure_sampler(**case))

    async def chunk(self, **case: Any) -> Mapping[str, Any]:
        """What a layer's attention takes of a chunk: ``case`` as ``measure_chunk`` has it. Takes no engine."""
        return asdict(measure_chunk(**case))

    async def close(self) -> None:
        """End the engine."""
        if self._engine is not None:
            await self._engine.close()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})

    async def _stream(self, num_prompt_tokens: int, num_output_tokens: int, first_share: float) -> None:
        """The first answers have all lengths, so that answers end one after the other."""
        num_tokens = max(1, round(first_share * num_output_tokens))
        while True:
            await asyncio.shield(self._submit(self._request(num_prompt_tokens, num_tokens, {})))
            num_tokens = num_output_tokens

    async def _ended(self, endings: Sequence[asyncio.Future[None]]) -> None:
        """Wait for these ends, or for the end of the engine."""
        assert self._reading is not None, "the engine was started"
        waiting: asyncio.Future[Any] = asyncio.gather(*endings)
        reading: asyncio.Future[Any] = self._reading
        await asyncio.wait({waiting, reading}, return_when=asyncio.FIRST_COMPLETED)
        if self._reading.done():
            self._reading.result()
        await waiting

    def _request(self, num_prompt_tokens: int, num_output_tokens: int, sampling: Mapping[str, Any]) -> EngineRequest:
        id = next(self._ids)
        prompt = random.Random(id).choices(_IDS, k=num_prompt_tokens)
        options = {"temperature": 0.0, "max_tokens": num_output_tokens, "ignore_eos": True, **sampling}
        generation = Generation(prompt_token_ids=tuple(prompt), sampling=Sampling(**options), seed=id)
        return EngineRequest(id=id, kind=RequestKind.DECODE, generation=generation)

    def _submit(self, request: EngineRequest) -> asyncio.Future[None]:
        assert self._engine is not None, "it was started"
        ending = self._endings[request.id] = asyncio.get_running_loop().create_future()
        self._engine.submit(request)
        return ending

    async def _read(self, engine: StepEngine) -> None:
        async for step in engine.outputs():
            if step.failed:
                raise step.failed[0].error
            self._num_tokens += len(step.token_ids)
            for finished in step.finished:
                if finished.reason is not FinishReason.LENGTH:
                    raise RuntimeError(f"a request ended early: {finished.reason}")
                self._endings.pop(finished.id).set_result(None)


async def _serve() -> None:
    side = _Side()
    try:
        answer("ready")
        async for order in orders():
            answer(await getattr(side, order.pop("do"))(**order))
    finally:
        await side.close()


if __name__ == "__main__":
    uvloop.run(_serve())
