"""The block pool shares what is equal, only that, and gives back every block once."""

from __future__ import annotations

from typing import Any

import pytest

from quartet.errors import OutOfBlocksError
from quartet.kvcache import block_hash, sequence
from quartet.kvcache.block_hash import ExtraKey, MediaSpan, sequence_hashes
from quartet.kvcache.block_pool import BlockCounts, BlockManager
from quartet.kvcache.sequence import Sequence

ITEM_A = b"a" * 32
ITEM_B = b"b" * 32


def new_seq(num_tokens: int, first: int = 0, **kwargs: Any) -> Sequence:
    return Sequence(range(first, first + num_tokens), block_size=4, **kwargs)


def compute(pool: BlockManager, seq: Sequence) -> None:
    seq.num_computed_tokens = len(seq)
    pool.commit(seq)


def run(pool: BlockManager, seq: Sequence) -> list[int]:
    """Allocate and compute; the blocks."""
    pool.allocate(seq)
    compute(pool, seq)
    return list(seq.block_table)


def cache(pool: BlockManager, seq: Sequence) -> list[int]:
    """Compute and finish; the blocks that it had."""
    blocks = run(pool, seq)
    pool.free(seq)
    return blocks


def test_a_new_pool_is_free() -> None:
    assert BlockManager(8, 4).counts == BlockCounts(free=8, cached=0, held=0, in_use=0, total=8)


def test_full_blocks_stay_cached_and_a_partly_filled_one_becomes_free() -> None:
    pool = BlockManager(8, 4)
    cache(pool, new_seq(10))
    assert pool.counts == BlockCounts(free=6, cached=2, held=0, in_use=0, total=8)


def test_a_cached_prefix_is_shared_and_not_computed_again() -> None:
    pool = BlockManager(8, 4)
    blocks = cache(pool, new_seq(10))
    seq = new_seq(10)
    assert pool.allocate(seq) == 8
    assert seq.num_computed_tokens == 8
    assert seq.block_table[:2] == blocks[:2]


def test_the_block_of_the_last_token_is_never_shared() -> None:
    pool = BlockManager(8, 4)
    cache(pool, new_seq(8))
    assert pool.allocate(new_seq(8)) == 4
    assert pool.allocate(new_seq(4)) == 0
    assert pool.allocate(new_seq(1)) == 0


def test_running_sequences_share_a_block_that_counts_once() -> None:
    pool = BlockManager(8, 4)
    first, second = new_seq(5), new_seq(6)
    run(pool, first)
    assert pool.allocate(second) == 4
    assert pool.counts.in_use == 3
    pool.free(first)
    assert pool.counts.in_use == 2
    pool.free(second)
    assert pool.counts == BlockCounts(free=7, cached=1, held=0, in_use=0, total=8)


def test_blocks_that_are_not_computed_are_not_shared() -> None:
    pool = BlockManager(8, 4)
    first = new_seq(12)
    pool.allocate(first)
    first.num_computed_tokens = 7
    pool.commit(first)
    assert pool.allocate(new_seq(12)) == 4


def test_generated_tokens_are_cached_too() -> None:
    pool = BlockManager(8, 4)
    seq = new_seq(6)
    run(pool, seq)
    for token_id in (6, 7, 8):
        pool.extend(seq)
        seq.append(token_id)
    assert len(seq.block_table) == 3
    compute(pool, seq)
    pool.free(seq)
    assert pool.allocate(new_seq(12)) == 8


def test_a_sequence_is_extended_by_a_block_only_when_its_last_one_is_full() -> None:
    pool = BlockManager(4, 4)
    seq = new_seq(6)
    pool.allocate(seq)
    pool.extend(seq, 2)
    assert len(seq.block_table) == 2
    pool.extend(seq, 3)
    assert len(seq.block_table) == 3
    pool.extend(seq, 3)
    assert len(seq.block_table) == 3


def test_too_few_blocks_change_nothing() -> None:
    pool = BlockManager(4, 4)
    cache(pool, new_seq(8))
    before = pool.counts
    seq = new_seq(17)
    with pytest.raises(OutOfBlocksError):
        pool.allocate(seq)
    assert (pool.counts, seq.block_table, seq.num_computed_tokens) == (before, [], 0)
    assert pool.allocate(new_seq(9)) == 8


def test_too_little_room_to_extend_changes_nothing() -> None:
    pool = BlockManager(2, 4)
    seq = new_seq(8)
    blocks = run(pool, seq)
    with pytest.raises(OutOfBlocksError):
        pool.extend(seq)
    assert seq.block_table == blocks
    assert pool.counts.in_use == 2


def test_shared_cached_blocks_are_not_counted_as_room() -> None:
    pool = BlockManager(4, 4)
    cache(pool, new_seq(12))
    run(pool, new_seq(4, first=100))
    # Three cached blocks are shared, nothing is left for the fourth.
    with pytest.raises(OutOfBlocksError):
        pool.allocate(new_seq(13))
    assert pool.counts == BlockCounts(free=0, cached=3, held=0, in_use=1, total=4)


def test_the_least_recently_used_leaf_is_evicted_first() -> None:
    pool = BlockManager(4, 4)
    cache(pool, new_seq(8))
    cache(pool, new_seq(8, first=100))
    cache(pool, new_seq(9))  # uses the first one again, and evicts the leaf of the other for its third block
    assert pool.counts == BlockCounts(free=1, cached=3, held=0, in_use=0, total=4)
    seq = new_seq(9, first=100)
    assert pool.allocate(seq) == 4  # its leaf is gone, its first block is not
    pool.free(seq)
    assert pool.allocate(new_seq(9)) == 4  # the leaf of this one had to go for that


def test_giving_back_twice_is_giving_back_once() -> None:
    pool = BlockManager(4, 4)
    seq, other = new_seq(6), new_seq(6, first=100)
    pool.allocate(seq)
    pool.free(seq)
    pool.allocate(other)
    pool.free(seq)
    assert pool.counts.in_use == 2
    assert (seq.block_table, seq.num_computed_tokens) == ([], 0)


def test_a_freed_sequence_starts_again_from_what_is_cached() -> None:
    pool = BlockManager(4, 4)
    seq = new_seq(10)
    cache(pool, seq)
    assert pool.allocate(seq) == 8


def test_a_block_is_named_as_routers_name_it() -> None:
    pool = BlockManager(4, 4)
    extra_key = ExtraKey(cache_salt="salt")
    blocks = run(pool, new_seq(10, extra_key=extra_key))
    assert [pool.sequence_hash(block) for block in blocks[:2]] == sequence_hashes(range(10), 4, extra_key)
    assert pool.sequence_hash(blocks[2]) is None


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"extra_key": ExtraKey("a")}, {"extra_key": ExtraKey("b")}),
        ({"extra_key": ExtraKey("", "a")}, {"extra_key": ExtraKey("a", "")}),
        ({"media": (MediaSpan(ITEM_A, 1, 2),)}, {"media": (MediaSpan(ITEM_B, 1, 2),)}),
        ({"media": (MediaSpan(ITEM_A, 1, 2),)}, {"media": (MediaSpan(ITEM_A, 2, 2),)}),
        ({}, {"media": (MediaSpan(ITEM_A, 1, 2),)}),
        ({}, {"first": 1}),
    ],
    ids=["adapter", "salt", "media item", "media position", "media or text", "tokens"],
)
@pytest.mark.parametrize("collides", [False, True])
def test_nothing_is_shared_that_differs_even_where_all_hashes_collide(
    first: dict[str, Any], second: dict[str, Any], collides: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if collides:
        monkeypatch.setattr(sequence, "chain_hashes", lambda _, blocks: [42] * len(blocks))
    pool = BlockManager(8, 4)
    blocks = cache(pool, new_seq(8, **first))
    assert (pool.sequence_hash(blocks[0]) == 42) == collides
    assert pool.allocate(new_seq(8, **second)) == 0
    assert pool.allocate(new_seq(8, **first)) == 4


@pytest.mark.parametrize("collides", [False, True])
def test_equal_blocks_behind_different_prefixes_are_not_shared(collides: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if collides:
        monkeypatch.setattr(block_hash, "xxh3_64_intdigest", lambda *_: 42)
    pool = BlockManager(8, 4)
    cache(pool, Sequence([1, 1, 1, 1, 5, 5, 5, 5], block_size=4))
    cache(pool, Sequence([2, 2, 2, 2, 6, 6, 6, 6], block_size=4))
    assert pool.allocate(Sequence([2, 2, 2, 2, 5, 5, 5, 5, 9], block_size=4)) == 4


def test_sequences_that_compute_the_same_at_once_share_one_chain_of_names() -> None:
    pool = BlockManager(12, 4)
    first, second = new_seq(8), new_seq(8)
    pool.allocate(first)
    pool.allocate(second)
    compute(pool, first)
    compute(pool, second)
    assert pool.sequence_hash(second.block_table[0]) is None
    for token_id in range(8, 12):
        pool.extend(second)
        second.append(token_id)
    compute(pool, second)
    third = new_seq(13)
    assert pool.allocate(third) == 12
    assert third.block_table[:3] == [*first.block_table, second.block_table[2]]


def test_a_copy_takes_over_the_name_when_the_block_that_bore_it_is_given_up() -> None:
    pool = BlockManager(4, 4)
    first, second = new_seq(8), new_seq(8)
    pool.allocate(first)
    pool.allocate(second)
    compute(pool, first)
    compute(pool, second)
    pool.free(first)
    assert pool.counts == BlockCounts(free=2, cached=0, held=0, in_use=2, total=4)
    assert [pool.sequence_hash(block) for block in second.block_table] == sequence_hashes(range(8), 4)
    pool.extend(second, 8)  # the names of its first blocks stay, whatever is evicted for its next ones
    for token_id in range(8, 16):
        second.append(token_id)
    compute(pool, second)
    pool.free(second)
    assert pool.allocate(new_seq(16)) == 12


def test_a_cached_block_gives_way_to_the_equal_one_of_a_running_sequence() -> None:
    pool = BlockManager(4, 4)
    first, second = new_seq(8), new_seq(8)
    pool.allocate(first)
    pool.allocate(second)
    compute(pool, first)
    pool.free(first)
    assert pool.counts.cached == 2
    compute(pool, second)
    assert pool.counts == BlockCounts(free=2, cached=0, held=0, in_use=2, total=4)


def test_held_blocks_are_never_handed_out() -> None:
    pool = BlockManager(4, 4)
    seq = new_seq(10)
    blocks = run(pool, seq)
    assert pool.hold(seq, holder=1) == tuple(blocks)
    assert seq.block_table == []
    assert pool.counts == BlockCounts(free=1, cached=0, held=3, in_use=0, total=4)
    with pytest.raises(OutOfBlocksError):
        pool.allocate(new_seq(8, first=100))
    pool.release(1)
    assert pool.counts == BlockCounts(free=2, cached=2, held=0, in_use=0, total=4)
    pool.release(1)
    assert pool.counts.cached == 2


def test_only_computed_blocks_are_held() -> None:
    pool = BlockManager(8, 4)
    seq = new_seq(6)
    blocks = run(pool, seq)
    pool.extend(seq, 8)
    assert pool.hold(seq, holder=1) == tuple(blocks)
    assert pool.counts == BlockCounts(free=6, cached=0, held=2, in_use=0, total=8)


def test_a_held_block_can_be_shared_and_is_held_again_afterwards() -> None:
    pool = BlockManager(4, 4)
    seq, other = new_seq(10), new_seq(10)
    run(pool, seq)
    pool.hold(seq, holder=1)
    assert pool.allocate(other) == 8
    assert pool.counts == BlockCounts(free=0, cached=0, held=1, in_use=3, total=4)
    pool.free(other)
    assert pool.counts == BlockCounts(free=1, cached=0, held=3, in_use=0, total=4)


def test_a_shared_block_that_is_no_longer_held_is_still_in_use() -> None:
    pool = BlockManager(4, 4)
    seq, other = new_seq(10), new_seq(10)
    run(pool, seq)
    pool.hold(seq, holder=1)
    pool.allocate(other)
    pool.release(1)
    assert pool.counts == BlockCounts(free=1, cached=0, held=0, in_use=3, total=4)
    pool.free(other)
    assert pool.counts == BlockCounts(free=2, cached=2, held=0, in_use=0, total=4)


def test_held_blocks_are_evicted_leaf_first_after_their_release() -> None:
    pool = BlockManager(3, 4)
    seq = new_seq(12)
    run(pool, seq)
    pool.hold(seq, holder=1)
    pool.release(1)
    cache(pool, new_seq(1, first=100))
    assert pool.allocate(new_seq(12)) == 8


def test_a_block_held_by_two_stays_until_both_release_it() -> None:
    pool = BlockManager(4, 4)
    for holder in (1, 2):
        seq = new_seq(5)
        run(pool, seq)
        pool.hold(seq, holder)
    assert pool.counts.held == 3
    pool.release(1)
    assert pool.counts.held == 2
    pool.release(2)
    assert pool.counts == BlockCounts(free=3, cached=1, held=0, in_use=0, total=4)


def test_releasing_for_an_unknown_holder_changes_nothing() -> None:
    pool = BlockManager(4, 4)
    pool.release(7)
    assert pool.counts.free == 4


def test_what_was_evicted_lately_is_remembered_until_it_is_there_again() -> None:
    pool = BlockManager(4, 4, has_events=True)
    cache(pool, new_seq(10))
    cache(pool, new_seq(12, first=100))  # takes the place of one block of the first
    again = new_seq(10)
    assert pool.allocate(again) == 4
    assert pool.num_evicted_tokens(again) == 4
    compute(pool, again)
    pool.free(again)
    assert pool.allocate(again) == 8
    assert pool.num_evicted_tokens(again) == 0


def test_no_more_evicted_blocks_are_remembered_than_the_pool_has() -> None:
    pool = BlockManager(2, 4, has_events=True)
    for first in (0, 100, 200):
        cache(pool, new_seq(8, first=first))
    known = [new_seq(9, first=first) for first in (0, 100)]
    assert [pool.num_evicted_tokens(seq) for seq in known] == [0, 8]


def test_a_block_that_is_evicted_again_is_remembered_from_then_on() -> None:
    pool = BlockManager(3, 4, has_events=True)  # two whole blocks stay cached
    # Evicted are 0, 100, 0 again, 200 and 300, of which three are remembered.
    for first in (0, 100, 200, 0, 200, 300, 400, 500):
        cache(pool, new_seq(5, first=first))
    assert [pool.num_evicted_tokens(new_seq(5, first=first)) for first in (0, 100, 200, 300)] == [4, 0, 4, 4]


def test_without_events_nothing_evicted_is_remembered() -> None:
    pool = BlockManager(2, 4)
    for first in (0, 100):
        cache(pool, new_seq(8, first=first))
    assert pool.num_evicted_tokens(new_seq(9)) == 0
