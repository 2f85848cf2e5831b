"""Worker records for tests, and bounded ways to read a watch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from quartet.discovery.base import (
    HostIdentity,
    Role,
    RouterRecord,
    RouterWatch,
    Synchronised,
    Watch,
    WorkerAdded,
    WorkerChanged,
    WorkerEvent,
    WorkerKey,
    WorkerRecord,
    WorkerRemoved,
)

TIMEOUT_S = 60.0

_DECODE = WorkerRecord(
    worker_id="decode-0",
    role=Role.DECODE,
    epoch=2**64 - 1,
    grpc_address="127.0.0.1:50051",
    events_address="tcp://127.0.0.1:50052",
    model_name="tiny",
    model_fingerprint="ab" * 32,
    host=HostIdentity(boot_id="boot", ipc_namespace="ipc:[1]"),
    num_blocks=64,
    block_size=32,
    max_model_len=2048,
    transfer_ways=("shm", "grpc"),
    sampling_fields=("temperature", "seed"),
    contract_version="1",
)


_ROUTER = RouterRecord(
    router_id="router-0",
    epoch=2**64 - 1,
    grpc_address="127.0.0.1:50050",
    http_address="127.0.0.1:8000",
    metrics_address="127.0.0.1:9090",
    events_address="tcp://127.0.0.1:50049",
    max_generates=40_000,
    contract_version="1",
)


def make_router(router_id: str = "router-0", **fields: Any) -> RouterRecord:
    return replace(_ROUTER, router_id=router_id, **fields)


def make_record(worker_id: str = "decode-0", **fields: Any) -> WorkerRecord:
    return replace(_DECODE, worker_id=worker_id, **fields)


async def next_event(watch: Watch) -> WorkerEvent:
    async with asyncio.timeout(TIMEOUT_S):
        return await anext(aiter(watch))


async def next_routers(watch: RouterWatch) -> list[RouterRecord]:
    async with asyncio.timeout(TIMEOUT_S):
        return list(await anext(aiter(watch)))


async def read_until(watch: Watch, last: WorkerEvent) -> list[WorkerEvent]:
    """Every event up to and including ``last``."""
    events = [await next_event(watch)]
    while events[-1] != last:
        events.append(await next_event(watch))
    return events


async def synchronised(watch: Watch) -> list[WorkerEvent]:
    """What the first list reported, without its end."""
    return (await read_until(watch, Synchronised()))[:-1]


async def read_until_known(watch: Watch, known: dict[WorkerKey, WorkerRecord], wanted: list[WorkerRecord]) -> None:
    """Read until the events applied to ``known``, which is changed, leave exactly ``wanted``."""
    while known != {record.key: record for record in wanted}:
        match await next_event(watch):
            case WorkerAdded(record) | WorkerChanged(record):
                known[record.key] = record
            case WorkerRemoved(worker_id, role):
                del known[WorkerKey(role=role, worker_id=worker_id)]


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    """Return once ``condition`` holds; for states of a server that nothing announces."""
    async with asyncio.timeout(TIMEOUT_S):
        while not await condition():  # noqa: ASYNC110 - the server has no event to wait for
            await asyncio.sleep(0.02)
