"""Block pools of workers on one host: pass ours to peers, map theirs for reading, copy between the two.

A source's life line (``life_line.py``) passes its pool's memfd (SCM_RIGHTS) to a peer that sends the token of
``granted``. The peer maps it and reads without asking again. It can then read the *whole* pool, not only the pieces
that it asked for: on one host the workers of a deployment trust each other. Three things limit that trust. The memfd is
sealed, so the peer cannot write; the peer must run as the same user; the token needs a hand-off's secret first.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from quartet.errors import TransferError
from quartet.transfer.base import PoolMemory, TransferWay
from quartet.transfer.life_line import LentPool, LifeLineServer, LivePools, PoolOwner
from quartet.transfer.runs import Runs, check_runs, run_to_end

#: One thread comes near a core's memory bandwidth; the second is for another fetch, not for more of one.
_NUM_COPY_THREADS = 2

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


class MappedSources:
    """What readers of mapped memory have in common: the pools of other workers, or what these staged."""

    def __init__(self, way: TransferWay) -> None:
        """For ``way``; nothing is mapped yet."""
        self.way = way
        self._pools = ShmPools()

    def may_open(self, owner: PoolOwner) -> bool:
        """As ``PoolReader``."""
        return self._pools.may_open(owner)

    def is_open(self, owner: PoolOwner) -> bool:
        """As ``PoolReader``."""
        return self._pools.opened(owner) is not None

    async def open(self, owner: PoolOwner, lent: LentPool, *, timeout_s: float) -> None:
        """As ``PoolReader``."""
        assert isinstance(lent, SharedPool)
        await self._pools.open(owner, lent, timeout_s=timeout_s)

    def _source(self, owner: PoolOwner) -> memoryview:
        """The open memory of ``owner``. Raises ``TransferError``: it has ended."""
        source = self._pools.opened(owner)
        if source is None:
            raise TransferError("the source's worker has ended")
        return source


class ShmReader(MappedSources):
    """A ``PoolReader`` into a pool in host memory."""

    def __init__(self, memory: PoolMemory, way: TransferWay = TransferWay.SHM) -> None:
        """Read into ``memory``, by ``way``: pools, or what sources staged; nothing is mapped yet."""
        super().__init__(way)
        self._memory = memory
        self._executor = ThreadPoolExecutor(_NUM_COPY_THREADS, thread_name_prefix="kv-copy")

    async def copy(self, owner: PoolOwner, runs: Runs) -> None:
        """As ``PoolReader``."""
        source = self._source(owner)
        try:
            await copy_runs(source, self._memory.view, runs, self._executor)
        except ValueError as error:
            raise TransferError(f"the source's offsets are wrong: {error}") from None

    async def close(self) -> None:
        """As ``PoolReader``."""
        await asyncio.to_thread(self._executor.shutdown)
        self._pools.close()


async def copy_runs(source: memoryview, destination: memoryview, runs: Runs, executor: Executor) -> None:
    """Copy ``runs``; large ones in ``executor``.

    When this returns, raises or is cancelled, nothing writes to ``destination`` any more.

    Raises:
        ValueError: a run leaves one of the two.
    """
    check_runs(runs, len(source), len(destination))
    stop = threading.Event()
    if runs[:, 2].sum() <= _INLINE_SIZE_BYTES:
        _copy(source, destination, runs, stop)
        return
    # The thread sees `stop` at its next slice.
    await run_to_end(executor, partial(_copy, source, destination, runs, stop), stop.set)


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


def _copy(source: memoryview, destination: memoryview, runs: Runs, stop: threading.Event) -> None:
    """Copy until done or ``stop``. NumPy lets go of the GIL; a memoryview's slice assignment keeps it."""
    from_bytes = np.frombuffer(source, dtype=np.uint8)
    to_bytes = np.frombuffer(destination, dtype=np.uint8)
    for source_offset, destination_offset, size_bytes in runs.tolist():
        for done in range(0, size_bytes, _SLICE_SIZE_BYTES):
            if stop.is_set():
                return
            size = min(_SLICE_SIZE_BYTES, size_bytes - done)
            start, target = source_offset + done, destination_offset + done
            np.copyto(to_bytes[target : target + size], from_bytes[start : start + size])
