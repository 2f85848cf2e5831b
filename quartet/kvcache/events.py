"""What changes in the set of blocks that a pool could share: what the world is told of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias


class Tier(IntEnum):
    """Where a block lies, dearer the further down."""

    DEVICE = 0
    HOST = 1
    DISK = 2


@dataclass(frozen=True)
class Stored:
    """Blocks that can be shared from now on; each follows the one before it.

    Attributes:
        parent_hash: sequence hash of the block before the first; ``None`` where there is none.
        sequence_hashes: unsigned 64 bit, in the order of the sequence; at least one.
    """

    parent_hash: int | None
    sequence_hashes: Sequence[int]
    tier: Tier = Tier.DEVICE


@dataclass(frozen=True)
class Removed:
    """Blocks that are there no more; in any order."""

    sequence_hashes: Sequence[int]
    tier: Tier = Tier.DEVICE


@dataclass(frozen=True)
class Cleared:
    """Nothing is there any more, on any tier."""


KvEvent: TypeAlias = Stored | Removed | Cleared
