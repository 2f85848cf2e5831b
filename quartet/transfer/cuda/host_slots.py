"""Slots of pinned host memory below a pool on a GPU, copied on streams of their own that steps are ordered against."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from quartet.transfer.cuda.driver import Copies, Driver
from quartet.transfer.cuda.memory import DeviceMemory

_Addresses: TypeAlias = npt.NDArray[np.int64]


class PinnedHostBlocks:
    """``HostBlocks`` of a GPU's pool.

    A block that the pool evicted was written by steps that have been read, so a copy of it waits for no step, and runs
    beside the one in flight. The steps launched later wait for the copy.
    """

    def __init__(self, memory: DeviceMemory, num_slots: int) -> None:
        """Pin ``num_slots`` slots below all of ``memory``. Raises ``CudaError``."""
        self.num_blocks, self.block_size_bytes = memory.num_blocks, memory.piece_size_bytes
        self._memory, self._driver = memory, memory.driver
        self._driver.bind(memory.device)
        size_bytes = num_slots * self.block_size_bytes
        self._address = self._driver.allocate_host(size_bytes, is_write_combined=False)
        self._saves, self._loads = self._driver.create_stream(), self._driver.create_stream()
        bytes_of = np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(self._address))
        self._slots = bytes_of.reshape(num_slots, self.block_size_bytes)
        self._savings: list[_PinnedSaving] = []

    def save(self, block_ids: Sequence[int], slots: Sequence[int]) -> _PinnedSaving:
        """As ``HostBlocks``."""
        driver = self._driver
        driver.bind(self._memory.device)
        driver.copy_many(self._copies(self._blocks(block_ids), self._places(slots)), self._saves)
        saving = _PinnedSaving(driver, self._memory.device, self._event())
        driver.record(saving.event, self._saves)
        driver.order(self._memory.compute_stream, saving.event)
        self._savings.append(saving)
        return saving

    def load(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """As ``HostBlocks``."""
        if not slots:
            return  # the driver takes no batch of no copies
        driver = self._driver
        driver.bind(self._memory.device)
        event = driver.create_event()
        try:
            driver.copy_many(self._copies(self._places(slots), self._blocks(block_ids)), self._loads)
            driver.record(event, self._loads)
            driver.wait(event)
        finally:
            driver.destroy_event(event)

    def slot(self, slot: int) -> memoryview:
        """As ``HostBlocks``."""
        return memoryview(self._slots[slot])

    def close(self) -> None:
        """As ``HostBlocks``."""
        driver = self._driver
        driver.bind(self._memory.device)
        for stream in (self._saves, self._loads):
            driver.synchronize(stream)
            driver.destroy_stream(stream)
        for saving in self._savings:
            driver.destroy_event(saving.event)
        del self._slots
        driver.free_host(self._address)

    def _event(self) -> int:
        """An event that nobody needs any more, or a new one. Who still waits for an old one waits a little longer."""
        if self._savings and self._savings[0].is_done:
            return self._savings.pop(0).event
        return self._driver.create_event()

    def _blocks(self, block_ids: Sequence[int]) -> _Addresses:
        return self._memory.address + np.array(block_ids, dtype=np.int64) * self.block_size_bytes

    def _places(self, slots: Sequence[int]) -> _Addresses:
        return self._address + np.array(slots, dtype=np.int64) * self.block_size_bytes

    def _copies(self, sources: _Addresses, targets: _Addresses) -> Copies:
        return np.stack([sources, targets, np.full_like(sources, self.block_size_bytes)], axis=1)


class _PinnedSaving:
    """A copy to slots that ``event`` follows, until another one takes the event over: then it was done."""

    def __init__(self, driver: Driver, device: int, event: int) -> None:
        self.event = event
        self._driver, self._device = driver, device
        self._is_done = False

    @property
    def is_done(self) -> bool:
        if not self._is_done:
            self._driver.bind(self._device)
            self._is_done = self._driver.is_ready(self.event)
        return self._is_done

    def wait(self) -> None:
        if not self._is_done:
            self._driver.bind(self._device)
            self._driver.wait(self.event)
            self._is_done = True
