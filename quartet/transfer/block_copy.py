"""Copying pieces between two pools in memory: few large runs, off the event loop, stopped for certain."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np

#: Up to this a copy takes less than the event loop may stand still for (1 ms, at 5 GB/s); a thread costs half of that.
_INLINE_SIZE_BYTES = 4 << 20
#: How much is copied between two looks at whether to stop: some milliseconds.
_SLICE_SIZE_BYTES = 16 << 20


@dataclass(frozen=True)
class CopyRun:
    """Copy ``size_bytes`` bytes from one offset to another."""

    source_offset: int
    destination_offset: int
    size_bytes: int


def merge_runs(source_offsets: Sequence[int], destination_offsets: Sequence[int], size_bytes: int) -> list[CopyRun]:
    """One run per stretch of pieces, each of ``size_bytes``, that are neighbours on both sides."""
    runs: list[CopyRun] = []
    for source, destination in zip(source_offsets, destination_offsets, strict=True):
        last = runs[-1] if runs else CopyRun(0, 0, 0)
        ends = (last.source_offset + last.size_bytes, last.destination_offset + last.size_bytes)
        if runs and ends == (source, destination):
            runs[-1] = CopyRun(last.source_offset, last.destination_offset, last.size_bytes + size_bytes)
        else:
            runs.append(CopyRun(source, destination, size_bytes))
    return runs


async def copy_runs(source: memoryview, destination: memoryview, runs: Sequence[CopyRun], executor: Executor) -> None:
    """Copy ``runs``; large ones in ``executor``.

    When this returns, raises or is cancelled, nothing writes to ``destination`` any more.

    Raises:
        ValueError: a run leaves one of the two.
    """
    for run in runs:
        _check(run, len(source), len(destination))
    stop = threading.Event()
    if sum(run.size_bytes for run in runs) <= _INLINE_SIZE_BYTES:
        _copy(source, destination, runs, stop)
        return
    copying = asyncio.get_running_loop().run_in_executor(executor, _copy, source, destination, runs, stop)
    try:
        await asyncio.shield(copying)
    finally:
        stop.set()
        # Cancelled: the thread sees `stop` at its next slice. A second cancellation must not cut this short either.
        while not copying.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([copying])


def _check(run: CopyRun, source_size: int, destination_size: int) -> None:
    in_source = 0 <= run.source_offset <= source_size - run.size_bytes
    in_destination = 0 <= run.destination_offset <= destination_size - run.size_bytes
    if not (in_source and in_destination):
        raise ValueError("a piece lies outside its pool")


def _copy(source: memoryview, destination: memoryview, runs: Sequence[CopyRun], stop: threading.Event) -> None:
    """Copy until done or ``stop``. NumPy lets go of the GIL; a memoryview's slice assignment keeps it."""
    from_bytes = np.frombuffer(source, dtype=np.uint8)
    to_bytes = np.frombuffer(destination, dtype=np.uint8)
    for run in runs:
        for done in range(0, run.size_bytes, _SLICE_SIZE_BYTES):
            if stop.is_set():
                return
            size = min(_SLICE_SIZE_BYTES, run.size_bytes - done)
            start, target = run.source_offset + done, run.destination_offset + done
            np.copyto(to_bytes[target : target + size], from_bytes[start : start + size])
