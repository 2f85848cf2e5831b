"""Copies keys and values from their blocks to where they lie one after the other, for kernels that load by TMA.

A tensor memory accelerator (Hopper and later) loads a whole tile of a matrix for a single thread, and the others go on
computing; but it knows rows at one distance from each other, and no block tables. For a prompt of many queries the copy
takes less than what loading then saves.

    gather(pool, layer, tables, chunks, copies)

All as in ``attention``: nothing waits for the GPU or depends on values that are there.
"""
# No `from __future__ import annotations`: Triton's interpreter would not know the constants any more.

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

if TYPE_CHECKING:
    from quartet.engine.torch.kernels.attention import BlockTables, Chunks

# Tokens that one program copies; their keys, or their values.
_TOKENS = 16


@dataclass(frozen=True)
class Copies:
    """Keys and values of the sequences of ``Chunks``, of one layer at a time: the next one's take their place.

    Each sequence has whole spans, one after the other. Behind its last token a span is filled with zeros.

    Attributes:
        rows: ``[2, N, Hkv * D]``: keys, and values.
        span: tokens of a span; a multiple of 16.
        begins: ``[S]`` int32: row of each sequence's first token; of those that are no chunks it says nothing.
        span_seqs: ``[spans]`` int32: the sequence of each span, in the order of the rows.
        span_begins: ``[spans]`` int32: its first token, counted from the sequence's first one.
    """

    rows: torch.Tensor
    span: int
    begins: torch.Tensor
    span_seqs: torch.Tensor
    span_begins: torch.Tensor

    def descriptors(self, head_dim: int) -> list[TensorDescriptor]:
        """Keys and values, loaded a span of one head at a time."""
        return [
            TensorDescriptor(part, list(part.shape), list(part.stride()), [self.span, head_dim]) for part in self.rows
        ]


def gather(pool: torch.Tensor, layer: int, tables: "BlockTables", chunks: "Chunks", copies: Copies) -> None:
    """Fill ``copies`` with a layer's keys and values.

    Args:
        pool: ``[num_blocks, num_layers, 2, block_size, Hkv, D]``.
        layer: index of the layer.
        tables: of the step's sequences.
        chunks: which of them are copied, with their own tokens.
        copies: filled.
    """
    width = copies.rows.shape[2]
    _gather[(copies.span_seqs.shape[0], copies.span // _TOKENS, 2)](
        pool,
        copies.rows,
        tables.blocks,
        tables.begins,
        tables.contexts,
        chunks.query_begins,
        copies.span_seqs,
        copies.span_begins,
        layer * pool.stride(1),
        pool.stride(2),
        pool.stride(0),
        copies.rows.stride(0),
        WIDTH=width,
        PADDED_WIDTH=triton.next_power_of_2(width),
        SPAN=copies.span,
        TOKENS=_TOKENS,
        BLOCK_SIZE=pool.shape[3],
        num_warps=8,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _gather(  # type: ignore[no-untyped-def]
    pool,
    rows,
    tables,
    table_begins,
    contexts,
    query_begins,
    span_seqs,
    span_begins,
    layer_offset,
    values_offset,
    block_stride,
    part_stride,
    WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One program for ``TOKENS`` of a span; ``WIDTH`` are the elements of all their KV heads."""
    span = tl.program_id(0)
    share = tl.program_id(1)
    part = tl.program_id(2)
    seq = tl.load(span_seqs + span)
    length = tl.load(contexts + seq) + tl.load(query_begins + seq + 1) - tl.load(query_begins + seq)
    token = tl.load(span_begins + span) + share * TOKENS + tl.arange(0, TOKENS)
    exists = token < length
    block = tl.load(tables + tl.load(table_begins + seq) + token // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
    element = tl.arange(0, PADDED_WIDTH)
    begin = pool + layer_offset + part * values_offset
    at = begin + (block * block_stride + (token % BLOCK_SIZE) * WIDTH)[:, None] + element[None, :]
    is_element = (element < WIDTH)[None, :]
    copied = tl.load(at, mask=exists[:, None] & is_element, other=0.0)
    row = span.to(tl.int64) * SPAN + share * TOKENS + tl.arange(0, TOKENS)
    to = rows + part.to(tl.int64) * part_stride + row[:, None] * WIDTH + element[None, :]
    tl.store(to, copied, mask=is_element)
