"""Way ``cuda_ipc``: open a peer's pool in GPU memory and copy out of it, on the same GPU or another one.

The GPU's copy engine copies runs of blocks, a kernel small ones, and on one GPU also those that come while the worker's
engine does not step (``kernel_copies``). Both work on a stream beside the engine's. An event after
the last copy tells the end, and a thread sleeps until then: the event loop makes no call of CUDA.

A pool stays readable when its worker is killed or frees it, until it is closed here; so the end of a worker breaks no
copy, and its pool is closed once copies from it have ended. GPUs that can't reach each other, and processes that hide
from each other (containers with IPC or PID namespaces of their own), show when the pool is opened.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np

from quartet.errors import TransferError
from quartet.transfer.base import TransferWay
from quartet.transfer.cuda.driver import CudaError
from quartet.transfer.cuda.kernel_copies import Compile, PullKernel, compile_kernel, cut
from quartet.transfer.cuda.lent import LentDeviceMemory
from quartet.transfer.cuda.memory import DeviceMemory
from quartet.transfer.cuda.threads import CLOSE_TIMEOUT_S, COPIES_A_CALL, COPIES_A_FIRST_CALL, CopyThreads, Lane
from quartet.transfer.life_line import LentPool, LivePools, PoolOwner
from quartet.transfer.runs import Runs, check_runs

logger = logging.getLogger(__name__)


class CudaReader:
    """A ``PoolReader`` into a pool in GPU memory."""

    way = TransferWay.CUDA_IPC

    def __init__(
        self, memory: DeviceMemory, is_busy: Callable[[], bool], compile_kernel: Compile = compile_kernel
    ) -> None:
        """Read into ``memory``; nothing is opened yet.

        Args:
            memory: the local pool.
            is_busy: whether the engine whose pool it is has steps to take; called on any thread.
            compile_kernel: as the function of this name.
        """
        self._memory = memory
        self._peers = _PeerMemory(memory, is_busy, compile_kernel)
        self._pools = _CudaPools(self._peers)

    def may_open(self, owner: PoolOwner) -> bool:
        """As ``PoolReader``."""
        return self._pools.may_open(owner)

    def is_open(self, owner: PoolOwner) -> bool:
        """As ``PoolReader``."""
        return self._pools.opened(owner) is not None

    async def open(self, owner: PoolOwner, lent: LentPool, *, timeout_s: float) -> None:
        """As ``PoolReader``."""
        assert isinstance(lent, LentDeviceMemory)
        if lent.epoch != owner.epoch:
            raise TransferError("the source granted the pool of another epoch")
        with self._pools.busy():
            await self._pools.open(owner, lent, timeout_s=timeout_s)

    async def copy(self, owner: PoolOwner, runs: Runs) -> None:
        """As ``PoolReader``."""
        pool = self._pools.opened(owner)
        if pool is None:
            raise TransferError("the source's worker has ended")
        try:
            check_runs(runs, pool.lent.size_bytes, self._memory.size_bytes)
        except ValueError as error:
            raise TransferError(f"the source's offsets are wrong: {error}") from None
        with self._pools.used(pool):
            await self._peers.copy(pool, runs)

    async def close(self) -> None:
        """As ``PoolReader``."""
        self._pools.close()
        if not await self._pools.all_unused(CLOSE_TIMEOUT_S):
            logger.error("copies on GPU %s have not ended within %s s", self._memory.device, CLOSE_TIMEOUT_S)
        await self._peers.close()


@dataclass(eq=False)
class _OpenPool:
    """A peer's pool at ``address`` of this process."""

    lent: LentDeviceMemory
    address: int
    num_users: int = 0
    is_dropped: bool = False


class _CudaPools(LivePools[LentDeviceMemory, _OpenPool]):
    """Opens each peer's pool, and closes it once its worker has ended and no fetch copies from it."""

    def __init__(self, peers: _PeerMemory) -> None:
        super().__init__()
        self._peers = peers
        self._num_users = 0
        self._unused = asyncio.Event()
        self._unused.set()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Have ``all_unused`` wait for the end of the block."""
        self._num_users += 1
        self._unused.clear()
        try:
            yield
        finally:
            self._num_users -= 1
            if not self._num_users:
                self._unused.set()

    @contextmanager
    def used(self, pool: _OpenPool) -> Iterator[None]:
        """Keep ``pool`` open for the length of the block, also if its worker ends."""
        pool.num_users += 1
        with self.busy():
            try:
                yield
            finally:
                pool.num_users -= 1
                self._close_if_unused(pool)

    async def all_unused(self, timeout_s: float) -> bool:
        """Wait until nothing is opened or copied any more; whether that came in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._unused.wait()
        except TimeoutError:
            return False
        return True

    async def _open(self, lent: LentDeviceMemory, descriptors: Sequence[int]) -> _OpenPool:
        for descriptor in descriptors:  # the life line of a pool in host memory
            os.close(descriptor)
        return _OpenPool(lent, await self._peers.open(lent))

    def _check(self, pool: _OpenPool, lent: LentDeviceMemory) -> None:
        if pool.lent != lent:
            raise TransferError("the source granted another pool than before")

    def _close(self, pool: _OpenPool) -> None:
        pool.is_dropped = True
        self._close_if_unused(pool)

    def _close_if_unused(self, pool: _OpenPool) -> None:
        if pool.is_dropped and not pool.num_users:
            self._peers.close_pool(pool.address)


class _PeerMemory:
    """Opens peers' pools on the local pool's GPU and copies out of them, on threads of its own."""

    def __init__(self, memory: DeviceMemory, is_busy: Callable[[], bool], compile_kernel: Compile) -> None:
        self._memory = memory
        self._is_busy = is_busy
        self._threads = CopyThreads(memory, "cuda-copy")
        self._driver = memory.driver
        self._kernel = PullKernel(memory, self._threads, compile_kernel)

    async def open(self, lent: LentDeviceMemory) -> int:
        """Map a peer's pool and return its address. Raises ``TransferError``: it can't be had."""
        opened: list[int] = []
        try:
            await self._threads.call(partial(self._open, lent, opened))
        except CudaError as error:
            raise TransferError(f"the peer's GPU memory can't be opened: {error}") from error
        except asyncio.CancelledError:
            for address in opened:
                self.close_pool(address)
            raise
        self._kernel.prepare()
        return opened[0]

    async def copy(self, pool: _OpenPool, runs: Runs) -> None:
        """Copy ``runs`` from ``pool``; ends when nothing writes any more. Raises ``TransferError``."""
        await self._threads.copy(partial(self._copy, pool, runs), "a copy out of the peer's GPU memory")

    def close_pool(self, address: int) -> None:
        """Unmap a pool from which nothing is copied; returns at once."""
        self._threads.submit(partial(self._driver.close, address))

    async def close(self) -> None:
        """End the threads, once they have done what they were given. May be called twice."""
        await self._kernel.end_preparation()
        await self._threads.close(last=self._kernel.unload)

    def _open(self, lent: LentDeviceMemory, opened: list[int]) -> None:
        address = self._driver.open(lent.handle)
        size_bytes = self._driver.size_of(address)
        if size_bytes is not None and size_bytes < lent.size_bytes:
            self._driver.close(address)
            raise TransferError("the peer's GPU memory is smaller than was granted")
        opened.append(address)
        where = "this GPU" if lent.device_uuid == self._memory.device_uuid else "another GPU"
        logger.info("opened a peer's pool of %s MiB on %s", lent.size_bytes >> 20, where)

    def _copy(self, pool: _OpenPool, runs: Runs, lane: Lane, stop: threading.Event) -> None:
        """Issue all copies; look now and then whether to stop, and whether the engine steps."""
        places = (pool.address, self._memory.address, 0)
        is_same_gpu = pool.lent.device_uuid == self._memory.device_uuid
        runs = cut(runs)
        by_kernel = self._kernel.begin(lane, pool.address, runs, is_same_gpu=is_same_gpu)
        num_issued, num_next = 0, COPIES_A_FIRST_CALL
        while num_issued < len(runs) and not stop.is_set():
            is_busy = self._is_busy()
            if by_kernel.is_better(is_busy=is_busy):
                num_issued += by_kernel.issue(num_issued, is_busy=is_busy)
                continue
            some = np.add(runs[num_issued : num_issued + num_next], places)
            self._driver.copy_many(some, lane.stream)
            num_issued += len(some)
            num_next = min(4 * num_next, COPIES_A_CALL)
