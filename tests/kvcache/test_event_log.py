"""Which events a pool gives, and how few."""

from __future__ import annotations

import pytest

from quartet.events.kv import Removed, Stored
from quartet.kvcache import sequence
from quartet.kvcache.block_hash import sequence_hashes
from quartet.kvcache.block_pool import BlockManager
from quartet.kvcache.sequence import Sequence

TOKENS = tuple(range(8))
HASHES = sequence_hashes(TOKENS, 2)


def computed(pool: BlockManager, tokens: tuple[int, ...] = TOKENS, num_tokens: int | None = None) -> Sequence:
    """A sequence in ``pool`` whose first ``num_tokens`` are computed and named."""
    seq = Sequence(tokens, block_size=2)
    pool.allocate(seq)
    go_on(pool, seq, len(tokens) if num_tokens is None else num_tokens)
    return seq


def go_on(pool: BlockManager, seq: Sequence, num_tokens: int) -> None:
    seq.num_computed_tokens = max(seq.num_computed_tokens, num_tokens)
    pool.commit(seq)


def test_blocks_of_a_sequence_committed_in_one_step_are_one_event() -> None:
    pool = BlockManager(8, 2, has_events=True)
    computed(pool)
    assert pool.take_events() == [Stored(None, HASHES)]


def test_a_later_chunk_goes_on_where_the_one_before_ended() -> None:
    pool = BlockManager(8, 2, has_events=True)
    seq = computed(pool, num_tokens=5)
    assert pool.take_events() == [Stored(None, HASHES[:2])]
    go_on(pool, seq, 8)
    assert pool.take_events() == [Stored(HASHES[1], HASHES[2:])]


def test_sequences_of_one_step_are_an_event_each() -> None:
    pool = BlockManager(8, 2, has_events=True)
    computed(pool)
    other = (*TOKENS[:4], 9, 9)
    computed(pool, other)
    assert pool.take_events() == [Stored(None, HASHES), Stored(HASHES[1], sequence_hashes(other, 2)[2:])]


def test_a_copy_and_its_taking_over_are_no_events() -> None:
    pool = BlockManager(16, 2, has_events=True)
    first, second = Sequence(TOKENS, block_size=2), Sequence(TOKENS, block_size=2)
    for seq in (first, second):
        pool.allocate(seq)
    for seq in (first, second):
        go_on(pool, seq, 8)
    assert pool.take_events() == [Stored(None, HASHES)]
    pool.free(first)
    pool.free(second)
    assert pool.take_events() == []


def test_blocks_evicted_at_once_are_one_event_with_the_leaves_first() -> None:
    pool = BlockManager(4, 2, has_events=True)
    pool.free(computed(pool))
    pool.take_events()
    computed(pool, (7, 7, 7, 7, 7))
    assert pool.take_events() == [
        Removed(HASHES[:0:-1]),
        Stored(None, sequence_hashes((7, 7, 7, 7), 2)),
    ]


def test_the_table_knows_every_block_and_its_parent() -> None:
    pool = BlockManager(8, 2, has_events=True)
    computed(pool)
    assert list(pool.stored_blocks().items()) == list(zip(HASHES, (None, *HASHES), strict=False))


def test_of_blocks_with_colliding_hashes_only_the_last_removal_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence, "chain_hashes", lambda _, blocks: [42] * len(blocks))
    pool = BlockManager(3, 2, has_events=True)
    pool.free(computed(pool, (1, 1)))
    pool.free(computed(pool, (2, 2)))
    assert pool.take_events() == [Stored(None, [42])]
    pool.free(computed(pool, (3, 3, 3), 0))
    assert pool.take_events() == []
    assert pool.stored_blocks() == {42: None}
    computed(pool, (4, 4, 4, 4, 4), 0)
    assert pool.take_events() == [Removed([42])]


def test_a_pool_without_events_reports_none() -> None:
    pool = BlockManager(8, 2)
    computed(pool)
    assert pool.take_events() == []
    assert pool.stored_blocks() == {}
