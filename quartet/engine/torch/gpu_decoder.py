"""Decoder layers run by hand on a GPU: ``Decoder``'s mathematics, with kernels for all that is between the products.

A layer of many rows is four products (cuBLAS) and, besides attention, four kernels. A layer of a single row is five
kernels: its products read each weight once, at what memory gives, and take norms, gate and residual with them; each is
launched while the one before still runs. Nothing waits for the GPU or depends on values that are there, so that a CUDA
graph can capture a step.

``on_kernels`` makes a ``GpuDecoder`` of what ``fuse`` found, with the same weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from quartet.engine.torch.attention import LayerAttention
from quartet.engine.torch.decoder import DecoderLayer, DecoderParts, HeadShape, Linear, Norm, PlainLinear
from quartet.engine.torch.kernel_step import KernelStep
from quartet.engine.torch.kernels.attention import DTYPES
from quartet.engine.torch.kernels.gemv import multiply_row, supports_pdl
from quartet.engine.torch.kernels.layer import add_norm, multiply_gated, rotate_and_store

# Positions whose angles are computed at a time.
_NUM_ANGLES = 1 << 13


def on_kernels(parts: DecoderParts, max_positions: int) -> GpuDecoder | None:
    """Run ``parts`` by kernels; ``None`` if some of them can't be.

    Args:
        parts: as ``Decoder`` has them; no weight is copied.
        max_positions: tokens of the longest sequence.
    """
    layers = [layer for layer in map(_take_layer, parts.layers) if layer is not None]
    if parts.embedding.dtype not in DTYPES or parts.shape.head_dim % 2 or len(layers) < len(parts.layers):
        return None
    if not isinstance(parts.head, PlainLinear):
        return None
    cos_sin = _angles(parts, max_positions)
    return GpuDecoder(parts.embedding, layers, _weights(parts.norm), parts.head, cos_sin, parts.shape)


class GpuDecoder:
    """A causal language model over the block pool; each call is one step. Called in ``inference_mode``."""

    def __init__(
        self,
        embedding: torch.Tensor,
        layers: Sequence[_Layer],
        norm: _Norm,
        head: PlainLinear,
        cos_sin: torch.Tensor,
        shape: HeadShape,
    ) -> None:
        """``on_kernels`` says what they are."""
        self._embedding = embedding
        self._layers = tuple(layers)
        self._norm = norm
        self._head = head
        self._cos_sin = cos_sin
        self._shape = shape
        self._pdl = supports_pdl(embedding.device)

    def __call__(self, step: KernelStep) -> torch.Tensor:
        """Write the step's KV to the pool; logits ``[R, V]`` of the rows that sample."""
        batch = step.batch
        hidden = functional.embedding(batch.token_ids[0], self._embedding)
        if batch.media is not None:
            batch.media.put_into(hidden)
        if hidden.shape[0] == 1 and batch.sampled is None:
            return self._run_row(step, hidden)
        return self._run_rows(step, hidden)

    def _run_rows(self, step: KernelStep, hidden: torch.Tensor) -> torch.Tensor:
        rows = _Rows.like(hidden, self._layers[0], self._shape)
        sampled = step.batch.sampled
        for layer in self._layers if sampled is None else self._layers[:-1]:
            self._project(layer, step, rows)
            step.attend_rows(layer.attention, self._queries(rows.heads), rows.attended)
            self._add_attended(layer, rows)
        if sampled is None:
            order = step.batch.last_rows
        else:
            # Of the last layer, the other rows' keys and values are all that is wanted.
            layer, order = self._layers[-1], sampled.order
            self._project(layer, step, rows)
            queries = self._queries(rows.heads).index_select(0, sampled.rows)
            rows = _Rows.like(rows.hidden.index_select(0, sampled.rows), layer, self._shape)
            step.attend_rows(layer.attention, queries, rows.attended, is_sampled=True)
            self._add_attended(layer, rows)
        add_norm(rows.hidden, rows.addend, *self._norm, rows.normed)
        return self._head(rows.normed.index_select(0, order))

    def _project(self, layer: _Layer, step: KernelStep, rows: _Rows) -> None:
        """From the rows, or what was added to them last, to queries; keys and values go to the pool."""
        add_norm(rows.hidden, rows.addend if rows.has_addend else None, *layer.input_norm, rows.normed)
        layer.query_key_value.write_to(rows.heads, rows.normed)
        self._rotate_and_store(layer, step, rows.heads, pdl=False)

    def _add_attended(self, layer: _Layer, rows: _Rows) -> None:
        layer.output.write_to(rows.addend, rows.attended.flatten(1))
        add_norm(rows.hidden, rows.addend, *layer.mlp_norm, rows.normed)
        layer.gate_up.write_to(rows.gate_up, rows.normed)
        multiply_gated(rows.gate_up, rows.gated)
        layer.down.write_to(rows.addend, rows.gated)
        rows.has_addend = True

    def _run_row(self, step: KernelStep, hidden: torch.Tensor) -> torch.Tensor:
        rows = _Rows.like(hidden, self._layers[0], self._shape)
        attended, gated, pdl = rows.attended.flatten(1), rows.gated, self._pdl
        for layer in self._layers:
            into_heads, out, into_gated, down = layer.query_key_value, layer.output, layer.gate_up, layer.down
            norm = layer.input_norm
            multiply_row(hidden, into_heads.weight, rows.heads, bias=into_heads.bias, norm=norm, pdl=pdl)
            self._rotate_and_store(layer, step, rows.heads, pdl=pdl)
            step.attend_rows(layer.attention, self._queries(rows.heads), rows.attended)
            multiply_row(attended, out.weight, hidden, bias=out.bias, adds=True, pdl=pdl)
            norm = layer.mlp_norm
            multiply_row(hidden, into_gated.weight, gated, bias=into_gated.bias, norm=norm, is_gated=True, pdl=pdl)
            multiply_row(gated, down.weight, hidden, bias=down.bias, adds=True, pdl=pdl)
        logits = hidden.new_empty(1, self._head.weight.shape[0])
        multiply_row(hidden, self._head.weight, logits, bias=self._head.bias, norm=self._norm, pdl=pdl)
        return logits

    def _rotate_and_store(self, layer: _Layer, step: KernelStep, heads: torch.Tensor, *, pdl: bool) -> None:
        rotate_and_store(
            heads,
            layer.query_norm,
            layer.key_norm,
            self._cos_sin,
            step.batch.positions[0],
            step.slots,
            step.pool.tensor,
            layer.attention.index,
            pdl=pdl,
        )

    def _queries(self, heads: torch.Tensor) -> torch.Tensor:
        """``[T, H, D]`` of ``heads``, no copy."""
        return heads.view(heads.shape[0], -1, self._shape.head_dim)[:, : self._shape.num_heads]


#: Weight and epsilon.
_Norm = tuple[torch.Tensor, float]


@dataclass(frozen=True, eq=False)
class _Layer:
    """One layer's weights, and how it attends."""

    attention: LayerAttention
    input_norm: _Norm
    query_key_value: PlainLinear
    query_norm: _Norm | None
    key_norm: _Norm | None
    output: PlainLinear
    mlp_norm: _Norm
    gate_up: PlainLinear
    down: PlainLinear


@dataclass(eq=False)
class _Rows:
    """What a layer computes of a step's ``T`` rows; each layer overwrites what the one before left.

    Attributes:
        hidden: ``[T, hidden_size]``.
        addend: is yet to be added to ``hidden``, if ``has_addend``.
        normed: of the sum.
        heads: ``[T, (H + 2 * Hkv) * D]``.
        attended: ``[T, H, D]``.
        gate_up: ``[T, 2 * intermediate_size]``.
        gated: ``[T, intermediate_size]``.
    """

    hidden: torch.Tensor
    addend: torch.Tensor
    normed: torch.Tensor
    heads: torch.Tensor
    attended: torch.Tensor
    gate_up: torch.Tensor
    gated: torch.Tensor
    has_addend: bool = False

    @classmethod
    def like(cls, hidden: torch.Tensor, layer: _Layer, shape: HeadShape) -> _Rows:
        num_rows = hidden.shape[0]
        num_between = layer.down.weight.shape[1]
        return cls(
            hidden=hidden,
            addend=torch.empty_like(hidden),
            normed=torch.empty_like(hidden),
            heads=hidden.new_empty(num_rows, layer.query_key_value.weight.shape[0]),
            attended=hidden.new_empty(num_rows, shape.num_heads, shape.head_dim),
            gate_up=hidden.new_empty(num_rows, 2 * num_between),
            gated=hidden.new_empty(num_rows, num_between),
        )


def _angles(parts: DecoderParts, max_positions: int) -> torch.Tensor:
    """``[max_positions, D]``, as ``rotate_and_store`` takes it.

    The engine takes no model whose angles depend on more than the position (``support.check_config``).
    """
    half = parts.shape.head_dim // 2
    table = parts.embedding.new_empty(max_positions, 2 * half)
    for first in range(0, max_positions, _NUM_ANGLES):
        into = table[first : first + _NUM_ANGLES]
        positions = torch.arange(first, first + len(into), device=table.device)
        cos, sin = parts.rotary(table, positions[None])
        # An element and the one half a head after it turn by one angle.
        into[:, :half], into[:, half:] = cos[0, :, :half], sin[0, :, :half]
    return table


def _take_layer(layer: DecoderLayer) -> _Layer | None:
    linears = [_plain(linear) for linear in (layer.query_key_value, layer.output, layer.gate_up, layer.down)]
    plain = [linear for linear in linears if linear is not None]
    if len(plain) < len(linears) or (layer.query_norm is None) != (layer.key_norm is None):
        return None
    query_key_value, output, gate_up, down = plain
    return _Layer(
        attention=layer.attention,
        input_norm=_weights(layer.input_norm),
        query_key_value=query_key_value,
        query_norm=None if layer.query_norm is None else _weights(layer.query_norm),
        key_norm=None if layer.key_norm is None else _weights(layer.key_norm),
        output=output,
        mlp_norm=_weights(layer.mlp_norm),
        gate_up=gate_up,
        down=down,
    )


def _plain(linear: Linear) -> PlainLinear | None:
    return linear if isinstance(linear, PlainLinear) else None


def _weights(norm: Norm) -> _Norm:
    return norm.weight, norm.epsilon
