"""Where the source's pool is mapped, pieces are read while `begin` is on the way: sooner, and never believed sooner."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from quartet.errors import HandOffNotFoundError, TransferError
from quartet.kvcache.hand_off import HandOffState
from quartet.kvcache.layout import BlocksPayload, HandOff
from quartet.transfer.base import PieceCopy, TransferWay
from tests.transfer.workers import NUM_BLOCKS, Ended, PullerWorker, SourceWorker, puller_worker, source_worker

COPIES = (PieceCopy(0, 5), PieceCopy(1, 2))


@asynccontextmanager
async def mapped_workers() -> AsyncIterator[tuple[SourceWorker, PullerWorker]]:
    """A puller that has fetched from the source before."""
    async with source_worker() as source, puller_worker() as here:
        await here.puller.claim(source.offer(1, (0,))).fetch([PieceCopy(0, 0)])
        assert await source.end() == Ended(1, HandOffState.RELEASED)
        yield source, here


def with_block_ids(hand_off: HandOff, *block_ids: int) -> HandOff:
    assert isinstance(hand_off.payload, BlocksPayload)
    return replace(hand_off, payload=replace(hand_off.payload, block_ids=block_ids))


async def test_what_was_read_ahead_is_what_was_held() -> None:
    async with mapped_workers() as (source, here):
        result = await here.puller.claim(source.offer(2, (3, 7))).fetch(COPIES)
        assert result.way is TransferWay.SHM
        assert here.memory.piece(5) == source.memory.piece(3)
        assert here.memory.piece(2) == source.memory.piece(7)


@pytest.mark.parametrize("block_ids", [(), (3,), (7, 3), (0, 1)])
async def test_the_source_s_word_on_where_pieces_are_counts_not_the_hand_off_s(block_ids: tuple[int, ...]) -> None:
    async with mapped_workers() as (source, here):
        hand_off = with_block_ids(source.offer(2, (3, 7)), *block_ids)
        await here.puller.claim(hand_off).fetch(COPIES)
        assert here.memory.piece(5) == source.memory.piece(3)
        assert here.memory.piece(2) == source.memory.piece(7)


async def test_block_ids_outside_the_pool_are_a_transfer_error() -> None:
    async with mapped_workers() as (source, here):
        hand_off = with_block_ids(source.offer(2, (3, 7)), 3, NUM_BLOCKS)
        claim = here.puller.claim(hand_off)
        with pytest.raises(TransferError):
            await claim.fetch(COPIES)
        await claim.abort()
        assert await source.end() == Ended(2, HandOffState.CANCELLED)


async def test_what_was_read_ahead_of_a_refusal_does_not_count() -> None:
    async with mapped_workers() as (source, here):
        hand_off = source.offer(2, (3, 7))
        source.source.withdraw(2)
        with pytest.raises(HandOffNotFoundError):
            await here.puller.claim(hand_off).fetch(COPIES)
