"""A worker as far as a router sees it that rebuilds its index: it answers StreamKvSnapshot. A process of its own.

It says its port on standard output as JSON, and ends with its standard input.

    python -m benchmarks.index_worker --num-blocks N --seed N
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from array import array
from itertools import pairwise

import uvloop

from benchmarks.index_work import PROMPT_BLOCKS
from quartet.discovery.base import Role, WorkerRecord
from quartet.discovery.host import host_identity
from quartet.events.kv import KvSnapshot, StoredBlocks
from quartet.events.load import WorkerLoad
from quartet.rpc.server import RpcServer, ServerConfig
from services.workers.servicer import DrainOutcome, WorkerServicer, worker_service

_BATCHES = 1


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.index_worker", description=__doc__.partition("\n")[0])
    parser.add_argument("--num-blocks", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    arguments = parser.parse_args()
    uvloop.run(_serve(_Worker(arguments.num_blocks, arguments.seed)))


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
        self.record = WorkerRecord(
            worker_id=f"worker-{seed}",
            role=Role.PREFILL,
            epoch=seed,
            grpc_address="127.0.0.1:1",
            events_address="",
            model_name="none",
            model_fingerprint="0" * 64,
            host=host_identity(),
            num_blocks=num_blocks,
            block_size=32,
            max_model_len=32 * PROMPT_BLOCKS,
            transfer_ways=("grpc",),
            sampling_fields=(),
            contract_version="quartet.v1",
        )
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
    print(json.dumps({"port": await server.start()}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.drain(0.0)


if __name__ == "__main__":
    main()
