"""A puller and a source over a real server: which bytes move, by which way, and how hand-offs end."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

import pytest

from quartet.discovery.base import HostIdentity
from quartet.errors import (
    HandOffNotFoundError,
    HandOffStateError,
    LayoutMismatchError,
    StaleEpochError,
    TransferError,
)
from quartet.kvcache.hand_off import HandOffState
from quartet.kvcache.layout import HandOff
from quartet.transfer.base import PieceCopy, TransferWay
from quartet.transfer.config import TransferConfig
from tests.transfer.workers import (
    CONFIG,
    LARGE_LAYOUT,
    LAYOUT,
    NUM_BLOCKS,
    Ended,
    PullerWorker,
    puller_worker,
    source_worker,
)

ELSEWHERE = HostIdentity(boot_id="another machine", ipc_namespace="ipc:[1]")
BLOCKS = (3, 4, 9, 0)
#: Long enough for three tries of a renewal on a busy machine, where an answer takes a tenth of a second.
TTL_S = 0.9


@pytest.mark.parametrize("way", [TransferWay.GRPC, TransferWay.SHM])
@pytest.mark.parametrize("layout", [LAYOUT, LARGE_LAYOUT], ids=["small", "large"])
async def test_only_the_pieces_asked_for_move_and_their_bytes_are_equal(way: TransferWay, layout) -> None:
    config = dataclasses.replace(CONFIG, ways=tuple(dict.fromkeys((way, TransferWay.GRPC))))
    async with source_worker(layout=layout) as source, puller_worker(layout=layout, config=config) as here:
        hand_off = source.offer(1, BLOCKS)
        copies = (PieceCopy(3, 1), PieceCopy(0, 5), PieceCopy(1, 6))
        result = await here.puller.claim(hand_off).fetch(copies)
        assert (result.way, result.size_bytes) == (way, 3 * layout.piece_size_bytes)
        for block_id in range(NUM_BLOCKS):
            piece = next((copy.piece for copy in copies if copy.block_id == block_id), None)
            expected = bytes(layout.piece_size_bytes) if piece is None else source.memory.piece(BLOCKS[piece])
            assert here.memory.piece(block_id) == expected
        assert await source.end() == Ended(1, HandOffState.TAKEN)
        assert source.source.counts.taken == 1


async def test_shared_memory_is_taken_only_on_the_same_host() -> None:
    async with source_worker(host=ELSEWHERE) as source, puller_worker() as here:
        result = await here.puller.claim(source.offer(1, BLOCKS)).fetch([PieceCopy(0, 0)])
        assert result.way is TransferWay.GRPC


async def test_a_source_that_speaks_only_grpc_is_pulled_from_by_grpc() -> None:
    config = TransferConfig(ways=(TransferWay.GRPC,))
    async with source_worker(config=config) as source, puller_worker() as here:
        result = await here.puller.claim(source.offer(1, BLOCKS)).fetch([PieceCopy(0, 0)])
        assert result.way is TransferWay.GRPC


async def test_a_fetch_of_no_blocks_releases_the_source() -> None:
    async with source_worker() as source, puller_worker() as here:
        assert (await here.puller.claim(source.offer(1, BLOCKS)).fetch(())).size_bytes == 0
        assert await source.end() == Ended(1, HandOffState.TAKEN)


async def test_opaque_hand_offs_are_finished_and_aborted_like_others() -> None:
    async with source_worker() as source, puller_worker() as here:
        await here.puller.claim(source.offer_opaque(1)).fetch(())
        assert await source.end() == Ended(1, HandOffState.TAKEN)
        await here.puller.claim(source.offer_opaque(2)).release()
        assert await source.end() == Ended(2, HandOffState.CANCELLED)


async def test_abort_frees_at_once_and_may_be_repeated() -> None:
    async with source_worker() as source, puller_worker() as here:
        claim = here.puller.claim(source.offer(1, BLOCKS))
        await claim.release()
        await claim.release()
        assert await source.end() == Ended(1, HandOffState.CANCELLED)
        with pytest.raises(HandOffStateError):
            await claim.fetch(())


async def test_a_hand_off_is_renewed_for_as_long_as_the_claim_is_open() -> None:
    config = TransferConfig(hand_off_ttl_s=TTL_S)
    async with source_worker(config=config) as source, puller_worker() as here:
        claimed, forgotten = source.offer(1, BLOCKS), source.offer(2, BLOCKS)
        claim = here.puller.claim(claimed)
        assert await source.end() == Ended(2, HandOffState.EXPIRED)
        # Three others expired, and the claim is still good.
        for holder in (3, 4, 5):
            source.offer(holder, BLOCKS)
            assert await source.end() == Ended(holder, HandOffState.EXPIRED)
        await claim.fetch([PieceCopy(0, 0)])
        assert await source.end() == Ended(1, HandOffState.TAKEN)
        with pytest.raises(HandOffNotFoundError):
            await here.puller.claim(forgotten).fetch(())


async def test_a_claim_for_another_needs_no_pool_and_stops_without_an_abort() -> None:
    config = TransferConfig(hand_off_ttl_s=TTL_S)
    async with source_worker(config=config) as source, puller_worker() as here:
        claim = here.puller.claim_for_another(source.offer(1, BLOCKS))
        source.offer(2, BLOCKS)
        assert await source.end() == Ended(2, HandOffState.EXPIRED)
        source.offer(3, BLOCKS)
        assert await source.end() == Ended(3, HandOffState.EXPIRED)
        claim.stop()
        assert await source.end() == Ended(1, HandOffState.EXPIRED)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"secret": bytes(16)}, HandOffNotFoundError),
        ({"secret": b"short"}, HandOffNotFoundError),
        ({"hand_off_id": bytes(16)}, HandOffNotFoundError),
        ({"hand_off_id": b""}, HandOffNotFoundError),
        ({"epoch": 8}, StaleEpochError),
    ],
)
async def test_a_wrong_ticket_moves_no_blocks_and_leaves_the_hand_off_intact(change, error: type[Exception]) -> None:
    async with source_worker() as source, puller_worker() as here:
        hand_off = source.offer(1, BLOCKS)
        forged = here.puller.claim(dataclasses.replace(hand_off, **change))
        with pytest.raises(error):
            await forged.fetch([PieceCopy(0, 0)])
        assert here.memory.view == bytes(here.memory.size_bytes)
        await here.puller.claim(hand_off).fetch([PieceCopy(0, 0)])


async def test_pieces_out_of_range_are_refused_and_the_hand_off_stays_valid() -> None:
    async with source_worker() as source, puller_worker() as here:
        hand_off = source.offer(1, BLOCKS)
        with pytest.raises(TransferError, match="INVALID_ARGUMENT"):
            await here.puller.claim(hand_off).fetch([PieceCopy(4, 0)])
        await here.puller.claim(hand_off).fetch([PieceCopy(3, 0)])


async def test_a_hand_off_is_pulled_once() -> None:
    async with source_worker() as source, puller_worker() as here:
        hand_off = source.offer(1, BLOCKS)
        await here.puller.claim(hand_off).fetch(())
        with pytest.raises(HandOffNotFoundError):
            await here.puller.claim(hand_off).fetch(())


@pytest.mark.parametrize(
    "field", ["model_fingerprint", "dtype", "num_layers", "num_kv_heads", "head_dim", "block_size"]
)
async def test_another_layout_is_refused_naming_the_field(field: str) -> None:
    other = dataclasses.replace(LAYOUT, **{field: "float16" if field == "dtype" else "x" if "model" in field else 16})
    async with source_worker(layout=other) as source, puller_worker() as here:
        with pytest.raises(LayoutMismatchError, match=field):
            here.puller.claim(source.offer(1, BLOCKS))


async def test_two_lives_of_one_worker_id_each_give_their_own_bytes() -> None:
    async with source_worker(epoch=7) as former, source_worker(epoch=8) as living, puller_worker() as here:
        assert former.memory.view != living.memory.view
        # The second fetch from each reads its pool, which is mapped by then, before the source answers.
        for holder, source in enumerate((former, living, former, living)):
            hand_off = source.offer(holder, BLOCKS)
            assert hand_off.worker_id == "source"
            result = await here.puller.claim(hand_off).fetch([PieceCopy(2, holder)])
            assert result.way is TransferWay.SHM
            assert here.memory.piece(holder) == source.memory.piece(BLOCKS[2])
            assert await source.end() == Ended(holder, HandOffState.TAKEN)


@pytest.mark.parametrize("way", [TransferWay.GRPC, TransferWay.SHM])
async def test_a_source_that_starts_anew_at_the_same_address_is_pulled_from_again(
    way: TransferWay, free_port: Callable[[], int]
) -> None:
    config = dataclasses.replace(CONFIG, ways=tuple(dict.fromkeys((way, TransferWay.GRPC))))
    address = f"127.0.0.1:{free_port()}"
    async with puller_worker(config=config) as here:
        for epoch in (7, 8):
            async with source_worker(epoch=epoch, address=address) as source, asyncio.timeout(30):
                hand_off = source.offer(0, BLOCKS)
                # Pulls fail at once until gRPC tries to connect again, which has no event.
                while await is_unreachable(here, hand_off):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                for block in (1, 2):
                    result = await here.puller.claim(source.offer(block, BLOCKS)).fetch([PieceCopy(1, block)])
                    assert result.way is way
                    assert here.memory.piece(block) == source.memory.piece(BLOCKS[1])
                left = source.offer(3, BLOCKS)
            assert await is_unreachable(here, left)


async def is_unreachable(here: PullerWorker, hand_off: HandOff) -> bool:
    try:
        await here.puller.claim(hand_off).fetch([PieceCopy(0, 0)])
    except TransferError:
        return True
    return False


async def test_a_source_that_is_not_there_is_a_failed_transfer_and_abort_does_not_mind(free_port) -> None:
    async with source_worker() as source, puller_worker() as here:
        gone = dataclasses.replace(source.offer(1, BLOCKS), address=f"127.0.0.1:{free_port()}")
        claim = here.puller.claim(gone)
        with pytest.raises(TransferError) as raised:
            await claim.fetch([PieceCopy(0, 0)])
        # Not WorkerUnavailableError: over the wire that would be said of the worker that wanted to pull.
        assert raised.type is TransferError
        async with asyncio.timeout(60):
            await claim.release()


async def test_a_peer_whose_pool_cannot_be_mapped_is_pulled_from_by_grpc_the_next_time() -> None:
    async with source_worker() as source, puller_worker() as here:
        await source.shm.close()  # as unreachable as from another network namespace
        with pytest.raises(TransferError):
            await here.puller.claim(source.offer(1, BLOCKS)).fetch([PieceCopy(0, 0)])
        assert await source.end() == Ended(1, HandOffState.CANCELLED)
        result = await here.puller.claim(source.offer(2, BLOCKS)).fetch([PieceCopy(0, 0)])
        assert result.way is TransferWay.GRPC


@pytest.mark.parametrize("by", ["grpc", "shm", "a mapped pool"])
async def test_a_fetch_cancelled_at_any_turn_frees_the_source_once_and_writes_no_more(by: str) -> None:
    config = dataclasses.replace(CONFIG, ways=(TransferWay.GRPC,)) if by == "grpc" else CONFIG
    copies = (PieceCopy(0, 1), PieceCopy(2, 5))
    async with source_worker(layout=LARGE_LAYOUT) as source:
        for num_turns in range(0, 40, 2):
            async with puller_worker(layout=LARGE_LAYOUT, config=config) as here:
                if by == "a mapped pool":
                    await here.puller.claim(source.offer(1000, BLOCKS)).fetch([PieceCopy(0, 0)])
                    await source.end()
                claim = here.puller.claim(source.offer(num_turns, BLOCKS))
                fetching = asyncio.create_task(claim.fetch(copies))
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                fetching.cancel()
                await asyncio.gather(fetching, return_exceptions=True)
                # As an engine does it; a fetch that was never begun would else wait for its time to live.
                await claim.release()
                pieces = [here.memory.piece(copy.block_id) for copy in copies]
                written = [bytes(piece) for piece in pieces]
                assert (await source.end()).holder == num_turns
                assert [bytes(piece) for piece in pieces] == written
        counts = source.source.counts
        assert (counts.held, counts.pulling) == (0, 0)
        assert source.ends.empty()


async def test_closing_the_source_ends_everything_it_holds() -> None:
    async with source_worker() as source:
        source.offer(1, BLOCKS)
        source.offer(2, BLOCKS)
        source.source.withdraw(1)
        source.source.withdraw(1)
        source.source.close()
        assert [await source.end(), await source.end()] == [
            Ended(1, HandOffState.CANCELLED),
            Ended(2, HandOffState.CANCELLED),
        ]
