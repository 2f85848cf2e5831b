"""Real sources and pullers on loopback, with pools in the memory of fake GPUs."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from quartet.discovery.base import HostIdentity
from quartet.discovery.host import host_identity
from quartet.kvcache.layout import BlocksPayload, HandOff, KvLayout
from quartet.rpc.server import RpcServer, ServerConfig, Service
from quartet.transfer.config import TransferConfig
from quartet.transfer.cuda.lent import CudaServer
from quartet.transfer.cuda.memory import DeviceMemory
from quartet.transfer.cuda.staging import StagingArea, StagingServer
from quartet.transfer.grpc.puller import TransferPuller
from quartet.transfer.grpc.servicer import TransferServicer, add_transfer_servicer
from quartet.transfer.source import TransferSource
from tests.transfer.fake_cuda import FakeDriver, FakeHost
from tests.transfer.workers import CONFIG, EPOCH, LAYOUT, NUM_BLOCKS, open_channel


class GpuSource:
    """A worker that holds: a pool on a GPU, in a process of its own as far as the driver knows.

    Attributes:
        on_end: called with the holder of a hand-off that has ended.
    """

    def __init__(
        self, memory: DeviceMemory, layout: KvLayout, epoch: int, config: TransferConfig, host: HostIdentity | None
    ) -> None:
        assert isinstance(memory.driver, FakeDriver)
        self.layout = layout
        self.memory, self.driver = memory, memory.driver
        self.on_end: Callable[[int], None] = lambda _holder: None
        self.source = TransferSource(
            worker_id="source",
            epoch=epoch,
            config=config,
            on_end=lambda holder, _state: self.on_end(holder),
            memory=self.memory,
        )
        self.cuda = CudaServer(self.memory, epoch)
        self.staging = StagingArea(self.memory, config.staging_size_bytes)
        self.staging_server = StagingServer(self.staging)
        self.servicer = TransferServicer(
            self.source,
            host=host or host_identity(),
            config=config,
            cuda=self.cuda,
            staging=self.staging,
            staging_server=self.staging_server,
        )
        service = Service("quartet.v1.TransferService", lambda server: add_transfer_servicer(self.servicer, server))
        self._services = [service]

    async def start(self, address: str) -> None:
        """Serve at ``address``."""
        self.server = RpcServer(ServerConfig(address=address), self._services)
        self.source.advertise(f"127.0.0.1:{await self.server.start()}")
        await self.cuda.start()
        await self.staging_server.start()

    def fill(self, block_id: int, seed: int) -> bytes:
        """Put random bytes into a block."""
        size = self.layout.piece_size_bytes
        data = random.Random(seed).randbytes(size)
        self.driver.write(self.memory.address + block_id * size, data)
        return data

    def offer(self, holder: int, block_ids: Sequence[int]) -> HandOff:
        payload = BlocksPayload(self.layout, len(block_ids) * self.layout.block_size)
        return self.source.offer(holder, block_ids, payload)


@asynccontextmanager
async def gpu_source(
    host: FakeHost,
    *,
    device: int = 0,
    epoch: int = EPOCH,
    num_blocks: int = NUM_BLOCKS,
    address: str = "127.0.0.1:0",
    layout: KvLayout = LAYOUT,
    memory: DeviceMemory | None = None,
    config: TransferConfig = CONFIG,
    identity: HostIdentity | None = None,
) -> AsyncIterator[GpuSource]:
    """A source with its pool on ``device``, or in ``memory``; at the end its process is killed."""
    if memory is None:
        memory = DeviceMemory(FakeDriver(host, (device,)), 0, num_blocks, layout.piece_size_bytes)
    worker = GpuSource(memory, layout, epoch, config, identity)
    await worker.start(address)
    try:
        yield worker
    finally:
        worker.driver.kill()
        await worker.cuda.close()
        await worker.staging_server.close()
        await worker.server.drain(0.0)
        worker.source.close()
        await worker.staging.close()
        assert (worker.driver.num_pinned, worker.driver.num_streams, worker.driver.num_events) == (0, 0, 0)


class GpuPuller:
    """A worker that wants: an empty pool on a GPU, and a puller into it."""

    def __init__(
        self, driver: FakeDriver, num_blocks: int, config: TransferConfig, layout: KvLayout, host: HostIdentity | None
    ) -> None:
        self.driver = driver
        self.memory = DeviceMemory(self.driver, 0, num_blocks, layout.piece_size_bytes)
        self.puller = TransferPuller(open_channel, host=host or host_identity(), config=config)
        self.puller.attach(self.memory, layout)

    def block(self, block_id: int) -> bytes:
        """What is in a block."""
        size = self.memory.piece_size_bytes
        return self.driver.read(self.memory.address + block_id * size, size)


@asynccontextmanager
async def gpu_puller(
    host: FakeHost,
    *,
    device: int = 0,
    num_blocks: int = NUM_BLOCKS,
    config: TransferConfig = CONFIG,
    layout: KvLayout = LAYOUT,
    driver: FakeDriver | None = None,
    identity: HostIdentity | None = None,
) -> AsyncIterator[GpuPuller]:
    """A puller; afterwards nothing of it may be left."""
    worker = GpuPuller(driver or FakeDriver(host, (device,)), num_blocks, config, layout, identity)
    try:
        yield worker
    finally:
        await worker.puller.close()
        driver = worker.driver
        assert (driver.num_opened, driver.num_streams, driver.num_events, driver.num_pinned) == (0, 0, 0, 0)
        worker.memory.close()
        assert host.faults == []
