"""Copies between two pools: which bytes go where, and how a thread's work is awaited to its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass


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


def check_runs(runs: Sequence[CopyRun], source_size: int, destination_size: int) -> None:
    """Raise ``ValueError`` if a run leaves one of the two pools, whose sizes are in bytes."""
    for run in runs:
        in_source = 0 <= run.source_offset <= source_size - run.size_bytes
        in_destination = 0 <= run.destination_offset <= destination_size - run.size_bytes
        if not (in_source and in_destination):
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
