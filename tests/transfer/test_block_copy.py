"""Copies between pools: merged, bounded by both pools, and stopped before they are left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.transfer import shm
from quartet.transfer.base import PieceCopy, PieceRun
from quartet.transfer.cuda.kernel_copies import cut
from quartet.transfer.runs import CopyRun, as_runs, check_runs, merge_runs
from quartet.transfer.shm import copy_runs

MIB = 1 << 20


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as threads:
        yield threads


def test_neighbours_on_both_sides_become_one_run() -> None:
    runs = merge_runs(np.array([0, 10, 20, 50, 60]), np.array([100, 110, 130, 140, 150]), 10)
    assert runs.tolist() == [[0, 100, 20], [20, 130, 10], [50, 140, 20]]
    assert merge_runs(np.empty(0, np.int64), np.empty(0, np.int64), 10).shape == (0, 3)


def test_a_run_of_pieces_is_a_sequence_of_copies() -> None:
    run = PieceRun(2, [9, 4, 7])
    copies = (PieceCopy(2, 9), PieceCopy(3, 4), PieceCopy(4, 7))
    assert tuple(run) == copies
    assert (run[-1], run[1:]) == (copies[2], copies[1:])
    assert tuple(run.moved(10)) == (PieceCopy(2, 19), PieceCopy(3, 14), PieceCopy(4, 17))
    with pytest.raises(IndexError):
        run[3]


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=20))
def test_merged_runs_are_the_pieces_in_their_order(pieces: list[tuple[int, int]]) -> None:
    size = 1 << 36  # more than 32 bits reach
    offsets = size * np.array(pieces, np.int64).reshape(-1, 2)
    runs = merge_runs(offsets[:, 0], offsets[:, 1], size)
    assert cut(runs, size)[:, :2].tolist() == offsets.tolist()
    ends = runs[:-1, :2] + runs[:-1, 2:]
    assert not (ends == runs[1:, :2]).all(axis=1).any()


@pytest.mark.parametrize("run", [(95, 0, 10), (0, 195, 10), (-1, 0, 10), (0, -(1 << 63), 10), ((1 << 63) - 1, 0, 10)])
def test_a_run_that_leaves_its_pool_is_found(run: tuple[int, int, int]) -> None:
    inside = [CopyRun(90, 190, 10), CopyRun(0, 0, 100)]
    check_runs(as_runs(inside), 100, 200)
    check_runs(as_runs([]), 100, 200)
    check_runs(as_runs(inside), 1 << 64, (1 << 64) - 1)
    with pytest.raises(ValueError, match="outside"):
        check_runs(as_runs([*inside, CopyRun(*run)]), 100, 200)


@pytest.mark.parametrize("size", [100, 3 * MIB], ids=["inline", "in a thread"])
async def test_runs_are_copied_and_nothing_else_is_touched(size: int, executor: ThreadPoolExecutor) -> None:
    source, destination = memoryview(b"\7" * 2 * size), memoryview(bytearray(2 * size))
    await copy_runs(source, destination, as_runs([CopyRun(size, 10, size - 20)]), executor)
    assert destination == bytes(10) + b"\7" * (size - 20) + bytes(size + 10)


@pytest.mark.parametrize("run", [CopyRun(95, 0, 10), CopyRun(0, 95, 10), CopyRun(-1, 0, 10)])
async def test_a_run_outside_a_pool_copies_nothing(run: CopyRun, executor: ThreadPoolExecutor) -> None:
    destination = memoryview(bytearray(100))
    with pytest.raises(ValueError, match="outside"):
        await copy_runs(memoryview(b"\7" * 100), destination, as_runs([CopyRun(0, 0, 10), run]), executor)
    assert destination == bytes(100)


async def test_a_cancelled_copy_returns_only_after_the_thread_has_stopped(
    executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    copying, go_on = threading.Event(), threading.Event()
    copyto = shm.np.copyto

    def copy_after_go(destination, source) -> None:
        copying.set()
        assert go_on.wait(10)
        copyto(destination, source)

    monkeypatch.setattr(shm.np, "copyto", copy_after_go)
    destination = memoryview(bytearray(64 * MIB))
    task = asyncio.create_task(
        copy_runs(memoryview(b"\7" * 64 * MIB), destination, as_runs([CopyRun(0, 0, 64 * MIB)]), executor)
    )
    assert await asyncio.to_thread(copying.wait, 10)
    for _ in range(2):
        task.cancel()
        done, _pending = await asyncio.wait([task], timeout=0.05)
        assert not done, "it returned while the thread was still in a slice"
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(30):
            await task
    copied = destination.obj.count(7)
    assert 0 < copied < 64 * MIB, "the slice under way was finished, and no other begun"
    await asyncio.to_thread(executor.shutdown)
    assert destination.obj.count(7) == copied
