"""The policy seam: what waits, what is known of the places, and who goes where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quartet.discovery.place import Place


@dataclass(frozen=True, kw_only=True)
class Pending:
    """A request (one choice of it) that waits for a place.

    Attributes:
        num_tokens: tokens to prefill: prompt and already generated ones.
        num_reserved_tokens: tokens that its decode place must have room for: ``num_tokens`` and what it may
            generate soon (see ``router.attempt_tools.AttemptConfig.reserve_tokens``).
        num_most_tokens: tokens that its decode place must be able to hold at all, which are those of its longest
            possible sequence; at least ``num_reserved_tokens``.
        adapter: the adapter that it needs; empty: none.
        avoid: worker ids that just failed it; taken only where no other will do.
        prefer_prefill: where its blocks are probably cached.
    """

    num_tokens: int
    num_reserved_tokens: int
    num_most_tokens: int
    adapter: str = ""
    avoid: frozenset[str] = frozenset()
    prefer_prefill: Place | None = None


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """What the router knows of one place.

    Attributes:
        num_total_blocks: KV blocks of the place, of ``block_size`` tokens.
        num_used_blocks: blocks in use or held, as the place last reported; what is only cached is left out.
        num_promised_blocks: blocks that the router's own placements there may still take beyond those.
        num_queued_tokens: prompt tokens that wait there, the router's own unreported ones included.
        adapters: adapters that it serves.
    """

    place: Place
    num_total_blocks: int
    block_size: int
    num_used_blocks: int = 0
    num_promised_blocks: int = 0
    num_queued_tokens: int = 0
    adapters: frozenset[str] = frozenset()

    @property
    def num_free_for_booking(self) -> int:
        """Blocks that a new request may count on."""
        return self.num_total_blocks - self.num_used_blocks - self.num_promised_blocks

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens take here."""
        return -(-num_tokens // self.block_size)

    def serves(self, adapter: str) -> bool:
        """Whether requests for ``adapter`` can run here."""
        return not adapter or adapter in self.adapters


@dataclass(frozen=True)
class Snapshot:
    """The places of one pool that take requests now."""

    prefill: Sequence[Candidate]
    decode: Sequence[Candidate]


@dataclass(frozen=True)
class Placement:
    """Where one request goes; ``prefill`` is ``None`` where the decode place prefills itself."""

    prefill: Place | None
    decode: Place


class Policy(Protocol):
    """Chooses places; pure but for its own random numbers or turn."""

    def assign(self, waiting: Sequence[Pending], snapshot: Snapshot) -> list[Placement | None]:
        """Choose places for ``waiting``, first come first; ``None`` keeps a request in the router's queue.

        A request is placed only where its decode place has room for ``num_reserved_tokens``, counting those placed
        by this very call.
        """
        ...
