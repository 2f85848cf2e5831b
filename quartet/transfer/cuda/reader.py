"""Way ``cuda_ipc``: open a peer's pool in GPU memory and copy out of it, on the same GPU or another one.

Each run of blocks is one copy by the GPU's copy engine, on a stream beside the engine's. An event after the last one
tells the end, and a thread sleeps until then: the event loop makes no call of CUDA.

A pool stays readable when its worker is killed or frees it, until it is closed here; so the end of a worker breaks no
copy, and its pool is closed once copies from it have ended. GPUs that can't reach each other, and processes that hide
from each other (containers with IPC or PID namespaces of their own), show when the pool is opened.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from quartet.errors import TransferError
from quartet.transfer.base import TransferWay
from quartet.transfer.cuda.driver import CudaError
from quartet.transfer.cuda.lent import LentDeviceMemory
from quartet.transfer.cuda.memory import DeviceMemory
from quartet.transfer.life_line import LentPool, LivePools, PoolOwner
from quartet.transfer.runs import CopyRun, check_runs, run_to_end

logger = logging.getLogger(__name__)

#: A thread sleeps while its fetch's copies are under way; another one begins the next fetch's meanwhile.
_NUM_COPY_THREADS = 2

#: How many copies a thread starts, at 4 us each, before it looks again whether to stop.
_COPIES_A_LOOK = 64

#: How long ``close`` waits for copies. They take milliseconds; a GPU that hangs must not keep the process.
_CLOSE_TIMEOUT_S = 10.0


class CudaReader:
    """A ``PoolReader`` into a pool in GPU memory."""

    way = TransferWay.CUDA_IPC

    def __init__(self, memory: DeviceMemory) -> None:
        """Read into ``memory``; nothing is opened yet."""
        self._memory = memory
        self._threads = _CopyThreads(memory)
        self._pools = _CudaPools(self._threads)

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

    async def copy(self, owner: PoolOwner, runs: Sequence[CopyRun]) -> None:
        """As ``PoolReader``."""
        pool = self._pools.opened(owner)
        if pool is None:
            raise TransferError("the source's worker has ended")
        try:
            check_runs(runs, pool.lent.size_bytes, self._memory.size_bytes)
        except ValueError as error:
            raise TransferError(f"the source's offsets are wrong: {error}") from None
        with self._pools.used(pool):
            await self._threads.copy(pool.address, runs)

    async def close(self) -> None:
        """As ``PoolReader``."""
        self._pools.close()
        if not await self._pools.all_unused(_CLOSE_TIMEOUT_S):
            logger.error("copies on GPU %s have not ended within %s s", self._memory.device, _CLOSE_TIMEOUT_S)
        await self._threads.close()


@dataclass(eq=False)
class _OpenPool:
    """A peer's pool at ``address`` of this process."""

    lent: LentDeviceMemory
    address: int
    num_users: int = 0
    is_dropped: bool = False


class _CudaPools(LivePools[LentDeviceMemory, _OpenPool]):
    """Opens each peer's pool, and closes it once its worker has ended and no fetch copies from it."""

    def __init__(self, threads: _CopyThreads) -> None:
        super().__init__()
        self._threads = threads
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
        return _OpenPool(lent, await self._threads.open(lent))

    def _check(self, pool: _OpenPool, lent: LentDeviceMemory) -> None:
        if pool.lent != lent:
            raise TransferError("the source granted another pool than before")

    def _close(self, pool: _OpenPool) -> None:
        pool.is_dropped = True
        self._close_if_unused(pool)

    def _close_if_unused(self, pool: _OpenPool) -> None:
        if pool.is_dropped and not pool.num_users:
            self._threads.close_pool(pool.address)


@dataclass(frozen=True)
class _Lane:
    """What one thread copies by."""

    stream: int
    event: int


class _CopyThreads:
    """The threads that call CUDA, each bound to the local pool's GPU, with a stream and an event of its own."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._driver = memory.driver
        self._executor = ThreadPoolExecutor(_NUM_COPY_THREADS, thread_name_prefix="cuda-copy")
        self._lanes: dict[int, _Lane] = {}  # by thread
        self._is_closed = False

    async def open(self, lent: LentDeviceMemory) -> int:
        """Map a peer's pool and return its address. Raises ``TransferError``: it can't be had."""
        opened: list[int] = []
        try:
            await run_to_end(self._executor, partial(self._open, lent, opened), lambda: None)
        except CudaError as error:
            raise TransferError(f"the peer's GPU memory can't be opened: {error}") from error
        except asyncio.CancelledError:
            for address in opened:
                self.close_pool(address)
            raise
        return opened[0]

    async def copy(self, source: int, runs: Sequence[CopyRun]) -> None:
        """Copy ``runs`` from the pool at ``source``; ends when nothing writes any more. Raises ``TransferError``."""
        stop = threading.Event()
        try:
            await run_to_end(self._executor, partial(self._copy, source, runs, stop), stop.set)
        except CudaError as error:
            raise TransferError(f"a copy out of the peer's GPU memory failed: {error}") from error

    def close_pool(self, address: int) -> None:
        """Unmap a pool from which nothing is copied; returns at once."""
        self._executor.submit(self._close_pool, address).add_done_callback(_log_failure)

    async def close(self) -> None:
        """End the threads, once they have done what they were given. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self._executor.submit(self._destroy_lanes).add_done_callback(_log_failure)
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await asyncio.to_thread(self._executor.shutdown)
        except TimeoutError:
            logger.error("the copy threads of GPU %s do not end", self._memory.device)

    def _open(self, lent: LentDeviceMemory, opened: list[int]) -> None:
        self._driver.bind(self._memory.device)
        address = self._driver.open(lent.handle)
        size_bytes = self._driver.size_of(address)
        if size_bytes is not None and size_bytes < lent.size_bytes:
            self._driver.close(address)
            raise TransferError("the peer's GPU memory is smaller than was granted")
        opened.append(address)
        where = "this GPU" if lent.device_uuid == self._memory.device_uuid else "another GPU"
        logger.info("opened a peer's pool of %s MiB on %s", lent.size_bytes >> 20, where)

    def _close_pool(self, address: int) -> None:
        self._driver.bind(self._memory.device)
        self._driver.close(address)

    def _copy(self, source: int, runs: Sequence[CopyRun], stop: threading.Event) -> None:
        lane, copy, target = self._lane(), self._driver.copy, self._memory.address
        try:
            for first in range(0, len(runs), _COPIES_A_LOOK):
                if stop.is_set():
                    return
                for run in runs[first : first + _COPIES_A_LOOK]:
                    copy(target + run.destination_offset, source + run.source_offset, run.size_bytes, lane.stream)
        finally:
            self._wait(lane)  # also when cancelled or failed: the copies that began write until then

    def _wait(self, lane: _Lane) -> None:
        try:
            self._driver.record(lane.event, lane.stream)
            self._driver.wait(lane.event)
        except CudaError:
            self._driver.synchronize(lane.stream)  # fails only where the context is lost, and then nothing writes
            raise

    def _lane(self) -> _Lane:
        self._driver.bind(self._memory.device)
        lane = self._lanes.get(threading.get_ident())
        if lane is None:
            lane = _Lane(self._driver.create_stream(), self._driver.create_event())
            self._lanes[threading.get_ident()] = lane
        return lane

    def _destroy_lanes(self) -> None:
        self._driver.bind(self._memory.device)
        while self._lanes:
            _, lane = self._lanes.popitem()
            self._driver.destroy_event(lane.event)
            self._driver.destroy_stream(lane.stream)


def _log_failure(done: Future[None]) -> None:
    error = done.exception()
    if error is not None:
        logger.error("GPU memory of a peer was not given back: %r", error)
