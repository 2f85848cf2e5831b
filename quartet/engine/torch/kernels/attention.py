"""Attention over the block pool as kernels: keys and values go in, and queries attend to whole sequences in it.

The functions are plain: tensors in, tensors filled, no state. Nothing of them waits for the GPU or depends on values
that are there, so that a CUDA graph can capture every call.

    store_kv(key, value, slots, pool, layer)
    attend_decode(query, output, pool, layer, tables, scores, num_splits=1)
    attend_chunks(query, output, pool, layer, tables, chunks, scores)

Chunks of many queries attend to copies of their sequences' keys and values (``gather``), where ``Chunks`` has room for
them.

``key`` and ``value`` are ``[T, Hkv, D]``, ``query`` and ``output`` ``[T, H, D]``, ``pool`` is ``KvPool.tensor``. Any
number of query heads may share a KV head, ``D`` may be any even number, and the dtype bfloat16, float16 or float32.

The algorithm is that of FlashAttention-2 (Dao 2023, arXiv 2307.08691) over pages; for single queries the keys are split
among programs (Flash-Decoding). The queries of one KV head's group are rows of one product.
"""
# No `from __future__ import annotations`: Triton's interpreter would not know the constants any more.

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from quartet.engine.torch.kernels.gather import Copies, gather

#: Dtypes that the kernels compute in.
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

#: In how many parts the keys of a decoding sequence may be split. Each is a kernel of its own.
SPLITS = (1, 8, 32)

#: The most of them for prompts, whose queries make many programs.
MAX_CHUNK_SPLITS = 8

_LOG2_E = 1.4426950408889634
# A split of fewer tokens costs more than it saves: what it found must be merged.
_MIN_SPLIT_TOKENS = 256
# A sequence this much longer than others would keep a few programs busy while the rest of the GPU is idle.
_MAX_SPLIT_TOKENS = 1024
# Programs of a decode step that are on the way at a time on one multiprocessor.
_PROGRAMS_PER_SM = 4
# More keys on their way at a time gained nothing, as measured.
_MAX_STAGES = 5
# Of copies, as many keys at a time as leave room for as many turns: more turns took longer, fewer much longer.
_NUM_COPIED_STAGES = 3
_COPIED_SPANS = (128, 64, 32)
# What tells that loads by TMA are done has room beside the queries, keys and values.
_BARRIERS_SIZE_BYTES = 1 << 10
# Of shared memory, for what a program exchanges besides queries, keys and values.
_SPARE_SHARED_SIZE_BYTES = 8 << 10


@dataclass(frozen=True)
class Scores:
    """How scores of queries and keys are computed, in one layer.

    Attributes:
        scale: factor of ``query @ key``.
        window: a query sees as many keys, its own included; ``None``: all before it.
        softcap: scores become ``tanh(score / softcap) * softcap``.
        sinks: ``[H]``: logits of a key that has no value (GPT-OSS).
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True)
class BlockTables:
    """Where the sequences of a step have their keys and values.

    Attributes:
        blocks: ``[N]`` int32: the block tables of all sequences, one after the other.
        begins: ``[S]`` int32: where in ``blocks`` each begins.
        contexts: ``[S]`` int32: tokens of each before its first query; -1: it is no sequence, and its output is 0.
    """

    blocks: torch.Tensor
    begins: torch.Tensor
    contexts: torch.Tensor


@dataclass(frozen=True)
class Chunks:
    """Queries of prompts: the sequences of ``BlockTables`` that have several, cut in tiles.

    Attributes:
        num_queries: of a tile, as ``queries_per_tile`` says; a sequence's last tile may have fewer.
        first_row: of these sequences, which come last.
        num_splits: in how many parts the keys are split; one of ``SPLITS``.
        query_begins: ``[S + 1]`` int32: row of each sequence's first query, and the row after the last one's.
        tile_seqs: ``[tiles]`` int32: which sequence each tile is of.
        tile_begins: ``[tiles]`` int32: its first query, counted from the sequence's first one.
        copies: where keys and values of layers without a window are copied first; ``None``: they are read in the pool.
    """

    num_queries: int
    first_row: int
    num_splits: int
    query_begins: torch.Tensor
    tile_seqs: torch.Tensor
    tile_begins: torch.Tensor
    copies: Copies | None = None


def num_splits(num_rows: int, num_kv_heads: int, longest: int, num_sms: int) -> int:
    """In how many parts to split the keys of decoding sequences, as few kinds as ``SPLITS`` has.

    Args:
        num_rows: of the step.
        num_kv_heads: of the model, on this GPU.
        longest: tokens of the longest sequence.
        num_sms: multiprocessors of the GPU.
    """
    for_the_gpu = _PROGRAMS_PER_SM * num_sms // (num_rows * num_kv_heads)
    for_the_longest = longest // _MAX_SPLIT_TOKENS
    wanted = min(max(for_the_gpu, for_the_longest), longest // _MIN_SPLIT_TOKENS)
    return next((splits for splits in SPLITS if splits >= wanted), SPLITS[-1])


def num_chunk_splits(num_tiles: int, num_kv_heads: int, longest: int, num_sms: int) -> int:
    """As ``num_splits``, for a prompt's tiles: a short rest of a long conversation leaves most of the GPU idle."""
    is_small = 4 * num_tiles * num_kv_heads <= num_sms
    return MAX_CHUNK_SPLITS if is_small and longest >= MAX_CHUNK_SPLITS * _MIN_SPLIT_TOKENS else 1


def store_kv(key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, pool: torch.Tensor, layer: int) -> None:
    """Write a layer's new keys and values to the pool.

    Args:
        key: ``[T, Hkv, D]``, any strides but the last one.
        value: the same.
        slots: ``[T]`` int64: ``block * block_size + offset`` of each token; negative: it is not stored.
        pool: ``[num_blocks, num_layers, 2, block_size, Hkv, D]``.
        layer: index of the layer.
    """
    num_tokens, num_kv_heads, head_dim = key.shape
    if not num_tokens:
        return
    width = num_kv_heads * head_dim
    _store[(num_tokens,)](
        key,
        value,
        slots,
        pool,
        layer * pool.stride(1),
        pool.stride(2),
        pool.stride(0),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        WIDTH=width,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=pool.shape[3],
        PADDED_WIDTH=triton.next_power_of_2(width),
        num_warps=4 if width > 256 else 1,
    )


def attend_decode(
    query: torch.Tensor,
    output: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    tables: BlockTables,
    scores: Scores,
    num_splits: int = 1,
) -> None:
    """Let single queries attend: row ``i`` is that of sequence ``i``, whose own key is in the pool already.

    Args:
        query: ``[N, H, D]``, any strides but the last one; ``N`` may be less than the tables' sequences.
        output: ``[N, H, D]``, contiguous; filled.
        pool: ``[num_blocks, num_layers, 2, block_size, Hkv, D]``.
        layer: index of the layer.
        tables: of the sequences; ``contexts`` are the queries' positions.
        scores: how the layer attends.
        num_splits: one of ``SPLITS``.
    """
    num_rows = query.shape[0]
    if not num_rows:
        return
    shape, parts = _Shape.of(query, pool), _Parts.empty(query, num_splits)
    _launch(shape, decode_tile(shape), num_rows, query, output, pool, layer, tables, scores, parts=parts)
    if parts is not None:
        parts.merge(output, first_row=0)


def attend_chunks(
    query: torch.Tensor,
    output: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    tables: BlockTables,
    chunks: Chunks,
    scores: Scores,
) -> None:
    """Let the queries of ``chunks`` attend, whose own keys are in the pool already.

    ``query`` and ``output`` hold all rows of the step, of which only those of ``chunks`` are read and written; all else
    as in ``attend_decode``.
    """
    num_tiles = chunks.tile_seqs.shape[0]
    if not num_tiles:
        return
    shape = _Shape.of(query, pool)
    tile = chunk_tile(shape, _shared_size_bytes(query.device))
    assert tile.num_queries == chunks.num_queries, "tiles are cut for layers with other heads"
    if chunks.copies is not None and scores.window is None:
        copied = gather(pool, layer, tables, chunks, chunks.copies)
        if copied is not None:
            tile = replace(tile, num_keys=chunks.copies.span, num_stages=_NUM_COPIED_STAGES)
            _launch(shape, tile, num_tiles, query, output, pool, layer, tables, scores, chunks=chunks, copied=copied)
            return
    parts = _Parts.empty(query, chunks.num_splits)
    _launch(shape, tile, num_tiles, query, output, pool, layer, tables, scores, chunks=chunks, parts=parts)
    if parts is not None:
        parts.merge(output, chunks.first_row)


def copied_span(num_heads: int, pool: torch.Tensor) -> int | None:
    """``Copies.span`` for so many query heads and keys and values of this pool; ``None``: copies gain nothing."""
    shape = _Shape(num_heads, pool.shape[4], pool.shape[5], pool.dtype)
    if not _has_tma(pool.device) or shape.dtype == torch.float32 or shape.padded_dim != shape.head_dim:
        return None
    shared = _shared_size_bytes(pool.device)
    row_size_bytes = shape.head_dim * shape.dtype.itemsize
    most = (shared - _BARRIERS_SIZE_BYTES) // row_size_bytes - chunk_tile(shape, shared).num_rows
    return next((span for span in _COPIED_SPANS if 2 * span * _NUM_COPIED_STAGES <= most), None)


def queries_per_tile(num_heads: int, pool: torch.Tensor) -> int:
    """How many queries a tile of ``Chunks`` has, for so many query heads and keys and values of this pool."""
    shape = _Shape(num_heads, pool.shape[4], pool.shape[5], pool.dtype)
    return chunk_tile(shape, _shared_size_bytes(pool.device)).num_queries


@dataclass(frozen=True)
class _Shape:
    """What a kernel is compiled for."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, query: torch.Tensor, pool: torch.Tensor) -> "_Shape":
        return cls(query.shape[1], pool.shape[4], query.shape[2], query.dtype)

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def padded_group(self) -> int:
        return int(triton.next_power_of_2(self.group))

    @property
    def padded_dim(self) -> int:
        return _padded_dim(self.head_dim)


def _padded_dim(head_dim: int) -> int:
    return max(16, int(triton.next_power_of_2(head_dim)))  # 16: a product's least


@dataclass(frozen=True)
class Tile:
    """What one program computes at a time.

    Attributes:
        num_queries: of a sequence; each has a row for every head of the group.
        num_rows: of the product, padded.
        num_keys: of one turn.
        num_warps: of a program.
        num_stages: turns whose keys are on their way at a time.
    """

    num_queries: int
    num_rows: int
    num_keys: int
    num_warps: int
    num_stages: int


@functools.cache
def decode_tile(shape: _Shape) -> Tile:
    """One query; as measured on an H200, with several programs on a multiprocessor."""
    num_rows = max(16, shape.padded_group)
    if shape.dtype == torch.float32:
        return Tile(1, num_rows, 32, 4, 2)
    if shape.padded_dim > 128:
        return Tile(1, num_rows, 32, 4, 3)
    return Tile(1, num_rows, 64, 2, 3)


@functools.cache
def chunk_tile(shape: _Shape, shared_size_bytes: int) -> Tile:
    """Many queries, whose program has a multiprocessor for itself; as measured on an H200."""
    if shape.dtype == torch.float32:  # computed exactly, which is slow: it is for comparisons
        num_queries = max(1, 16 // shape.padded_group)
        return Tile(num_queries, max(16, num_queries * shape.padded_group), 32, 4, 2)
    num_keys = 64 if shape.padded_dim <= 128 else 32
    row_size_bytes = shape.padded_dim * shape.dtype.itemsize
    most_rows = 128 if 3 * 128 * row_size_bytes <= shared_size_bytes else 64
    num_queries = max(1, most_rows // shape.padded_group)
    num_rows = max(16, num_queries * shape.padded_group)
    spare = shared_size_bytes - num_rows * row_size_bytes - _SPARE_SHARED_SIZE_BYTES
    num_stages = 1 + spare // (2 * num_keys * row_size_bytes)
    return Tile(num_queries, num_rows, num_keys, 8, min(max(2, num_stages), _MAX_STAGES))


@functools.cache
def _shared_size_bytes(device: torch.device) -> int:
    """Shared memory that one program may have."""
    if device.type != "cuda":
        return 227 << 10  # the interpreter has no bound: a Hopper's
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)


@functools.cache
def _has_tma(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


@dataclass(frozen=True)
class _Parts:
    """What each split found.

    Attributes:
        outputs: ``[N, H, splits, D]`` float32.
        weights: ``[N, H, splits]`` float32: logarithm, to base 2, of the sum of its weights.
    """

    num_splits: int
    outputs: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def empty(cls, query: torch.Tensor, num_splits: int) -> "_Parts | None":
        """For all rows of ``query``; ``None``: there is nothing to split."""
        if num_splits == 1:
            return None
        num_rows, num_heads, head_dim = query.shape
        outputs = query.new_empty(num_rows, num_heads, num_splits, head_dim, dtype=torch.float32)
        return cls(num_splits, outputs, outputs.new_empty(num_rows, num_heads, num_splits))

    def merge(self, output: torch.Tensor, first_row: int) -> None:
        """Fill the rows of ``output`` from ``first_row`` on."""
        num_rows, num_heads, head_dim = output.shape
        _merge[(num_rows - first_row, num_heads)](
            self.outputs[first_row:],
            self.weights[first_row:],
            output[first_row:],
            SPLITS=self.num_splits,
            HEAD_DIM=head_dim,
            PADDED_DIM=_padded_dim(head_dim),
            num_warps=4,
        )


def _launch(
    shape: _Shape,
    tile: Tile,
    num_tiles: int,
    query: torch.Tensor,
    output: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    tables: BlockTables,
    scores: Scores,
    *,
    chunks: Chunks | None = None,
    parts: _Parts | None = None,
    copied: Sequence[TensorDescriptor] | None = None,
) -> None:
    unused = tables.contexts
    copied_keys, copied_values = (None, None) if copied is None else copied
    splits = 1 if parts is None else parts.num_splits
    # With a softcap, the factor of base 2 comes after it.
    scale = scores.scale if scores.softcap else scores.scale * _LOG2_E
    _attend[(shape.num_kv_heads, num_tiles, splits)](
        query,
        output,
        output if parts is None else parts.outputs,
        output if parts is None else parts.weights,
        pool,
        tables.blocks,
        tables.begins,
        tables.contexts,
        unused if chunks is None else chunks.query_begins,
        unused if chunks is None else chunks.tile_seqs,
        unused if chunks is None else chunks.tile_begins,
        unused if scores.sinks is None else scores.sinks,
        copied_keys,
        copied_values,
        None if copied is None or chunks is None or chunks.copies is None else chunks.copies.begins,
        float(scale),
        float(scores.softcap or 1.0),
        layer * pool.stride(1),
        pool.stride(2),
        pool.stride(0),
        query.stride(0),
        query.stride(1),
        **_constants(shape, tile, scores, pool.shape[3], splits, is_decode=chunks is None),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=True,
    )


def _constants(
    shape: _Shape, tile: Tile, scores: Scores, block_size: int, splits: int, *, is_decode: bool
) -> dict[str, int | bool | str]:
    """What ``_attend`` is compiled for, by name."""
    return {
        "NUM_HEADS": shape.num_heads,
        "NUM_KV_HEADS": shape.num_kv_heads,
        "GROUP": shape.group,
        "PADDED_GROUP": shape.padded_group,
        "QUERIES": tile.num_queries,
        "ROWS": tile.num_rows,
        "KEYS": tile.num_keys,
        "BLOCK_SIZE": block_size,
        "HEAD_DIM": shape.head_dim,
        "PADDED_DIM": shape.padded_dim,
        "WINDOW": scores.window or 0,
        "HAS_SOFTCAP": bool(scores.softcap),
        "HAS_SINKS": scores.sinks is not None,
        "SPLITS": splits,
        "IS_DECODE": is_decode,
        "PRECISION": "ieee" if shape.dtype == torch.float32 else "tf32",
    }


@triton.jit  # type: ignore[untyped-decorator]
def _store(  # type: ignore[no-untyped-def]
    keys,
    values,
    slots,
    pool,
    layer_offset,
    values_offset,
    block_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
):
    """One program a token; ``WIDTH`` are the elements of all its KV heads."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    element = tl.arange(0, PADDED_WIDTH)
    # Both conditions in one: Triton's interpreter takes no vector and a scalar of them.
    is_stored = element < tl.where(slot < 0, 0, WIDTH)
    head = element // HEAD_DIM
    inside = element % HEAD_DIM
    key = tl.load(keys + token * key_token_stride + head * key_head_stride + inside, mask=is_stored)
    value = tl.load(values + token * value_token_stride + head * value_head_stride + inside, mask=is_stored)
    begin = pool + layer_offset + (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * WIDTH
    tl.store(begin + element, key, mask=is_stored)
    tl.store(begin + values_offset + element, value, mask=is_stored)


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    queries,
    output,
    partial,
    weights,
    pool,
    tables,
    table_begins,
    contexts,
    query_begins,
    tile_seqs,
    tile_begins,
    sinks,
    copied_keys,
    copied_values,
    copied_begins,
    scale,
    softcap,
    layer_offset,
    values_offset,
    block_stride,
    query_token_stride,
    query_head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SPLITS: tl.constexpr,
    IS_DECODE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A program is one KV head's group of heads of one tile's queries, against one share of the sequence's keys.

    Descriptors of copied keys and values, if there are any, take the place of the pool.
    """
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    split = tl.program_id(2)
    if IS_DECODE:
        seq = tile
        first_query = 0
        first_row = tile
        num_queries = 1
    else:
        seq = tl.load(tile_seqs + tile)
        first_query = tl.load(tile_begins + tile)
        first_row = tl.load(query_begins + seq)
        num_queries = tl.load(query_begins + seq + 1) - first_row
    context = tl.load(contexts + seq)
    table = tables + tl.load(table_begins + seq)

    row = tl.arange(0, ROWS)
    query = first_query + row // PADDED_GROUP
    head = kv_head * GROUP + row % PADDED_GROUP
    is_query = (query < num_queries) & (row % PADDED_GROUP < GROUP) & (row // PADDED_GROUP < QUERIES)
    position = context + query
    inside = tl.arange(0, PADDED_DIM)
    is_inside = inside < HEAD_DIM
    is_element = is_query[:, None] & is_inside[None, :]
    batch_row = (first_row + query).to(tl.int64)
    at = queries + batch_row[:, None] * query_token_stride + head[:, None] * query_head_stride + inside[None, :]
    q = tl.load(at, mask=is_element, other=0.0)

    # Keys are taken ``KEYS`` at a time: turns from ``first_turn`` on, of which this split has its share.
    limit = context + tl.minimum(first_query + QUERIES, num_queries)
    first_turn = 0
    if WINDOW:
        first_turn = tl.maximum(context + first_query - WINDOW + 1, 0) // KEYS
    end_turn = (limit + KEYS - 1) // KEYS
    share = (end_turn - first_turn + SPLITS - 1) // SPLITS
    begin = (first_turn + split * share) * KEYS
    end = tl.minimum(begin + share * KEYS, end_turn * KEYS)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    if HAS_SINKS:
        if split == 0:
            top = tl.load(sinks + head, mask=is_query, other=0.0).to(tl.float32) * 1.4426950408889634
            total = tl.full([ROWS], 1.0, tl.float32)
    sums = tl.full([ROWS, PADDED_DIM], 0.0, tl.float32)
    keys = pool + layer_offset + kv_head * HEAD_DIM
    column = kv_head * HEAD_DIM
    copied_row = 0
    if copied_begins is not None:
        copied_row = tl.load(copied_begins + seq)
    masked = begin
    if WINDOW == 0:
        # All queries see the keys of whole turns before the first query.
        masked = tl.minimum(tl.maximum((context + first_query + 1) // KEYS * KEYS, begin), end)
        for key in tl.range(begin, masked, KEYS):
            sums, total, top = _take_turn(
                sums, total, top, q, position, keys, values_offset, table, key, limit, block_stride, scale, softcap,
                copied_keys, copied_values, copied_row + key, column,
                False, WINDOW, HAS_SOFTCAP, KEYS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, PADDED_DIM, PRECISION,
            )  # fmt: skip
    for key in tl.range(masked, end, KEYS):
        sums, total, top = _take_turn(
            sums, total, top, q, position, keys, values_offset, table, key, limit, block_stride, scale, softcap,
            copied_keys, copied_values, copied_row + key, column,
            True, WINDOW, HAS_SOFTCAP, KEYS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, PADDED_DIM, PRECISION,
        )  # fmt: skip

    is_empty = total == 0.0
    result = sums / tl.where(is_empty, 1.0, total)[:, None]
    if SPLITS == 1:
        to = output + batch_row[:, None] * (NUM_HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM + inside[None, :]
        tl.store(to, result.to(output.dtype.element_ty), mask=is_element)
    else:
        part = (batch_row * NUM_HEADS + head) * SPLITS + split
        tl.store(partial + part[:, None] * HEAD_DIM + inside[None, :], result, mask=is_element)
        weight = tl.where(is_empty, float("-inf"), top + tl.log2(tl.where(is_empty, 1.0, total)))
        tl.store(weights + part, weight, mask=is_query)


@triton.jit  # type: ignore[untyped-decorator]
def _take_turn(  # type: ignore[no-untyped-def]
    sums,
    total,
    top,
    q,
    position,
    keys,
    values_offset,
    table,
    first_key,
    limit,
    block_stride,
    scale,
    softcap,
    copied_keys,
    copied_values,
    copied_row,
    column,
    IS_MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend to ``KEYS`` keys: ``sums`` of values, by weights that are ``total`` in all and relative to ``top``."""
    key = first_key + tl.arange(0, KEYS)
    inside = tl.arange(0, PADDED_DIM)
    exists = key < limit
    at = keys
    # Without bounds where there are none: loads are wider then.
    if copied_keys is not None:
        k = copied_keys.load([copied_row, column])
    else:
        if IS_MASKED:
            block = tl.load(table + key // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
        else:
            block = tl.load(table + key // BLOCK_SIZE).to(tl.int64)
        at = keys + (block * block_stride + (key % BLOCK_SIZE) * (NUM_KV_HEADS * HEAD_DIM))[:, None] + inside[None, :]
        if IS_MASKED:
            k = tl.load(at, mask=exists[:, None] & (inside < HEAD_DIM)[None, :], other=0.0)
        elif PADDED_DIM != HEAD_DIM:
            k = tl.load(at, mask=(inside < HEAD_DIM)[None, :], other=0.0)
        else:
            k = tl.load(at)
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if HAS_SOFTCAP:
        # tanh(score / softcap) * softcap, in powers of 2.
        power = tl.exp2(score * (2.0 * 1.4426950408889634 / softcap))
        score = (1.0 - 2.0 / (1.0 + power)) * (softcap * 1.4426950408889634)
    if IS_MASKED:
        is_seen = key[None, :] <= position[:, None]
        if WINDOW:
            is_seen = is_seen & (key[None, :] > position[:, None] - WINDOW)
        score = tl.where(is_seen, score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, 1))
    # A row that has seen nothing yet: minus infinity from itself is no number.
    base = new_top
    if IS_MASKED:
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weight = tl.exp2(score - base[:, None])
    fade = tl.exp2(top - base)
    total = total * fade + tl.sum(weight, 1)
    if copied_values is not None:
        v = copied_values.load([copied_row, column])
    elif IS_MASKED:
        v = tl.load(at + values_offset, mask=exists[:, None] & (inside < HEAD_DIM)[None, :], other=0.0)
    elif PADDED_DIM != HEAD_DIM:
        v = tl.load(at + values_offset, mask=(inside < HEAD_DIM)[None, :], other=0.0)
    else:
        v = tl.load(at + values_offset)
    sums = tl.dot(weight.to(v.dtype), v, sums * fade[:, None], input_precision=PRECISION)
    return sums, total, new_top


@triton.jit  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]
    partial,
    weights,
    output,
    SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """A program is one head of one row."""
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    split = tl.arange(0, SPLITS)
    inside = tl.arange(0, PADDED_DIM)
    is_inside = inside < HEAD_DIM
    weight = tl.load(weights + row * SPLITS + split)
    top = tl.max(weight, 0)
    share = tl.exp2(weight - tl.where(top == float("-inf"), 0.0, top))
    at = partial + (row * SPLITS + split)[:, None] * HEAD_DIM + inside[None, :]
    part = tl.load(at, mask=(share > 0)[:, None] & is_inside[None, :], other=0.0)
    total = tl.sum(share, 0)
    result = tl.sum(part * share[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(output + row * HEAD_DIM + inside, result.to(output.dtype.element_ty), mask=is_inside)
