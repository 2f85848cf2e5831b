"""What a source says of its pool in GPU memory: the bytes of ``PullGranted.opaque``, and the life line beside them."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import numpy as np

from quartet.errors import TransferError
from quartet.transfer.cuda.driver import HANDLE_SIZE_BYTES, UUID_SIZE_BYTES
from quartet.transfer.cuda.memory import DeviceMemory
from quartet.transfer.life_line import TOKEN_SIZE_BYTES, LifeLineServer
from quartet.transfer.runs import Offsets

_VERSION = 1

#: Version, handle, GPU, bytes of the pool, epoch, token, length of the socket's name, number of offsets; network order.
_HEAD = struct.Struct(f"!B{HANDLE_SIZE_BYTES}s{UUID_SIZE_BYTES}sQQ{TOKEN_SIZE_BYTES}sBI")

_OFFSET = np.dtype(">u8")

#: The kernel's bound of a Unix socket's name.
_MAX_SOCKET_PATH = 107


@dataclass(frozen=True)
class LentDeviceMemory:
    """Where a pool on a GPU of this host can be had.

    Attributes:
        handle: opens it, 64 bytes.
        device_uuid: the GPU that has it, 16 bytes.
        epoch: of the worker.
        socket_path: its life line, abstract: begins with ``@``.
        token: what the life line requires, 16 bytes.
    """

    handle: bytes = field(repr=False)
    device_uuid: bytes
    size_bytes: int
    epoch: int
    socket_path: str
    token: bytes = field(repr=False)


def to_opaque(lent: LentDeviceMemory, offsets: Offsets) -> bytes:
    """The bytes of ``granted``; ``offsets``: where each piece asked for begins in the pool, in bytes."""
    name = lent.socket_path.encode("ascii")
    numbers = (lent.size_bytes, lent.epoch)
    head = _HEAD.pack(_VERSION, lent.handle, lent.device_uuid, *numbers, lent.token, len(name), len(offsets))
    return head + name + offsets.astype(_OFFSET).tobytes()


def from_opaque(opaque: bytes) -> tuple[LentDeviceMemory, Offsets]:
    """The pool and the offsets that ``to_opaque`` wrote; others of 2**63 and more become negative.

    Raises:
        TransferError: another version, or anything that ``to_opaque`` does not write.
    """
    if opaque[:1] != bytes([_VERSION]):
        raise TransferError(f"the source speaks another version of cuda_ipc: {opaque[:1].hex() or 'none'}")
    if len(opaque) < _HEAD.size:
        raise TransferError("the source's description of its GPU memory is too short")
    _, handle, device_uuid, size_bytes, epoch, token, name_length, num_offsets = _HEAD.unpack_from(opaque)
    name = opaque[_HEAD.size : _HEAD.size + name_length]
    if len(opaque) != _HEAD.size + name_length + 8 * num_offsets:
        raise TransferError("the source's description of its GPU memory has a wrong length")
    is_name = name[:1] == b"@" and 1 < name_length <= _MAX_SOCKET_PATH and all(0x20 < char < 0x7F for char in name)
    if not is_name or not size_bytes:
        raise TransferError("the source's description of its GPU memory names no socket or no bytes")
    lent = LentDeviceMemory(handle, device_uuid, size_bytes, epoch, name.decode("ascii"), token)
    return lent, np.frombuffer(opaque[_HEAD.size + name_length :], _OFFSET).astype(np.int64)


class CudaServer(LifeLineServer):
    """Lends a pool in GPU memory to peers on this host, from ``start`` until ``close``."""

    def __init__(self, memory: DeviceMemory, epoch: int) -> None:
        """Draw a name and a token for ``epoch`` of the worker; nothing listens yet."""
        super().__init__("cuda")
        self.lent = LentDeviceMemory(
            memory.handle, memory.device_uuid, memory.size_bytes, epoch, self.socket_path, self.token
        )
