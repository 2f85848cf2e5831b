"""Way ``staged``, the source's side: blocks on a GPU are copied into pinned host memory, where others get them.

The memory is a memfd like a pool in host memory, sealed and passed on in the same way, in slots of one piece. A pull on
this host maps it and holds a slot for each piece until it ends; any other pull is sent piece by piece, and holds slots
for two windows: one is sent while the GPU copies into the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import numpy as np

from quartet.errors import NoHandOffError
from quartet.limited_log import LimitedLog
from quartet.transfer.base import PoolMemory
from quartet.transfer.cuda.driver import CudaError
from quartet.transfer.cuda.memory import DeviceMemory
from quartet.transfer.cuda.threads import COPIES_A_LOOK, CopyThreads, Lane
from quartet.transfer.life_line import LifeLineServer
from quartet.transfer.runs import Runs, merge_runs

logger = logging.getLogger(__name__)

#: How much is copied ahead of what is sent: the GPU takes less than a millisecond, gRPC some.
_WINDOW_SIZE_BYTES = 16 << 20


class StagingArea:
    """Pinned host memory for the blocks of one pool on a GPU; reserved when the first pull wants it.

    Attributes:
        num_slots: pieces that are here at once.
        size_bytes: of all slots.
    """

    def __init__(self, memory: DeviceMemory, max_size_bytes: int) -> None:
        """Reserve nothing yet; ``max_size_bytes``, but two slots at least."""
        size = memory.piece_size_bytes
        self.num_slots = max(2, min(max_size_bytes // size, memory.num_blocks))
        self.size_bytes = self.num_slots * size
        self._memory = memory
        self._slots = _Slots(self.num_slots)
        self._num_window_slots = max(1, min(self.num_slots // 2, _WINDOW_SIZE_BYTES // size))
        self._threads = CopyThreads(memory, "cuda-stage")
        self._host: PoolMemory | None = None
        self._reserving = asyncio.Lock()
        self._refusals = LimitedLog(logger)  # each pull can cause one

    @property
    def fd(self) -> int | None:
        """The memfd; ``None`` before the first pull, and at the end."""
        return None if self._host is None else self._host.fd

    @property
    def num_free_slots(self) -> int:
        """Slots that no pull holds."""
        return self._slots.num_free

    @asynccontextmanager
    async def staged(self, block_ids: Sequence[int]) -> AsyncIterator[list[int]]:
        """Have the blocks here for the length of the context; gives where each one begins, in bytes.

        Waits for slots, in order. Leaves when nothing writes to its slots any more, whatever happens.

        Raises:
            NoHandOffError: there is no host memory; the next pull may find some.
            TransferError: a copy failed, or the area is closed.
        """
        async with self._slots.taken(len(block_ids)) as slots:
            await self._copy(block_ids, slots)
            yield [slot * self._memory.piece_size_bytes for slot in slots]

    async def send(self, block_ids: Sequence[int], send: Callable[[int, memoryview], Awaitable[None]]) -> None:
        """Call ``send`` with the number of each block in ``block_ids`` and its bytes, which then may be overwritten.

        Raises what ``send`` raises, and as ``staged``.
        """
        size = self._num_window_slots
        windows = [range(first, min(first + size, len(block_ids))) for first in range(0, len(block_ids), size)]
        async with self._slots.taken(min(len(block_ids), 2 * size)) as slots:
            halves = (slots[:size], slots[size:])
            copying: asyncio.Task[None] | None = None
            try:
                for number, window in enumerate(windows):
                    if copying is None:
                        copying = self._start(block_ids, window, halves[0])
                    await copying
                    if number + 1 < len(windows):
                        copying = self._start(block_ids, windows[number + 1], halves[(number + 1) % 2])
                    for index, slot in zip(window, halves[number % 2], strict=False):
                        await send(index, self._piece(slot))
            finally:
                if copying is not None:
                    await _end(copying)

    async def close(self) -> None:
        """Give the memory back, once copies under way have ended. May be called twice."""
        await self._threads.close(last=self._release)

    def _start(self, block_ids: Sequence[int], window: range, slots: Sequence[int]) -> asyncio.Task[None]:
        wanted = [block_ids[index] for index in window]
        return asyncio.create_task(self._copy(wanted, slots[: len(wanted)]), name="stage-blocks")

    async def _copy(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Copy blocks into slots; ends when nothing writes there any more."""
        if self._host is None:
            await self._reserve()
        size = self._memory.piece_size_bytes
        runs = merge_runs(np.array(block_ids, np.int64) * size, np.array(slots, np.int64) * size, size)
        await self._threads.copy(partial(self._copy_runs, runs), "a copy out of the GPU's memory")

    async def _reserve(self) -> None:
        async with self._reserving:
            if self._host is not None:
                return
            try:
                await self._threads.call(self._pin)
            except (CudaError, OSError) as error:
                self._refusals.warning("no %s bytes of host memory for blocks of the GPU: %s", self.size_bytes, error)
                raise NoHandOffError(f"the source has no host memory for blocks of its GPU: {error}") from error

    def _pin(self) -> None:
        # Touching gigabytes with `mmap` keeps the GIL, and so the event loop, for that long; the driver does not.
        host = PoolMemory(self.num_slots, self._memory.piece_size_bytes, is_touched=False)
        try:
            self._threads.driver.pin(_address(host), host.size_bytes)
        except CudaError:
            host.close()
            raise
        self._host = host
        logger.info("pinned %s MiB of host memory for blocks of GPU %s", host.size_bytes >> 20, self._memory.device)

    def _release(self) -> None:
        host, self._host = self._host, None
        if host is not None:
            self._threads.driver.unpin(_address(host))
            host.close()

    def _piece(self, slot: int) -> memoryview:
        assert self._host is not None, "a block was copied there"
        return self._host.piece(slot)

    def _copy_runs(self, runs: Runs, lane: Lane, stop: threading.Event) -> None:
        assert self._host is not None, "reserved before"
        copy, source, target = self._threads.driver.copy_to_host, self._memory.address, _address(self._host)
        for first in range(0, len(runs), COPIES_A_LOOK):
            if stop.is_set():
                return
            for begin, end, size_bytes in runs[first : first + COPIES_A_LOOK].tolist():
                copy(target + end, source + begin, size_bytes, lane.stream)


class StagingServer(LifeLineServer):
    """Passes a staging area to peers on this host, from ``start`` until ``close``."""

    def __init__(self, area: StagingArea) -> None:
        """Draw a name and a token for this epoch of the worker; nothing listens yet."""
        super().__init__("staging")
        self._area = area

    @property
    def descriptors(self) -> Sequence[int]:
        """The memfd; none before something was granted, when no puller has a reason to ask."""
        fd = self._area.fd
        return () if fd is None else (fd,)


class _Slots:
    """Which slots are free, and who waits for some, in order. Lives on one event loop."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots))  # a heap: low ones first, so that neighbours come together
        self._waiting: deque[tuple[int, asyncio.Future[list[int]]]] = deque()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @asynccontextmanager
    async def taken(self, num_slots: int) -> AsyncIterator[list[int]]:
        """Have so many slots, ascending, for the length of the block."""
        granted: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        waiter = (num_slots, granted)
        self._waiting.append(waiter)
        self._serve()
        try:
            yield await granted
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            if granted.done() and not granted.cancelled():
                for slot in granted.result():
                    heapq.heappush(self._free, slot)
            self._serve()

    def _serve(self) -> None:
        while self._waiting and (self._waiting[0][1].cancelled() or self._waiting[0][0] <= len(self._free)):
            num_slots, granted = self._waiting.popleft()
            if not granted.cancelled():
                granted.set_result([heapq.heappop(self._free) for _ in range(num_slots)])


async def _end(copying: asyncio.Task[None]) -> None:
    """Cancel a copy that is not wanted, and wait until it writes no more; a second cancellation changes nothing."""
    copying.cancel()
    while not copying.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([copying])
    if not copying.cancelled():
        copying.exception()  # else asyncio logs that it was never looked at


def _address(host: PoolMemory) -> int:
    return int(np.frombuffer(host.view, dtype=np.uint8).ctypes.data)
