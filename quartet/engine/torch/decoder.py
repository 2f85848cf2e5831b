"""Decoder layers run by hand: the same mathematics as transformers' modules, in fewer and cheaper operations.

For models whose every module is one that this code knows (Llama, Mistral, Qwen2 and Qwen3 and what has their layers):
RMS norm, attention with rotary embedding, RMS norm, gated SiLU. Queries, keys and values come from one product, gate
and up projection from another; residuals are added by the products themselves; wide intermediate results are made for a
few rows at a time, which then are still in the processor's cache; and past its keys and values, the last layer computes
only the rows whose logits are wanted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from quartet.engine.torch.attention import LayerAttention, PagedStep, attend
from quartet.engine.torch.batch import Segment
from quartet.engine.torch.buffers import Buffers
from quartet.engine.torch.linear import ROWS_ON_CPU, Linear
from quartet.engine.torch.pool import KeysValues, KvPool


class Norm:
    """RMS norm over the last dimension: ``x / sqrt(mean(x**2) + epsilon) * weight``."""

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        self._weight = weight
        self._epsilon = epsilon
        # The mean's divisor goes into weight and epsilon: four operations instead of seven.
        self._scaled_weight = weight * math.sqrt(weight.numel())
        self._scaled_epsilon = weight.new_tensor(math.sqrt(epsilon * weight.numel()))

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Of each row, as new memory."""
        if rows.dtype == torch.float64:  # transformers computes it in float32 even then
            normed = functional.rms_norm(rows.float(), self._weight.shape, eps=self._epsilon)
            return normed.double().mul_(self._weight)
        if rows.dtype == torch.float32 and rows.device.type == "cpu":
            length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
            return (rows / torch.hypot(length, self._scaled_epsilon)).mul_(self._scaled_weight)
        return functional.rms_norm(rows, self._weight.shape, self._weight, self._epsilon)


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """One layer's weights, and how it attends.

    Attributes:
        query_norm, key_norm: over each head (Qwen3); ``None`` in models without.
    """

    attention: LayerAttention
    input_norm: Norm
    query_key_value: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    output: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class HeadShape:
    """Heads of every layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class Decoder:
    """A causal language model over the block pool; each call is one step. Called in ``inference_mode``."""

    def __init__(
        self,
        *,
        embedding: torch.Tensor,
        layers: Sequence[DecoderLayer],
        norm: Norm,
        head: Linear,
        rotary: torch.nn.Module,
        shape: HeadShape,
    ) -> None:
        """``rotary`` is transformers' module: ``(hidden, position_ids) -> cos, sin``, each ``[1, T, head_dim]``."""
        self._embedding = embedding
        self._layers = tuple(layers)
        self._norm = norm
        self._head = head
        self._rotary = rotary
        self._shape = shape
        self._buffers = Buffers(embedding)
        self._max_rows = ROWS_ON_CPU if embedding.device.type == "cpu" else None

    def __call__(self, step: PagedStep) -> torch.Tensor:
        """Write the step's KV to the pool; logits ``[S, V]`` of the rows that sample."""
        batch = step.batch
        hidden = functional.embedding(batch.token_ids[0], self._embedding)
        if batch.media is not None:
            batch.media.put_into(hidden)
        rope = _Rope.at(self._rotary, hidden, batch.positions)
        slices = self._slices(hidden.shape[0])
        sampled = batch.sampled
        for layer in self._layers if sampled is None else self._layers[:-1]:
            heads, fresh = self._project(layer, hidden, rope, step, slices)
            self._add_attention(layer, hidden, heads, fresh, step.pool, batch.segments, slices)
            self._add_mlp(layer, hidden, slices)
        if sampled is None:
            return self._head(self._norm(hidden.index_select(0, batch.last_rows)))
        layer = self._layers[-1]
        heads, fresh = self._project(layer, hidden, rope, step, slices)
        hidden, heads = hidden.index_select(0, sampled.rows), heads.index_select(0, sampled.rows)
        slices = self._slices(hidden.shape[0])
        self._add_attention(layer, hidden, heads, fresh, step.pool, sampled.segments, slices)
        self._add_mlp(layer, hidden, slices)
        return self._head(self._norm(hidden.index_select(0, sampled.order)))

    def _slices(self, num_rows: int) -> list[slice]:
        return [slice(first, end) for first, end in _cut(num_rows, self._max_rows or max(num_rows, 1))]

    def _project(
        self, layer: DecoderLayer, hidden: torch.Tensor, rope: _Rope, step: PagedStep, slices: Sequence[slice]
    ) -> tuple[torch.Tensor, KeysValues]:
        """Queries, keys and values of all rows, ``[T, H + 2 * Hkv, D]``; the latter two are in the pool then."""
        shape, num_tokens = self._shape, hidden.shape[0]
        num_rotated = shape.num_heads + shape.num_kv_heads
        heads = self._buffers.take("heads", num_tokens, num_rotated + shape.num_kv_heads, shape.head_dim)
        for rows in slices:
            layer.query_key_value.write_to(heads[rows].flatten(1), layer.input_norm(hidden[rows]))
            self._norm_heads(layer, heads[rows])
            rope.rotate(heads[rows, :num_rotated], rows)
        keys_values = heads[:, shape.num_heads :].view(num_tokens, 2, -1, shape.head_dim).transpose(0, 1)
        step.pool.write(step.batch.slots[layer.attention.index], keys_values)
        by_head = keys_values.transpose(1, 2)[:, None]
        return heads, KeysValues(by_head[0], by_head[1])

    def _add_attention(
        self,
        layer: DecoderLayer,
        hidden: torch.Tensor,
        heads: torch.Tensor,
        fresh: KeysValues,
        pool: KvPool,
        segments: Sequence[Segment],
        slices: Sequence[slice],
    ) -> None:
        """``hidden``, ``heads`` and ``segments`` are of the same rows; ``fresh`` are the whole step's."""
        num_heads, head_dim = self._shape.num_heads, self._shape.head_dim
        query = heads[None, :, :num_heads].transpose(1, 2)
        attended = self._buffers.take("attended", hidden.shape[0], num_heads, head_dim)
        for segment in segments:
            attend(layer.attention, segment, pool, query, fresh, attended)
        for rows in slices:
            layer.output.add_to(hidden[rows], attended[rows].flatten(1))

    def _norm_heads(self, layer: DecoderLayer, heads: torch.Tensor) -> None:
        num_heads = self._shape.num_heads
        if layer.query_norm is not None:
            queries = heads[:, :num_heads]
            queries.copy_(layer.query_norm(queries))
        if layer.key_norm is not None:
            keys = heads[:, num_heads : num_heads + self._shape.num_kv_heads]
            keys.copy_(layer.key_norm(keys))

    def _add_mlp(self, layer: DecoderLayer, hidden: torch.Tensor, slices: Sequence[slice]) -> None:
        for rows in slices:
            part = hidden[rows]
            gate, up = layer.gate_up(layer.mlp_norm(part)).chunk(2, dim=1)
            layer.down.add_to(part, functional.silu(gate).mul_(up))


@dataclass(frozen=True)
class _Rope:
    """Rotary embedding of one step's positions; ``cos`` and ``sin`` are ``[T, 1, head_dim]``."""

    cos: torch.Tensor
    sin: torch.Tensor  # its first half negated

    @classmethod
    def at(cls, rotary: torch.nn.Module, hidden: torch.Tensor, positions: torch.Tensor) -> _Rope:
        cos, sin = rotary(hidden, positions)
        half = cos.shape[-1] // 2
        sin[..., :half].neg_()
        return cls(cos[0, :, None], sin[0, :, None])

    def rotate(self, heads: torch.Tensor, rows: slice) -> None:
        """In place; ``heads`` are those of ``rows``."""
        swapped = heads.roll(heads.shape[-1] // 2, -1)
        heads.mul_(self.cos[rows]).addcmul_(swapped, self.sin[rows])


def _cut(num_rows: int, max_rows: int) -> list[tuple[int, int]]:
    return [(first, min(first + max_rows, num_rows)) for first in range(0, num_rows, max_rows)]
