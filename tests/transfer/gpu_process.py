"""A worker with a pool on the first GPU it sees, in a process of its own, without PyTorch, whose import takes seconds.

``source NUM_BLOCKS SEED ADDRESS``: for each line that it reads, prints a hand-off of all its blocks; for ``counts``,
how many hand-offs are held and how many are pulled now.
``host_source`` with the same: its pool is in host memory.
``reader NUM_BLOCKS``: fetches each hand-off that it reads, and prints whether its bytes are those of the seed beside.

Hand-offs are pickled, in hexadecimal. Both run until they are killed.
"""

from __future__ import annotations

import asyncio
import pickle
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np

from quartet.discovery.host import host_identity
from quartet.kvcache.layout import BlocksPayload, HandOff
from quartet.rpc.server import RpcServer, ServerConfig, Service
from quartet.transfer.base import PieceCopy, PoolMemory, never
from quartet.transfer.config import TransferConfig
from quartet.transfer.cuda.driver import Driver, cuda_driver
from quartet.transfer.cuda.lent import CudaServer
from quartet.transfer.cuda.memory import DeviceMemory
from quartet.transfer.cuda.staging import StagingArea, StagingServer
from quartet.transfer.grpc.puller import TransferPuller
from quartet.transfer.grpc.servicer import TransferServicer, add_transfer_servicer
from quartet.transfer.shm import ShmServer
from quartet.transfer.source import TransferSource
from tests.transfer.workers import CONFIG, EPOCH, LARGE_LAYOUT, open_channel

PIECE = LARGE_LAYOUT.piece_size_bytes


def make_pool(num_blocks: int, driver: Driver | None = None) -> DeviceMemory:
    return DeviceMemory(driver or cuda_driver(), 0, num_blocks, PIECE)


def block_bytes(seed: int, block_id: int) -> bytes:
    """What a source of this seed has in a block."""
    return np.full(PIECE // 8, seed << 32 | block_id, dtype=np.int64).tobytes()


def write(memory: DeviceMemory | PoolMemory, block_id: int, data: bytes) -> None:
    if isinstance(memory, PoolMemory):
        memory.piece(block_id)[:] = data
        return
    memory.driver.bind(0)
    source = np.frombuffer(data, dtype=np.uint8)
    cuda_driver()._call("cuMemcpyHtoD", memory.address + block_id * PIECE, source.ctypes.data, len(data))


def read(memory: DeviceMemory | PoolMemory, block_id: int) -> bytes:
    if isinstance(memory, PoolMemory):
        return bytes(memory.piece(block_id))
    memory.driver.bind(0)
    into = np.empty(PIECE, dtype=np.uint8)
    cuda_driver()._call("cuMemcpyDtoH", into.ctypes.data, memory.address + block_id * PIECE, PIECE)
    return into.tobytes()


def free_size_bytes(device: int = 0) -> int:
    cuda_driver().bind(device)
    free, _total = cuda_driver()._call("cuMemGetInfo")
    return int(free)


def wrong_blocks(memory: DeviceMemory | PoolMemory, seed: int, blocks: dict[int, int]) -> list[int]:
    """Those of ``blocks`` (here: there) that differ from a source's."""
    return [here for here, there in blocks.items() if read(memory, here) != block_bytes(seed, there)]


@asynccontextmanager
async def puller_on_gpu(
    num_blocks: int,
    config: TransferConfig = CONFIG,
    *,
    driver: Driver | None = None,
    is_busy: Callable[[], bool] = never,
) -> AsyncIterator[tuple[TransferPuller, DeviceMemory]]:
    memory = make_pool(num_blocks, driver)
    async with _puller_into(memory, config, is_busy) as puller:
        yield puller, memory


@asynccontextmanager
async def puller_on_host(
    num_blocks: int, config: TransferConfig = CONFIG
) -> AsyncIterator[tuple[TransferPuller, PoolMemory]]:
    memory = PoolMemory(num_blocks, PIECE)
    async with _puller_into(memory, config) as puller:
        yield puller, memory


@asynccontextmanager
async def _puller_into(
    memory: DeviceMemory | PoolMemory, config: TransferConfig, is_busy: Callable[[], bool] = never
) -> AsyncIterator[TransferPuller]:
    puller = TransferPuller(open_channel, host=host_identity(), config=config)
    puller.attach(memory, LARGE_LAYOUT, is_busy)
    try:
        yield puller
    finally:
        await puller.close()
        memory.close()


async def _lines() -> AsyncIterator[str]:
    while line := await asyncio.to_thread(sys.stdin.readline):
        yield line.strip()


async def _source(memory: DeviceMemory | PoolMemory, seed: int, address: str) -> None:
    num_blocks = memory.num_blocks
    few = [*range(min(num_blocks, 64)), *range(max(num_blocks - 64, 0), num_blocks)]
    for block_id in few:
        write(memory, block_id, block_bytes(seed, block_id))
    source = TransferSource(
        worker_id="source", epoch=EPOCH + seed, config=CONFIG, on_end=lambda *_: None, memory=memory
    )
    shm = cuda = staging = staging_server = None
    if isinstance(memory, PoolMemory):
        shm = ShmServer(memory)
        await shm.start()
    else:
        cuda = CudaServer(memory, EPOCH + seed)
        staging = StagingArea(memory, CONFIG.staging_size_bytes)
        staging_server = StagingServer(staging)
        await cuda.start()
        await staging_server.start()
    servicer = TransferServicer(
        source,
        host=host_identity(),
        config=CONFIG,
        shm=shm,
        cuda=cuda,
        staging=staging,
        staging_server=staging_server,
    )
    service = Service("quartet.v1.TransferService", lambda server: add_transfer_servicer(servicer, server))
    server = RpcServer(ServerConfig(address=address), [service])
    source.advertise(f"127.0.0.1:{await server.start()}")
    holder = 0
    async for line in _lines():
        if line == "counts":
            print(source.counts.held, source.counts.pulling, flush=True)
            continue
        holder += 1
        payload = BlocksPayload(LARGE_LAYOUT, num_blocks * LARGE_LAYOUT.block_size)
        print(pickle.dumps(source.offer(holder, range(num_blocks), payload)).hex(), flush=True)


async def _reader(num_blocks: int) -> None:
    async with puller_on_gpu(num_blocks) as (puller, memory):
        print("ready", flush=True)
        async for line in _lines():
            text, _, seed = line.partition(" ")
            hand_off: HandOff = pickle.loads(bytes.fromhex(text))
            claim = puller.claim(hand_off)
            print("begins", flush=True)
            await claim.fetch([PieceCopy(block_id, block_id) for block_id in range(num_blocks)])
            wrong = wrong_blocks(memory, int(seed), {block_id: block_id for block_id in range(min(num_blocks, 64))})
            print(f"wrong {wrong}" if wrong else "right", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "source":
        asyncio.run(_source(make_pool(int(sys.argv[2])), int(sys.argv[3]), sys.argv[4]))
    elif sys.argv[1] == "host_source":
        asyncio.run(_source(PoolMemory(int(sys.argv[2]), PIECE), int(sys.argv[3]), sys.argv[4]))
    else:
        asyncio.run(_reader(int(sys.argv[2])))
