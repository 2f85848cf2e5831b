"""The book of embeddings: what can be found, what goes first, and what is refused."""

from __future__ import annotations

import pytest

from quartet.errors import OutOfBlocksError
from quartet.events.kv import Removed, Stored
from quartet.kvcache.block_pool import BlockCounts
from quartet.kvcache.embedding_pool import EmbeddingPool, PooledItem
from quartet.media.media_id import media_hash

BLOCK_SIZE = 4
A, B, C = (bytes([number]) * 32 for number in (1, 2, 3))


def write(pool: EmbeddingPool, media_id: bytes, num_tokens: int) -> tuple[int, ...]:
    block_ids = pool.allocate(media_id, num_tokens)
    pool.commit(media_id)
    return block_ids


def test_an_item_is_found_once_it_is_written() -> None:
    pool = EmbeddingPool(4, BLOCK_SIZE)
    block_ids = pool.allocate(A, 5)
    assert len(block_ids) == 2
    assert pool.find(A) is None
    assert pool.counts == BlockCounts(free=2, cached=0, held=0, in_use=2, total=4)
    pool.commit(A)
    assert pool.find(A) == PooledItem(block_ids, 5)
    assert pool.counts == BlockCounts(free=2, cached=2, held=0, in_use=0, total=4)


def test_an_item_that_could_not_be_written_leaves_nothing_behind() -> None:
    pool = EmbeddingPool(2, BLOCK_SIZE, has_events=True)
    pool.allocate(A, 8)
    pool.discard(A)
    assert pool.find(A) is None
    assert pool.counts == BlockCounts(free=2, cached=0, held=0, in_use=0, total=2)
    assert pool.take_events() == []


def test_the_least_recently_held_item_goes_first() -> None:
    pool = EmbeddingPool(2, BLOCK_SIZE)
    write(pool, A, 4)
    write(pool, B, 4)
    pool.hold(A)
    pool.release(A)
    write(pool, C, 4)
    assert pool.find(B) is None
    assert pool.find(A) is not None
    assert pool.find(C) is not None


def test_a_held_item_stays_until_its_last_holder_releases_it() -> None:
    pool = EmbeddingPool(2, BLOCK_SIZE)
    write(pool, A, 8)
    pool.hold(A)
    pool.hold(A)
    pool.release(A)
    with pytest.raises(OutOfBlocksError, match="need 1 blocks for embeddings, 0 of 2 are available"):
        pool.allocate(B, 1)
    assert pool.find(A) is not None
    pool.release(A)
    write(pool, B, 1)
    assert pool.find(A) is None


def test_a_refused_item_evicts_nothing() -> None:
    pool = EmbeddingPool(3, BLOCK_SIZE, has_events=True)
    write(pool, A, 4)
    write(pool, B, 4)
    pool.hold(B)
    pool.take_events()
    with pytest.raises(OutOfBlocksError):
        pool.allocate(C, 12)
    assert pool.find(A) is not None
    assert pool.counts == BlockCounts(free=1, cached=1, held=1, in_use=0, total=3)
    assert pool.take_events() == []


def test_every_item_is_reported_as_a_first_block() -> None:
    pool = EmbeddingPool(2, BLOCK_SIZE, has_events=True)
    write(pool, A, 4)
    write(pool, B, 4)
    assert pool.take_events() == [Stored(None, [media_hash(A)]), Stored(None, [media_hash(B)])]
    write(pool, C, 8)
    assert pool.take_events() == [Removed([media_hash(A), media_hash(B)]), Stored(None, [media_hash(C)])]
    assert pool.stored_items() == {media_hash(C): None}


def test_items_of_one_public_name_are_two_items_and_there_until_both_are_gone() -> None:
    pool = EmbeddingPool(2, BLOCK_SIZE, has_events=True)
    twin = A[:8] + B[8:]
    assert media_hash(twin) == media_hash(A)
    write(pool, A, 4)
    assert pool.find(twin) is None
    assert write(pool, twin, 3) != pool.find(A)
    assert pool.take_events() == [Stored(None, [media_hash(A)])]
    write(pool, B, 4)  # A goes
    assert pool.take_events() == [Stored(None, [media_hash(B)])]
    write(pool, C, 4)  # and so does its twin
    assert pool.take_events() == [Removed([media_hash(A)]), Stored(None, [media_hash(C)])]


def test_without_events_no_item_is_noted() -> None:
    pool = EmbeddingPool(1, BLOCK_SIZE)
    write(pool, A, 1)
    assert (pool.take_events(), pool.stored_items()) == ([], {})
