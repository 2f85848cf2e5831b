"""A block pool in a GPU's memory, allocated by the driver so that other processes can open it."""

from __future__ import annotations

import logging

from quartet.transfer.base import PoolMemory, TransferWay
from quartet.transfer.cuda.driver import CudaError, Driver
from quartet.transfer.cuda.pinned import pinned_kind

logger = logging.getLogger(__name__)

#: The driver puts smaller allocations into one page together, and a handle opens whole pages (CUDA Programming Guide,
#: "Interprocess Communication").
_PAGE_SIZE_BYTES = 2 << 20


class DeviceMemory:
    """A block pool's bytes on one GPU.

    PyTorch's own allocator gives parts of larger reservations, whose handle would open more than the pool.

    Attributes:
        reserved_size_bytes: what it takes of the GPU's memory: whole pages, so that its handle opens nothing else.
        ways: by which its blocks can be moved, best first; ``cuda_ipc`` is missing where the driver exports no memory,
            all others where it pins none of the host's.
        driver: that gave it.
        device: the GPU's index in this process.
        device_uuid: the GPU's 16 bytes.
        address: of its first byte, in this process.
        handle: the 64 bytes by which another process opens it; empty: none can.
        compute_stream: on which the engine launches its steps; 0: the driver's default stream.
    """

    def __init__(self, driver: Driver, device: int, num_blocks: int, piece_size_bytes: int) -> None:
        """Reserve ``num_blocks * piece_size_bytes`` bytes, whatever is in them. Raises ``CudaError``."""
        self.driver = driver
        self.device = device
        self.compute_stream = 0
        self.num_blocks = num_blocks
        self.piece_size_bytes = piece_size_bytes
        self.size_bytes = num_blocks * piece_size_bytes
        driver.bind(device)
        self.device_uuid = driver.uuid(device)
        self.reserved_size_bytes = -(-self.size_bytes // _PAGE_SIZE_BYTES) * _PAGE_SIZE_BYTES
        self.address = driver.allocate(self.reserved_size_bytes)
        try:
            self.handle = driver.export(self.address)
        except CudaError as error:
            logger.warning("other processes can't open the blocks on GPU %s: %s", device, error)
            self.handle = b""
        direct = (TransferWay.CUDA_IPC,) if self.handle else ()
        staged = PoolMemory.ways if pinned_kind(driver) is not None else ()
        self.ways: tuple[TransferWay, ...] = (*direct, *staged)

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """The pool as an array of bytes, for ``torch.as_tensor``."""
        return {
            "shape": (self.size_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }

    def close(self) -> None:
        """Give the memory back; a peer that opened it keeps it until it closes it. May be called twice."""
        if self.address:
            address, self.address = self.address, 0
            self.driver.bind(self.device)
            self.driver.free(address)
