"""The book of embeddings against a naive model, in any order of calls.

The model writes the item's name into each of its blocks: so a block in two places, or one that is handed out while
a holder still reads it, shows as wrong content, whatever the book believes.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quartet.errors import OutOfBlocksError
from quartet.kvcache.block_pool import BlockCounts
from quartet.kvcache.embedding_pool import EmbeddingPool, PooledItem
from quartet.media.media_id import media_hash
from tests.kvcache.replica import Replica

NUM_BLOCKS = 7
BLOCK_SIZE = 3
#: Two names for each public one.
MEDIA_IDS = [bytes([number // 2]) * 8 + bytes([number]) * 24 for number in range(8)]


class EmbeddingMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = EmbeddingPool(NUM_BLOCKS, BLOCK_SIZE, has_events=True)
        self.replica = Replica()
        self.blocks: list[bytes | None] = [None] * NUM_BLOCKS  # what was last written to each
        self.being_written: dict[bytes, PooledItem] = {}
        self.found: dict[bytes, PooledItem] = {}
        self.holds: list[bytes] = []
        self.last_held: dict[bytes, int] = {}
        self.now = 0

    @rule(data=st.data(), num_tokens=st.integers(1, 12))
    def allocate(self, data: st.DataObject, num_tokens: int) -> None:
        absent = [media_id for media_id in MEDIA_IDS if media_id not in {**self.found, **self.being_written}]
        if not absent:
            return
        media_id = data.draw(st.sampled_from(absent))
        num_wanted = -(-num_tokens // BLOCK_SIZE)
        idle = sorted((name for name in self.found if name not in self.holds), key=self.last_held.__getitem__)
        num_free = NUM_BLOCKS - self.num_blocks(self.found) - self.num_blocks(self.being_written)
        if num_wanted > num_free + sum(len(self.found[name].block_ids) for name in idle):
            with pytest.raises(OutOfBlocksError):
                self.pool.allocate(media_id, num_tokens)
            return
        while num_free < num_wanted:
            num_free += len(self.found.pop(idle.pop(0)).block_ids)
        block_ids = self.pool.allocate(media_id, num_tokens)
        assert len(block_ids) == len(set(block_ids)) == num_wanted
        self.being_written[media_id] = PooledItem(block_ids, num_tokens)
        for block_id in block_ids:
            self.blocks[block_id] = media_id

    @precondition(lambda self: self.being_written)
    @rule(data=st.data(), is_written=st.booleans())
    def end_writing(self, data: st.DataObject, is_written: bool) -> None:
        media_id = data.draw(st.sampled_from(sorted(self.being_written)))
        item = self.being_written.pop(media_id)
        if not is_written:
            self.pool.discard(media_id)
            return
        self.pool.commit(media_id)
        self.found[media_id] = item
        self.note_release(media_id)

    @precondition(lambda self: self.found)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        media_id = data.draw(st.sampled_from(sorted(self.found)))
        self.pool.hold(media_id)
        self.holds.append(media_id)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        media_id = data.draw(st.sampled_from(self.holds))
        self.pool.release(media_id)
        self.holds.remove(media_id)
        if media_id not in self.holds:
            self.note_release(media_id)

    @invariant()
    def counts_equal_the_models_and_add_up(self) -> None:
        held = {media_id: item for media_id, item in self.found.items() if media_id in self.holds}
        num_held, num_in_use = self.num_blocks(held), self.num_blocks(self.being_written)
        num_cached = self.num_blocks(self.found) - num_held
        num_free = NUM_BLOCKS - num_held - num_in_use - num_cached
        assert self.pool.counts == BlockCounts(num_free, num_cached, num_held, num_in_use, NUM_BLOCKS)
        assert self.pool.num_available == num_free + num_cached

    @invariant()
    def exactly_what_is_written_is_found_and_nobody_wrote_over_it(self) -> None:
        for media_id in MEDIA_IDS:
            assert self.pool.find(media_id) == self.found.get(media_id)
        for media_id, item in {**self.found, **self.being_written}.items():
            assert {self.blocks[block_id] for block_id in item.block_ids} == {media_id}

    @invariant()
    def a_subscriber_to_the_events_knows_the_stored_items(self) -> None:
        self.replica.apply(self.pool.take_events())
        assert set(self.replica.parents) == {media_hash(media_id) for media_id in self.found}
        assert set(self.replica.parents.values()) <= {None}
        assert self.pool.stored_items() == self.replica.parents

    def note_release(self, media_id: bytes) -> None:
        self.now += 1
        self.last_held[media_id] = self.now

    def num_blocks(self, items: dict[bytes, PooledItem]) -> int:
        return sum(len(item.block_ids) for item in items.values())


TestEmbeddingPool = EmbeddingMachine.TestCase
TestEmbeddingPool.settings = settings(stateful_step_count=40)
