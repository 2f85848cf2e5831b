"""How a worker reads another's pool by itself, without that worker: one ``PoolReader`` for each kind of local pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quartet.transfer.base import BlockMemory, PoolMemory, TransferWay
from quartet.transfer.cuda.memory import DeviceMemory
from quartet.transfer.cuda.reader import CudaReader
from quartet.transfer.life_line import LentPool, PoolOwner
from quartet.transfer.runs import CopyRun
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

    async def copy(self, owner: PoolOwner, runs: Sequence[CopyRun]) -> None:
        """Copy ``runs`` from ``owner``'s open pool; returns, raises or is cancelled once nothing writes any more.

        Raises:
            TransferError: a run leaves one of the pools, or the source has ended, or a copy failed.
        """
        ...

    async def close(self) -> None:
        """Close every pool, once copies from it have ended."""
        ...


def pool_reader(memory: BlockMemory) -> PoolReader | None:
    """What reads into ``memory``; ``None``: nothing does."""
    if isinstance(memory, PoolMemory):
        return ShmReader(memory)
    return CudaReader(memory) if isinstance(memory, DeviceMemory) else None
