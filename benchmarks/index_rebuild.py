"""How long a router that just started needs until it knows which blocks its workers hold.

Each worker is a process of this module, which ``measure_rebuild`` starts. It answers StreamKvSnapshot, the only part of
a worker that a router needs to rebuild its index. It prints its port, and ends when its standard input ends.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from array import array
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import pairwise

import uvloop

from benchmarks.children import answer, argument, orders, start_child
from benchmarks.index_case import PROMPT_BLOCKS, make_record
from quartet.discovery.base import Rank, Role
from quartet.events.kv import KvSnapshot, StoredBlocks, Tier
from quartet.events.load import WorkerLoad
from quartet.rpc.channels import create_channel
from quartet.rpc.server import RpcServer, ServerConfig
from quartet.streams.worker_client import DrainOutcome, WorkerClient
from router.kv_index.index import PrefixIndex
from services.workers.servicer import WorkerServicer, worker_service

_TIMEOUT_S = 120.0
_BATCHES = 1


@dataclass(frozen=True, kw_only=True)
class Rebuild:
    """Workers' snapshots, fetched over gRPC all at once, into one new index.

    Attributes:
        num_blocks: blocks of all workers together, no two alike.
        runs_s: wall time of each rebuild, from the first call on.
        router_cpu_s: CPU time of the router's process for one rebuild, median.
    """

    num_workers: int
    num_blocks: int
    runs_s: Sequence[float]
    router_cpu_s: float

    @property
    def median_s(self) -> float:
        """Median of ``runs_s``."""
        return statistics.median(self.runs_s)


async def measure_rebuild(num_workers: int, num_blocks: int, num_runs: int) -> Rebuild:
    """Start the workers, rebuild ``num_runs`` times, and end the workers.

    Raises:
        RuntimeError: a worker did not start, or the index lacks blocks afterwards.
        TimeoutError: it takes too long.
    """
    wall_s: list[float] = []
    cpu_s: list[float] = []
    async with asyncio.timeout(_TIMEOUT_S), AsyncExitStack() as exits:
        children = [
            await exits.enter_async_context(start_child("benchmarks.index_rebuild", num_blocks // num_workers, seed))
            for seed in range(num_workers)
        ]
        ports = [await child.read(_TIMEOUT_S) for child in children]
        for _ in range(num_runs):
            began, cpu_began = time.perf_counter(), time.process_time()
            index = await _rebuild(ports)
            wall_s.append(time.perf_counter() - began)
            cpu_s.append(time.process_time() - cpu_began)
            if index.num_blocks(Tier.DEVICE) != num_blocks // num_workers * num_workers:
                raise RuntimeError(f"{index.num_blocks(Tier.DEVICE)} blocks of {num_blocks} are in the index")
    return Rebuild(num_workers=num_workers, num_blocks=num_blocks, runs_s=wall_s, router_cpu_s=statistics.median(cpu_s))


def main() -> None:
    """Be a worker: the arguments are how many blocks it holds, and the seed of their hashes."""
    uvloop.run(_serve(_Worker(argument(0), argument(1))))


async def _rebuild(ports: Sequence[int]) -> PrefixIndex:
    index = PrefixIndex()
    async with asyncio.TaskGroup() as group:
        for number, port in enumerate(ports):
            group.create_task(_take(index, Rank(f"worker-{number}"), port))
    return index


async def _take(index: PrefixIndex, rank: Rank, port: int) -> None:
    async with create_channel(f"127.0.0.1:{port}", None, is_bulk=True) as channel:
        async for part in WorkerClient(channel).kv_snapshot(_TIMEOUT_S):
            for stored in part.stored:
                index.store(rank, stored.parent_hash, stored.sequence_hashes, stored.tier)


class _Worker:
    """Holds chains as long as the benchmark's prompts (``services.workers.servicer.WorkerFace``)."""

    def __init__(self, num_blocks: int, seed: int) -> None:
        rng = random.Random(seed)
        parents: dict[int, int | None] = {}
        while len(parents) < num_blocks:
            chain = array("Q", rng.randbytes(8 * min(PROMPT_BLOCKS, num_blocks - len(parents)))).tolist()
            parents[chain[0]] = None
            parents.update((block, parent) for parent, block in pairwise(chain))
        self._snapshot = KvSnapshot(_BATCHES, [StoredBlocks(0, parents)])
        self.record = make_record(f"worker-{seed}", Role.PREFILL, num_blocks)
        self.uptime_s = 0.0

    def sample_load(self) -> WorkerLoad:
        raise NotImplementedError

    async def kv_snapshot(self) -> KvSnapshot:
        return self._snapshot

    async def drain(self, timeout_s: float | None) -> DrainOutcome:
        return DrainOutcome(0, 0)


async def _serve(worker: _Worker) -> None:
    servicer = WorkerServicer(dict)
    servicer.serve(worker)
    server = RpcServer(ServerConfig(), [worker_service(servicer)])
    answer(await server.start())
    async for _ in orders():
        pass
    await server.drain(0.0)


if __name__ == "__main__":
    main()
