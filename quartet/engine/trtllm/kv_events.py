"""TensorRT-LLM's KV events: read from JSON, followed by a mirror, and passed on with our names of blocks.

TensorRT-LLM names a block by a hash of its own, from which ours cannot be computed; but ``stored`` events carry tokens
and a parent. So ``RankMirror`` keeps every stored block under TensorRT-LLM's hash, with our name of it, if it has one:

- The mirror follows only the largest attention window that a ``created`` event announced. A smaller one drops blocks
  that the largest one still needs, so what is in it does not show what can be reused. Before any ``created`` it follows
  none.
- A block has no name of ours if it is not full (the last one of a sequence may be), if it is or might be private (see
  ``PrivateBlocks``), or if the block before it has none. The mirror keeps it nonetheless: it does not report its
  removal, and the blocks after it have no name either.
- The mirror does not keep a block after one that it does not know. If the block is stored again after its parent, it
  gets its name then.
- ``removed`` is the end on every tier; the mirror ignores it for a block that it does not know.
- Numbers that do not follow one another mean that events were lost, or that the engine restarted. A lost event may have
  removed any block, so the mirror assumes that none is there, and reports ``Cleared``. Engines do not repeat their
  events. But they store a block only after all blocks before it: one that is stored after a block from before the gap
  shows that this one, and all before it, are still there, and they are reported again. TensorRT-LLM's hash is of the
  contents, so the name is still the right one; a sequence that just stored a block has those before it on the device.

TensorRT-LLM 1.2's events carry tokens, and nothing of what else decides a block's contents. ``PrivateBlocks`` knows
which blocks must not be reported for that reason: those of requests with a salt, an adapter or media, which look like
plain ones. Later events name salts and media, and such blocks are not reported, either.

Pure code, but for the lock and the clock of ``PrivateBlocks``; ``Feeds`` drives it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

from quartet.discovery.base import SALTED_BLOCKS
from quartet.events.kv import KvEvent, StoredBlocks, Tier
from quartet.kvcache.block_hash import TOKEN_SIZE_BYTES, chain_hash, hash_bytes, pack_token_ids, sequence_hashes
from quartet.kvcache.block_pool import EventLog

#: What is never reported, as ``WorkerRecord`` says it.
UNANNOUNCED_BLOCKS = (SALTED_BLOCKS, "adapter", "media")

_TIERS = {0: Tier.DEVICE, 1: Tier.HOST}

#: Blocks from before a gap that are remembered, some 200 bytes each; the oldest go first.
_MAX_DOUBTFUL_BLOCKS = 1 << 18

#: How long after a request's end its last events may still be sent; its last steps are long over by then.
_GRACE_S = 5.0

#: Requests that ended and whose events may still come, some 500 bytes each.
_MAX_ENDED = 1 << 15

#: TensorRT-LLM's name of a block: 64 bits, or since 1.3 possibly a digest's text (`kv_cache_event_hash_algo`).
#: Nothing is read out of it.
LlmHash: TypeAlias = int | str

#: Whether a block with these tokens, after the one with that sequence hash, might be a private request's.
IsPrivate = Callable[[int | None, bytes], bool]


class UnreadableEventError(Exception):
    """An event of an unknown shape; its content is lost."""


@dataclass(frozen=True)
class LlmBlock:
    """A block that was stored.

    Attributes:
        block_hash: TensorRT-LLM's own name of it.
        token_bytes: its tokens as ``pack_token_ids`` gives them; ``None`` for a block without a name of ours: it is
            not full, or other things than tokens decide what is in it.
    """

    block_hash: LlmHash
    token_bytes: bytes | None
    tier: Tier = Tier.DEVICE


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
        self._vocab_size = vocab_size

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
        return LlmBlock(_hash(block["block_hash"]), self._token_bytes(block), _tier(block.get("cache_level") or 0))

    def _token_bytes(self, block: Mapping[str, Any]) -> bytes | None:
        tokens = block["tokens"]
        # Versions later than 1.2 name pictures and salts; all versions number tokens that are not plain.
        if len(tokens) != self._block_size or block.get("mm_keys") or block.get("cache_salt"):
            return None
        if any(token.get("token_extra_id") for token in tokens):
            return None
        token_ids = [token["token_id"] for token in tokens]
        if any(isinstance(token_id, str) for token_id in token_ids):
            return None  # since 1.3, the digest of a media item in place of its first token
        return pack_token_ids(token_ids) if self._are_text(token_ids) else None

    def _are_text(self, token_ids: Iterable[int]) -> bool:
        limit = (1 << 32) if self._vocab_size is None else self._vocab_size
        return all(0 <= token_id < limit and token_id not in self._media_token_ids for token_id in token_ids)


class RankMirror:
    """Follows the events of one rank.

    A receiver of all events that ``take`` returned knows exactly ``stored_blocks``.

    Attributes:
        num_blocks: blocks on the device; ``None``: not reported yet.
    """

    def __init__(self, rank: int, is_private: IsPrivate) -> None:
        self._rank = rank
        self._is_private = is_private
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
                name = self._name(parent.sequence_hash if parent else None, stored_block) if has_name else None
                block = self._take_in(stored_block, name, parent_hash, parent)
            else:
                self._move(block, stored_block.tier)
            parent, parent_hash, has_name = block, stored_block.block_hash, _has_name(block)

    def _name(self, parent_name: int | None, stored: LlmBlock) -> int | None:
        """Sequence hash of a block whose parent has a name, or that has no parent."""
        if stored.token_bytes is None or self._is_private(parent_name, stored.token_bytes):
            return None
        return chain_hash(parent_name, hash_bytes(stored.token_bytes))

    def _take_in(
        self, stored: LlmBlock, name: int | None, parent_hash: LlmHash | None, parent: _Block | None
    ) -> _Block:
        self._doubtful.pop(stored.block_hash, None)
        block = self._blocks[stored.block_hash] = _Block(name, parent_hash, stored.tier)
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


class PrivateBlocks:
    """Remembers each private request's first private block, for as long as events may still report that block.

    A block after one without a name of ours has no name either, so one block for each request is enough. The tokens
    that this block had at first are enough, too: any block that begins with them might be the request's. This also
    withholds plain blocks that begin alike and are stored meanwhile: too little is reported, never too much. If too
    many requests end while no event comes, they are forgotten, and every block counts as private until events catch
    up. Thread-safe.
    """

    def __init__(self, block_size: int, clock: Callable[[], float] = time.monotonic, max_ended: int = _MAX_ENDED):
        self._block_size_bytes = block_size * TOKEN_SIZE_BYTES
        self._block_size = block_size
        self._clock = clock
        self._max_ended = max_ended
        self._lock = threading.Lock()
        # By parent: how many requests have exactly this block, or so far only its front.
        self._full: dict[int | None, dict[bytes, int]] = {}
        self._fronts: dict[int | None, dict[bytes, int]] = {}
        self._ended: deque[tuple[float, _Start]] = deque()
        self._overflowed_at: float | None = None

    def __len__(self) -> int:
        """The number of requests that are remembered."""
        with self._lock:
            return sum(sum(blocks.values()) for kind in (self._full, self._fronts) for blocks in kind.values())

    def add(self, token_ids: Sequence[int], first_position: int = 0) -> ExitStack:
        """Call this before submitting a private request, and close what it returns when its last output came.

        Args:
            token_ids: of its prompt and of what it has generated already.
            first_position: where its contents begin to differ from a plain request's.
        """
        first_block = first_position // self._block_size
        before = sequence_hashes(token_ids[: first_block * self._block_size], self._block_size)
        block = token_ids[first_block * self._block_size : (first_block + 1) * self._block_size]
        start = _Start(before[-1] if before else None, pack_token_ids(block))
        with self._lock:
            self._count(start, 1)
        noted = ExitStack()
        noted.callback(self._end, start)
        return noted

    def matches(self, parent: int | None, token_bytes: bytes) -> bool:
        """Whether a block with these tokens, after the one with that sequence hash, might be private."""
        with self._lock:
            if self._overflowed_at is not None or token_bytes in self._full.get(parent, ()):
                return True
            return any(token_bytes.startswith(front) for front in self._fronts.get(parent, ()))

    def forget(self, read_until: float) -> None:
        """Forget old requests: all events sent before ``read_until``, in ``clock``'s seconds, were read."""
        with self._lock:
            while self._ended and self._ended[0][0] + _GRACE_S <= read_until:
                self._count(self._ended.popleft()[1], -1)
            if self._overflowed_at is not None and self._overflowed_at + _GRACE_S <= read_until:
                self._overflowed_at = None

    def _end(self, start: _Start) -> None:
        with self._lock:
            self._ended.append((self._clock(), start))
            if len(self._ended) > self._max_ended:
                self._overflowed_at = self._ended[-1][0]
                while self._ended:
                    self._count(self._ended.popleft()[1], -1)

    def _count(self, start: _Start, change: int) -> None:
        by_parent = self._full if len(start.token_bytes) == self._block_size_bytes else self._fronts
        blocks = by_parent.setdefault(start.parent, {})
        blocks[start.token_bytes] = blocks.get(start.token_bytes, 0) + change
        if not blocks[start.token_bytes]:
            del blocks[start.token_bytes]
        if not blocks:
            del by_parent[start.parent]


@dataclass(slots=True)
class _Block:
    """``sequence_hash``: our name; ``parent``: TensorRT-LLM's name of the block before it."""

    sequence_hash: int | None
    parent: LlmHash | None
    tier: Tier


@dataclass(frozen=True)
class _Start:
    """The first private block of a sequence: after the block named ``parent``, and with these tokens at its front."""

    parent: int | None
    token_bytes: bytes


def _hash(name: int | str) -> LlmHash:
    return name if isinstance(name, str) else int(name)


def _parent(name: int | str | None) -> LlmHash | None:
    return None if name is None else _hash(name)


def _tier(cache_level: int) -> Tier:
    return _TIERS.get(cache_level, Tier.DISK)


def _has_name(block: _Block | None) -> bool:
    return block is not None and block.sequence_hash is not None
