"""Two real processes: what the one wrote is what the other reads, and a killed source leaves nothing behind."""

from __future__ import annotations

import asyncio
import pickle
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from quartet.errors import TransferError
from quartet.kvcache.layout import HandOff
from quartet.transfer.base import PieceCopy, TransferWay
from quartet.transfer.config import TransferConfig
from tests.transfer.workers import EPOCH, LARGE_LAYOUT, NUM_BLOCKS, PullerWorker, puller_worker

ROOT = Path(__file__).parents[2]
GRPC_ONLY = TransferConfig(ways=(TransferWay.GRPC,))
COPIES = tuple(PieceCopy(piece, piece) for piece in range(NUM_BLOCKS))


@asynccontextmanager
async def source_process(behaviour: str = "serve") -> AsyncIterator[tuple[asyncio.subprocess.Process, HandOff]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.transfer.source_process", str(NUM_BLOCKS), behaviour),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 20,
        cwd=ROOT,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(30):
            line = await process.stdout.readline()
        yield process, pickle.loads(bytes.fromhex(line.decode()))
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def is_as_sent(here: PullerWorker) -> bool:
    return bytes(here.memory.view) == random.Random(EPOCH).randbytes(here.memory.size_bytes)


@pytest.mark.parametrize("way", [TransferWay.SHM, TransferWay.GRPC])
async def test_another_process_s_blocks_arrive_unchanged_and_its_memory_goes_with_it(way: TransferWay) -> None:
    config = TransferConfig() if way is TransferWay.SHM else GRPC_ONLY
    async with source_process() as (process, hand_off), puller_worker(layout=LARGE_LAYOUT, config=config) as here:
        num_before = _num_foreign_pools()
        result = await here.puller.claim(hand_off).fetch(COPIES)
        assert (result.way, result.size_bytes) == (way, here.memory.size_bytes)
        assert is_as_sent(here)
        assert _num_foreign_pools() == num_before + (way is TransferWay.SHM)
        process.kill()
        await process.wait()
        for _ in range(3):
            await asyncio.sleep(0)  # the hang-up is in the kernel by now; the event loop has to look
        assert _num_foreign_pools() == num_before


async def test_a_source_killed_in_the_middle_of_a_pull_is_a_transfer_error_and_nothing_stays() -> None:
    async with source_process("stall") as (process, hand_off):
        async with puller_worker(layout=LARGE_LAYOUT, config=GRPC_ONLY) as here:
            fetch = asyncio.create_task(here.puller.claim(hand_off).fetch(COPIES))
            async with asyncio.timeout(30):
                assert await process.stdout.readline() == b"stalled\n"
            process.kill()
            with pytest.raises(TransferError):
                await fetch
        assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


def _num_foreign_pools() -> int:
    """Pools that this process maps for reading only."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("quartet-kv-pool" in line and " r--s " in line for line in lines)
