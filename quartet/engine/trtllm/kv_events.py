"""TensorRT-LLM's KV events: read from JSON, followed by a mirror, and passed on with our names of blocks.

TensorRT-LLM names a block by a hash of its own, from which ours cannot be computed; but ``stored`` events carry tokens
and a parent. So ``RankMirror`` keeps every stored block under TensorRT-LLM's hash, with our name of it, if it has one:

- The mirror follows only the largest attention window that a ``created`` event announced. A smaller one drops blocks
  that the largest one still needs, so what is in it does not show what can be reused. Before any ``created`` it follows
  none.
- A block has no name of ours if it is not full (the last one of a sequence may be), if its contents are not known for
  certain (see ``PrivateBlocks``), or if the block before it has none. The mirror keeps it nonetheless: it does not
  report its removal, and the blocks after it have no name either.
- The mirror does not keep a block after one that it does not know. If the block is stored again after its parent, it
  gets its name then.
- ``removed`` is the end on every tier; the mirror ignores it for a block that it does not know.
- Numbers that do not follow one another mean that events were lost, or that the engine restarted. A lost event may have
  removed any block, so the mirror assumes that none is there, and reports ``Cleared``. Engines do not repeat their
  events. But they store a block only after all blocks before it: one that is stored after a block from before the gap
  shows that this one, and all before it, are still there, and they are reported again. TensorRT-LLM's hash is of the
  contents, so the name is still the right one; a sequence that just stored a block has those before it on the device.

TensorRT-LLM 1.2's events carry tokens, and nothing of what else decides a block's contents: salt, adapter, media. Those
of 1.3 and later may say of each block its sequence's salt, as it was given, and which parts of which media are in it
(``mm_keys``), by names that we gave it with them. Or they may not: those of the second KV cache manager
(``use_kv_cache_manager_v2``) have the key of the salt, and nothing in it. So ``PrivateBlocks`` remembers all requests
with any of the three. It says which blocks must not be reported because they look like plain ones and may be theirs;
and, where an event names salt or media, whether a request of ours has such a block. The name is made of that request's
salt, tokens and media ids, and of nothing that the event alone says.

Pure code; ``Feeds`` drives it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

from quartet.discovery.base import SALTED_BLOCKS
from quartet.events.kv import KvEvent, StoredBlocks, Tier
from quartet.kvcache.block_hash import (
    ExtraKey,
    chain_hash,
    hash_bytes,
    pack_token_ids,
)
from quartet.kvcache.block_pool import EventLog

#: What is not reported, as ``WorkerRecord`` says it, where events don't say whose blocks they are; else adapters alone.
UNANNOUNCED_BLOCKS = (SALTED_BLOCKS, "adapter", "media")

_TIERS = {0: Tier.DEVICE, 1: Tier.HOST}

#: Blocks from before a gap that are remembered, some 200 bytes each; the oldest go first.
_MAX_DOUBTFUL_BLOCKS = 1 << 18

#: TensorRT-LLM's name of a block: 64 bits, or since 1.3 possibly a digest's text (`kv_cache_event_hash_algo`).
#: Nothing is read out of it.
LlmHash: TypeAlias = int | str

#: ``PrivateBlocks.contents``: what our hash of a block is made of, after the block with that name.
Contents = Callable[["int | None", "LlmBlock"], "bytes | None"]


class UnreadableEventError(Exception):
    """An event of an unknown shape; its content is lost."""


@dataclass(frozen=True)
class LlmBlock:
    """A block that was stored.

    Attributes:
        block_hash: TensorRT-LLM's own name of it.
        token_bytes: its tokens as ``pack_token_ids`` gives them; ``None``: it is not full, or they are not all text.
        salt: of its sequence, as the event says it.
        media: if it has parts of media, what the event says of them; there is no ``token_bytes`` then.
    """

    block_hash: LlmHash
    token_bytes: bytes | None
    tier: Tier = Tier.DEVICE
    salt: str = ""
    media: LlmMedia | None = None


@dataclass(frozen=True)
class LlmMedia:
    """What an event says of a full block with parts of media.

    Attributes:
        token_ids: of its positions; ``None`` for what is no text.
        parts: of each part, in order, where it begins in its item, in tokens (``None``: not said), and what the item is
            called: by its hash, or the id that was given with it.
    """

    token_ids: tuple[int | None, ...]
    parts: tuple[tuple[int | None, frozenset[str]], ...]


@dataclass(frozen=True)
class LlmCreated:
    """A window's pool was created, empty."""

    num_device_blocks: int


@dataclass(frozen=True)
class LlmStored:
    """Blocks can be reused from now on; each follows the one before it, the first one ``parent_hash``."""

    parent_hash: LlmHash | None
    blocks: Sequence[LlmBlock]


@dataclass(frozen=True)
class LlmRemoved:
    """Blocks are gone from every tier."""

    block_hashes: Sequence[LlmHash]


@dataclass(frozen=True)
class LlmUpdated:
    """Something about a block changed; ``tier`` is ``None`` unless it moved."""

    block_hash: LlmHash
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
        self._limit = (1 << 32) if vocab_size is None else vocab_size

    def read(self, item: Any) -> LlmEvent:
        """The event in ``item``. Raises ``UnreadableEventError``."""
        try:
            return LlmEvent(
                rank=int(item.get("attention_dp_rank") or 0),
                number=int(item["event_id"]),
                window_size=int(item.get("window_size") or 0),
                change=self._change(item["data"]),
            )
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise UnreadableEventError(f"{type(error).__name__} in an event") from error

    def _change(self, data: Mapping[str, Any]) -> LlmChange:
        match data["type"]:
            case "created":
                return LlmCreated(int(data["num_blocks_per_cache_level"][0]))
            case "stored":
                return LlmStored(_parent(data["parent_hash"]), [self._block(block) for block in data["blocks"]])
            case "removed":
                return LlmRemoved([_hash(block_hash) for block_hash in data["block_hashes"]])
            case "updated":
                moved = data.get("cache_level")
                return LlmUpdated(_hash(data["block_hash"]), None if moved is None else _tier(moved["new_value"]))
        raise ValueError("unknown type")

    def _block(self, block: Mapping[str, Any]) -> LlmBlock:
        salt = block.get("cache_salt") or ""
        if not isinstance(salt, str):
            raise TypeError("a salt is text")
        token_bytes, media, tokens = None, None, block["tokens"]
        if len(tokens) == self._block_size and not any(token.get("token_extra_id") for token in tokens):
            # Since 1.3 the digest of a media item may stand in place of its first token.
            token_ids = tuple(self._text(token["token_id"]) for token in tokens)
            if block.get("mm_keys"):
                media = LlmMedia(token_ids, tuple(map(_part, block["mm_keys"])))
            elif None not in token_ids:
                token_bytes = pack_token_ids(token_ids)  # type: ignore[arg-type]
        return LlmBlock(_hash(block["block_hash"]), token_bytes, _tier(block.get("cache_level") or 0), salt, media)

    def _text(self, token_id: int | str) -> int | None:
        is_text = isinstance(token_id, int) and 0 <= token_id < self._limit and token_id not in self._media_token_ids
        return token_id if is_text else None  # type: ignore[return-value]


class RankMirror:
    """Follows the events of one rank.

    A receiver of all events that ``take`` returned knows exactly ``stored_blocks``.

    Attributes:
        num_blocks: blocks on the device; ``None``: not reported yet.
    """

    def __init__(self, rank: int, contents: Contents) -> None:
        self._rank = rank
        self._contents = contents
        self._names = EventLog()
        self._blocks: dict[LlmHash, _Block] = {}
        self._doubtful: dict[LlmHash, _Block] = {}  # were here before a gap
        self._window_size: int | None = None
        self._next_number = 0
        self.num_blocks: int | None = None

    @property
    def num_named_device_blocks(self) -> int:
        """Blocks on the device that are reported."""
        return self._names.num_blocks(Tier.DEVICE)

    def apply(self, event: LlmEvent) -> None:
        """Follow one event."""
        if event.number != self._next_number:
            self.distrust()
        self._next_number = event.number + 1
        if isinstance(event.change, LlmCreated):
            self._create(event, event.change)
        elif event.window_size == self._window_size:
            self._follow(event.change)

    def distrust(self) -> None:
        """Assume that no block is there any more: events are missing."""
        self._names.clear()
        self._doubtful |= self._blocks
        self._blocks = {}
        num_too_many = len(self._doubtful) - _MAX_DOUBTFUL_BLOCKS
        if num_too_many > 0:
            for block_hash in list(islice(self._doubtful, num_too_many)):
                del self._doubtful[block_hash]

    def take(self) -> list[KvEvent]:
        """Events for the blocks that became shareable, or ceased to be, since the last call."""
        return self._names.take()

    def stored_blocks(self) -> list[StoredBlocks]:
        """All blocks that can be shared, as of the last ``take``; at least one table."""
        tables = self._names.tables() or {Tier.DEVICE: {}}
        return [StoredBlocks(self._rank, parents, tier) for tier, parents in tables.items()]

    def _create(self, event: LlmEvent, created: LlmCreated) -> None:
        # An engine that restarted has the windows that it had before.
        if self._window_size is not None and event.window_size < self._window_size:
            return
        self.distrust()
        if event.window_size != self._window_size:
            self._doubtful = {}
        self._window_size, self.num_blocks = event.window_size, created.num_device_blocks

    def _follow(self, change: LlmStored | LlmRemoved | LlmUpdated) -> None:
        match change:
            case LlmStored():
                self._store(change)
            case LlmRemoved(block_hashes):
                for block_hash in block_hashes:
                    self._remove(block_hash)
            case LlmUpdated(block_hash, tier):
                block = self._blocks.get(block_hash)
                if block is not None and tier is not None:
                    self._move(block, tier)

    def _store(self, stored: LlmStored) -> None:
        parent = None if stored.parent_hash is None else self._find(stored.parent_hash)
        parent_hash, has_name = stored.parent_hash, stored.parent_hash is None or _has_name(parent)
        for stored_block in stored.blocks:
            block = self._find(stored_block.block_hash)
            if block is None and parent is None and not has_name:
                continue  # The block before it is unknown. Stored again after a known one, it gets its name.
            if block is None:
                name = self._name(parent, stored_block) if has_name else None
                block = self._take_in(stored_block, name, parent_hash, parent)
            else:
                self._move(block, stored_block.tier)
            parent, parent_hash, has_name = block, stored_block.block_hash, _has_name(block)

    def _name(self, parent: _Block | None, stored: LlmBlock) -> int | None:
        """Sequence hash of a block whose parent has a name, or that has no parent."""
        if parent is not None and parent.salt != stored.salt:
            return None  # every block of a sequence has its salt
        contents = self._contents(None if parent is None else parent.sequence_hash, stored)
        if contents is None:
            return None
        before = ExtraKey(cache_salt=stored.salt).hash_seed if parent is None else parent.sequence_hash
        return chain_hash(before, hash_bytes(contents))

    def _take_in(
        self, stored: LlmBlock, name: int | None, parent_hash: LlmHash | None, parent: _Block | None
    ) -> _Block:
        self._doubtful.pop(stored.block_hash, None)
        block = self._blocks[stored.block_hash] = _Block(name, parent_hash, stored.tier, stored.salt)
        if name is not None:
            self._names.store(name, parent.sequence_hash if parent else None, stored.tier)
        return block

    def _find(self, block_hash: LlmHash) -> _Block | None:
        """Find a block that was stored, or is the parent of one. If it was here before a gap, it counts again."""
        block = self._blocks.get(block_hash)
        if block is not None or block_hash not in self._doubtful:
            return block
        chain: list[LlmHash] = []
        step: LlmHash | None = block_hash
        while step is not None and step in self._doubtful:
            chain.append(step)
            step = self._doubtful[step].parent
        if step is not None and step not in self._blocks:
            return None  # a block before it was forgotten, and its name with it
        before = None if step is None else self._blocks[step].sequence_hash
        has_name = step is None or before is not None
        for link in reversed(chain):
            block = self._blocks[link] = self._doubtful.pop(link)
            block.tier = Tier.DEVICE
            if not has_name:
                block.sequence_hash = None
            if block.sequence_hash is not None:
                self._names.store(block.sequence_hash, before, Tier.DEVICE)
            before, has_name = block.sequence_hash, _has_name(block)
        return block

    def _remove(self, block_hash: LlmHash) -> None:
        self._doubtful.pop(block_hash, None)
        block = self._blocks.pop(block_hash, None)
        if block is not None and block.sequence_hash is not None:
            self._names.remove(block.sequence_hash, block.tier)

    def _move(self, block: _Block, tier: Tier) -> None:
        if block.tier is tier:
            return
        if block.sequence_hash is not None:
            self._names.move(block.sequence_hash, block.tier, tier)
        block.tier = tier


@dataclass(slots=True)
class _Block:
    """``sequence_hash``: our name; ``parent``: TensorRT-LLM's name of the block before it; ``salt``: as events say."""

    sequence_hash: int | None
    parent: LlmHash | None
    tier: Tier
    salt: str


def _part(key: Mapping[str, Any]) -> tuple[int | None, frozenset[str]]:
    """What one of ``mm_keys`` says: the first manager puts the id that was given in place of the hash."""
    offset = key.get("start_offset")
    names = frozenset(name for name in (key.get("hash"), key.get("uuid")) if name and isinstance(name, str))
    return offset if isinstance(offset, int) else None, names


def _hash(name: int | str) -> LlmHash:
    return name if isinstance(name, str) else int(name)


def _parent(name: int | str | None) -> LlmHash | None:
    return None if name is None else _hash(name)


def _tier(cache_level: int) -> Tier:
    return _TIERS.get(cache_level, Tier.DISK)


def _has_name(block: _Block | None) -> bool:
    return block is not None and block.sequence_hash is not None
