"""Way staged on a real GPU, between processes: right bytes in each direction, and no copy outlives its fetch."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from quartet.errors import TransferError
from quartet.transfer.base import PieceCopy, PoolMemory, TransferWay
from quartet.transfer.cuda.driver import cuda_driver
from quartet.transfer.cuda.memory import DeviceMemory
from quartet.transfer.cuda.pinned import PinnedKind, pinned_kind
from quartet.transfer.cuda.staging import StagingArea
from quartet.transfer.grpc.puller import TransferPuller
from tests.transfer.gpu_process import (
    PIECE,
    block_bytes,
    make_pool,
    puller_on_gpu,
    puller_on_host,
    read,
    write,
    wrong_blocks,
)
from tests.transfer.test_cuda_two_processes import source
from tests.transfer.workers import CONFIG

pytestmark = pytest.mark.gpu

#: 160 MiB: many windows of either side.
NUM_BLOCKS = (160 << 20) // PIECE
ALL = [PieceCopy(block_id, block_id) for block_id in range(NUM_BLOCKS)]
SOME = {block_id: block_id for block_id in (0, 1, 31, NUM_BLOCKS - 2, NUM_BLOCKS - 1)}
#: No cuda_ipc: by shared memory, and by the stream.
CONFIGS = {
    "shm": replace(CONFIG, ways=(TransferWay.SHM, TransferWay.GRPC)),
    "grpc": replace(CONFIG, ways=(TransferWay.GRPC,)),
}
pairs = pytest.mark.parametrize(("there", "here"), [("gpu", "cpu"), ("cpu", "gpu"), ("gpu", "gpu")])
carriers = pytest.mark.parametrize("carrier", CONFIGS)

Pool = DeviceMemory | PoolMemory


async def open_puller(stack: AsyncExitStack, here: str, carrier: str) -> tuple[TransferPuller, Pool]:
    puller = puller_on_gpu if here == "gpu" else puller_on_host
    return await stack.enter_async_context(puller(NUM_BLOCKS, CONFIGS[carrier]))


def kind_of(there: str) -> str:
    return "source" if there == "gpu" else "host_source"


@pairs
@carriers
async def test_blocks_of_another_process_arrive(there: str, here: str, carrier: str) -> None:
    async with AsyncExitStack() as stack:
        puller, memory = await open_puller(stack, here, carrier)
        peer = await stack.enter_async_context(source(NUM_BLOCKS, kind=kind_of(there)))
        for _ in range(3):
            for block_id in SOME:
                write(memory, block_id, bytes(PIECE))
            result = await puller.claim(await peer.offer()).fetch(ALL)
            assert (result.way, result.size_bytes) == (TransferWay.STAGED, memory.size_bytes)
            assert wrong_blocks(memory, peer.seed, SOME) == []
            print(f"{there} to {here} by {carrier}: {result.size_bytes / result.duration_s / 1e9:.1f} GB/s")


@pairs
async def test_scattered_blocks_go_where_they_belong(there: str, here: str) -> None:
    async with AsyncExitStack() as stack:
        puller, memory = await open_puller(stack, here, "shm")
        peer = await stack.enter_async_context(source(NUM_BLOCKS, kind=kind_of(there)))
        copies = [PieceCopy(piece, NUM_BLOCKS - 1 - 2 * piece) for piece in range(20)]
        await puller.claim(await peer.offer()).fetch(copies)
        assert wrong_blocks(memory, peer.seed, {copy.block_id: copy.piece for copy in copies}) == []


@carriers
async def test_a_cancelled_pull_writes_no_more(carrier: str) -> None:
    async with AsyncExitStack() as stack:
        puller, memory = await open_puller(stack, "gpu", carrier)
        peer = await stack.enter_async_context(source(NUM_BLOCKS))
        await puller.claim(await peer.offer()).fetch(ALL)
        for num_turns in range(0, 300, 30):
            fetching = asyncio.create_task(puller.claim(await peer.offer()).fetch(ALL))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)
            for block_id in SOME:
                write(memory, block_id, block_bytes(7, block_id))
            assert wrong_blocks(memory, 7, SOME) == []
        await puller.claim(await peer.offer()).fetch(ALL)  # the source has room for it
        assert wrong_blocks(memory, peer.seed, SOME) == []


@carriers
async def test_a_source_killed_in_the_middle_is_a_failed_transfer(carrier: str) -> None:
    async with AsyncExitStack() as stack:
        puller, memory = await open_puller(stack, "gpu", carrier)
        async with source(NUM_BLOCKS) as peer:
            claims = [puller.claim(await peer.offer()) for _ in range(4)]
            await claims[0].fetch(ALL)
            fetches = [asyncio.create_task(claim.fetch(ALL)) for claim in claims[1:]]
            await asyncio.sleep(0)
            peer.process.kill()
            outcomes = await asyncio.gather(*fetches, return_exceptions=True)
            assert all(isinstance(outcome, TransferError) for outcome in outcomes)
        write(memory, 5, block_bytes(99, 5))  # the context is healthy
        assert read(memory, 5) == block_bytes(99, 5)


async def test_this_driver_has_write_combined_memory() -> None:
    cuda_driver().bind(0)
    assert pinned_kind(cuda_driver()) is PinnedKind.WRITE_COMBINED


async def test_the_event_loop_turns_while_host_memory_is_pinned() -> None:
    memory = make_pool((2 << 30) // PIECE)
    area = StagingArea(memory, 2 << 30)

    async def stage() -> None:
        async with area.staged(range(10)):
            pass

    staging = asyncio.create_task(stage())
    num_turns = 0
    while not staging.done():
        await asyncio.sleep(0)
        num_turns += 1
    await staging
    await area.close()
    memory.close()
    print(f"{num_turns} turns")
    assert num_turns > 100
