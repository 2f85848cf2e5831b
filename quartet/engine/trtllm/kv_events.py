"""TensorRT-LLM's KV events, read: what JSON says becomes plain data for a mirror to follow."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

from quartet.events.kv import Cleared, KvEvent, Removed, Stored, StoredBlocks, Tier
from quartet.kvcache.block_hash import TOKEN_SIZE_BYTES, chain_hash, hash_bytes, pack_token_ids, sequence_hashes

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


# Follows one rank's KV events, and says in our names what the rank could share: pure code, driven by ``Feeds``.
#
# TensorRT-LLM names a block by a hash of its own, from which ours cannot be computed; but ``stored`` events carry
# tokens,
# and a parent. So every block that was told is kept here under its hash, with its name of ours, if it has one:
#
# - Only the largest attention window that a ``created`` event told of is followed. A smaller one drops blocks that the
#   largest one still needs, so what is in there says nothing about what can be reused. Before any ``created`` nothing
# is.
# - A block has no name of ours if it is not full (the last one of a sequence may be), if something private is or might
# be
#   in it (see ``PrivateBlocks``), or if the block before it has none or is unknown. It is kept nonetheless: its
#   end is no news, and neither are those after it.
# - ``removed`` is the end on every tier; one of a block that was never told of says nothing.
# - Numbers that do not follow one another mean that events were lost, or that the engine began anew. What was lost may
#   be the end of any block here: nothing is known to be there any more, and that is told (``Cleared``). Engines do not
#   tell of their blocks again. But a block is stored only after all blocks before it: one that is stored after a block
#   that was here before the gap shows that this one, and all before it, still are, and they are told again.
#   TensorRT-LLM's hash is of the contents, so the name is still the right one; a sequence that just stored a block has
#   those before it on the device.

# Blocks of before a gap that are remembered, some 200 bytes each; the oldest go first.
_MAX_DOUBTFUL_BLOCKS = 1 << 18

#: Whether a block with these tokens, after the one with that sequence hash, might be a private request's.
IsPrivate = Callable[[int | None, bytes], bool]


@dataclass(slots=True)
class _Block:
    """``sequence_hash``: our name; ``parent``: TensorRT-LLM's of the block before it."""

    sequence_hash: int | None
    parent: int | None
    tier: Tier


class RankMirror:
    """One rank. ``stored_blocks`` is always what somebody knows who heard all events that ``take`` returned."""

    def __init__(self, rank: int, is_private: IsPrivate) -> None:
        self._rank = rank
        self._is_private = is_private
        self._names = NameLog()
        self._blocks: dict[int, _Block] = {}
        self._doubtful: dict[int, _Block] = {}  # were here before a gap
        self._window_size: int | None = None
        self._next_number = 0
        self._num_blocks: int | None = None

    @property
    def num_blocks(self) -> int | None:
        """Blocks on the device; ``None``: not told yet."""
        return self._num_blocks

    @property
    def num_named_device_blocks(self) -> int:
        """Blocks on the device that are told of."""
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
        """Take nothing for there any more: events are missing."""
        self._names.clear()
        self._doubtful |= self._blocks
        self._blocks = {}
        num_too_many = len(self._doubtful) - _MAX_DOUBTFUL_BLOCKS
        if num_too_many > 0:
            for block_hash in list(islice(self._doubtful, num_too_many)):
                del self._doubtful[block_hash]

    def take(self) -> list[KvEvent]:
        """What became or ceased to be shareable since the last call."""
        return self._names.take()

    def stored_blocks(self) -> list[StoredBlocks]:
        """All that could be shared once everything was taken; at least one table."""
        tables = self._names.tables() or {Tier.DEVICE: {}}
        return [StoredBlocks(self._rank, parents, tier) for tier, parents in tables.items()]

    def _create(self, event: LlmEvent, created: LlmCreated) -> None:
        # An engine that began anew has the windows that it had before.
        if self._window_size is not None and event.window_size < self._window_size:
            return
        self.distrust()
        if event.window_size != self._window_size:
            self._doubtful = {}
        self._window_size, self._num_blocks = event.window_size, created.num_device_blocks

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
        for told in stored.blocks:
            block = self._find(told.block_hash)
            if block is None:
                name = self._name(parent.sequence_hash if parent else None, told) if has_name else None
                block = self._take_in(told, name, parent_hash, parent)
            else:
                self._move(block, told.tier)
            parent, parent_hash, has_name = block, told.block_hash, _has_name(block)

    def _name(self, parent_name: int | None, told: LlmBlock) -> int | None:
        """Sequence hash of a block after one that has a name, or after none."""
        if told.token_bytes is None or self._is_private(parent_name, told.token_bytes):
            return None
        return chain_hash(parent_name, hash_bytes(told.token_bytes))

    def _take_in(self, told: LlmBlock, name: int | None, parent_hash: int | None, parent: _Block | None) -> _Block:
        self._doubtful.pop(told.block_hash, None)
        block = self._blocks[told.block_hash] = _Block(name, parent_hash, told.tier)
        if name is not None:
            self._names.store(name, parent.sequence_hash if parent else None, told.tier)
        return block

    def _find(self, block_hash: int) -> _Block | None:
        """A block that was stored, or after which one was: if it was here before a gap, it is again."""
        block = self._blocks.get(block_hash)
        if block is not None or block_hash not in self._doubtful:
            return block
        chain: list[int] = []
        step: int | None = block_hash
        while step is not None and step in self._doubtful:
            chain.append(step)
            step = self._doubtful[step].parent
        if step is not None and step not in self._blocks:
            return None  # of one before it not even the name is known
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

    def _remove(self, block_hash: int) -> None:
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


def _has_name(block: _Block | None) -> bool:
    return block is not None and block.sequence_hash is not None


# What one rank has on each tier, by our names, and what of that is still to be told.


class NameLog:
    """Takes note of names that come, go and move; ``quartet.kvcache.block_pool`` of a cache with several tiers.

    Two blocks may have one name, as a salted and a plain one with equal tokens do: it is there while either is.
    """

    def __init__(self) -> None:
        self._events: list[KvEvent] = []
        self._tables: dict[Tier, dict[int, int | None]] = {tier: {} for tier in Tier}
        self._num_more: dict[tuple[Tier, int], int] = {}  # blocks beyond the first one with that name
        # What is being added to: hashes of the last event, if it is of that kind, and its tier.
        self._stored: tuple[Tier, list[int]] | None = None
        self._removed: tuple[Tier, list[int]] | None = None

    def num_blocks(self, tier: Tier) -> int:
        """Names that are there."""
        return len(self._tables[tier])

    def store(self, sequence_hash: int, parent_hash: int | None, tier: Tier) -> None:
        """A block came, or came to that tier."""
        table = self._tables[tier]
        if sequence_hash in table:
            self._num_more[tier, sequence_hash] = self._num_more.get((tier, sequence_hash), 0) + 1
            return
        table[sequence_hash] = parent_hash
        if self._stored is not None and self._stored[0] is tier and self._stored[1][-1] == parent_hash:
            self._stored[1].append(sequence_hash)
            return
        self._stored, self._removed = (tier, [sequence_hash]), None
        self._events.append(Stored(parent_hash, self._stored[1], tier))

    def remove(self, sequence_hash: int, tier: Tier) -> None:
        """A block that is there went."""
        num_more = self._num_more.pop((tier, sequence_hash), 0)
        if num_more:
            if num_more > 1:
                self._num_more[tier, sequence_hash] = num_more - 1
            return
        del self._tables[tier][sequence_hash]
        if self._removed is not None and self._removed[0] is tier:
            self._removed[1].append(sequence_hash)
            return
        self._stored, self._removed = None, (tier, [sequence_hash])
        self._events.append(Removed(self._removed[1], tier))

    def move(self, sequence_hash: int, old: Tier, new: Tier) -> None:
        """A block that is there went to another tier; it is never said to be nowhere, as others may follow it."""
        self.store(sequence_hash, self._tables[old][sequence_hash], new)
        self.remove(sequence_hash, old)

    def clear(self) -> None:
        """Nothing is there any more, as far as anybody knows."""
        if not self._events and not any(self._tables.values()):
            return
        for table in self._tables.values():
            table.clear()
        self._num_more.clear()
        # What was still to be told before is of no use to anybody now.
        self._events, self._stored, self._removed = [Cleared()], None, None

    def take(self) -> list[KvEvent]:
        """What changed since the last call, in order."""
        events, self._events = self._events, []
        self._stored = self._removed = None
        return events

    def tables(self) -> dict[Tier, dict[int, int | None]]:
        """Of every name that is there the one before it, by tier; no block comes before its parent."""
        return {tier: _in_order(table) for tier, table in self._tables.items() if table}


def _in_order(table: dict[int, int | None]) -> dict[int, int | None]:
    """``table`` with parents first: chains move to another tier from their end on."""
    ordered: dict[int, int | None] = {}
    for sequence_hash in table:
        chain: list[int] = []
        step: int | None = sequence_hash
        while step is not None and step in table and step not in ordered:
            chain.append(step)
            step = table[step]
        for link in reversed(chain):
            ordered[link] = table[link]
    return ordered


# Which blocks must not be told of: those of requests with a salt, an adapter or media, which look like plain ones.
#
# TensorRT-LLM 1.2's events carry tokens, and nothing of what else decides a block's contents.

# How much later than a request's end its last events may be sent on, by which time its last steps are long over.
_GRACE_S = 5.0

# Requests that ended and whose events may still come, some 500 bytes each.
_MAX_ENDED = 1 << 15


@dataclass(frozen=True)
class _Start:
    """The first private block of a sequence: after the block named ``parent``, and with these tokens at its front."""

    parent: int | None
    token_bytes: bytes


class PrivateTokens:
    """One private request, from before it is submitted until ``end``."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end: Callable[[], None] | None = on_end

    def end(self) -> None:
        """Its last output came. May be called twice."""
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()


class PrivateBlocks:
    """What private requests' first private blocks look like, for as long as events may still tell of such blocks.

    What follows a block without a name of ours has none either, so one block a request is enough; and the tokens that
    it had at first are, as any block that begins with them might be its. That also withholds plain blocks that look
    the same and are stored meanwhile: too little is told, never too much. Should too many end while nothing is heard,
    they are forgotten one by one, and every block counts as theirs until events catch up. Thread-safe.
    """

    def __init__(self, block_size: int, clock: Callable[[], float] = time.monotonic, max_ended: int = _MAX_ENDED):
        self._block_size_bytes = block_size * TOKEN_SIZE_BYTES
        self._block_size = block_size
        self._clock = clock
        self._max_ended = max_ended
        self._lock = threading.Lock()
        # By parent: how many have exactly this block, or only its front yet.
        self._full: dict[int | None, dict[bytes, int]] = {}
        self._fronts: dict[int | None, dict[bytes, int]] = {}
        self._ended: deque[tuple[float, _Start]] = deque()
        self._overflowed_at: float | None = None

    def __len__(self) -> int:
        """Requests that are remembered."""
        with self._lock:
            return sum(sum(blocks.values()) for kind in (self._full, self._fronts) for blocks in kind.values())

    def add(self, token_ids: Sequence[int], first_position: int = 0) -> PrivateTokens:
        """A private request is about to be submitted.

        Args:
            token_ids: of its prompt and what is generated already.
            first_position: where its contents begin to differ from a plain request's.
        """
        first_block = first_position // self._block_size
        before = sequence_hashes(token_ids[: first_block * self._block_size], self._block_size)
        block = token_ids[first_block * self._block_size : (first_block + 1) * self._block_size]
        start = _Start(before[-1] if before else None, pack_token_ids(block))
        with self._lock:
            self._count(start, 1)
        return PrivateTokens(lambda: self._end(start))

    def matches(self, parent: int | None, token_bytes: bytes) -> bool:
        """Whether a block with these tokens, after the one with that sequence hash, might be private."""
        with self._lock:
            if self._overflowed_at is not None or token_bytes in self._full.get(parent, ()):
                return True
            return any(token_bytes.startswith(front) for front in self._fronts.get(parent, ()))

    def forget(self, told_until: float) -> None:
        """All that the engine had to say before ``told_until``, in ``clock``'s seconds, was heard."""
        with self._lock:
            while self._ended and self._ended[0][0] + _GRACE_S <= told_until:
                self._count(self._ended.popleft()[1], -1)
            if self._overflowed_at is not None and self._overflowed_at + _GRACE_S <= told_until:
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
