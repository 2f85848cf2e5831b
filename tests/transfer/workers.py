"""Real sources and pullers on loopback, as the transfer tests use them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from quartet.discovery.base import HostIdentity
from quartet.discovery.host import host_identity
from quartet.kvcache.hand_off import HandOffState
from quartet.kvcache.layout import BlocksPayload, HandOff, KvLayout, OpaquePayload
from quartet.rpc.channels import create_channel
from quartet.rpc.server import RpcServer, ServerConfig, Service
from quartet.transfer.base import PoolMemory
from quartet.transfer.config import TransferConfig
from quartet.transfer.grpc.puller import TransferPuller
from quartet.transfer.grpc.servicer import TransferServicer, add_transfer_servicer
from quartet.transfer.shm import ShmServer
from quartet.transfer.source import TransferSource

EPOCH = 7
NUM_BLOCKS = 12
#: 1 KiB a piece.
LAYOUT = KvLayout(model_fingerprint="f" * 64, dtype="float32", num_layers=2, num_kv_heads=2, head_dim=8, block_size=4)
#: 2.5 MiB a piece: three messages each.
LARGE_LAYOUT = KvLayout(
    model_fingerprint="f" * 64, dtype="float32", num_layers=5, num_kv_heads=8, head_dim=256, block_size=32
)
CONFIG = TransferConfig(hand_off_ttl_s=10.0, max_pull_s=10.0, stall_timeout_s=5.0)


@dataclass(frozen=True)
class Ended:
    """What a source said of a holder."""

    holder: int
    state: HandOffState


class SourceWorker:
    """A worker that holds: a pool of random bytes, its source, and a server in front of it."""

    def __init__(
        self, layout: KvLayout, config: TransferConfig, host: HostIdentity, epoch: int, server: ServerConfig
    ) -> None:
        self.layout = layout
        self.memory = PoolMemory(NUM_BLOCKS, layout.piece_size_bytes)
        self.memory.view[:] = random.Random(epoch).randbytes(self.memory.size_bytes)
        self.ends: asyncio.Queue[Ended] = asyncio.Queue()
        self.source = TransferSource(
            worker_id="source",
            epoch=epoch,
            config=config,
            on_end=lambda holder, state: self.ends.put_nowait(Ended(holder, state)),
            memory=self.memory,
        )
        self.shm = ShmServer(self.memory)
        self.servicer = TransferServicer(self.source, host=host, config=config, shm=self.shm)
        service = Service("quartet.v1.TransferService", lambda server: add_transfer_servicer(self.servicer, server))
        self.server = RpcServer(server, [service])
        self.address = ""

    def offer(self, holder: int, block_ids: Sequence[int]) -> HandOff:
        num_tokens = len(block_ids) * self.layout.block_size - 1  # the last block is not full
        return self.source.offer(holder, block_ids, BlocksPayload(self.layout, num_tokens))

    def offer_opaque(self, holder: int) -> HandOff:
        return self.source.offer(holder, (), OpaquePayload("trtllm", b"state"))

    async def end(self) -> Ended:
        """The next end of a hand-off, whenever it comes."""
        async with asyncio.timeout(30):
            return await self.ends.get()


@asynccontextmanager
async def source_worker(
    *,
    layout: KvLayout = LAYOUT,
    config: TransferConfig = CONFIG,
    host: HostIdentity | None = None,
    epoch: int = EPOCH,
    address: str = "127.0.0.1:0",
) -> AsyncIterator[SourceWorker]:
    """A source that serves at ``address``, by default on a free port."""
    worker = SourceWorker(layout, config, host or host_identity(), epoch, ServerConfig(address=address))
    worker.address = f"127.0.0.1:{await worker.server.start()}"
    worker.source.advertise(worker.address)
    await worker.shm.start()
    try:
        yield worker
    finally:
        await worker.server.drain(0.0)
        await worker.shm.close()
        worker.source.close()
        worker.memory.close()


class PullerWorker:
    """A worker that wants: an empty pool, and a puller into it."""

    def __init__(
        self,
        layout: KvLayout,
        config: TransferConfig,
        host: HostIdentity,
        channel_factory: Callable[[str], grpc.aio.Channel],
    ) -> None:
        self.memory = PoolMemory(NUM_BLOCKS, layout.piece_size_bytes)
        self.puller = TransferPuller(channel_factory, host=host, config=config)
        self.puller.attach(self.memory, layout)


def open_channel(address: str) -> grpc.aio.Channel:
    """A plain channel, as a worker without TLS makes it."""
    return create_channel(address, None)


@asynccontextmanager
async def puller_worker(
    *,
    layout: KvLayout = LAYOUT,
    config: TransferConfig = CONFIG,
    host: HostIdentity | None = None,
    channel_factory: Callable[[str], grpc.aio.Channel] = open_channel,
) -> AsyncIterator[PullerWorker]:
    """A puller on this host, unless ``host`` says otherwise."""
    worker = PullerWorker(layout, config, host or host_identity(), channel_factory)
    try:
        yield worker
    finally:
        await worker.puller.close()
        worker.memory.close()
