"""The KV blocks that a worker could share: every change in order, and snapshots of all of them at one moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias


class Tier(IntEnum):
    """Where a block lies, dearer the further down."""

    DEVICE = 0
    HOST = 1
    DISK = 2


@dataclass(frozen=True)
class Contents:
    """What blocks say, and the rest of what their names are made of.

    Attributes:
        blocks: of each block the bytes that its block hash is of: token ids as u32, then its media
            (``quartet.kvcache.block_hash``).
        adapter, cache_salt: of their sequence; empty where there is none.
    """

    blocks: Sequence[bytes]
    adapter: str = ""
    cache_salt: str = ""


@dataclass(frozen=True)
class Stored:
    """Blocks that can be shared from now on; each follows the one before it.

    Attributes:
        parent_hash: sequence hash of the block before the first; ``None`` where there is none.
        sequence_hashes: unsigned 64 bit, in the order of the sequence; at least one.
        contents: of these blocks, where the engine tells them. Workers' own feed leaves them out, and they make no
            difference between events: the names say the same.
    """

    parent_hash: int | None
    sequence_hashes: Sequence[int]
    tier: Tier = Tier.DEVICE
    contents: Contents | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Removed:
    """Blocks that are there no more; in any order."""

    sequence_hashes: Sequence[int]
    tier: Tier = Tier.DEVICE


@dataclass(frozen=True)
class Cleared:
    """Nothing is there any more, on any tier."""


KvEvent: TypeAlias = Stored | Removed | Cleared


@dataclass(frozen=True)
class RankEvents:
    """What changed at one data-parallel rank, in order."""

    data_parallel_rank: int
    events: Sequence[KvEvent]


@dataclass(frozen=True, kw_only=True)
class KvBatch:
    """What changed at one rank of one epoch of a worker.

    Attributes:
        epoch: one life of the worker's process.
        number: counts that epoch's batches, of all ranks, from 1 on without a gap.
    """

    worker_id: str
    epoch: int
    number: int
    data_parallel_rank: int
    events: Sequence[KvEvent]


@dataclass(frozen=True)
class StoredBlocks:
    """All blocks of one rank and tier that can be shared at one moment.

    Attributes:
        parent_hashes: of each sequence hash, the one of the block before it; ``None`` for a sequence's first block.
            A block comes after the one before it.
    """

    data_parallel_rank: int
    parent_hashes: Mapping[int, int | None]
    tier: Tier = Tier.DEVICE


@dataclass(frozen=True)
class KvSnapshot:
    """What a worker holds once its batches up to and with ``number`` are applied; 0: none was published yet."""

    number: int
    blocks: Sequence[StoredBlocks]


@dataclass(frozen=True, kw_only=True)
class KvSnapshotPart:
    """A piece of a snapshot as it crosses the wire: ``stored`` is to be added to what the rank's other parts say."""

    number: int
    epoch: int
    data_parallel_rank: int
    stored: Sequence[Stored]
