"""Pinned host memory, which a GPU copies to and from at full speed: which kind there is, and one window of it."""

from __future__ import annotations

import ctypes
import logging
import threading
from dataclasses import dataclass
from enum import StrEnum
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from quartet.transfer.cuda.driver import CudaError, Driver

logger = logging.getLogger(__name__)

_PROBE_SIZE_BYTES = 4096

_probing = threading.Lock()
_kinds: WeakKeyDictionary[Driver, PinnedKind | None] = WeakKeyDictionary()


class PinnedKind(StrEnum):
    """The best pinned memory for bytes that the CPU writes and the GPU reads."""

    WRITE_COMBINED = "write-combined"  # spares the CPU's caches; the CPU must not read it
    PLAIN = "plain"


def pinned_kind(driver: Driver) -> PinnedKind | None:
    """What there is, found out once in a process; ``None``: no host memory can be pinned. Needs a bound context."""
    with _probing:
        if driver not in _kinds:
            _kinds[driver] = _probe(driver)
        return _kinds[driver]


def _probe(driver: Driver) -> PinnedKind | None:
    for kind in PinnedKind:
        try:
            driver.free_host(
                driver.allocate_host(_PROBE_SIZE_BYTES, is_write_combined=kind is PinnedKind.WRITE_COMBINED)
            )
        except CudaError as error:
            logger.warning("no %s pinned memory for copies to GPUs: %s", kind, error)
        else:
            logger.info("copies to GPUs go through %s pinned memory", kind)
            return kind
    return None


@dataclass(eq=False)
class HostWindow:
    """Pinned memory that the CPU fills and the GPU then copies out of.

    Attributes:
        address: of its first byte.
        data: all its bytes; on write-combined memory, only to be written.
        event: tells when the GPU has read what was last put here.
    """

    address: int
    data: npt.NDArray[np.uint8]
    event: int

    @classmethod
    def allocate(cls, driver: Driver, size_bytes: int) -> HostWindow:
        """A new window, with the event. Raises ``CudaError``: it can't be had, and nothing was kept."""
        is_write_combined = pinned_kind(driver) is PinnedKind.WRITE_COMBINED
        address = driver.allocate_host(size_bytes, is_write_combined=is_write_combined)
        try:
            event = driver.create_event()
        except CudaError:
            driver.free_host(address)
            raise
        data = np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))
        return cls(address, data, event)

    def free(self, driver: Driver) -> None:
        """Give memory and event back; nothing uses them any more."""
        driver.destroy_event(self.event)
        driver.free_host(self.address)
