"""The two sides of the engine benchmark, Quartet's engine and ``generate`` of transformers, and their workloads.

Both sides load the same checkpoint. A workload is random prompts and the number of output tokens of each.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers

from quartet.engine.base import EngineRequest, Generation, RequestKind, StepOutput
from quartet.engine.sampling import Sampling
from quartet.engine.scheduler import SchedulerConfig
from quartet.engine.step_engine import StepEngine
from quartet.engine.torch import TorchEngineConfig, create_runner

VOCAB_SIZE = 4096
_NUM_STREAMS = 32
_MAX_PROMPT, _MAX_OUTPUT = 512, 256
NUM_THREADS = 1
# Room for every workload, and for what the prefix cache keeps of the workloads before.
_NUM_BLOCKS = 2048
# At the usual 0.02 the two best logits now and then nearly tie, and rounding would decide the greedy token.
_INIT_STD = 0.1
Tokens = list[list[int]]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One request: greedy, exactly ``num_output_tokens``."""

    prompt: tuple[int, ...] = field(repr=False)
    num_output_tokens: int


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests that come at once.

    Attributes:
        counts_prompts: the useful tokens are the prompts', not the output's; each request wants one token.
    """

    jobs: Sequence[Job]
    counts_prompts: bool = False

    @property
    def num_useful_tokens(self) -> int:
        """Tokens that a request asked for, without padding and without tokens after a request's end."""
        return sum(len(job.prompt) if self.counts_prompts else job.num_output_tokens for job in self.jobs)


def one_stream(source: random.Random) -> Workload:
    """A single request, mostly decode."""
    return Workload(jobs=[Job(prompt=_tokens(source, 32), num_output_tokens=128)])


def equal_32(source: random.Random) -> Workload:
    """32 requests of one length: the best case of a padded batch."""
    return Workload(jobs=[Job(prompt=_tokens(source, 64), num_output_tokens=64) for _ in range(_NUM_STREAMS)])


def ragged_32(source: random.Random) -> Workload:
    """32 requests with prompts of 32 to 512 tokens and outputs of 16 to 256, evenly spread and paired at random."""
    prompts = _spread(32, _MAX_PROMPT)
    outputs = _spread(16, _MAX_OUTPUT)
    source.shuffle(prompts)
    source.shuffle(outputs)
    return Workload(
        jobs=[
            Job(prompt=_tokens(source, num_prompt), num_output_tokens=num_output)
            for num_prompt, num_output in zip(prompts, outputs, strict=True)
        ]
    )


def prefill(source: random.Random) -> Workload:
    """32 prompts of 256 tokens, one token each."""
    jobs = [Job(prompt=_tokens(source, 256), num_output_tokens=1) for _ in range(_NUM_STREAMS)]
    return Workload(jobs=jobs, counts_prompts=True)


def long_prompt(source: random.Random) -> Workload:
    """One prompt of 1500 tokens, one token."""
    return Workload(jobs=[Job(prompt=_tokens(source, 1500), num_output_tokens=1)], counts_prompts=True)


def shared_prefix_32(source: random.Random) -> Workload:
    """32 requests that begin with the same 1024 tokens, continue with 16 of their own, and want 16 output tokens."""
    prefix = _tokens(source, 1024)
    return Workload(jobs=[Job(prompt=prefix + _tokens(source, 16), num_output_tokens=16) for _ in range(_NUM_STREAMS)])


class Side(Protocol):
    """An engine that computes greedy tokens."""

    async def run(self, jobs: Sequence[Job]) -> Tokens:
        """The output of ``jobs``, which all begin together."""
        ...


def write_checkpoint(directory: Path) -> int:
    """Save a Llama with random float32 weights in ``directory``; returns how many parameters it has."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        initializer_range=_INIT_STD,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    auto: Any = transformers.AutoModelForCausalLM  # its methods are not typed
    model = auto.from_config(config)
    model.save_pretrained(directory)
    return int(model.num_parameters())


class QuartetSide:
    """A whole engine: its thread, its scheduler with prefix cache, its outputs read on the event loop."""

    def __init__(self, checkpoint: Path) -> None:
        """Load nothing before ``start``."""
        config = TorchEngineConfig(model_path=str(checkpoint), num_blocks=_NUM_BLOCKS, num_threads=NUM_THREADS)
        self._engine = StepEngine(lambda: create_runner(config), SchedulerConfig())
        self._num_requests = 0

    async def start(self) -> None:
        """Load the model."""
        await self._engine.start()

    async def run(self, jobs: Sequence[Job]) -> Tokens:
        """Submit all at once and read until the last one ends."""
        tokens: dict[int, list[int]] = {}
        for job in jobs:
            self._num_requests += 1
            tokens[self._num_requests] = []
            self._engine.submit(_request(self._num_requests, job))
        num_running = len(jobs)
        async for step in self._engine.outputs():
            _collect(step, tokens)
            num_running -= len(step.finished)
            if not num_running:
                break
        return list(tokens.values())

    async def close(self) -> None:
        """Release the model."""
        await self._engine.close()


class GenerateSide:
    """``model.generate`` on one batch, padded on the left, that runs until the longest output is complete."""

    def __init__(self, checkpoint: Path) -> None:
        """Load the model with the attention that transformers chooses."""
        auto: Any = transformers.AutoModelForCausalLM  # its methods are not typed
        self._model = auto.from_pretrained(checkpoint, dtype=torch.float32)

    async def run(self, jobs: Sequence[Job]) -> Tokens:
        """Run in a thread, as the engine does, so that the event loop is equally free on both sides."""
        return await asyncio.to_thread(self._generate, jobs)

    def logits_after(self, token_ids: Sequence[int]) -> torch.Tensor:
        """``[V]``: this side's logits of the next token."""
        with torch.inference_mode():
            logits: torch.Tensor = self._model(torch.tensor([token_ids]), logits_to_keep=1).logits
        return logits[0, -1]

    def _generate(self, jobs: Sequence[Job]) -> Tokens:
        longest = max(len(job.prompt) for job in jobs)
        padding = [longest - len(job.prompt) for job in jobs]
        output = self._model.generate(
            torch.tensor([[0] * num + list(job.prompt) for num, job in zip(padding, jobs, strict=True)]),
            attention_mask=torch.tensor([[0] * num + [1] * (longest - num) for num in padding]),
            max_new_tokens=max(job.num_output_tokens for job in jobs),
            do_sample=False,
            pad_token_id=0,
        )
        rows = output[:, longest:].tolist()
        return [row[: job.num_output_tokens] for row, job in zip(rows, jobs, strict=True)]


def _tokens(source: random.Random, num_tokens: int) -> tuple[int, ...]:
    return tuple(source.randrange(VOCAB_SIZE) for _ in range(num_tokens))


def _spread(first: int, last: int) -> list[int]:
    return [first + round((last - first) * i / (_NUM_STREAMS - 1)) for i in range(_NUM_STREAMS)]


def _request(id: int, job: Job) -> EngineRequest:
    sampling = Sampling(temperature=0.0, max_tokens=job.num_output_tokens, ignore_eos=True)
    return EngineRequest(
        id=id, kind=RequestKind.DECODE, generation=Generation(prompt_token_ids=job.prompt, sampling=sampling)
    )


def _collect(step: StepOutput, tokens: dict[int, list[int]]) -> None:
    if step.failed:
        raise step.failed[0].error
    first = 0
    for id, num_tokens in zip(step.ids, step.num_tokens, strict=True):
        tokens[id] += step.token_ids[first : first + num_tokens]
        first += num_tokens


#: By the name that the results use.
WORKLOADS: Mapping[str, Callable[[random.Random], Workload]] = {
    make.__name__: make for make in (one_stream, equal_32, ragged_32, prefill, long_prompt, shared_prefix_32)
}
