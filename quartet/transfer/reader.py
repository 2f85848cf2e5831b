"""What brings pieces into a worker's own pool: readers of other workers' memory, by way, and sinks of what is sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from quartet.transfer.base import BlockMemory, PoolMemory, TransferWay
from quartet.transfer.cuda.memory import DeviceMemory
from quartet.transfer.cuda.reader import CudaReader
from quartet.transfer.cuda.staged import DeviceSink, DeviceWriter, StagedReader
from quartet.transfer.life_line import LentPool, PoolOwner
from quartet.transfer.runs import Runs
from quartet.transfer.shm import ShmReader


class PoolReader(Protocol):
    """Copies out of other workers' pools on this host into one local pool. Lives on one event loop."""

    @property
    def way(self) -> TransferWay:
        """By which it reads."""
        ...

    def may_open(self, owner: PoolOwner) -> bool:
        """False once ``owner``'s pool could not be had: offer another way then."""
        ...

    def is_open(self, owner: PoolOwner) -> bool:
        """Whether ``owner``'s pool is open, so that ``copy`` works."""
        ...

    async def open(self, owner: PoolOwner, lent: LentPool, *, timeout_s: float) -> None:
        """Open ``owner``'s pool unless it is; it stays open until its worker ends.

        Raises:
            TransferError: it cannot be had, or is not what was said; ``may_open`` is false from then on.
        """
        ...

    async def copy(self, owner: PoolOwner, runs: Runs) -> None:
        """Copy ``runs`` from ``owner``'s open pool; returns, raises or is cancelled once nothing writes any more.

        Raises:
            TransferError: a run leaves one of the pools, or the source has ended, or a copy failed.
        """
        ...

    async def close(self) -> None:
        """Close every pool, once copies from it have ended."""
        ...


class PieceSink(Protocol):
    """Puts what the source sends into one local pool, for one fetch."""

    async def put(self, offset_bytes: int, data: memoryview) -> None:
        """Take bytes for this place in the pool; at the latest ``flush`` writes them.

        Returns, raises or is cancelled once nothing writes any more. Raises ``TransferError``: a copy failed.
        """
        ...

    async def flush(self) -> None:
        """Write all that was taken; ends and raises as ``put`` does."""
        ...


class PoolInputs(Protocol):
    """All that brings pieces into one local pool."""

    @property
    def readers(self) -> Mapping[TransferWay, PoolReader]:
        """What reads other workers' memory, by way, best first."""
        ...

    def sink(self) -> PieceSink:
        """What takes the pieces of one fetch that the source sends."""
        ...

    async def close(self) -> None:
        """Close all of them, once what they write has been written."""
        ...


def pool_inputs(memory: BlockMemory, is_busy: Callable[[], bool]) -> PoolInputs:
    """What brings pieces into ``memory``; ``is_busy`` as ``Puller.attach``."""
    if isinstance(memory, DeviceMemory):
        return _DeviceInputs(memory, is_busy)
    assert isinstance(memory, PoolMemory), "a pool is in host memory or on a GPU"
    return _HostInputs(memory)


class _HostInputs:
    """Into a pool in host memory.

    What a source staged has a reader of its own: nothing may be read there ahead of ``granted``.
    """

    def __init__(self, memory: PoolMemory) -> None:
        self._memory = memory
        ways = (TransferWay.SHM, TransferWay.STAGED)
        self.readers: Mapping[TransferWay, PoolReader] = {way: ShmReader(memory, way) for way in ways}

    def sink(self) -> PieceSink:
        return _HostSink(self._memory)

    async def close(self) -> None:
        for reader in self.readers.values():
            await reader.close()


class _DeviceInputs:
    """Into a pool on a GPU; pools in host memory and what sources staged are written by one ``DeviceWriter``."""

    def __init__(self, memory: DeviceMemory, is_busy: Callable[[], bool]) -> None:
        self._writer = DeviceWriter(memory)
        ways = (TransferWay.SHM, TransferWay.STAGED)
        self.readers: Mapping[TransferWay, PoolReader] = {
            TransferWay.CUDA_IPC: CudaReader(memory, is_busy),
            **{way: StagedReader(memory, self._writer, way) for way in ways},
        }

    def sink(self) -> PieceSink:
        return DeviceSink(self._writer)

    async def close(self) -> None:
        for reader in self.readers.values():
            await reader.close()
        await self._writer.close()


class _HostSink:
    def __init__(self, memory: PoolMemory) -> None:
        self._memory = memory

    async def put(self, offset_bytes: int, data: memoryview) -> None:
        self._memory.view[offset_bytes : offset_bytes + len(data)] = data

    async def flush(self) -> None:
        pass
