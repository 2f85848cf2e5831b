"""Way ``staged``, the taker's side: bytes in host memory go into a pool on a GPU through pinned memory.

A copy thread fills one window of pinned memory while the GPU copies the other one's bytes to the pool.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np

from quartet.errors import TransferError
from quartet.transfer.base import TransferWay
from quartet.transfer.cuda.memory import DeviceMemory
from quartet.transfer.cuda.pinned import HostWindow
from quartet.transfer.cuda.threads import CopyThreads, Lane
from quartet.transfer.life_line import PoolOwner
from quartet.transfer.runs import CopyRun, Runs, check_runs
from quartet.transfer.shm import MappedSources

#: A millisecond of the CPU's copying; the GPU takes a tenth of that.
_WINDOW_SIZE_BYTES = 4 << 20

#: Where in the pool the bytes begin, and the bytes.
HostPart: TypeAlias = tuple[int, memoryview]


class DeviceWriter:
    """Writes into one pool on a GPU."""

    def __init__(self, memory: DeviceMemory) -> None:
        """Write into ``memory``; nothing is pinned yet."""
        self._memory = memory
        self._threads = CopyThreads(memory, "cuda-write")

    async def write(self, parts: Sequence[HostPart]) -> None:
        """Put ``parts`` into the pool; returns, raises or is cancelled once nothing writes there any more.

        Raises:
            TransferError: a call of CUDA failed, or the writer is closed.
        """
        await self._threads.copy(partial(self._write, parts), "a copy to the GPU")

    async def close(self) -> None:
        """Give the pinned memory back, once writes under way have ended. May be called twice."""
        await self._threads.close()

    def _write(self, parts: Sequence[HostPart], lane: Lane, stop: threading.Event) -> None:
        driver = self._threads.driver
        for number, filling in enumerate(_fillings(parts)):
            if stop.is_set():
                return
            if len(lane.windows) <= number % 2:
                lane.windows.append(HostWindow.allocate(driver, _WINDOW_SIZE_BYTES))
            window = lane.windows[number % 2]
            if number >= 2:
                driver.wait(window.event)  # the GPU still reads what was put there before
            for run in _fill(window, filling):
                target = self._memory.address + run.destination_offset
                driver.copy_to_device(target, window.address + run.source_offset, run.size_bytes, lane.stream)
            driver.record(window.event, lane.stream)


def _fillings(parts: Sequence[HostPart]) -> Iterator[list[HostPart]]:
    """``parts``, cut where a window is full."""
    filling: list[HostPart] = []
    room = _WINDOW_SIZE_BYTES
    for offset, data in parts:
        done = 0
        while done < len(data):
            size = min(room, len(data) - done)
            filling.append((offset + done, data[done : done + size]))
            done, room = done + size, room - size
            if not room:
                yield filling
                filling, room = [], _WINDOW_SIZE_BYTES
    if filling:
        yield filling


def _fill(window: HostWindow, filling: Sequence[HostPart]) -> list[CopyRun]:
    """Put bytes into the window, one after the other. NumPy lets go of the GIL.

    Returns:
        From where in the window they go where in the pool, neighbours together.
    """
    runs: list[CopyRun] = []
    at = 0
    for offset, data in filling:
        size = len(data)
        np.copyto(window.data[at : at + size], np.frombuffer(data, dtype=np.uint8))
        last = runs[-1] if runs else None
        if last is not None and last.destination_offset + last.size_bytes == offset:
            runs[-1] = CopyRun(last.source_offset, last.destination_offset, last.size_bytes + size)
        else:
            runs.append(CopyRun(at, offset, size))
        at += size
    return runs


class StagedReader(MappedSources):
    """A ``PoolReader`` into a pool on a GPU, out of memory that a worker on this host lends."""

    def __init__(self, memory: DeviceMemory, writer: DeviceWriter, way: TransferWay) -> None:
        """Read into ``memory`` by ``writer``, which stays the caller's; nothing is mapped yet."""
        super().__init__(way)
        self._memory = memory
        self._writer = writer

    async def copy(self, owner: PoolOwner, runs: Runs) -> None:
        """As ``PoolReader``."""
        source = self._source(owner)
        try:
            check_runs(runs, len(source), self._memory.size_bytes)
        except ValueError as error:
            raise TransferError(f"the source's offsets are wrong: {error}") from None
        parts = [(target, source[begin : begin + size]) for begin, target, size in runs.tolist()]
        await self._writer.write(parts)

    async def close(self) -> None:
        """As ``PoolReader``."""
        self._pools.close()


class DeviceSink:
    """A ``PieceSink`` into a pool on a GPU: gathers a window's worth of what comes, then writes it."""

    def __init__(self, writer: DeviceWriter) -> None:
        """Write by ``writer``, for one fetch."""
        self._writer = writer
        self._parts: list[HostPart] = []
        self._size_bytes = 0

    async def put(self, offset_bytes: int, data: memoryview) -> None:
        """As ``PieceSink``."""
        self._parts.append((offset_bytes, data))
        self._size_bytes += len(data)
        if self._size_bytes >= _WINDOW_SIZE_BYTES:
            await self.flush()

    async def flush(self) -> None:
        """As ``PieceSink``."""
        parts, self._parts, self._size_bytes = self._parts, [], 0
        if parts:
            await self._writer.write(parts)
