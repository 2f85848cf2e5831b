"""The transfer seam: fetch these remote pieces into those local blocks, whatever the way.

A *piece* is one block of a sequence, or of a media item's embeddings, numbered by its position; its bytes are laid out
as the hand-off's ``PieceLayout`` says. One module of this package per way to move pieces.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, NamedTuple, Protocol, overload

from quartet.kvcache.layout import EmbeddingLayout, HandOff, PieceLayout

#: Linux 5.1; the standard library names it from Python 3.13 on.
_F_SEAL_FUTURE_WRITE = 0x10


class TransferWay(StrEnum):
    """How bytes move, best first where several are possible."""

    CUDA_IPC = "cuda_ipc"  # same host, GPU pools
    STAGED = "staged"  # one of the pools is on a GPU: through pinned host memory, then as shm or grpc
    SHM = "shm"  # same host, CPU pools: the source's memfd is mapped, one copy
    NIXL = "nixl"  # across hosts by RDMA
    GRPC = "grpc"  # always works: bytes ride the Pull stream


class PieceCopy(NamedTuple):
    """Put remote piece ``piece`` (position in the sequence) into local block ``block_id``."""

    piece: int
    block_id: int


class PieceRun(Sequence[PieceCopy]):
    """The copies of consecutive pieces: piece ``first_piece + i`` into local block ``block_ids[i]``.

    A long prompt has thousands of them, which need not be objects.
    """

    def __init__(self, first_piece: int, block_ids: Sequence[int]) -> None:
        """``block_ids`` stay the caller's and must not change."""
        self.first_piece = first_piece
        self.block_ids = block_ids

    def moved(self, num_blocks: int) -> PieceRun:
        """The same pieces into the blocks that lie so many further."""
        return PieceRun(self.first_piece, [block_id + num_blocks for block_id in self.block_ids])

    def __len__(self) -> int:
        return len(self.block_ids)

    def __iter__(self) -> Iterator[PieceCopy]:
        return map(PieceCopy, range(self.first_piece, self.first_piece + len(self)), self.block_ids)

    @overload
    def __getitem__(self, index: int) -> PieceCopy: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[PieceCopy]: ...

    def __getitem__(self, index: int | slice) -> PieceCopy | Sequence[PieceCopy]:
        if isinstance(index, slice):
            return tuple(self)[index]
        return PieceCopy(range(self.first_piece, self.first_piece + len(self))[index], self.block_ids[index])


@dataclass(frozen=True)
class FetchResult:
    """What a fetch moved: the way taken, bytes, and seconds from the first message to ``finished``."""

    way: TransferWay
    size_bytes: int
    duration_s: float


def never() -> bool:
    """False: what is said of a pool that no engine computes with."""
    return False


class Claim(Protocol):
    """A hand-off that this worker accepted; it is renewed until ``fetch`` or ``release`` ends it."""

    async def fetch(self, copies: Sequence[PieceCopy]) -> FetchResult:
        """Move the pieces, then notify the source that it may release them; ``copies`` may be empty.

        Returns only when nothing writes to the local blocks any more, also when it raises or is cancelled; ``release``
        then frees the source's blocks sooner than the hand-off would expire.

        Raises:
            TransferError, TransferTimeoutError, HandOffNotFoundError, HandOffStateError, StaleEpochError,
            LayoutMismatchError: what arrived must be thrown away. A source that is gone is a ``TransferError`` too.
            NoHandOffError: no way leads from that worker's pool into this one.
        """
        ...

    async def release(self) -> None:
        """Give the claim up: the source need not hold anything for it. Nothing happens after a fetch that went well.

        Never raises; bounded in time; may be called twice.
        """
        ...


class Puller(Protocol):
    """Fetches pieces for one local pool."""

    def attach(self, memory: BlockMemory, layout: PieceLayout, is_busy: Callable[[], bool] = never) -> None:
        """Name the pool that is fetched into; called once, before the first ``claim``.

        ``is_busy``: whether the engine that computes with this pool has steps to take; called on any thread.
        """
        ...

    def claim(self, hand_off: HandOff) -> Claim:
        """Accept ``hand_off``: check its layout against the local pool, start renewing it.

        Raises:
            LayoutMismatchError: its blocks cannot be taken over here; nothing was started.
        """
        ...

    async def close(self) -> None:
        """End every renewal and channel. Claims still open end with ``TransferError``."""
        ...


class BlockMemory(Protocol):
    """A block pool's bytes, wherever they are. ``PoolMemory`` is one, and ``cuda.memory.DeviceMemory``."""

    @property
    def ways(self) -> tuple[TransferWay, ...]:
        """The ways by which its blocks can be moved, best first."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks, numbered from 0, one after the other."""
        ...

    @property
    def piece_size_bytes(self) -> int:
        """Bytes of one."""
        ...

    @property
    def size_bytes(self) -> int:
        """Bytes of all."""
        ...

    def close(self) -> None:
        """Give the memory back; no transfer reads or writes it any more. May be called twice."""
        ...


class PoolMemory:
    """A block pool's bytes in host memory, in a memfd so that a process on this host can map it.

    The memory is touched once here, unless ``is_touched`` is false: fresh pages cost three times a warm copy, and
    touching them keeps the GIL (half a second a GiB, measured). The memfd is sealed: other processes can neither write
    through it nor shrink the pool while they or others read it. Only the mapping made here, and processes forked from
    this one, can write.

    Attributes:
        ways: by which its blocks can be moved, best first.
    """

    ways: ClassVar[tuple[TransferWay, ...]] = (TransferWay.SHM, TransferWay.GRPC)

    def __init__(self, num_blocks: int, piece_size_bytes: int, *, is_touched: bool = True) -> None:
        """Reserve ``num_blocks * piece_size_bytes`` bytes, zeroed."""
        self.num_blocks = num_blocks
        self.piece_size_bytes = piece_size_bytes
        self.size_bytes = num_blocks * piece_size_bytes
        self.fd = os.memfd_create("quartet-kv-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.size_bytes)
        touching = getattr(mmap, "MAP_POPULATE", 0) if is_touched else 0
        self._map = mmap.mmap(self.fd, self.size_bytes, flags=mmap.MAP_SHARED | touching)
        # The seal on writing leaves mappings alone that exist already: ours.
        seals = _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
        self.view = memoryview(self._map)

    def piece(self, block_id: int) -> memoryview:
        """The bytes of block ``block_id``, writable, no copy. Raises ``IndexError`` outside the pool."""
        if not 0 <= block_id < self.num_blocks:
            raise IndexError(f"block {block_id} of {self.num_blocks}")
        start = block_id * self.piece_size_bytes
        return self.view[start : start + self.piece_size_bytes]

    def close(self) -> None:
        """Close the file descriptor; the pages live on as long as a process maps them."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass(frozen=True)
class EmbeddingMemory:
    """A pool of media embeddings, in host memory or on a GPU; its ``EmbeddingPool`` knows what lies where."""

    layout: EmbeddingLayout
    memory: BlockMemory
