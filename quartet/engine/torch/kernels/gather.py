"""Copies keys and values from their blocks to where they lie one after the other, for kernels that load by TMA.

A tensor memory accelerator (Hopper and later) loads a whole tile of a matrix for a single thread, and the others go on
computing; but it knows rows at one distance from each other, and no block tables. For a prompt of many queries the copy
takes less than what loading then saves.

    gather(pool, layer, tables, chunks, copies)

All as in ``attention``: nothing waits for the GPU or depends on values that are there.
"""
# No `from __future__ import annotations`: Triton's interpreter would not know the constants any more.

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

if TYPE_CHECKING:
    from quartet.engine.torch.kernels.attention import BlockTables, Chunks

_LOG = logging.getLogger(__name__)

# Tokens that one program copies; their keys, or their values.
_TOKENS = 16
# Room grows by so many rows.
_ROWS_ROUNDED = 4096


class Room:
    """Memory for the copies of one step after the other, up to a bound; it grows to what the largest step took."""

    def __init__(self, pool: torch.Tensor, max_size_bytes: int) -> None:
        """Of the dtype and on the device of ``pool``, for rows of its heads."""
        self._like = pool
        self._width = pool.shape[4] * pool.shape[5]
        self._max_rows = max_size_bytes // (2 * self._width * pool.dtype.itemsize)
        self._rows = pool.new_empty(2, 0, self._width)

    def holds(self, num_rows: int) -> bool:
        """Whether so many rows are within the bound."""
        return num_rows <= self._max_rows

    def rows(self, num_rows: int) -> torch.Tensor | None:
        """``[2, num_rows, Hkv * D]``, uninitialised; ``None``, from now on: there is no memory.

        Steps run one after the other, on one stream: what the last one has there is no longer read.
        """
        if not self.holds(num_rows):
            return None
        if num_rows > self._rows.shape[1]:
            wanted = min(-(-num_rows // _ROWS_ROUNDED) * _ROWS_ROUNDED, self._max_rows)
            self._rows = self._like.new_empty(2, 0, self._width)  # give the smaller one back first
            try:
                self._rows = self._like.new_empty(2, wanted, self._width)
            except torch.OutOfMemoryError:
                _LOG.warning("keys and values of prompts are read in their blocks: there is no memory to copy them")
                self._max_rows = 0
                return None
        return self._rows[:, :num_rows]


@dataclass(frozen=True)
class Copies:
    """Keys and values of the sequences of ``Chunks``, of one layer at a time: the next one's take their place.

    Each sequence has whole spans, one after the other. Behind its last token a span is filled with zeros.

    Attributes:
        room: for them; nothing is taken of it before a layer without a window comes.
        span: tokens of a span; a multiple of 16.
        begins: ``[S]`` int32: row of each sequence's first token; of those that are no chunks it says nothing.
        span_seqs: ``[spans]`` int32: the sequence of each span, in the order of the rows.
        span_begins: ``[spans]`` int32: its first token, counted from the sequence's first one.
    """

    room: Room
    span: int
    begins: torch.Tensor
    span_seqs: torch.Tensor
    span_begins: torch.Tensor


def gather(
    pool: torch.Tensor, layer: int, tables: "BlockTables", chunks: "Chunks", copies: Copies
) -> list[TensorDescriptor] | None:
    """Copy a layer's keys and values.

    Args:
        pool: ``[num_blocks, num_layers, 2, block_size, Hkv, D]``.
        layer: index of the layer.
        tables: of the step's sequences.
        chunks: which of them are copied, with their own tokens.
        copies: where to, and whose.

    Returns:
        Keys and values, loaded a span of one head at a time; ``None``: there is no memory.
    """
    assert copies.span % _TOKENS == 0, "a program copies so many tokens of a span"
    rows = copies.room.rows(copies.span * copies.span_seqs.shape[0])
    if rows is None:
        return None
    width, head_dim = rows.shape[2], pool.shape[5]
    _gather[(copies.span_seqs.shape[0], copies.span // _TOKENS, 2)](
        pool,
        rows,
        tables.blocks,
        tables.begins,
        tables.contexts,
        chunks.query_begins,
        copies.span_seqs,
        copies.span_begins,
        layer * pool.stride(1),
        pool.stride(2),
        pool.stride(0),
        rows.stride(0),
        WIDTH=width,
        PADDED_WIDTH=triton.next_power_of_2(width),
        SPAN=copies.span,
        TOKENS=_TOKENS,
        BLOCK_SIZE=pool.shape[3],
        num_warps=8,
    )
    return [TensorDescriptor(part, list(part.shape), list(part.stride()), [copies.span, head_dim]) for part in rows]


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
