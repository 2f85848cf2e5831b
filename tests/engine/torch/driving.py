"""Drives whole engines on the torch runner."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from quartet.engine.base import EngineRequest, Failed, Finished, Prefilled, StepOutput
from quartet.engine.guided.compiler import GrammarCompiler
from quartet.engine.runner import ModelRunner
from quartet.engine.sampling import PromptLogprobs, TokenLogprobs
from quartet.engine.scheduler import SchedulerConfig
from quartet.engine.step_engine import StepEngine
from quartet.engine.torch import TorchEngineConfig, create_runner
from quartet.transfer.base import Puller

WAIT_S = 120.0
BLOCK_SIZE = 4


@dataclass
class Outcome:
    """All that came of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    finished: Finished | None = None
    prefilled: Prefilled | None = None
    failed: Failed | None = None

    @property
    def has_ended(self) -> bool:
        return (self.finished or self.prefilled or self.failed) is not None


@asynccontextmanager
async def torch_engine(
    model_path: Path,
    *,
    dtype: str = "float64",
    device: str = "cpu",
    num_blocks: int = 512,
    max_num_batched_tokens: int = 512,
    puller: Puller | None = None,
    random_seed: int | None = None,
    cuda_graph_max_batch_size: int = 256,
    follows_grammars: bool = False,
) -> AsyncIterator[StepEngine]:
    config = TorchEngineConfig(
        model_path=str(model_path),
        dtype=dtype,
        device=device,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_threads=1,
        random_seed=random_seed,
        cuda_graph_max_batch_size=cuda_graph_max_batch_size,
    )
    scheduling = SchedulerConfig(
        max_num_seqs=min(64, max_num_batched_tokens), max_num_batched_tokens=max_num_batched_tokens
    )
    grammars = partial(_compiler, model_path) if follows_grammars else None
    engine = StepEngine(lambda: create_runner(config), scheduling, puller=puller, grammars=grammars)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


def _compiler(model_path: Path, runner: ModelRunner) -> GrammarCompiler:
    source = (model_path / "tokenizer.json").read_text()
    return GrammarCompiler(source, runner.vocab_size, runner.eos_token_ids)


async def run_all(engine: StepEngine, requests: Sequence[EngineRequest], *, may_fail: bool = False) -> list[Outcome]:
    """Submit all at once; their outcomes, in order."""
    outcomes = {request.id: Outcome() for request in requests}
    for request in requests:
        engine.submit(request)
    async with asyncio.timeout(WAIT_S):
        async for step in engine.outputs():
            _collect(step, outcomes)
            if all(outcome.has_ended for outcome in outcomes.values()):
                break
    for outcome in outcomes.values():
        assert outcome.failed is None or may_fail, outcome.failed
    return [outcomes[request.id] for request in requests]


def _collect(step: StepOutput, outcomes: dict[int, Outcome]) -> None:
    first = 0
    for id, num_tokens in zip(step.ids, step.num_tokens, strict=True):
        outcomes[id].token_ids += step.token_ids[first : first + num_tokens]
        first += num_tokens
    for report in step.logprobs:
        outcomes[report.id].logprobs += report.tokens
    for prompt in step.prompt_logprobs:
        assert not (outcomes[prompt.id].prompt_logprobs or outcomes[prompt.id].token_ids[1:]), "once, and no later"
        outcomes[prompt.id].prompt_logprobs = prompt.logprobs
    for name in ("finished", "prefilled", "failed"):
        for item in getattr(step, name):
            setattr(outcomes[item.id], name, item)
