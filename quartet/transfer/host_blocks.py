"""Slots of host memory below a block pool: blocks are saved there and loaded from there, several at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from quartet.transfer.base import PoolMemory


class Saving(Protocol):
    """A copy from the pool to slots that was begun."""

    @property
    def is_done(self) -> bool:
        """Whether the slots have the bytes, and the pool's blocks may be written by anybody."""
        ...

    def wait(self) -> None:
        """Return once it is done. May be called on any thread, several times."""
        ...


class HostBlocks(Protocol):
    """Slots of as many bytes as a block of the pool. Which of them may be used by whom is the caller's to know.

    Attributes:
        num_blocks: of the pool.
        block_size_bytes: of one.
    """

    num_blocks: int
    block_size_bytes: int

    def save(self, block_ids: Sequence[int], slots: Sequence[int]) -> Saving:
        """Begin to copy blocks of the pool into slots; on the engine's thread, between steps.

        Steps that are launched afterwards begin once that is done.
        """
        ...

    def load(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy slots into blocks of the pool, which no step in flight uses. Any thread; returns when it is done.

        Raises:
            Exception: the blocks hold nothing of use.
        """
        ...

    def slot(self, slot: int) -> memoryview:
        """The bytes of a slot, writable."""
        ...

    def close(self) -> None:
        """Give the memory back; nothing uses it any more."""
        ...


class PlainHostBlocks:
    """Slots below a pool that is in host memory itself."""

    def __init__(self, memory: PoolMemory, num_slots: int, *, first_block: int = 0, num_blocks: int) -> None:
        """Slots below ``num_blocks`` blocks of ``memory``, which are numbered from ``first_block`` on.

        Memory of a slot is taken when it is first used.
        """
        pool = np.frombuffer(memory.view, np.uint8).reshape(memory.num_blocks, memory.piece_size_bytes)
        self.num_blocks, self.block_size_bytes = num_blocks, memory.piece_size_bytes
        self._pool = pool[first_block : first_block + num_blocks]
        self._slots = np.empty((num_slots, memory.piece_size_bytes), np.uint8)

    def save(self, block_ids: Sequence[int], slots: Sequence[int]) -> Saving:
        """As ``HostBlocks``."""
        for block_id, slot in zip(block_ids, slots, strict=True):
            self._slots[slot] = self._pool[block_id]
        return DONE

    def load(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """As ``HostBlocks``. The interpreter runs meanwhile: each is one copy without its lock."""
        for slot, block_id in zip(slots, block_ids, strict=True):
            self._pool[block_id] = self._slots[slot]

    def slot(self, slot: int) -> memoryview:
        """As ``HostBlocks``."""
        return memoryview(self._slots[slot])

    def close(self) -> None:
        """As ``HostBlocks``."""
        del self._pool, self._slots


class _Done:
    is_done = True

    def wait(self) -> None:
        """At once."""


#: A copy that has ended.
DONE: Saving = _Done()
