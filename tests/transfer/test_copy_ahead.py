"""Where the source's pool is mapped, pieces are read while `begin` is on the way: sooner, and never believed sooner.

Neither does `finish` wait for `granted` then; both answers have to come, and to say what was read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest

from quartet.errors import HandOffNotFoundError, TransferError
from quartet.kvcache.hand_off import HandOffState, HandOffTicket, Offer
from quartet.kvcache.layout import BlocksPayload, HandOff
from quartet.rpc.errors import from_pull_error
from quartet.transfer.base import PieceCopy, PieceRun, TransferWay
from quartet.transfer.grpc.messages import PullMessage
from quartet.transfer.grpc.streams import PullStream
from quartet.transfer.life_line import PoolOwner
from quartet.transfer.runs import Runs
from quartet.transfer.shm import ShmReader
from quartet.v1 import transfer_pb2 as pb
from tests.transfer.test_hostile_source import FINISHED, GRANTED, RECEIVE, granted, scripted
from tests.transfer.workers import (
    CONFIG,
    LAYOUT,
    NUM_BLOCKS,
    Ended,
    PullerWorker,
    SourceWorker,
    puller_worker,
    source_worker,
)

COPIES = (PieceCopy(0, 5), PieceCopy(1, 2))


@asynccontextmanager
async def mapped_workers() -> AsyncIterator[tuple[SourceWorker, PullerWorker]]:
    """A puller that has fetched from the source before."""
    async with source_worker() as source, puller_worker() as here:
        await here.puller.claim(source.offer(1, (0,))).fetch([PieceCopy(0, 0)])
        assert await source.end() == Ended(1, HandOffState.TAKEN)
        yield source, here


def with_block_ids(hand_off: HandOff, *block_ids: int) -> HandOff:
    assert isinstance(hand_off.payload, BlocksPayload)
    return replace(hand_off, payload=replace(hand_off.payload, block_ids=block_ids))


async def test_blocks_read_ahead_equal_the_held_ones() -> None:
    async with mapped_workers() as (source, here):
        result = await here.puller.claim(source.offer(2, (3, 7))).fetch(COPIES)
        assert result.way is TransferWay.SHM
        assert here.memory.piece(5) == source.memory.piece(3)
        assert here.memory.piece(2) == source.memory.piece(7)


async def test_the_copies_begin_before_the_source_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    copy, send = ShmReader.copy, PullStream.send

    async def noted_copy(reader: ShmReader, owner: PoolOwner, runs: Runs) -> None:
        order.append("copy")
        await copy(reader, owner, runs)

    async def noted_send(stream: PullStream, request: pb.PullRequest) -> None:
        order.append(str(request.WhichOneof("message")))
        await send(stream, request)

    async with mapped_workers() as (source, here):
        monkeypatch.setattr(ShmReader, "copy", noted_copy)
        monkeypatch.setattr(PullStream, "send", noted_send)
        await here.puller.claim(source.offer(2, (3, 7))).fetch(PieceRun(0, [5, 2]))
        assert order == ["copy", "begin", "finish"]
        assert here.memory.piece(5) == source.memory.piece(3)
        assert here.memory.piece(2) == source.memory.piece(7)


@pytest.mark.parametrize("block_ids", [(), (3,)])
async def test_if_a_hand_off_does_not_name_all_blocks_the_source_is_asked_for_the_positions(
    block_ids: tuple[int, ...],
) -> None:
    async with mapped_workers() as (source, here):
        hand_off = with_block_ids(source.offer(2, (3, 7)), *block_ids)
        await here.puller.claim(hand_off).fetch(COPIES)
        assert here.memory.piece(5) == source.memory.piece(3)
        assert here.memory.piece(2) == source.memory.piece(7)


@pytest.mark.parametrize("block_ids", [(7, 3), (0, 1)])
async def test_blocks_read_from_other_positions_than_the_source_holds_do_not_count(block_ids: tuple[int, ...]) -> None:
    async with mapped_workers() as (source, here):
        hand_off = with_block_ids(source.offer(2, (3, 7)), *block_ids)
        with pytest.raises(TransferError):
            await here.puller.claim(hand_off).fetch(COPIES)
        assert (await source.end()).holder == 2


async def test_blocks_read_and_granted_do_not_count_if_the_source_released_them_before_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with mapped_workers() as (source, here):
        begin = source.source.begin

        def begin_and_let_go(ticket: HandOffTicket, pieces: Sequence[int]) -> Offer:
            entry = begin(ticket, pieces)
            source.source.withdraw(2)
            return entry

        monkeypatch.setattr(source.source, "begin", begin_and_let_go)
        with pytest.raises(HandOffNotFoundError):
            await here.puller.claim(source.offer(2, (3, 7))).fetch(COPIES)


async def test_the_source_gets_the_end_before_it_granted_if_all_blocks_were_read() -> None:
    async with mapped_workers() as (source, here):
        hand_off = source.offer(2, (3, 7))
        offsets = [block * LAYOUT.piece_size_bytes for block in (3, 7)]
        grant = granted(way=pb.TRANSFER_WAY_SHM, shm=pb.ShmDescriptor(offsets=offsets))
        # It answers nothing until it has received both.
        async with scripted(RECEIVE, RECEIVE, grant, FINISHED) as (_scripted, elsewhere):
            result = await here.puller.claim(replace(hand_off, address=elsewhere.address)).fetch(COPIES)
        assert result.way is TransferWay.SHM
        assert here.memory.piece(5) == source.memory.piece(3)


@pytest.mark.parametrize("answers", [(), (FINISHED,), (GRANTED,)], ids=["none", "no grant", "a grant alone"])
async def test_both_the_grant_and_the_end_have_to_come(answers: tuple[pb.PullResponse, ...]) -> None:
    config = replace(CONFIG, stall_timeout_s=0.2)
    async with scripted(RECEIVE, RECEIVE, *answers) as (source, hand_off), puller_worker(config=config) as here:
        with pytest.raises(TransferError):
            await here.puller.claim(hand_off).fetch(())
        async with asyncio.timeout(30):
            await source.was_left.wait()


async def test_block_ids_outside_the_pool_are_a_transfer_error() -> None:
    async with mapped_workers() as (source, here):
        hand_off = with_block_ids(source.offer(2, (3, 7)), 3, NUM_BLOCKS)
        claim = here.puller.claim(hand_off)
        with pytest.raises(TransferError):
            await claim.fetch(COPIES)
        await claim.release()
        assert await source.end() == Ended(2, HandOffState.CANCELLED)


@pytest.mark.parametrize("num_hidden", [1, 2])
async def test_a_refusal_that_grpc_hides_behind_a_status_of_its_own_is_asked_for_again(
    num_hidden: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = grpc.aio.AioRpcError(
        grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(), "Internal error from Core"
    )
    receive, num_asked = PullStream.receive, 0

    async def receive_or_not(stream: PullStream) -> PullMessage:
        nonlocal num_asked
        num_asked += 1
        if num_asked <= num_hidden:
            raise from_pull_error(hidden)
        return await receive(stream)

    async with mapped_workers() as (source, here):
        hand_off = source.offer(2, (3, 7))
        source.source.withdraw(2)
        monkeypatch.setattr(PullStream, "receive", receive_or_not)
        with pytest.raises(HandOffNotFoundError):
            await here.puller.claim(hand_off).fetch(COPIES)


async def test_blocks_read_ahead_of_a_refusal_do_not_count() -> None:
    async with mapped_workers() as (source, here):
        hand_off = source.offer(2, (3, 7))
        source.source.withdraw(2)
        with pytest.raises(HandOffNotFoundError):
            await here.puller.claim(hand_off).fetch(COPIES)


async def test_a_fetch_cancelled_as_it_begins_leaves_no_listener() -> None:
    def listening() -> list[asyncio.Task[object]]:
        return [task for task in asyncio.all_tasks() if "PullStream.receive" in repr(task)]

    async with mapped_workers() as (source, here):
        for num_turns in range(20):
            fetching = asyncio.create_task(here.puller.claim(source.offer(2 + num_turns, (3, 7))).fetch(COPIES))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)
            assert not listening(), num_turns
