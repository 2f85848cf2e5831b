"""The kernel that pulls on a real GPU: right bytes at any place, and which copies it makes between two processes."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
import pytest

from quartet.transfer.base import PieceCopy, TransferWay
from quartet.transfer.cuda.driver import Copies, CudaDriver, CudaError, cuda_driver
from quartet.transfer.cuda.kernel_copies import PullKernel, compile_kernel, cut
from quartet.transfer.cuda.memory import DeviceMemory
from quartet.transfer.cuda.threads import CopyThreads, Lane
from quartet.transfer.grpc.puller import TransferPuller
from quartet.transfer.runs import CopyRun, as_runs
from tests.transfer.gpu_process import PIECE, block_bytes, free_size_bytes, puller_on_gpu, write, wrong_blocks
from tests.transfer.test_cuda_two_processes import source

pytestmark = pytest.mark.gpu

NUM_BLOCKS = (1 << 30) // PIECE + 1
ALL = [PieceCopy(block_id, block_id) for block_id in range(NUM_BLOCKS)]
#: Each block its own run.
REVERSED = [PieceCopy(block_id, NUM_BLOCKS - 1 - block_id) for block_id in range(NUM_BLOCKS)]


class CountingDriver(CudaDriver):
    """This machine's driver; counts launches, and copies on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.num_launches = self.num_copies = 0

    def launch(self, kernel: int, num_programs: int, num_threads: int, arguments: Sequence[int], stream: int) -> None:
        self.num_launches += 1
        super().launch(kernel, num_programs, num_threads, arguments, stream)

    def copy_many(self, copies: Copies, stream: int) -> None:
        self.num_copies += len(copies)
        super().copy_many(copies, stream)


@dataclass
class OnePool:
    """A pool, and the kernel that copies within it."""

    memory: DeviceMemory
    threads: CopyThreads
    kernel: PullKernel

    async def copy(self, runs: Sequence[CopyRun], *, is_same_gpu: bool = True, is_busy: bool = False) -> None:
        parts = cut(as_runs(runs))

        def work(lane: Lane, _stop: threading.Event) -> None:
            pull = self.kernel.begin(lane, self.memory.address, parts, is_same_gpu=is_same_gpu)
            num_issued = 0
            while num_issued < len(parts):
                num_issued += (issued := pull.issue(num_issued, is_busy=is_busy))
                assert issued, "the launch failed; the log says why"

        await self.threads.copy(work, "a copy by the kernel")

    def write(self, offset: int, data: bytes) -> None:
        self.memory.driver.bind(0)
        host = np.frombuffer(data, dtype=np.uint8)
        cuda_driver()._call("cuMemcpyHtoD", self.memory.address + offset, host.ctypes.data, len(data))

    def read(self, offset: int, size_bytes: int) -> bytes:
        self.memory.driver.bind(0)
        host = np.empty(size_bytes, dtype=np.uint8)
        cuda_driver()._call("cuMemcpyDtoH", host.ctypes.data, self.memory.address + offset, size_bytes)
        return host.tobytes()


@asynccontextmanager
async def one_pool(size_bytes: int) -> AsyncIterator[OnePool]:
    memory = DeviceMemory(cuda_driver(), 0, size_bytes // 4096, 4096)
    threads = CopyThreads(memory, "test-kernel")
    kernel = PullKernel(memory, threads, compile_kernel)
    try:
        kernel.prepare()
        assert kernel._preparation is not None
        await kernel._preparation
        assert kernel._loaded is not None, "the log says why there is no kernel"
        yield OnePool(memory, threads, kernel)
    finally:
        await kernel.end_preparation()
        await threads.close(last=kernel.unload)
        memory.close()


@pytest.mark.parametrize(("is_same_gpu", "is_busy"), [(True, False), (False, False), (True, True)])
async def test_runs_of_any_size_go_where_they_belong_and_nowhere_else(is_same_gpu: bool, is_busy: bool) -> None:
    half = 32 << 20
    draw = random.Random(5)
    async with one_pool(2 * half) as pool:
        pool.write(0, there := draw.randbytes(half))
        pool.write(half, here := bytearray(draw.randbytes(half)))
        runs, at = [], 0
        while at < half - (1 << 20):
            size = 16 * draw.choice([1, 2, 7, 255, 256, 257, 4095, 4096, 4097, 9999])
            runs.append(CopyRun(16 * draw.randrange((half - size) // 16), half + at, size))
            at += size + 16 * draw.randrange(3)
        draw.shuffle(runs)
        await pool.copy(runs, is_same_gpu=is_same_gpu, is_busy=is_busy)
        for run in runs:
            begin = run.destination_offset - half
            here[begin : begin + run.size_bytes] = there[run.source_offset : run.source_offset + run.size_bytes]
        assert pool.read(half, half) == bytes(here)


async def test_runs_lie_beyond_what_32_bits_and_64_gib_reach() -> None:
    size = 66 << 30
    if free_size_bytes() < size + (4 << 30):
        pytest.skip("needs 70 GiB of free GPU memory")
    async with one_pool(size) as pool:
        far = [0, (1 << 31) - 64, (1 << 32) + 32, (1 << 35) + 48, (1 << 36) + 16, size - 4096]
        data = [random.Random(number).randbytes(1040) for number in range(len(far))]
        for offset, text in zip(far, data, strict=True):
            pool.write(offset, text)
        targets = [offset + 2048 for offset in far[1:] + far[:1]]
        await pool.copy([CopyRun(begin, end, 1040) for begin, end in zip(far, targets, strict=True)])
        assert [pool.read(offset, 1040) for offset in targets] == data


async def until_prepared(puller: TransferPuller) -> None:
    assert puller._pool is not None
    reader = puller._pool.inputs.readers[TransferWay.CUDA_IPC]
    async with asyncio.timeout(60):
        await reader._peers._kernel._preparation  # type: ignore[attr-defined]
    assert reader._peers._kernel._loaded is not None  # type: ignore[attr-defined]


@pytest.mark.parametrize(("is_busy", "copies"), [(False, ALL), (False, REVERSED), (True, REVERSED)])
async def test_blocks_of_another_process_come_by_the_kernel_while_the_engine_is_idle(
    is_busy: bool, copies: Sequence[PieceCopy], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = CountingDriver()
    async with puller_on_gpu(NUM_BLOCKS, driver=driver, is_busy=lambda: is_busy) as (puller, memory), source() as there:
        await puller.claim(await there.offer()).fetch([PieceCopy(0, 0)])  # opens the pool
        await until_prepared(puller)
        driver.num_launches = driver.num_copies = 0
        for _ in range(3):
            result = await puller.claim(await there.offer()).fetch(copies)
            print(f"busy: {is_busy}, {len(copies)} blocks: {result.size_bytes / result.duration_s / 1e9:.0f} GB/s")
        by_kernel = not is_busy or PIECE < 1 << 20
        assert (driver.num_launches > 0, driver.num_copies > 0) == (by_kernel, not by_kernel)
        blocks = {copy.block_id: copy.piece for copy in copies if copy.piece < 64}
        assert wrong_blocks(memory, there.seed, blocks) == []


async def test_a_cancelled_copy_by_the_kernel_writes_no_more() -> None:
    driver = CountingDriver()
    async with puller_on_gpu(NUM_BLOCKS, driver=driver) as (puller, memory), source() as there:
        await puller.claim(await there.offer()).fetch(ALL)
        await until_prepared(puller)
        for num_turns in range(0, 60, 6):
            fetching = asyncio.create_task(puller.claim(await there.offer()).fetch(REVERSED))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)
            some = {block_id: block_id for block_id in (0, 1, NUM_BLOCKS // 2, NUM_BLOCKS - 1)}
            for block_id in some:
                write(memory, block_id, block_bytes(7, block_id))
            assert wrong_blocks(memory, 7, some) == []
        assert driver.num_launches > 0


def test_code_that_no_gpu_runs_is_refused() -> None:
    driver = cuda_driver()
    driver.bind(0)
    with pytest.raises(CudaError):
        driver.load(b"\x7fELF" + bytes(64), "pull")
