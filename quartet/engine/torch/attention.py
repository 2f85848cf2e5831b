"""Paged attention: a function that transformers' models call in place of their own.

The whole step is one flat batch without padding. New keys and values go to the pool first, then all queries attend to
the blocks of their block tables. ``Step`` is what a model needs for that: ``PagedStep`` goes segment by segment with
PyTorch's own operations, ``KernelStep`` (``kernel_step.py``) by kernels, on GPUs. No mask function is registered under
this name, so models build no mask (with one, transformers takes decode rows at positions 7, 8, 9 for one packed
sequence).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.nn import functional
from transformers import AttentionInterface

from quartet.engine.torch.batch import FlatBatch, KvSpan, Segment
from quartet.engine.torch.pool import KeysValues, KvPool

#: The name it is registered under in transformers' ``AttentionInterface``.
PAGED_ATTENTION = "quartet_paged"

# Most elements of scores that exist at once, if they are computed by hand.
_MAX_SCORES = 1 << 25


@dataclass(frozen=True, eq=False)
class LayerAttention:
    """How one layer attends."""

    index: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None  # [num_heads]: logits of a key that has no value (GPT-OSS)

    @property
    def needs_scores(self) -> bool:
        """Whether scaled_dot_product_attention cannot do it."""
        return self.softcap is not None or self.sinks is not None


class Step(Protocol):
    """The step, which every layer's attention gets as keyword ``paged``."""

    @property
    def batch(self) -> FlatBatch:
        """Its tokens."""
        ...

    @property
    def layers(self) -> list[LayerAttention]:
        """How the layers called attention, in the order in which they did; filled by ``paged_attention``."""
        ...

    def store_and_attend(self, layer: LayerAttention, fresh: KeysValues, query: torch.Tensor) -> torch.Tensor:
        """Both of the next two, as a model's modules have them.

        Args:
            layer: which layer, and how it attends.
            fresh: the step's keys and values, ``[1, Hkv, T, D]`` each.
            query: ``[1, H, T, D]``.

        Returns:
            ``[T, H, D]``.
        """
        ...

    def store(self, layer: LayerAttention, keys_values: torch.Tensor) -> None:
        """Write the step's keys and values, ``[2, T, Hkv, D]``, to the pool."""
        ...

    def attend(
        self,
        layer: LayerAttention,
        query: torch.Tensor,
        fresh: KeysValues,
        output: torch.Tensor,
        *,
        is_sampled: bool = False,
    ) -> None:
        """Let queries attend, whose keys and values are stored already.

        Args:
            layer: which layer, and how it attends.
            query: ``[1, H, T, D]``.
            fresh: the step's keys and values, ``[1, Hkv, T, D]`` each.
            output: ``[T, H, D]``, contiguous; filled.
            is_sampled: ``query`` and ``output`` have the rows of ``batch.sampled`` only.
        """
        ...


@dataclass(frozen=True)
class PagedStep:
    """A ``Step`` that gathers the blocks of each segment and has PyTorch attend to them."""

    pool: KvPool
    batch: FlatBatch
    layers: list[LayerAttention] = field(default_factory=list)

    def store_and_attend(self, layer: LayerAttention, fresh: KeysValues, query: torch.Tensor) -> torch.Tensor:
        """As ``Step`` says."""
        self.store(layer, torch.stack((fresh.keys[0], fresh.values[0])).transpose(1, 2))
        output = query.new_empty(query.shape[2], query.shape[1], query.shape[3])
        self.attend(layer, query, fresh, output)
        return output

    def store(self, layer: LayerAttention, keys_values: torch.Tensor) -> None:
        """As ``Step`` says."""
        self.pool.write(self.batch.slots[layer.index], keys_values)

    def attend(
        self,
        layer: LayerAttention,
        query: torch.Tensor,
        fresh: KeysValues,
        output: torch.Tensor,
        *,
        is_sampled: bool = False,
    ) -> None:
        """As ``Step`` says."""
        sampled = self.batch.sampled if is_sampled else None
        for segment in self.batch.segments if sampled is None else sampled.segments:
            attend(layer, segment, self.pool, query, fresh, output)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: Step,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Store the step's keys and values, then attend. The signature is that of transformers' ``AttentionInterface``.

    ``query`` is ``[1, H, T, D]``, ``key`` and ``value`` are ``[1, Hkv, T, D]``.

    Returns:
        ``[1, T, H, D]``, and no attention weights.
    """
    assert attention_mask is None, "no mask function is registered under this name"
    index: int = module.layer_idx  # type: ignore[assignment]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = LayerAttention(index, scale, sliding_window, softcap, s_aux)
    paged.layers.append(layer)
    output = paged.store_and_attend(layer, KeysValues(key, value), query)
    return output[None], None


AttentionInterface.register(PAGED_ATTENTION, paged_attention)


def attend(
    layer: LayerAttention,
    segment: Segment,
    pool: KvPool,
    query: torch.Tensor,
    fresh: KeysValues,
    output: torch.Tensor,
) -> None:
    """Let one segment's queries attend to its sequences, whose new keys and values are in the pool already.

    ``query`` ``[1, H, T, D]`` and ``fresh`` ``[1, Hkv, T, D]`` are those of the whole step; of ``output``
    ``[T, H, D]`` the segment's rows are written.
    """
    rows = slice(segment.begin, segment.end)
    queries = query[:, :, rows]
    if segment.is_whole(layer.window) and not layer.needs_scores:
        output[rows] = functional.scaled_dot_product_attention(
            queries,
            fresh.keys[:, :, rows],
            fresh.values[:, :, rows],
            is_causal=True,
            scale=layer.scale,
            enable_gqa=True,
        )[0].transpose(0, 1)
        return
    span = segment.span(layer.window)
    cached = _cut(pool.gather(span.rows[layer.index], segment.num_seqs), span)
    if segment.num_queries == 1:
        queries = queries.permute(2, 1, 0, 3)  # each row a sequence of its own
    if layer.needs_scores:
        attended = _attend_by_scores(layer, queries, cached, span.mask)
    elif segment.num_queries == 1:
        attended = _attend_decode(layer, queries, cached, span.mask)
    else:
        attended = functional.scaled_dot_product_attention(
            queries, cached.keys, cached.values, attn_mask=span.mask, scale=layer.scale, enable_gqa=True
        )
    output[rows] = attended.transpose(1, 2).flatten(0, 1)


def _cut(cached: KeysValues, span: KvSpan) -> KeysValues:
    tokens = slice(span.first_token, span.end_token)
    return KeysValues(cached.keys[:, :, tokens], cached.values[:, :, tokens])


def _attend_decode(
    layer: LayerAttention, queries: torch.Tensor, cached: KeysValues, mask: torch.Tensor | None
) -> torch.Tensor:
    # The query heads of one KV head become its queries: 2 to 7 times faster on a CPU than enable_gqa, as measured.
    num_seqs, num_heads, _, head_dim = queries.shape
    num_kv_heads = cached.keys.shape[1]
    grouped = queries.reshape(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    attended = functional.scaled_dot_product_attention(
        grouped, cached.keys, cached.values, attn_mask=mask, scale=layer.scale
    )
    return attended.flatten(1, 2).unsqueeze(2)


def _attend_by_scores(
    layer: LayerAttention, queries: torch.Tensor, cached: KeysValues, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attention with soft-capped scores (Gemma 2) or sinks, written out; in slices of queries, to keep scores small."""
    num_seqs, num_heads, num_queries, _ = queries.shape
    step = max(1, _MAX_SCORES // (num_seqs * num_heads * cached.keys.shape[2]))
    slices = [slice(first, first + step) for first in range(0, num_queries, step)]
    parts = [
        _attend_slice(layer, queries[:, :, part], cached, None if mask is None else mask[:, :, part]) for part in slices
    ]
    return torch.cat(parts, dim=2)


def _attend_slice(
    layer: LayerAttention, queries: torch.Tensor, cached: KeysValues, mask: torch.Tensor | None
) -> torch.Tensor:
    num_seqs, num_heads, num_queries, head_dim = queries.shape
    num_kv_heads = cached.keys.shape[1]
    grouped = queries.reshape(num_seqs, num_kv_heads, num_heads // num_kv_heads, num_queries, head_dim)
    scores = torch.matmul(grouped, cached.keys[:, :, None].transpose(3, 4)) * layer.scale
    if scores.dtype in (torch.bfloat16, torch.float16):
        scores = scores.float()
    if layer.softcap is not None:
        scores = torch.tanh(scores / layer.softcap) * layer.softcap
    if mask is not None:
        scores = scores + mask[:, :, None]
    weights = _softmax(scores, layer.sinks).to(queries.dtype)
    return torch.matmul(weights, cached.values[:, :, None]).flatten(1, 2)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over keys; a head's sink takes its share of the weight and adds nothing to the output."""
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(scores.dtype).view(1, scores.shape[1], scores.shape[2], 1, 1)
    column = column.expand(*scores.shape[:1], -1, -1, scores.shape[3], 1)
    return torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
