"""The sides of the engine benchmark: Quartet's engine, ``generate`` of transformers, and the bare kernels; workloads.

Quartet and ``generate`` load the same checkpoint. ``Floor`` is the least that prompts cost an engine on these kernels:
products with weights, and attention; nothing else. A workload is random prompts and how many output tokens each wants.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from torch.nn import functional

from quartet.engine.base import EngineRequest, Generation, RequestKind, StepOutput
from quartet.engine.sampling import Sampling
from quartet.engine.scheduler import SchedulerConfig
from quartet.engine.step_engine import StepEngine
from quartet.engine.torch import TorchEngineConfig, create_runner
from quartet.engine.torch.decoder import ROWS_ON_CPU, Linear, PlainLinear, best_order

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


class Floor:
    """Calls the kernels that the engine calls for whole prompts, on as many rows, and discards the results.

    It has no norm, rotary embedding, activation or embedding; it writes no KV, schedules nothing and chooses no token.
    """

    def __init__(self, checkpoint: Path, *, max_num_batched_tokens: int) -> None:
        """Make random weights in the checkpoint's shapes.

        Args:
            checkpoint: directory with a config.json.
            max_num_batched_tokens: limit of one step of the engine.
        """
        auto: Any = transformers.AutoConfig  # its methods are not typed
        config = auto.from_pretrained(checkpoint)
        self._budget = max_num_batched_tokens
        self._num_heads: int = config.num_attention_heads
        self._num_kv_heads: int = config.num_key_value_heads
        self._head_dim: int = config.hidden_size // config.num_attention_heads
        self._layers = [self._make_layer(config) for _ in range(config.num_hidden_layers)]
        self._head = _linear(config.hidden_size, config.vocab_size)
        self._hidden = torch.randn(max_num_batched_tokens, config.hidden_size)
        num_heads = self._num_heads + 2 * self._num_kv_heads
        self._heads = torch.empty(max_num_batched_tokens, num_heads * self._head_dim)
        self._activated = torch.randn(ROWS_ON_CPU, config.intermediate_size)

    async def run(self, jobs: Sequence[Job]) -> Tokens:
        """Do the least work that ``jobs`` need, in a thread, as the engine does; returns no tokens.

        Raises:
            ValueError: a job wants more than one token, or a prompt does not fit in a step.
        """
        await asyncio.to_thread(self._run, list(self._steps(jobs)))
        return []

    def _steps(self, jobs: Sequence[Job]) -> Iterator[list[int]]:
        """Lengths of the prompts in each step."""
        lengths: list[int] = []
        for job in jobs:
            if job.num_output_tokens != 1 or len(job.prompt) > self._budget:
                raise ValueError(f"a floor has prompts of up to {self._budget} tokens and one token out, not {job}")
            if sum(lengths) + len(job.prompt) > self._budget:
                yield lengths
                lengths = []
            lengths.append(len(job.prompt))
        yield lengths

    @torch.inference_mode()
    def _run(self, steps: Sequence[Sequence[int]]) -> None:
        for lengths in steps:
            hidden = self._hidden[: sum(lengths)]
            *layers, last = self._layers
            for layer in layers:
                self._attend(layer, hidden, lengths, is_causal=True)
                self._run_mlp(layer, hidden)
            # Of the last layer only the rows whose logits are needed count: one of each prompt.
            self._attend(last, hidden, lengths, is_causal=False)
            self._run_mlp(last, hidden[: len(lengths)])
            self._head(hidden[: len(lengths)])

    def _attend(self, layer: _Layer, hidden: torch.Tensor, lengths: Sequence[int], *, is_causal: bool) -> None:
        """Not causal: compute only the last query of each prompt."""
        for rows, output in zip(
            torch.split(hidden, ROWS_ON_CPU), torch.split(self._heads[: len(hidden)], ROWS_ON_CPU), strict=True
        ):
            layer.query_key_value.write_to(output, rows)
        heads = self._heads[: len(hidden)].view(len(hidden), -1, self._head_dim).transpose(0, 1)[None]
        sizes = [self._num_heads, self._num_kv_heads, self._num_kv_heads]
        for part in torch.split(heads, list(lengths), dim=2):
            query, key, value = torch.split(part, sizes, dim=1)
            queries = query if is_causal else query[:, :, -1:]
            functional.scaled_dot_product_attention(queries, key, value, is_causal=is_causal, enable_gqa=True)

    def _run_mlp(self, layer: _Layer, hidden: torch.Tensor) -> None:
        for rows in torch.split(hidden, ROWS_ON_CPU):
            layer.output(rows)
            layer.gate_up(rows)
            layer.down(self._activated[: len(rows)])

    def _make_layer(self, config: Any) -> _Layer:
        hidden, wide = config.hidden_size, config.intermediate_size
        return _Layer(
            query_key_value=_linear(hidden, (self._num_heads + 2 * self._num_kv_heads) * self._head_dim),
            output=_linear(hidden, hidden),
            gate_up=_linear(hidden, 2 * wide),
            down=_linear(wide, hidden),
        )


@dataclass(frozen=True, eq=False)
class _Layer:
    """Random weights in one layer's shapes. Each layer has its own, because all layers compete for one CPU cache."""

    query_key_value: Linear
    output: Linear
    gate_up: Linear
    down: Linear


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


def _linear(num_in: int, num_out: int) -> Linear:
    weight = torch.randn(num_out, num_in)
    order = best_order(weight)
    return PlainLinear(weight, None) if order is None else order(weight, None)


#: By the name that the results use.
WORKLOADS: Mapping[str, Callable[[random.Random], Workload]] = {
    make.__name__: make for make in (one_stream, equal_32, ragged_32, prefill, long_prompt, shared_prefix_32)
}
