"""The least that prompts cost an engine on these kernels: products with weights, and attention; nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn import functional

from benchmarks.engine_sides import Job, Tokens
from quartet.engine.torch.decoder import ROWS_ON_CPU, Linear, PlainLinear, best_order


@dataclass(frozen=True, eq=False)
class _Layer:
    """Random weights in one layer's shapes. Each layer has its own, because all layers compete for one CPU cache."""

    query_key_value: Linear
    output: Linear
    gate_up: Linear
    down: Linear


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


def _linear(num_in: int, num_out: int) -> Linear:
    weight = torch.randn(num_out, num_in)
    order = best_order(weight)
    return PlainLinear(weight, None) if order is None else order(weight, None)
