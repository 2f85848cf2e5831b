"""A stream that is open before it is needed saves time, and must cost nothing when it is not needed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from quartet.kvcache.hand_off import HandOffState
from quartet.transfer.base import PieceCopy
from quartet.transfer.grpc.streams import PullStream, SourceLife, SpareStreams
from tests.garbage import garbage
from tests.transfer.workers import (
    CONFIG,
    EPOCH,
    Ended,
    PullerWorker,
    SourceWorker,
    open_channel,
    puller_worker,
    source_worker,
)

COPIES = (PieceCopy(0, 5), PieceCopy(1, 2))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - of another part, which has no event for it
            await asyncio.sleep(0.001)


async def fetch(here: PullerWorker, source: SourceWorker, holder: int) -> None:
    await here.puller.claim(source.offer(holder, (3, 7))).fetch(COPIES)
    assert await source.end() == Ended(holder, HandOffState.TAKEN)
    assert here.memory.piece(5) == source.memory.piece(3)


async def test_after_a_fetch_the_next_one_finds_its_stream_open() -> None:
    async with source_worker() as source, puller_worker() as here:
        for holder in range(3):
            await fetch(here, source, holder)
            await until(lambda: source.server.num_active_calls == 1)
        await here.puller.close()
        await until(lambda: source.server.num_active_calls == 0)


async def test_claims_that_wait_share_one_spare_stream_and_each_gets_its_blocks() -> None:
    async with source_worker() as source, puller_worker() as here:
        claims = [here.puller.claim(source.offer(holder, (holder,))) for holder in range(5)]
        await until(lambda: source.server.num_active_calls == 1)
        await asyncio.gather(*(claim.fetch([PieceCopy(0, block)]) for block, claim in enumerate(claims)))
        for holder in range(5):
            assert here.memory.piece(holder) == source.memory.piece(holder)


async def test_an_aborted_claim_leaves_the_spare_to_the_next_one() -> None:
    async with source_worker() as source, puller_worker() as here:
        await here.puller.claim(source.offer(1, (3, 7))).release()
        assert await source.end() == Ended(1, HandOffState.CANCELLED)
        await fetch(here, source, 2)


async def test_an_unused_spare_stream_is_closed_before_the_source_ends_it() -> None:
    config = replace(CONFIG, hand_off_ttl_s=1.0)
    async with source_worker(config=config) as source, puller_worker(config=config) as here:
        await fetch(here, source, 1)
        await until(lambda: source.server.num_active_calls == 1)
        await until(lambda: source.server.num_active_calls == 0)
        await fetch(here, source, 2)


async def test_a_stream_that_ended_is_no_spare_any_more() -> None:
    opened: list[PullStream] = []
    async with source_worker() as source, open_channel(source.address) as channel:

        def open_stream(_source: SourceLife, _max_idle_s: float) -> PullStream:
            opened.append(PullStream(channel, timeout_s=10, stall_timeout_s=10))
            return opened[-1]

        spares, life = SpareStreams(open_stream), SourceLife(source.address, EPOCH)
        spares.prepare(life, 10)
        spares.prepare(life, 10)
        assert len(opened) == 1
        await until(lambda: source.server.num_active_calls == 1)
        await source.server.drain(0.0)
        await until(lambda: not opened[0].is_open)
        assert spares.take(life) is None
        spares.prepare(life, 10)
        assert len(opened) == 2
        spares.close()
        assert spares.take(life) is None


async def test_a_claim_that_was_fetched_is_freed_at_once() -> None:
    async with source_worker() as source, puller_worker() as here:
        await fetch(here, source, 1)
        with garbage("quartet.transfer.grpc.puller.PullClaim") as left:
            for holder in range(2, 7):
                await fetch(here, source, holder)
            await asyncio.sleep(0)  # the end of the last one's renewal
        assert not left
