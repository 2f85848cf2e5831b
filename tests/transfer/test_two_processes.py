"""Two real processes: what the one wrote is what the other reads, and a killed source leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from quartet.errors import TransferError
from quartet.kvcache.hand_off import HandOffState
from quartet.kvcache.layout import HandOff
from quartet.transfer.base import PieceCopy, TransferWay
from quartet.transfer.config import TransferConfig
from tests.transfer.workers import (
    CONFIG,
    EPOCH,
    LARGE_LAYOUT,
    NUM_BLOCKS,
    Ended,
    PullerWorker,
    puller_worker,
    source_worker,
)

ROOT = Path(__file__).parents[2]
GRPC_ONLY = TransferConfig(ways=(TransferWay.GRPC,))
ALL_BLOCKS = tuple(range(NUM_BLOCKS))
TTL_S = 0.9
COPIES = tuple(PieceCopy(piece, piece) for piece in range(NUM_BLOCKS))


@asynccontextmanager
async def running(module: str, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", module, *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 20,
        cwd=ROOT,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def source_process(behaviour: str = "serve") -> AsyncIterator[tuple[asyncio.subprocess.Process, HandOff]]:
    async with running("tests.transfer.source_process", str(NUM_BLOCKS), behaviour) as process:
        assert process.stdout is not None
        async with asyncio.timeout(30):
            line = await process.stdout.readline()
        yield process, pickle.loads(bytes.fromhex(line.decode()))


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


async def test_a_reader_killed_in_the_middle_frees_what_it_pulled_at_once_and_what_it_claimed_by_time() -> None:
    soon = replace(CONFIG, hand_off_ttl_s=TTL_S)
    async with (
        source_worker(layout=LARGE_LAYOUT) as source,
        source_worker(layout=LARGE_LAYOUT, config=soon) as forgetful,
        puller_worker(layout=LARGE_LAYOUT) as here,
    ):
        await here.puller.claim(source.offer(0, ALL_BLOCKS)).fetch(COPIES)
        assert (await source.end()).state is HandOffState.TAKEN
        num_open = _num_open_files()
        async with running("tests.transfer.reader_process") as process:
            assert process.stdin is not None
            assert process.stdout is not None
            async with asyncio.timeout(30):
                assert await process.stdout.readline() == b"ready\n"
                for offered in (
                    source.offer(1, ALL_BLOCKS),
                    source.offer(2, ALL_BLOCKS),
                    forgetful.offer(3, ALL_BLOCKS),
                ):
                    process.stdin.write(pickle.dumps(offered).hex().encode() + b"\n")
                assert await process.stdout.readline() == b"in the middle\n"
            # Another reader takes the same blocks meanwhile.
            await here.puller.claim(source.offer(4, ALL_BLOCKS)).fetch(COPIES)
            assert await source.end() == Ended(4, HandOffState.TAKEN)
            assert source.source.counts.pulling == 2
            process.kill()
            await process.wait()
            pulled = {await source.end(), await source.end()}
            assert pulled == {Ended(1, HandOffState.CANCELLED), Ended(2, HandOffState.CANCELLED)}
            assert await forgetful.end() == Ended(3, HandOffState.EXPIRED)
        here.memory.view[:] = bytes(here.memory.size_bytes)
        await here.puller.claim(source.offer(5, ALL_BLOCKS)).fetch(COPIES)
        assert is_as_sent(here)
        async with asyncio.timeout(30):
            while _num_open_files() > num_open:  # noqa: ASYNC110  # gRPC closes its own without an event
                await asyncio.sleep(0.05)


def _num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _num_foreign_pools() -> int:
    """Pools that this process maps for reading only."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("quartet-kv-pool" in line and " r--s " in line for line in lines)
