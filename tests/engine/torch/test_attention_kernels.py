"""The attention kernels against attention written out in float64, and their compilation for a Hopper."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.triton_kernels import compile_for_sm90, interpreted

attention = pytest.importorskip("quartet.engine.torch.kernels.attention", reason="Triton is not installed")
gather = pytest.importorskip("quartet.engine.torch.kernels.gather", reason="Triton is not installed")
if TYPE_CHECKING:
    from quartet.engine.torch.kernels import attention, gather

NUM_LAYERS, LAYER = 3, 1


@dataclass(frozen=True)
class Heads:
    """Heads of a model, and the size of its blocks."""

    query: int = 4
    kv: int = 2
    dim: int = 16
    block_size: int = 16


class Pool:
    """A pool with the sequences of one step, whose tokens before the step are in it already."""

    def __init__(self, heads: Heads, chunks: Sequence[tuple[int, int]], device: str, dtype: torch.dtype) -> None:
        """``chunks`` are tokens before the step and tokens of the step, of each sequence."""
        torch.manual_seed(0)
        self.heads, self.chunks, self.device = heads, chunks, device
        size = heads.block_size
        self.lengths = [context + num for context, num in chunks]
        num_blocks = [-(-length // size) for length in self.lengths]
        order = torch.randperm(sum(num_blocks) + 2).tolist()
        self.tensor = torch.randn(len(order), NUM_LAYERS, 2, size, heads.kv, heads.dim, device=device).to(dtype)
        self.block_tables = [[order.pop() for _ in range(num)] for num in num_blocks]
        self.keys_values = [torch.randn(2, n, heads.kv, heads.dim, device=device).to(dtype) for n in self.lengths]
        for (context, _), kv, table in zip(chunks, self.keys_values, self.block_tables, strict=True):
            for position in range(context):
                self.tensor[table[position // size], LAYER, :, position % size] = kv[:, position]
        flat = [block for table in self.block_tables for block in table]
        begins = [sum(num_blocks[:i]) for i in range(len(chunks))]
        self.tables = attention.BlockTables(
            self.ints(flat), self.ints(begins), self.ints([context for context, _ in chunks])
        )

    def ints(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)

    def new(self, part: int) -> torch.Tensor:
        """Keys (0) or values (1) of the step's tokens, as a model has them: each head's tokens together."""
        rows = [kv[part, context:] for (context, _), kv in zip(self.chunks, self.keys_values, strict=True)]
        return torch.cat(rows).transpose(0, 1).contiguous().transpose(0, 1)

    def slots(self) -> torch.Tensor:
        size = self.heads.block_size
        return torch.tensor(
            [
                table[position // size] * size + position % size
                for (context, num), table in zip(self.chunks, self.block_tables, strict=True)
                for position in range(context, context + num)
            ],
            device=self.device,
        )

    def chunks_in_tiles(self, first: int, num_splits: int, span: int) -> attention.Chunks:
        """The sequences from ``first`` on; those before have a row each. ``span``: of copies, if there are any."""
        step = attention.queries_per_tile(self.heads.query, self.tensor)
        tiles = [(i, begin) for i, (_, num) in enumerate(self.chunks) if i >= first for begin in range(0, num, step)]
        begins = [sum(num for _, num in self.chunks[:i]) for i in range(len(self.chunks) + 1)]
        return attention.Chunks(
            step,
            first,
            num_splits,
            self.ints(begins),
            self.ints([seq for seq, _ in tiles]),
            self.ints([begin for _, begin in tiles]),
            self.copies(first, span) if span else None,
        )

    def copies(self, first: int, span: int) -> gather.Copies:
        """For sequences from ``first`` on; whatever is not written is no number."""
        spans = [(i, begin) for i in range(first, len(self.lengths)) for begin in range(0, self.lengths[i], span)]
        room = gather.Room(self.tensor, 1 << 30)
        rows = room.rows(span * len(spans))
        assert rows is not None
        rows.fill_(math.nan)
        return gather.Copies(
            room,
            span,
            self.ints([span * sum(seq < i for seq, _ in spans) for i in range(len(self.lengths))]),
            self.ints([seq for seq, _ in spans]),
            self.ints([begin for _, begin in spans]),
        )


def reference(query: torch.Tensor, kv: torch.Tensor, context: int, scores: attention.Scores) -> torch.Tensor:
    """Attention of one sequence's queries ``[n, H, D]`` to its ``[2, length, Hkv, D]``, in float64."""
    keys, values = kv.double().repeat_interleave(query.shape[1] // kv.shape[2], dim=2)
    found = torch.einsum("qhd,nhd->hqn", query.double(), keys) * scores.scale
    if scores.softcap:
        found = torch.tanh(found / scores.softcap) * scores.softcap
    position = context + torch.arange(len(query), device=query.device)[:, None]
    key = torch.arange(kv.shape[1], device=query.device)[None]
    hidden = key > position
    if scores.window:
        hidden |= key <= position - scores.window
    found.masked_fill_(hidden, -math.inf)
    if scores.sinks is not None:
        column = scores.sinks.double()[:, None, None].expand(-1, len(query), 1)
        found = torch.cat((found, column), dim=-1)
    return torch.einsum("hqn,nhd->qhd", found.softmax(-1)[..., : kv.shape[1]], values)


def attend(
    pool: Pool,
    num_splits: int = 1,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    span: int = 0,
    **how: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step's output, and the reference's. Sequences of one query come first; others may attend to copies."""
    heads = pool.heads
    num_decodes = sum(num == 1 for _, num in pool.chunks)
    sinks = torch.randn(heads.query, device=device).to(dtype) if how.pop("has_sinks", False) else None
    scores = attention.Scores(heads.dim**-0.5, sinks=sinks, **how)
    query = torch.randn(sum(num for _, num in pool.chunks), heads.query, heads.dim, device=device).to(dtype)
    output = torch.full_like(query, math.nan)
    attention.store_kv(pool.new(0), pool.new(1), pool.slots(), pool.tensor, LAYER)
    if num_decodes:
        attention.attend_decode(
            query[:num_decodes], output[:num_decodes], pool.tensor, LAYER, pool.tables, scores, num_splits
        )
    chunks = pool.chunks_in_tiles(num_decodes, min(num_splits, attention.MAX_CHUNK_SPLITS), span)
    attention.attend_chunks(query, output, pool.tensor, LAYER, pool.tables, chunks, scores)
    rows = query.split([num for _, num in pool.chunks])
    expected = [
        reference(q, kv, context, scores)
        for q, kv, (context, _) in zip(rows, pool.keys_values, pool.chunks, strict=True)
    ]
    return output, torch.cat(expected)


# Heads, chunks and how they attend. Sequences of one query come first.
CASES = {
    "one head a group, of one block": (Heads(2, 2, 16, 8), [(0, 1), (5, 1), (0, 3)], {}),
    "groups of four, a chunk after others": (Heads(8, 2, 16), [(0, 1), (40, 1), (0, 20), (33, 9)], {}),
    "eight splits": (Heads(4, 1, 16), [(5, 1), (300, 1)], {"num_splits": 8}),
    "splits and a window": (Heads(2, 1, 16, 4), [(0, 1), (70, 1)], {"num_splits": 8, "window": 40}),
    "splits, a window and sinks": (
        Heads(8, 1, 16),
        [(5, 1), (90, 1), (33, 6)],
        {"num_splits": 8, "window": 24, "has_sinks": True},
    ),
    "groups of three, softcap": (Heads(6, 2, 16), [(90, 1), (33, 7)], {"softcap": 3.0}),
    "softcap and a window": (Heads(4, 2, 16, 5), [(50, 1), (60, 20)], {"softcap": 3.0, "window": 8}),
    "a dimension that is no power of two": (Heads(4, 2, 24, 12), [(70, 1), (3, 20)], {"num_splits": 8}),
    "a tiny dimension": (Heads(4, 1, 6, 3), [(7, 1), (40, 5)], {}),
}


@pytest.mark.parametrize("name", CASES)
def test_attention_is_that_of_the_reference(name: str) -> None:
    heads, chunks, how = CASES[name]
    with interpreted(attention):
        output, expected = attend(Pool(heads, chunks, "cpu", torch.float32), **how)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)


# Those of them that copies serve: without a window, and with a dimension that is a power of two.
COPIED_CASES = {
    "one head a group, of one block": (Heads(2, 2, 16, 8), [(0, 1), (5, 1), (0, 3)], {}),
    "groups of four, a chunk after others": (Heads(8, 2, 16), [(0, 1), (40, 1), (0, 20), (33, 9), (0, 64)], {}),
    "groups of three, softcap and sinks": (Heads(6, 2, 16, 5), [(90, 1), (33, 7)], {"softcap": 3.0, "has_sinks": True}),
}


@pytest.mark.parametrize("name", COPIED_CASES)
def test_chunks_attend_to_copies_as_they_do_to_blocks(name: str) -> None:
    """Spans are filled whole: what lies behind a sequence in its last block reaches nobody."""
    heads, chunks, how = COPIED_CASES[name]
    pool = Pool(heads, chunks, "cpu", torch.float32)
    for table, length in zip(pool.block_tables, pool.lengths, strict=True):
        pool.tensor[table[-1], :, :, (length - 1) % heads.block_size + 1 :] = math.nan
    with interpreted(attention, gather):
        output, expected = attend(pool, span=32, **how)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)


def test_rows_that_pad_a_step_get_zeros_and_store_nothing() -> None:
    heads = Heads(4, 2, 16)
    pool = Pool(heads, [(20, 1), (0, 1)], "cpu", torch.float32)
    pool.tables.contexts[1] = -1
    slots = pool.slots()
    slots[1] = -1
    before = pool.tensor.clone()
    query = torch.randn(2, heads.query, heads.dim)
    for num_splits in (1, 8):
        output = torch.full_like(query, math.nan)
        with interpreted(attention):
            attention.store_kv(pool.new(0), pool.new(1), slots, pool.tensor, LAYER)
            attention.attend_decode(
                query, output, pool.tensor, LAYER, pool.tables, attention.Scores(0.25, sinks=query[0, :, 0]), num_splits
            )
        assert output[0].isfinite().all()
        assert not output[1].any()
    changed = (pool.tensor != before).flatten(3).any(-1).nonzero()
    assert changed.tolist() == [[pool.block_tables[0][1], LAYER, part] for part in (0, 1)]


def test_blocks_lie_beyond_what_32_bits_reach(tmp_path: Path) -> None:
    """In a file of 17 GB, of which only what is touched takes room."""
    shape = (1, NUM_LAYERS, 2, 16, 1, 16)
    block = (1 << 32) // math.prod(shape) + 5
    with (tmp_path / "sparse").open("w+b") as file:
        file.truncate(4 * math.prod(shape) * (block + 1))
        memory = mmap.mmap(file.fileno(), 0)
    with memory:
        # One block of it: the kernels compute addresses, and the interpreter copies what it is given.
        pool = torch.frombuffer(memory, dtype=torch.float32, count=math.prod(shape)).view(shape)
        one, value = torch.ones(1, 1, 16), torch.randn(1, 1, 16)
        ints = {n: torch.tensor([n], dtype=torch.int32) for n in (0, block)}
        output = torch.zeros(1, 1, 16)
        with interpreted(attention):
            attention.store_kv(one, value, torch.tensor([block * 16]), pool, LAYER)
            tables = attention.BlockTables(ints[block], ints[0], ints[0])
            attention.attend_decode(one, output, pool, LAYER, tables, attention.Scores(0.25))
        assert torch.equal(output, value)
        assert not pool.any()
        there = 4 * (block * math.prod(shape) + LAYER * 2 * 16 * 16)
        assert memory[there : there + 64] == one.numpy().tobytes()
        del pool


@pytest.mark.parametrize(
    ("num_rows", "longest", "expected"),
    [(1, 300, 1), (1, 1_000, 8), (1, 8_000, 32), (64, 300, 1), (64, 1_200, 1), (64, 8_000, 8), (256, 100_000, 32)],
)
def test_few_sequences_and_long_ones_are_split(num_rows: int, longest: int, expected: int) -> None:
    assert attention.num_splits(num_rows, num_kv_heads=8, longest=longest, num_sms=132) == expected


@pytest.mark.parametrize(
    ("num_tiles", "longest", "expected"), [(1, 8_000, 8), (4, 2_048, 8), (4, 2_000, 1), (5, 8_000, 1)]
)
def test_a_short_rest_of_a_long_conversation_is_split(num_tiles: int, longest: int, expected: int) -> None:
    assert attention.num_chunk_splits(num_tiles, num_kv_heads=8, longest=longest, num_sms=132) == expected


@pytest.mark.parametrize(
    ("way", "head_dim", "span"),
    [("decode", 64, 0), ("chunks", 64, 0), ("copies", 64, 128), ("copies", 128, 128), ("copies", 256, 32)],
)
def test_the_kernel_compiles_for_a_hopper_and_fits_it(
    way: str, head_dim: int, span: int, tmp_path: Path, monkeypatch: Any
) -> None:
    """With all that GPT-OSS needs of it: groups, a window and sinks."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    is_decode, is_copied = way == "decode", way == "copies"
    shape = attention._Shape(64, 8, head_dim, torch.bfloat16)
    tile = attention.decode_tile(shape) if is_decode else attention.chunk_tile(shape, 227 << 10)
    if is_copied:
        pool = torch.empty(1, 1, 2, 16, 8, head_dim, dtype=torch.bfloat16)
        assert attention.copied_span(64, pool) == span
        tile = replace(tile, num_keys=span, num_stages=attention._NUM_COPIED_STAGES)
    scores = attention.Scores(0.125, window=None if is_copied else 128, sinks=torch.zeros(64))
    constants = attention._constants(shape, tile, scores, 32, 8 if is_decode else 1, is_decode=is_decode)
    signature = dict.fromkeys(attention._attend.arg_names, "i32:16")
    signature |= dict.fromkeys(("queries", "output", "pool", "sinks"), "*bf16")
    signature |= dict.fromkeys(("partial", "weights"), "*fp32") | dict.fromkeys(("scale", "softcap"), "fp32")
    tables = ("tables", "table_begins", "contexts", "query_begins", "tile_seqs", "tile_begins")
    signature |= dict.fromkeys(tables, "*i32")
    if is_copied:
        signature |= dict.fromkeys(("copied_keys", "copied_values"), f"tensordesc<bf16[{span}, {head_dim}]>")
        signature["copied_begins"] = "*i32"
    else:
        constants |= dict.fromkeys(("copied_keys", "copied_values", "copied_begins"))
    signature = {name: kind for name, kind in signature.items() if name not in constants}
    compiled = compile_for_sm90(
        attention._attend, signature, constants, num_warps=tile.num_warps, num_stages=tile.num_stages
    )
    # Several decoding sequences share a multiprocessor, and prompts compute on its tensor cores at their full width.
    assert compiled.metadata.shared <= (56 << 10 if is_decode else 227 << 10)
    assert ("wgmma.mma_async" in compiled.asm["ptx"]) == (not is_decode)
    assert ("cp.async.bulk.tensor" in compiled.asm["ptx"]) == is_copied


def test_what_stores_and_what_merges_compile_for_a_hopper(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    strides = [name for name in attention._store.arg_names if name.endswith(("stride", "offset"))]
    stored = dict.fromkeys(("keys", "values"), "*bf16") | {"slots": "*i64", "pool": "*bf16"}
    sizes = {"WIDTH": 512, "HEAD_DIM": 64, "BLOCK_SIZE": 32, "PADDED_WIDTH": 512}
    compiled = compile_for_sm90(attention._store, stored | dict.fromkeys(strides, "i32:16"), sizes, num_warps=4)
    assert "st.global" in compiled.asm["ptx"]
    merged = dict.fromkeys(("partial", "weights"), "*fp32") | {"output": "*bf16"}
    sizes = {"SPLITS": 8, "HEAD_DIM": 80, "PADDED_DIM": 128}
    compiled = compile_for_sm90(attention._merge, merged, sizes, num_warps=4)
    assert "ex2.approx" in compiled.asm["ptx"]
    sizes = {"WIDTH": 512, "PADDED_WIDTH": 512, "SPAN": 64, "TOKENS": 16, "BLOCK_SIZE": 32}
    names = [name for name in gather._gather.arg_names if name not in sizes]
    copied = {name: "i32:16" if name.endswith(("stride", "offset")) else "*i32" for name in names}
    copied |= dict.fromkeys(("pool", "rows"), "*bf16")
    compiled = compile_for_sm90(gather._gather, copied, sizes, num_warps=8)
    assert "st.global.v4" in compiled.asm["ptx"]
