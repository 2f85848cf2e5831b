"""Embeddings as tensors: what is written comes back, wherever an item's blocks are and a read begins."""

from __future__ import annotations

import pytest
import torch

from quartet.engine.media.embeddings import EmbeddingPoolView
from quartet.kvcache.layout import EmbeddingLayout
from quartet.transfer.base import EmbeddingMemory, PoolMemory

HIDDEN_SIZE = 3
BLOCK_SIZE = 4


def make_memory(dtype: str = "float32", num_blocks: int = 6) -> EmbeddingMemory:
    layout = EmbeddingLayout(model_fingerprint="m", dtype=dtype, hidden_size=HIDDEN_SIZE, block_size=BLOCK_SIZE)
    return EmbeddingMemory(layout, PoolMemory(num_blocks, layout.piece_size_bytes))


def make_rows(num_tokens: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(1, 1 + num_tokens * HIDDEN_SIZE).view(num_tokens, HIDDEN_SIZE).to(dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("first", "num_tokens"), [(0, 10), (0, 4), (3, 2), (5, 5), (9, 1), (2, 0)])
def test_any_part_of_an_item_is_read_as_it_was_written(dtype: str, first: int, num_tokens: int) -> None:
    view, rows = EmbeddingPoolView(make_memory(dtype)), make_rows(10, getattr(torch, dtype))
    view.write((5, 0, 3), rows)
    assert torch.equal(view.read((5, 0, 3), first, num_tokens), rows[first : first + num_tokens])


def test_items_lie_in_the_pools_bytes_where_transfers_read_them() -> None:
    memory = make_memory()
    rows = make_rows(6)
    EmbeddingPoolView(memory).write((4, 1), rows)
    assert torch.equal(torch.frombuffer(memory.memory.piece(4), dtype=torch.float32).view(-1, HIDDEN_SIZE), rows[:4])
    last = torch.frombuffer(memory.memory.piece(1), dtype=torch.float32).view(-1, HIDDEN_SIZE)
    assert torch.equal(last[:2], rows[4:])
    assert not last[2:].any()
    assert torch.equal(EmbeddingPoolView(memory).read((4, 1), 0, 6), rows)


def test_rows_of_another_dtype_are_converted() -> None:
    view = EmbeddingPoolView(make_memory("bfloat16"))
    view.write((2,), make_rows(4, torch.float64) / 7)
    assert torch.equal(view.read((2,), 0, 4), (make_rows(4, torch.float64) / 7).bfloat16())


def test_read_rows_are_a_copy() -> None:
    view = EmbeddingPoolView(make_memory())
    view.write((2,), make_rows(4))
    read = view.read((2,), 0, 4)
    view.write((2,), torch.zeros(4, HIDDEN_SIZE))
    assert torch.equal(read, make_rows(4))


def test_more_tokens_than_the_blocks_hold_are_refused() -> None:
    view = EmbeddingPoolView(make_memory())
    with pytest.raises(IndexError):
        view.write((2,), make_rows(5))
    assert not view.read((2,), 0, 4).any()
    with pytest.raises(IndexError):
        view.read((2, 3), 6, 3)
