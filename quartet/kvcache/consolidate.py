"""Several sources' KV events as one feed, in which a block is there while any source has it.

The rules are those of the consolidator of ai-dynamo/dynamo's block manager
(``lib/llm/src/block_manager/kv_consolidator/tracker.rs``, first versions):

- A block is named by what is in it and before it (``vllm_blocks.block_name``), so it is the same block whichever
  engine's hash it comes with.
- ``BlockStored`` goes out for the first source that has a block, and ``BlockRemoved`` once the last one has it no more.
  Both bear the hash that the first source gave it, and the medium where it lay there.
- What a source removes and never stored is left out, and counted.

What a source can make this keep is bounded by its own hashes and ranks, so one that is broken or hostile takes no room
of the others.

It differs in three points. A source that clears its cache says nothing of the others' blocks: those stay, and
``AllBlocksCleared`` goes out only if nothing is left. A block after one that its source never stored has no name, so it
is left out, and not taken for the first of a sequence. And a parent goes out under the hash that the feed knows it by.

Pure code, without clock or I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from quartet.events.vllm import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ExternalHash,
    ExtraKeys,
    VllmBatch,
    VllmEvent,
    to_medium,
)
from quartet.kvcache.vllm_blocks import block_name

#: Hashes that one source may have for its blocks, on all its ranks together; further ones are left out.
MAX_BLOCKS = 1 << 22
#: Ranks on which one source may have blocks; those of further ones are left out.
MAX_RANKS = 1024

# Media on which one source may have one block. Publishers have three or four.
_MAX_MEDIA = 8


class LeftOut(StrEnum):
    """Why something that a source said has no effect."""

    UNKNOWN_REMOVED = "unknown_removed"  # a block that it never stored
    UNKNOWN_PARENT = "unknown_parent"  # after a block that it never stored
    NO_TOKENS = "no_tokens"  # without tokens, and not known by this hash either
    TOO_MANY = "too_many"  # beyond what one source may have
    IGNORED = "ignored"  # ``VllmBatch.num_ignored``


@dataclass(frozen=True)
class ChangedRank:
    """What changed at one data-parallel rank."""

    data_parallel_rank: int
    events: Sequence[VllmEvent]


class Consolidator:
    """Consolidates the feeds of sources, rank by rank; sources are known by name.

    A receiver of all that it returned has exactly the blocks that at least one source has.

    Attributes:
        left_out: how much had no effect, by source and reason; blocks, or events for ``IGNORED``.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS, max_ranks: int = MAX_RANKS) -> None:
        """No source has any block; each may have ``max_blocks`` hashes on ``max_ranks`` ranks."""
        self.left_out: Counter[tuple[str, LeftOut]] = Counter()
        self._room = _Room(max_blocks)
        self._max_ranks = max_ranks
        self._ranks: dict[int, _Rank] = {}

    def apply(self, source: str, batch: VllmBatch) -> list[ChangedRank]:
        """``source`` has sent ``batch``. A batch without a rank is one of rank 0."""
        number = batch.data_parallel_rank or 0
        rank = self._ranks.get(number) or _Rank(self.left_out, self._room)
        may_store = rank.has(source) or self._num_ranks(source) < self._max_ranks
        self.left_out[source, LeftOut.IGNORED] += batch.num_ignored
        for event in batch.events:
            if isinstance(event, BlockStored) and not may_store:
                self.left_out[source, LeftOut.TOO_MANY] += len(event.block_hashes)
            else:
                rank.apply(source, event)
        if rank.is_empty:
            self._ranks.pop(number, None)
        else:
            self._ranks[number] = rank
        return _changed([(number, rank.take())])

    def drop(self, source: str) -> list[ChangedRank]:
        """``source`` has no block any more, on any rank, or nobody knows which."""
        ranks = list(self._ranks.items())
        for number, rank in ranks:
            rank.clear(source)
            if rank.is_empty:
                del self._ranks[number]
        return _changed((number, rank.take()) for number, rank in ranks)

    def _num_ranks(self, source: str) -> int:
        return sum(rank.has(source) for rank in self._ranks.values())

    def num_blocks(self, source: str | None = None) -> int:
        """Blocks of all ranks that ``source`` has; ``None``: that any of them has. Any thread may ask."""
        return sum(rank.num_blocks(source) for rank in list(self._ranks.values()))


@dataclass(slots=True)
class _Block:
    """A block that some source has.

    Attributes:
        public_hash, medium: as it went out.
        num_holders: hashes, of all sources, that stand for it.
    """

    public_hash: ExternalHash
    medium: str
    num_holders: int = 0


@dataclass(slots=True)
class _Held:
    """A hash of one source: the block's name, and where it lies there."""

    name: int
    media: set[str]


class _Room:
    """The hashes that each source has, on all ranks together."""

    def __init__(self, max_hashes: int) -> None:
        self._max_hashes = max_hashes
        self._num_hashes: Counter[str] = Counter()

    def is_full(self, source: str) -> bool:
        return self._num_hashes[source] >= self._max_hashes

    def count(self, source: str, num_hashes: int) -> None:
        """The source has so many more, or less if negative."""
        self._num_hashes[source] += num_hashes


class _Rank:
    """The blocks of one rank."""

    def __init__(self, left_out: Counter[tuple[str, LeftOut]], room: _Room) -> None:
        self._left_out = left_out
        self._room = room
        self._blocks: dict[int, _Block] = {}
        self._names: dict[ExternalHash, int] = {}  # by public hash
        self._held: dict[str, dict[ExternalHash, _Held]] = {}  # by source
        self._events: list[VllmEvent] = []

    @property
    def is_empty(self) -> bool:
        """Whether no source has anything here."""
        return not any(self._held.values())

    def has(self, source: str) -> bool:
        return bool(self._held.get(source))

    def num_blocks(self, source: str | None) -> int:
        return len(self._blocks) if source is None else len(self._held.get(source, ()))

    def take(self) -> list[VllmEvent]:
        events, self._events = self._events, []
        return events

    def apply(self, source: str, event: VllmEvent) -> None:
        match event:
            case BlockStored():
                self._store(source, event)
            case BlockRemoved(block_hashes=block_hashes, medium=medium):
                for block_hash in block_hashes:
                    self._remove(source, block_hash, None if medium is None else to_medium(medium))
            case AllBlocksCleared():
                self.clear(source)

    def clear(self, source: str) -> None:
        held = self._held.pop(source, {})
        self._room.count(source, -len(held))
        if not any(self._held.values()):
            self._blocks.clear()
            self._names.clear()
            if held:
                self._events.append(AllBlocksCleared())
            return
        # Blocks after those before them: whoever keeps a tree can take leaves off.
        for block in reversed(held.values()):
            self._release(block.name)

    def _store(self, source: str, event: BlockStored) -> None:
        held = self._held.setdefault(source, {})
        if not event.token_ids:
            self._store_untold(source, event)
            return
        parent = self._find(held, event.parent_hash)
        if parent is None and event.parent_hash is not None:
            self._left_out[source, LeftOut.UNKNOWN_PARENT] += len(event.block_hashes)
            return
        for index, block_hash in enumerate(event.block_hashes):
            name = block_name(parent, _tokens_of(event, index), event.lora_name, _keys_of(event, index))
            has_room = block_hash in held or not self._room.is_full(source)
            if not has_room or (name not in self._blocks and not self._publish(name, parent, event, index)):
                self._left_out[source, LeftOut.TOO_MANY] += len(event.block_hashes) - index
                return
            self._hold(source, block_hash, name, to_medium(event.medium))
            parent = name

    def _store_untold(self, source: str, event: BlockStored) -> None:
        """Blocks without tokens: their hashes must be known."""
        held = self._held[source]
        for block_hash in event.block_hashes:
            name = self._find(held, block_hash)
            if name is None:
                self._left_out[source, LeftOut.NO_TOKENS] += 1
            elif block_hash not in held and self._room.is_full(source):
                self._left_out[source, LeftOut.TOO_MANY] += 1
            else:
                self._hold(source, block_hash, name, to_medium(event.medium))

    def _find(self, held: dict[ExternalHash, _Held], block_hash: ExternalHash | None) -> int | None:
        """The name of the block that a source calls so. Who hashes by the public scheme calls blocks by their names."""
        if block_hash is None:
            return None
        known = held.get(block_hash)
        if known is not None:
            return known.name
        return block_hash if isinstance(block_hash, int) and block_hash in self._blocks else None

    def _publish(self, name: int, parent: int | None, event: BlockStored, index: int) -> bool:
        """Take in a block that no source had, and say so; returns whether there is a hash for it."""
        public_hash = event.block_hashes[index]
        if public_hash in self._names:
            public_hash = name  # another engine's hash of other contents
        if public_hash in self._names:
            return False
        block = self._blocks[name] = _Block(public_hash, to_medium(event.medium))
        self._names[public_hash] = name
        keys = _keys_of(event, index)
        stored = BlockStored(
            block_hashes=[public_hash],
            parent_hash=None if parent is None else self._blocks[parent].public_hash,
            token_ids=_tokens_of(event, index),
            block_size=event.block_size,
            medium=block.medium,
            lora_name=event.lora_name,
            extra_keys=None if keys is None else [keys],
            group_idx=event.group_idx,
        )
        self._events.append(stored)
        return True

    def _hold(self, source: str, block_hash: ExternalHash, name: int, medium: str) -> None:
        held = self._held[source]
        known = held.get(block_hash)
        if known is not None and known.name == name:
            if len(known.media) < _MAX_MEDIA:
                known.media.add(medium)
            elif medium not in known.media:
                self._left_out[source, LeftOut.TOO_MANY] += 1
            return
        # Before the other block is let go of: it may be the one before this one.
        self._blocks[name].num_holders += 1
        held[block_hash] = _Held(name, {medium})
        if known is None:
            self._room.count(source, 1)
        else:
            self._release(known.name)  # its removal was lost

    def _remove(self, source: str, block_hash: ExternalHash, medium: str | None) -> None:
        held = self._held.get(source, {})
        known = held.get(block_hash)
        if known is None or (medium is not None and medium not in known.media):
            self._left_out[source, LeftOut.UNKNOWN_REMOVED] += 1
            return
        known.media = set() if medium is None else known.media - {medium}
        if not known.media:
            del held[block_hash]
            self._room.count(source, -1)
            self._release(known.name)

    def _release(self, name: int) -> None:
        block = self._blocks[name]
        block.num_holders -= 1
        if not block.num_holders:
            del self._blocks[name]
            del self._names[block.public_hash]
            self._events.append(BlockRemoved(block_hashes=[block.public_hash], medium=block.medium))


def _tokens_of(event: BlockStored, index: int) -> Sequence[int]:
    return event.token_ids[index * event.block_size : (index + 1) * event.block_size]


def _keys_of(event: BlockStored, index: int) -> ExtraKeys | None:
    return None if event.extra_keys is None else event.extra_keys[index]


def _changed(taken: Iterable[tuple[int, list[VllmEvent]]]) -> list[ChangedRank]:
    return [ChangedRank(number, _joined(events)) for number, events in taken if events]


def _joined(events: Sequence[VllmEvent]) -> list[VllmEvent]:
    """The same changes in as few events, from those of one block each."""
    runs: list[list[VllmEvent]] = []
    for event in events:
        if runs and _goes_on(runs[-1][-1], event):
            runs[-1].append(event)
        else:
            runs.append([event])
    return [_join(run) for run in runs]


def _goes_on(before: VllmEvent, event: VllmEvent) -> bool:
    match before, event:
        case BlockStored(), BlockStored():
            is_after = event.parent_hash is not None and event.parent_hash == before.block_hashes[-1]
            return is_after and _kind(before) == _kind(event)
        case BlockRemoved(), BlockRemoved():
            return before.medium == event.medium
    return False


def _kind(event: BlockStored) -> tuple[object, ...]:
    return event.block_size, event.medium, event.lora_name, event.group_idx


def _join(run: Sequence[VllmEvent]) -> VllmEvent:
    first = run[0]
    if isinstance(first, AllBlocksCleared) or len(run) == 1:
        return first
    block_hashes = [name for event in run if not isinstance(event, AllBlocksCleared) for name in event.block_hashes]
    if isinstance(first, BlockRemoved):
        return replace(first, block_hashes=block_hashes)
    stored = [event for event in run if isinstance(event, BlockStored)]
    keys = [_keys_of(event, 0) for event in stored]
    token_ids = [token_id for event in stored for token_id in event.token_ids]
    has_keys = any(key is not None for key in keys)
    return replace(first, block_hashes=block_hashes, token_ids=token_ids, extra_keys=keys if has_keys else None)
