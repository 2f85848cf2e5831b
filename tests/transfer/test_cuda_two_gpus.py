"""Way cuda_ipc between two GPUs, the reader on GPU 0: right bytes, and no memory kept on either."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Sequence

import pytest

from quartet.errors import TransferError
from quartet.transfer.base import PieceCopy, TransferWay
from quartet.transfer.cuda.driver import Copies, CudaDriver
from quartet.transfer.cuda.reader import CudaReader
from quartet.transfer.cuda.survey import cuda_survey_driver
from tests.transfer.gpu_process import PIECE, free_size_bytes, puller_on_gpu, write, wrong_blocks
from tests.transfer.test_cuda_kernel_gpu import REVERSED, CountingDriver, until_prepared
from tests.transfer.test_cuda_two_processes import ALL, NUM_BLOCKS, SOME, peer, source, until_free

pytestmark = pytest.mark.gpu

#: For what takes milliseconds.
WAIT_S = 30.0


class HeldDriver(CudaDriver):
    """This machine's driver; from ``hold`` until ``let_go`` a fetch stops once its first copies are started."""

    def __init__(self) -> None:
        super().__init__()
        self._is_held, self._may_go_on = threading.Event(), threading.Event()
        self._may_go_on.set()

    def hold(self) -> None:
        self._is_held.clear()
        self._may_go_on.clear()

    def let_go(self) -> None:
        self._may_go_on.set()

    async def until_held(self) -> None:
        """Wait until a fetch has stopped."""
        assert await asyncio.to_thread(self._is_held.wait, WAIT_S), "no copy was started"

    def copy_many(self, copies: Copies, stream: int) -> None:
        super().copy_many(copies, stream)
        if not self._may_go_on.is_set():
            self._is_held.set()
            assert self._may_go_on.wait(WAIT_S), "nobody let it go"


@pytest.fixture(autouse=True)
def unused() -> tuple[int, int]:
    """Free bytes of both GPUs. This process has a context on each from now on."""
    driver = cuda_survey_driver()
    if driver.num_devices() < 2 or not driver.can_reach(0, 1):
        pytest.skip("needs two GPUs that reach each other's memory")
    return free_size_bytes(0), free_size_bytes(1)


async def until_both_free(sizes: tuple[int, int]) -> None:
    for device, size_bytes in enumerate(sizes):
        await until_free(size_bytes, device)


@pytest.mark.parametrize("is_busy", [False, True])
@pytest.mark.parametrize("copies", [ALL, REVERSED], ids=["neighbours", "scattered"])
async def test_blocks_of_a_process_that_sees_the_other_gpu_only_arrive(
    is_busy: bool, copies: Sequence[PieceCopy], unused: tuple[int, int]
) -> None:
    driver = CountingDriver()
    async with puller_on_gpu(NUM_BLOCKS, driver=driver, is_busy=lambda: is_busy) as (puller, memory):
        async with source(gpu=1) as there:
            await puller.claim(await there.offer()).fetch([PieceCopy(0, 0)])  # opens the pool
            assert unused[1] - free_size_bytes(1) > NUM_BLOCKS * PIECE  # the source's pool is there to be missed
            await until_prepared(puller)
            for _ in range(3):
                for copy in copies:
                    if copy.piece in SOME:
                        write(memory, copy.block_id, bytes(PIECE))
                result = await puller.claim(await there.offer()).fetch(copies)
                assert (result.way, result.size_bytes) == (TransferWay.CUDA_IPC, memory.size_bytes)
                blocks = {copy.block_id: copy.piece for copy in copies if copy.piece in SOME}
                assert wrong_blocks(memory, there.seed, blocks) == []
                print(f"busy: {is_busy}, {result.size_bytes / result.duration_s / 1e9:.0f} GB/s")
        print(f"{driver.num_launches} launches, {driver.num_copies} copies")
    await until_both_free(unused)


async def test_a_source_on_the_other_gpu_killed_in_the_middle_of_pulls_leaves_both_as_they_were(
    unused: tuple[int, int],
) -> None:
    async with puller_on_gpu(NUM_BLOCKS) as (puller, memory):
        before = free_size_bytes(0), free_size_bytes(1)
        for seed in range(1, 6):
            async with source(seed=seed, gpu=1) as there:
                await puller.claim(await there.offer()).fetch(ALL)
                assert wrong_blocks(memory, seed, SOME) == []
                claims = [puller.claim(await there.offer()) for _ in range(3)]
                fetches = [asyncio.create_task(claim.fetch(ALL)) for claim in claims]
                for _ in range(8 * seed):  # another moment each time
                    await asyncio.sleep(0)
                there.process.kill()
                outcomes = await asyncio.gather(*fetches, return_exceptions=True)
                failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
                assert all(isinstance(failure, TransferError) for failure in failures), failures
                print(f"{len(failures)} of 3 fetches failed")
                assert len(failures) == len(fetches) or wrong_blocks(memory, seed, SOME) == []
        await until_both_free(before)
    await until_both_free(unused)


@pytest.mark.parametrize("is_open", [False, True], ids=["asks first", "reads ahead"])
async def test_a_fetch_fails_whose_source_on_the_other_gpu_dies_between_its_copies(
    is_open: bool, unused: tuple[int, int]
) -> None:
    """The pull is granted and not finished: what was read before and after the source's end counts for nothing."""
    driver = HeldDriver()
    async with puller_on_gpu(NUM_BLOCKS, driver=driver) as (puller, memory):
        before = free_size_bytes(0), free_size_bytes(1)
        async with source(gpu=1) as there:
            if is_open:
                await puller.claim(await there.offer()).fetch([PieceCopy(0, 0)])
            claim = puller.claim(await there.offer())
            driver.hold()
            fetching = asyncio.create_task(claim.fetch(REVERSED))  # each block its own copy: more than one call starts
            try:
                await driver.until_held()
                await there.until_counts("0 1")
                assert unused[1] - free_size_bytes(1) > NUM_BLOCKS * PIECE  # the source's pool is there to be missed
                await there.kill()
                for _ in range(20):
                    await asyncio.sleep(0)  # the event loop learns of that
                assert not fetching.done()  # copies may still write
            finally:
                driver.let_go()
            with pytest.raises(TransferError):
                await fetching
        assert puller._pool is not None
        reader = puller._pool.inputs.readers[TransferWay.CUDA_IPC]
        assert isinstance(reader, CudaReader)
        assert await reader._pools.all_unused(WAIT_S)
        assert reader._pools._pools == {}  # it keeps nothing of the dead worker's
        await until_both_free(before)
        async with source(seed=2, gpu=1) as there:  # the context is healthy
            await puller.claim(await there.offer()).fetch(ALL)
            assert wrong_blocks(memory, there.seed, SOME) == []
    await until_both_free(unused)


async def test_a_reader_on_the_other_gpu_killed_in_the_middle_frees_the_blocks_of_the_source_and_its_memory(
    unused: tuple[int, int],
) -> None:
    async with source(gpu=0) as there:
        for num_turns in (0, 30, 300):
            async with peer("reader", NUM_BLOCKS, gpu=1) as reader:
                assert await reader.line() == "ready"
                first, second = [pickle.dumps(await there.offer()).hex() for _ in range(2)]
                await reader.send(f"{first} {there.seed}")
                assert [await reader.line(), await reader.line()] == ["begins", "right"]
                await reader.send(f"{second} {there.seed}")
                assert await reader.line() == "begins"
                for _ in range(num_turns):  # another moment each time
                    await asyncio.sleep(0)
                await reader.kill()
        await there.until_all_ended()
    await until_both_free(unused)


async def test_a_pool_of_more_than_64_gib_on_the_other_gpu() -> None:
    num_blocks = (66 << 30) // PIECE
    if free_size_bytes(1) < (70 << 30):
        pytest.skip("needs 70 GiB of free GPU memory")
    async with puller_on_gpu(4) as (puller, memory), source(num_blocks, gpu=1) as there:
        copies = [PieceCopy(0, 2), PieceCopy(num_blocks - 1, 3)]
        await puller.claim(await there.offer()).fetch(copies)
        assert wrong_blocks(memory, there.seed, {copy.block_id: copy.piece for copy in copies}) == []
