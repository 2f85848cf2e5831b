"""What moving the bytes of a request takes at least, by a plain copy and as the way of shared memory copies."""

from __future__ import annotations

import mmap
import random
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import numpy as np

from quartet.transfer.base import PoolMemory
from quartet.transfer.shm import copy_runs, merge_runs

ParamsT = ParamSpec("ParamsT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, kw_only=True)
class CopyTimes:
    """As many bytes copied once each way, in milliseconds.

    Attributes:
        plain_ms: block by block, in the pools' order.
        transfer_ms: by the transfer's own code, from a pool mapped for reading, blocks scattered in both; without
            questions, answers and the change to another thread.
    """

    plain_ms: float
    transfer_ms: float


class BlockCopier:
    """Copies blocks between two pools of this process, made as workers have them.

    Attributes:
        pools: what is copied from, and to.
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        """Make pools of ``num_blocks``, each of ``block_bytes``."""
        self.pools = PoolMemory(num_blocks, block_bytes), PoolMemory(num_blocks, block_bytes)
        self._source, self._destination = (
            np.frombuffer(pool.view, np.uint8).reshape(num_blocks, block_bytes) for pool in self.pools
        )
        self._mapped = memoryview(mmap.mmap(self.pools[0].fd, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ))
        for pool in self.pools:
            pool.close()  # the mappings live on
        rng = random.Random(0)
        self._offsets = [rng.sample(range(0, num_blocks * block_bytes, block_bytes), num_blocks) for _ in range(2)]
        self._num_blocks, self._block_bytes = num_blocks, block_bytes
        self._next_plain = self._next_transfer = 0

    async def copy(self, num_blocks: int) -> CopyTimes:
        """Copy the next blocks each way, which no cache holds any more."""
        return CopyTimes(plain_ms=self.copy_plain(num_blocks), transfer_ms=await self.copy_as_transfer(num_blocks))

    def copy_plain(self, num_blocks: int) -> float:
        """As of ``CopyTimes``."""
        began = time.perf_counter()
        for number in range(self._next_plain, self._next_plain + num_blocks):
            block = number % self._num_blocks
            np.copyto(self._destination[block], self._source[block])
        self._next_plain += num_blocks
        return 1e3 * (time.perf_counter() - began)

    async def copy_as_transfer(self, num_blocks: int) -> float:
        """As of ``CopyTimes``."""
        numbers = [(self._next_transfer + number) % self._num_blocks for number in range(num_blocks)]
        self._next_transfer += num_blocks
        sources, destinations = ([offsets[number] for number in numbers] for offsets in self._offsets)
        runs = merge_runs(sources, destinations, self._block_bytes)
        began = time.perf_counter()
        await copy_runs(self._mapped, self.pools[1].view, runs, _InPlace())
        return 1e3 * (time.perf_counter() - began)


class _InPlace(Executor):
    """Does what it is given at once, where it is given."""

    def submit(
        self, function: Callable[ParamsT, ResultT], /, *args: ParamsT.args, **kwargs: ParamsT.kwargs
    ) -> Future[ResultT]:
        future: Future[ResultT] = Future()
        future.set_result(function(*args, **kwargs))
        return future
