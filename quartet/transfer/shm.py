"""Block pools of workers on one host: pass ours to peers, map theirs for reading, copy between the two.

A source's life line (``life_line.py``) passes its pool's memfd (SCM_RIGHTS) to a peer that sends the token of
``granted``. The peer maps it and reads without asking again. It can then read the *whole* pool, not only the pieces
that it asked for: on one host the workers of a deployment trust each other. Three things limit that trust. The memfd is
sealed, so the peer cannot write; the peer must run as the same user; the token needs a hand-off's secret first.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import mmap
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

import numpy as np

from quartet.errors import TransferError
from quartet.transfer.base import PoolMemory
from quartet.transfer.life_line import LifeLineServer, LivePools

#: Up to this a copy takes less than the event loop may stand still for (1 ms, at 5 GB/s); a thread costs half of that.
_INLINE_SIZE_BYTES = 4 << 20

#: How much a thread copies before it checks again whether to stop: some milliseconds.
_SLICE_SIZE_BYTES = 16 << 20


class ShmServer(LifeLineServer):
    """Passes one pool's memfd to peers with the token, from ``start`` until ``close``."""

    def __init__(self, memory: PoolMemory) -> None:
        """Draw a name and a token for this epoch of the worker; nothing listens yet."""
        super().__init__("shm")
        self.memory = memory

    @property
    def descriptors(self) -> Sequence[int]:
        """The pool's memfd."""
        return (self.memory.fd,)


@dataclass(frozen=True)
class SharedPool:
    """Where a pool on this host can be had."""

    socket_path: str
    token: bytes = field(repr=False)
    size_bytes: int


class ShmPools(LivePools[SharedPool, memoryview]):
    """Maps each peer's pool, read-only; a mapping ends with the last reference to its view."""

    async def _open(self, lent: SharedPool, descriptors: Sequence[int]) -> memoryview:
        if not descriptors:
            raise TransferError("the peer refused its pool")
        return _map_read_only(descriptors[0], lent.size_bytes)

    def _check(self, pool: memoryview, lent: SharedPool) -> None:
        if len(pool) != lent.size_bytes:
            raise TransferError("the peer's pool does not have the size that was granted")

    def _close(self, pool: memoryview) -> None:
        """A copy under way still has its pages."""


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


def _map_read_only(fd: int, size_bytes: int) -> memoryview:
    """Map the memfd and close it."""
    try:
        # Without its seal a peer that shrinks its pool would kill us (SIGBUS) in the middle of a copy.
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK or os.fstat(fd).st_size != size_bytes:
            raise TransferError("the peer's pool is not sealed, or not of the size that was granted")
        if not size_bytes:
            raise TransferError("the peer's pool is empty")
        return memoryview(mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ))
    finally:
        os.close(fd)


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
