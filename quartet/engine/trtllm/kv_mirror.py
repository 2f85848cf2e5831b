"""Follows one rank's KV events, and says in our names what the rank could share: pure code, driven by ``Feeds``.

TensorRT-LLM names a block by a hash of its own, from which ours cannot be computed; but ``stored`` events carry tokens,
and a parent. So every block that was told is kept here under its hash, with its name of ours, if it has one:

- Only the largest attention window that a ``created`` event told of is followed. A smaller one drops blocks that the
  largest one still needs, so what is in there says nothing about what can be reused. Before any ``created`` nothing is.
- A block has no name of ours if it is not full (the last one of a sequence may be), if something private is or might be
  in it (see ``PrivateBlocks``), or if the block before it has none or is unknown. It is kept nonetheless: its
  end is no news, and neither are those after it.
- ``removed`` is the end on every tier; one of a block that was never told of says nothing.
- Numbers that do not follow one another mean that events were lost, or that the engine began anew. What was lost may
  be the end of any block here: nothing is known to be there any more, and that is told (``Cleared``). Engines do not
  tell of their blocks again. But a block is stored only after all blocks before it: one that is stored after a block
  that was here before the gap shows that this one, and all before it, still are, and they are told again.
  TensorRT-LLM's hash is of the contents, so the name is still the right one; a sequence that just stored a block has
  those before it on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from quartet.engine.trtllm.kv_events import LlmBlock, LlmCreated, LlmEvent, LlmRemoved, LlmStored, LlmUpdated
from quartet.engine.trtllm.kv_names import NameLog
from quartet.events.kv import KvEvent, StoredBlocks, Tier
from quartet.kvcache.block_hash import chain_hash, hash_bytes

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
