"""TensorRT-LLM's KV events, read: what JSON says becomes plain data for a mirror to follow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from quartet.events.kv import Tier
from quartet.kvcache.block_hash import pack_token_ids

_TIERS = {0: Tier.DEVICE, 1: Tier.HOST}


class UnreadableEventError(Exception):
    """An event of a shape that is not known; what it said is lost."""


@dataclass(frozen=True)
class LlmBlock:
    """A block that was stored.

    Attributes:
        block_hash: TensorRT-LLM's own name of it, 64 bits.
        token_bytes: its tokens as ``pack_token_ids`` gives them; ``None`` for a block that has no name of ours: it is
            not full, or other things than tokens decide what is in it.
    """

    block_hash: int
    token_bytes: bytes | None
    tier: Tier = Tier.DEVICE


@dataclass(frozen=True)
class LlmCreated:
    """A window's pool is there, empty."""

    num_device_blocks: int


@dataclass(frozen=True)
class LlmStored:
    """Blocks can be reused from now on; each follows the one before it, the first one ``parent_hash``."""

    parent_hash: int | None
    blocks: Sequence[LlmBlock]


@dataclass(frozen=True)
class LlmRemoved:
    """Blocks are gone from every tier."""

    block_hashes: Sequence[int]


@dataclass(frozen=True)
class LlmUpdated:
    """Something about a block is new; ``tier`` is ``None`` where that is not where it lies."""

    block_hash: int
    tier: Tier | None


LlmChange: TypeAlias = LlmCreated | LlmStored | LlmRemoved | LlmUpdated


@dataclass(frozen=True)
class LlmEvent:
    """One event of one rank.

    Attributes:
        number: counts a rank's events from 0, of all window sizes together.
        window_size: attention window, in tokens, of the blocks that it is about.
    """

    rank: int
    number: int
    window_size: int
    change: LlmChange


class EventReader:
    """Reads events of an engine with these blocks."""

    def __init__(self, block_size: int, media_token_ids: frozenset[int] = frozenset(), vocab_size: int | None = None):
        """Read blocks of ``block_size`` tokens.

        Args:
            block_size: tokens of a full block.
            media_token_ids: tokens that stand for media.
            vocab_size: tokens from here on stand for media or prompt tuning too.
        """
        self._block_size = block_size
        self._media_token_ids = media_token_ids
        self._vocab_size = vocab_size

    def read(self, item: object) -> LlmEvent:
        """What ``item`` says. Raises ``UnreadableEventError``."""
        try:
            return self._read(item)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise UnreadableEventError(f"{type(error).__name__} in an event") from error

    def _read(self, item: Any) -> LlmEvent:
        return LlmEvent(
            rank=int(item.get("attention_dp_rank") or 0),
            number=int(item["event_id"]),
            window_size=int(item.get("window_size") or 0),
            change=self._change(item["data"]),
        )

    def _change(self, data: Mapping[str, Any]) -> LlmChange:
        match data["type"]:
            case "created":
                return LlmCreated(int(data["num_blocks_per_cache_level"][0]))
            case "stored":
                return LlmStored(data["parent_hash"], [self._block(block) for block in data["blocks"]])
            case "removed":
                return LlmRemoved([int(block_hash) for block_hash in data["block_hashes"]])
            case "updated":
                moved = data.get("cache_level")
                return LlmUpdated(int(data["block_hash"]), None if moved is None else _tier(moved["new_value"]))
        raise ValueError("unknown type")

    def _block(self, block: Mapping[str, Any]) -> LlmBlock:
        return LlmBlock(int(block["block_hash"]), self._token_bytes(block), _tier(block.get("cache_level") or 0))

    def _token_bytes(self, block: Mapping[str, Any]) -> bytes | None:
        tokens = block["tokens"]
        # Later versions than 1.2 name pictures and salts; all of them number what is no plain token.
        if len(tokens) != self._block_size or block.get("mm_keys") or block.get("cache_salt"):
            return None
        if any(token.get("token_extra_id") for token in tokens):
            return None
        token_ids = [int(token["token_id"]) for token in tokens]
        return pack_token_ids(token_ids) if self._are_text(token_ids) else None

    def _are_text(self, token_ids: Iterable[int]) -> bool:
        limit = (1 << 32) if self._vocab_size is None else self._vocab_size
        return all(0 <= token_id < limit and token_id not in self._media_token_ids for token_id in token_ids)


def _tier(cache_level: int) -> Tier:
    return _TIERS.get(cache_level, Tier.DISK)
