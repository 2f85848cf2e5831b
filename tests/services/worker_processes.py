"""Worker processes in this one: all that a process is made of, found by discovery."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc

from quartet.config import build
from quartet.discovery.base import Role, WorkerRecord
from quartet.discovery.create import DiscoveryConfig, DiscoveryKind, create_registry
from quartet.discovery.file import FileConfig
from quartet.rpc.channels import create_channel
from services.workers.config import WorkerConfig
from services.workers.parts import EncoderFactory
from services.workers.process import WorkerProcess
from tests import tiny

WAIT_S = 90.0


@dataclass
class RunningWorker:
    """A worker process that is registered."""

    record: WorkerRecord
    channel: grpc.aio.Channel
    running: asyncio.Task[None]
    stop: asyncio.Event


@asynccontextmanager
async def worker_process(
    directory: Path, role: Role, *, encoder_factory: EncoderFactory | None = None, **settings: Mapping[str, object]
) -> AsyncIterator[RunningWorker]:
    """One of the tiny model; it is stopped in the end, and its error raised."""
    file = FileConfig(directory=directory / f"{role}-discovery", ttl_s=60)
    discovery = DiscoveryConfig(kind=DiscoveryKind.FILE, file=file)
    base = {"worker_id": f"{role}-0", "model_path": str(tiny.CHECKPOINT), "drain_timeout_s": 0.5, **settings}
    config = replace(build(WorkerConfig, base), discovery=discovery)
    stop = asyncio.Event()
    running = asyncio.create_task(WorkerProcess(config, role, encoder_factory=encoder_factory).run(stop))
    registry = create_registry(discovery)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(registry.close)
        stack.push_async_callback(asyncio.wait, [running])
        stack.callback(stop.set)
        records: list[WorkerRecord] = []
        async with asyncio.timeout(WAIT_S):
            while not records and not running.done():
                records = await registry.workers()
        if not records:
            running.result()
        channel = create_channel(records[0].grpc_address, None)
        stack.push_async_callback(channel.close)
        yield RunningWorker(records[0], channel, running, stop)
    running.result()
