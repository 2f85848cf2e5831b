"""Copies between two pools: which bytes go where, and how a thread's work is awaited to its end.

A long prompt's copies are thousands, and the event loop prepares them, so they are lines of an array.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

#: ``[num_pieces]``: where each piece begins in a pool, in bytes.
Offsets: TypeAlias = npt.NDArray[np.int64]

_MAX_OFFSET = (1 << 63) - 1

#: ``[num_runs, 3]``: lines of the fields of ``CopyRun``.
Runs: TypeAlias = npt.NDArray[np.int64]


class CopyRun(NamedTuple):
    """Copy ``size_bytes`` bytes from one offset to another."""

    source_offset: int
    destination_offset: int
    size_bytes: int


def as_runs(runs: Sequence[CopyRun]) -> Runs:
    """``runs`` as lines of an array."""
    return np.array(runs, np.int64).reshape(-1, 3)


def merge_runs(source_offsets: Offsets, destination_offsets: Offsets, size_bytes: int) -> Runs:
    """One run per stretch of pieces, each of ``size_bytes``, that are neighbours on both sides."""
    begins_run = np.ones(len(source_offsets), np.bool_)
    begins_run[1:] = source_offsets[1:] != source_offsets[:-1] + size_bytes
    begins_run[1:] |= destination_offsets[1:] != destination_offsets[:-1] + size_bytes
    [first] = begins_run.nonzero()
    runs = np.empty((len(first), 3), np.int64)
    runs[:, 0], runs[:, 1] = source_offsets[first], destination_offsets[first]
    runs[:-1, 2] = first[1:] - first[:-1]
    runs[-1:, 2] = len(begins_run) - first[-1:]
    runs[:, 2] *= size_bytes
    return runs


def check_runs(runs: Runs, source_size: int, destination_size: int) -> None:
    """Raise ``ValueError`` if a run leaves one of the two pools, whose sizes are in bytes."""
    sources, destinations, sizes = np.ascontiguousarray(runs.T)
    for offsets, pool_size in ((sources, source_size), (destinations, destination_size)):
        # The size of a source's pool is what the source says.
        last = np.subtract(min(pool_size, _MAX_OFFSET), sizes)
        if offsets.min(initial=0) < 0 or (offsets > last).any():
            raise ValueError("a piece lies outside its pool")


async def run_to_end(executor: Executor, work: Callable[[], None], stop: Callable[[], None]) -> None:
    """Run ``work`` in ``executor``; returns, raises or is cancelled only once it has ended.

    ``stop`` is called when the outcome is waited for no more, so that ``work`` can end sooner; on cancellation, and
    after the end too.
    """
    working = asyncio.get_running_loop().run_in_executor(executor, work)
    try:
        await asyncio.shield(working)
    finally:
        stop()
        # Cancelled: a second cancellation must not cut this short either.
        while not working.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([working])
        working.exception()  # else asyncio logs an error that was not waited for
