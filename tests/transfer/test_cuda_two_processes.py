"""Way cuda_ipc on a real GPU, between processes that share it: right bytes, and no memory kept for the dead."""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from quartet.errors import TransferError
from quartet.kvcache.layout import HandOff
from quartet.transfer.base import PieceCopy, TransferWay
from quartet.transfer.cuda.driver import cuda_driver
from quartet.transfer.grpc.puller import TransferPuller
from tests.transfer.gpu_process import PIECE, block_bytes, free_size_bytes, puller_on_gpu, read, write, wrong_blocks

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
#: 1 GiB and more: a fetch of all takes some milliseconds, and none of it goes unseen in the GPU's free memory.
NUM_BLOCKS = (1 << 30) // PIECE + 1
ALL = [PieceCopy(block_id, block_id) for block_id in range(NUM_BLOCKS)]
SOME = {block_id: block_id for block_id in (0, 1, 63, NUM_BLOCKS - 64, NUM_BLOCKS - 1)}
#: Contexts and the driver's own take and give some.
SLACK = 256 << 20


@dataclass
class Peer:
    """A process of ``gpu_process``."""

    process: asyncio.subprocess.Process
    seed: int = 0

    async def line(self) -> str:
        assert self.process.stdout is not None
        async with asyncio.timeout(60):
            line = await self.process.stdout.readline()
        assert line, "the process has ended; its error is above"
        return line.decode().strip()

    async def send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        await self.process.stdin.drain()

    async def offer(self) -> HandOff:
        await self.send("offer")
        hand_off: HandOff = pickle.loads(bytes.fromhex(await self.line()))
        return hand_off

    async def until_all_ended(self) -> None:
        """Wait until a source holds nothing for anybody."""
        await self.until_counts("0 0")

    async def until_counts(self, counts: str) -> None:
        """Wait until a source answers so: how many hand-offs are held, and how many are pulled."""
        async with asyncio.timeout(30):
            while True:
                await self.send("counts")
                if await self.line() == counts:
                    return
                await asyncio.sleep(0.05)

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def peer(*arguments: object, seed: int = 0, gpu: int | None = None) -> AsyncIterator[Peer]:
    """``gpu``: the only one that the process sees, as this one numbers them; ``None``: it sees what this one does."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    name = gpu if gpu is None or visible == [""] else visible[gpu]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.transfer.gpu_process", *map(str, arguments)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 24,
        cwd=ROOT,
        env=os.environ if name is None else {**os.environ, "CUDA_VISIBLE_DEVICES": str(name)},
    )
    found = Peer(process, seed)
    try:
        yield found
    finally:
        await found.kill()


@asynccontextmanager
async def source(
    num_blocks: int = NUM_BLOCKS,
    seed: int = 1,
    address: str = "127.0.0.1:0",
    kind: str = "source",
    gpu: int | None = None,
) -> AsyncIterator[Peer]:
    async with peer(kind, num_blocks, seed, address, seed=seed, gpu=gpu) as found:
        yield found


async def until_free(size_bytes: int, device: int = 0) -> None:
    """The memory of a process that was killed comes back a moment later."""
    async with asyncio.timeout(30):
        while free_size_bytes(device) < size_bytes - SLACK:  # noqa: ASYNC110  # the driver tells nobody
            await asyncio.sleep(0.05)


async def test_blocks_of_another_process_arrive_and_its_memory_goes_with_it() -> None:
    async with puller_on_gpu(NUM_BLOCKS) as (puller, memory):
        before = free_size_bytes()
        async with source() as there:
            for _ in range(3):
                for block_id in SOME:
                    write(memory, block_id, bytes(PIECE))
                result = await puller.claim(await there.offer()).fetch(ALL)
                assert (result.way, result.size_bytes) == (TransferWay.CUDA_IPC, memory.size_bytes)
                assert wrong_blocks(memory, there.seed, SOME) == []
                print(f"{result.size_bytes / result.duration_s / 1e9:.0f} GB/s")
            assert before - free_size_bytes() > memory.size_bytes  # the source's pool is there to be missed
        await until_free(before)


async def test_scattered_blocks_go_where_they_belong() -> None:
    async with puller_on_gpu(200) as (puller, memory), source() as there:
        copies = [PieceCopy(piece, 199 - 3 * piece) for piece in range(60)]
        await puller.claim(await there.offer()).fetch(copies)
        assert wrong_blocks(memory, there.seed, {copy.block_id: copy.piece for copy in copies}) == []


async def test_the_driver_knows_the_size_of_a_pool_that_was_opened() -> None:
    async with puller_on_gpu(4) as (puller, _memory), source() as there:
        await puller.claim(await there.offer()).fetch([PieceCopy(0, 0)])
        reader = puller._pool.inputs.readers[TransferWay.CUDA_IPC]
        [live] = reader._pools._pools.values()
        assert cuda_driver().size_of(live.pool.address) >= NUM_BLOCKS * PIECE


async def test_the_event_loop_turns_while_a_thread_waits_for_the_gpu() -> None:
    async with puller_on_gpu(NUM_BLOCKS) as (puller, _memory), source() as there:
        await puller.claim(await there.offer()).fetch(ALL)
        claims = [puller.claim(await there.offer()) for _ in range(20)]
        fetching = asyncio.gather(*(claim.fetch(ALL) for claim in claims))
        num_turns = 0
        while not fetching.done():
            await asyncio.sleep(0)
            num_turns += 1
        await fetching
        print(f"{num_turns} turns")
        assert num_turns > 100


async def fetch_at_last(puller: TransferPuller, there: Peer) -> None:
    """Fetch from a source that has come back, as soon as gRPC has connected again, which has no event."""
    async with asyncio.timeout(60):
        while True:
            try:
                await puller.claim(await there.offer()).fetch(ALL)
                return
            except TransferError:
                await asyncio.sleep(0.05)


async def test_a_source_killed_in_the_middle_of_pulls_ten_times_at_one_address_leaves_the_gpu_as_it_was(
    free_port: Callable[[], int],
) -> None:
    address = f"127.0.0.1:{free_port()}"
    async with puller_on_gpu(NUM_BLOCKS) as (puller, memory):
        before = free_size_bytes()
        num_failed = 0
        for seed in range(1, 11):
            async with source(seed=seed, address=address) as there:
                await fetch_at_last(puller, there)
                assert wrong_blocks(memory, seed, SOME) == []
                for block_id in SOME:
                    write(memory, block_id, bytes(PIECE))
                claims = [puller.claim(await there.offer()) for _ in range(3)]
                fetches = [asyncio.create_task(claim.fetch(ALL)) for claim in claims]
                for _ in range(4 * seed):  # another moment each time
                    await asyncio.sleep(0)
                there.process.kill()
                outcomes = await asyncio.gather(*fetches, return_exceptions=True)
                failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
                assert all(isinstance(failure, TransferError) for failure in failures), failures
                num_failed += len(failures)
                # Also where one went well and others had begun to copy the same: memory of the dead stays as it was.
                assert len(failures) == len(fetches) or wrong_blocks(memory, seed, SOME) == []
        print(f"{num_failed} of 30 fetches failed")
        assert num_failed > 0
        write(memory, 5, block_bytes(99, 5))  # the context is healthy
        assert read(memory, 5) == block_bytes(99, 5)
        await until_free(before)
        pools = puller._pool.inputs.readers[TransferWay.CUDA_IPC]._pools._pools
        async with asyncio.timeout(30):
            while pools:  # noqa: ASYNC110  # the end of a copy has no event here
                await asyncio.sleep(0.05)


async def test_a_cancelled_pull_writes_no_more() -> None:
    async with puller_on_gpu(NUM_BLOCKS) as (puller, memory), source() as there:
        await puller.claim(await there.offer()).fetch(ALL)
        for num_turns in range(0, 60, 6):
            fetching = asyncio.create_task(puller.claim(await there.offer()).fetch(ALL))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)
            for block_id in SOME:
                write(memory, block_id, block_bytes(7, block_id))
            assert wrong_blocks(memory, 7, SOME) == []


async def test_two_readers_of_one_source_and_one_of_them_killed() -> None:
    async with puller_on_gpu(NUM_BLOCKS) as (puller, memory), source() as there, peer("reader", NUM_BLOCKS) as other:
        assert await other.line() == "ready"
        hand_offs = [await there.offer() for _ in range(4)]
        await other.send(f"{pickle.dumps(hand_offs[0]).hex()} {there.seed}")
        await puller.claim(hand_offs[1]).fetch(ALL)
        assert [await other.line(), await other.line()] == ["begins", "right"]
        await other.send(f"{pickle.dumps(hand_offs[2]).hex()} {there.seed}")
        assert await other.line() == "begins"
        await other.kill()
        await puller.claim(hand_offs[3]).fetch(ALL)
        assert wrong_blocks(memory, there.seed, SOME) == []


async def test_readers_killed_in_the_middle_free_the_blocks_of_the_source_and_their_memory() -> None:
    async with puller_on_gpu(NUM_BLOCKS) as (puller, memory), source() as there:
        await puller.claim(await there.offer()).fetch(ALL)
        before = free_size_bytes()
        for num_turns in (0, 30, 100, 300):
            async with peer("reader", NUM_BLOCKS) as other:
                assert await other.line() == "ready"
                first, *rest = [pickle.dumps(await there.offer()).hex() for _ in range(3)]
                await other.send(f"{first} {there.seed}")
                assert [await other.line(), await other.line()] == ["begins", "right"]
                for hand_off in rest:  # it pulls one; the other comes free when its time to live is over
                    await other.send(f"{hand_off} {there.seed}")
                assert await other.line() == "begins"
                for _ in range(num_turns):  # another moment each time
                    await asyncio.sleep(0)
                await other.kill()
            for block_id in SOME:
                write(memory, block_id, bytes(PIECE))
            await puller.claim(await there.offer()).fetch(ALL)
            assert wrong_blocks(memory, there.seed, SOME) == []
        await there.until_all_ended()
        await until_free(before)


@pytest.mark.parametrize("large", ["source", "reader"])
async def test_pools_of_more_than_64_gib(large: str) -> None:
    num_blocks = (66 << 30) // PIECE
    if free_size_bytes() < (70 << 30):
        pytest.skip("needs 70 GiB of free GPU memory")
    here, there_blocks = (4, num_blocks) if large == "source" else (num_blocks, 4)
    async with puller_on_gpu(here) as (puller, memory), source(there_blocks) as there:
        copies = [PieceCopy(0, here - 2), PieceCopy(there_blocks - 1, here - 1)]
        await puller.claim(await there.offer()).fetch(copies)
        assert wrong_blocks(memory, there.seed, {copy.block_id: copy.piece for copy in copies}) == []
