"""KV events as TensorRT-LLM makes them, and what a receiver of ours knows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from quartet.engine.trtllm.kv_events import EventReader, RankMirror
from quartet.engine.trtllm.private_blocks import PrivateBlocks, PrivateRequest
from quartet.events.kv import Cleared, KvEvent, Removed, Stored, StoredBlocks, Tier
from quartet.kvcache.block_hash import sequence_hashes

BLOCK_SIZE = 2
WINDOW = 4608


class TierReplica:
    """Applies events strictly: what is stored on a tier is new there, what is removed is there."""

    def __init__(self) -> None:
        self.parents: dict[Tier, dict[int, int | None]] = {tier: {} for tier in Tier}

    def apply(self, events: Iterable[KvEvent]) -> None:
        for event in events:
            match event:
                case Stored(parent_hash, hashes, tier):
                    assert hashes
                    for parent, child in zip((parent_hash, *hashes), hashes, strict=False):
                        assert child not in self.parents[tier]
                        self.parents[tier][child] = parent
                case Removed(hashes, tier):
                    assert hashes
                    for sequence_hash in hashes:
                        del self.parents[tier][sequence_hash]
                case Cleared():
                    self.parents = {tier: {} for tier in Tier}

    @property
    def named(self) -> set[int]:
        return {sequence_hash for table in self.parents.values() for sequence_hash in table}

    def assert_is(self, snapshot: Iterable[StoredBlocks]) -> None:
        """A snapshot says the same, parents before children."""
        said = {blocks.tier: dict(blocks.parent_hashes) for blocks in snapshot}
        assert said == {tier: table for tier, table in self.parents.items() if table or tier in said}
        for table in said.values():
            positions = {named: position for position, named in enumerate(table)}
            assert all(
                parent not in positions or positions[parent] < positions[named] for named, parent in table.items()
            )


class RawEvents:
    """Numbers one rank's events."""

    def __init__(self, rank: int | None = None) -> None:
        self.number = 0
        self._rank = rank

    def event(self, data: dict[str, Any], window_size: int = WINDOW) -> dict[str, Any]:
        event = {"event_id": self.number, "data": data, "window_size": window_size}
        self.number += 1
        return event if self._rank is None else {**event, "attention_dp_rank": self._rank}

    def created(self, *num_blocks: int, window_size: int = WINDOW) -> dict[str, Any]:
        return self.event({"type": "created", "num_blocks_per_cache_level": [*(num_blocks or (64, 0))]}, window_size)

    def stored(
        self, parent: int | None, blocks: Sequence[tuple[int, Sequence[int]]], window_size: int = WINDOW, **more: Any
    ) -> dict[str, Any]:
        stored = [stored_block(block_hash, tokens, **more) for block_hash, tokens in blocks]
        return self.event({"type": "stored", "parent_hash": parent, "blocks": stored}, window_size)

    def removed(self, *block_hashes: int, window_size: int = WINDOW) -> dict[str, Any]:
        return self.event({"type": "removed", "block_hashes": [*block_hashes]}, window_size)

    def moved(self, block_hash: int, new: int) -> dict[str, Any]:
        diff = {"type": "event_diff", "new_value": new, "old_value": 1 - new}
        return self.event({"type": "updated", "block_hash": block_hash, "cache_level": diff, "priority": None})


class Listener:
    """A mirror, and a receiver of all its events."""

    def __init__(self, block_size: int = BLOCK_SIZE, *, names_private: bool = False) -> None:
        self.private = PrivateBlocks(block_size, names_private=names_private)
        self.mirror = RankMirror(0, self.private.contents)
        self.replica = TierReplica()
        self._reader = EventReader(block_size, media_token_ids=frozenset({99}), vocab_size=1000)

    def add(self, *token_ids: int, **more: Any) -> ExitStack:
        """Note a private request."""
        return self.private.add(PrivateRequest(token_ids=token_ids, **{"salt": "private", **more}))

    def receive(self, *items: dict[str, Any]) -> list[KvEvent]:
        for item in items:
            self.mirror.apply(self._reader.read(item))
        events = self.mirror.take()
        self.replica.apply(events)
        self.replica.assert_is(self.mirror.stored_blocks())
        return events


def stored_block(block_hash: int, tokens: Sequence[int], extra_id: int = 0, **more: Any) -> dict[str, Any]:
    stored = [{"type": "unique_token", "token_id": token, "token_extra_id": extra_id} for token in tokens]
    block = {"type": "stored_block", "block_hash": block_hash, "tokens": stored, "cache_level": 0, "priority": 35}
    return {**block, **more}


def names(*token_ids: int) -> list[int]:
    return sequence_hashes(token_ids, BLOCK_SIZE)
