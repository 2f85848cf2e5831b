"""A source that is killed in the middle of pulls, again and again, and comes back at its address each time."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import pickle
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from quartet.errors import TransferError
from quartet.kvcache.layout import HandOff
from quartet.rpc.channels import Dialer
from quartet.transfer.base import PieceCopy, TransferWay
from quartet.transfer.grpc.puller import PullClaim
from tests.transfer.source_lives import LAYOUT
from tests.transfer.workers import CONFIG, NUM_BLOCKS, puller_worker

ROOT = Path(__file__).parents[2]
NUM_LIVES = 100
#: By then everything is allocated that is allocated once.
NUM_WARM = 20
WAIT_S = 30.0
COPIES = [PieceCopy(piece, NUM_BLOCKS - 1 - piece) for piece in range(NUM_BLOCKS)]
BY_GRPC = replace(CONFIG, ways=(TransferWay.GRPC,))
#: A tenth of what the pools of all lives have together.
SLACK_BYTES = (NUM_LIVES - NUM_WARM) * NUM_BLOCKS * LAYOUT.piece_size_bytes // 10


class Lives:
    """The process of ``tests.transfer.source_lives``."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def line(self) -> bytes:
        assert self._process.stdout is not None
        async with asyncio.timeout(WAIT_S):
            return await self._process.stdout.readline()

    async def begin(self, epoch: int) -> tuple[int, list[HandOff]]:
        """A source lives: its process, and what it offers."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{epoch}\n".encode())
        pid, hand_offs = (await self.line()).split()
        return int(pid), pickle.loads(bytes.fromhex(hand_offs.decode()))


@asynccontextmanager
async def source_lives(address: str) -> AsyncIterator[Lives]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.transfer.source_lives", address),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 20,
        cwd=ROOT,
    )
    lives = Lives(process)
    try:
        assert await lives.line() == b"ready\n"
        yield lives
    finally:
        process.kill()
        await process.wait()


@dataclass(frozen=True)
class Held:
    """What this process holds, in numbers."""

    num_files: int
    num_mappings: int
    num_foreign_pools: int
    num_tasks: int
    resident_bytes: int

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what is free but kept for later is no leak
        mappings = Path("/proc/self/maps").read_text().splitlines()
        pools = sum("quartet-kv-pool" in line and " r--s " in line for line in mappings)
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        num_files = len(os.listdir("/proc/self/fd"))
        return cls(num_files, len(mappings), pools, len(asyncio.all_tasks()), resident)


def blocks_of(epoch: int) -> bytes:
    """All blocks of the source of this epoch, in the order of ``COPIES``."""
    size = LAYOUT.piece_size_bytes
    pool = random.Random(epoch).randbytes(NUM_BLOCKS * size)
    return b"".join(pool[block * size :][:size] for block in reversed(range(NUM_BLOCKS)))


async def fetch_while_it_dies(claims: Sequence[PullClaim], pid: int, num_turns: int) -> list[bool]:
    """Fetch all blocks of each, and kill their source after so many turns; whether each fetch went well."""
    fetches = [asyncio.create_task(claim.fetch(COPIES)) for claim in claims]
    for _ in range(num_turns):
        await asyncio.sleep(0)
    os.kill(pid, signal.SIGKILL)
    outcomes = await asyncio.gather(*fetches, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            assert isinstance(outcome, TransferError), repr(outcome)
    return [not isinstance(outcome, BaseException) for outcome in outcomes]


async def test_a_source_killed_a_hundred_times_gives_right_blocks_or_a_failed_transfer_and_leaves_nothing(
    free_port: Callable[[], int],
) -> None:
    outcomes: list[bool] = []
    async with (
        puller_worker(layout=LAYOUT, channel_factory=Dialer(None).open) as by_shm,
        puller_worker(layout=LAYOUT, config=BY_GRPC, channel_factory=Dialer(None).open) as by_grpc,
        source_lives(f"127.0.0.1:{free_port()}") as lives,
    ):
        pullers = (by_shm, by_grpc)
        before: Held | None = None
        claims: list[PullClaim] = []
        for epoch in range(1, NUM_LIVES + 1):
            if epoch % 5 == 0:  # nobody is there to be told; gRPC then waits before it connects to that life again
                await asyncio.gather(*(claim.release() for claim in claims))
            pid, hand_offs = await lives.begin(epoch)
            await asyncio.gather(*(claim.release() for claim in claims))  # the next life is told
            # The first fetch from each life goes well, however soon after its start.
            ways = [(await here.puller.claim(hand_offs.pop()).fetch(COPIES)).way for here in pullers]
            assert ways == [TransferWay.SHM, TransferWay.GRPC]
            expected = blocks_of(epoch)
            for here in pullers:
                assert here.memory.view == expected
                here.memory.view[:] = bytes(here.memory.size_bytes)
            claims = [here.puller.claim(hand_offs.pop()) for here in pullers]
            are_right = await fetch_while_it_dies(claims, pid, num_turns=epoch * 7 % NUM_LIVES)
            for here, is_right in zip(pullers, are_right, strict=True):
                assert not is_right or here.memory.view == expected
            outcomes += are_right
            if epoch == NUM_WARM:
                before = Held.now()
        assert before is not None
        print(f"{outcomes.count(False)} of {len(outcomes)} fetches failed")
        assert not all(outcomes)
        async with asyncio.timeout(WAIT_S):  # ends of streams and connections take a moment
            while grown := what_grew(before, Held.now()):
                print(grown)
                await asyncio.sleep(0.05)


def what_grew(before: Held, now: Held) -> list[str]:
    """What there is more of now; far less than one for each life is no leak."""
    bounds = {"num_files": 8, "num_mappings": 30, "num_tasks": 8, "resident_bytes": SLACK_BYTES}
    grown = [name for name, slack in bounds.items() if getattr(now, name) > getattr(before, name) + slack]
    return grown + ["num_foreign_pools"] * (now.num_foreign_pools > 0)
