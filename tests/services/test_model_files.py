"""A worker gives the text files of its own model, and of no other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import pytest

from quartet.discovery.base import WorkerRecord
from quartet.errors import ModelMismatchError
from quartet.events.kv import KvSnapshot
from quartet.events.load import WorkerLoad
from quartet.rpc.errors import from_rpc_error
from quartet.rpc.server import RpcServer, ServerConfig
from quartet.streams.worker_client import WorkerClient
from quartet.v1 import worker_pb2, worker_pb2_grpc
from services.workers.servicer import DrainOutcome, WorkerServicer, worker_service
from tests.router.records import make_load, make_record

FILES = {"tokenizer.json": b"{}", "config.json": b"[]"}


@dataclass
class FakeWorker:
    """Only says who it is."""

    record: WorkerRecord = field(default_factory=make_record)
    uptime_s: float = 1.0
    snapshot: KvSnapshot = field(default_factory=lambda: KvSnapshot(0, ()))

    def sample_load(self) -> WorkerLoad:
        return make_load(self.record)

    async def kv_snapshot(self) -> KvSnapshot:
        return self.snapshot

    async def drain(self, timeout_s: float | None) -> DrainOutcome:
        return DrainOutcome(0, 0)


@asynccontextmanager
async def serving(worker: FakeWorker, files: Mapping[str, bytes]) -> AsyncIterator[str]:
    """``host:port`` of a server of ``worker``, which gives ``files``."""
    servicer = WorkerServicer(lambda: files)
    servicer.serve(worker)
    server = RpcServer(ServerConfig(), [worker_service(servicer)])
    port = await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.drain(0)


async def ask(address: str, fingerprint: str) -> dict[str, bytes]:
    async with grpc.aio.insecure_channel(address) as channel:
        client = WorkerClient(channel)
        return await client.model_files(FILES, model_fingerprint=fingerprint, max_size_bytes=100, timeout_s=10)


@pytest.mark.parametrize("fingerprint", ["", make_record().model_fingerprint])
async def test_files_are_given_to_callers_that_name_the_model_or_none(fingerprint: str) -> None:
    async with serving(FakeWorker(), FILES) as address:
        files = await ask(address, fingerprint)
    assert files == FILES


async def test_a_caller_that_names_another_model_gets_no_files() -> None:
    async with serving(FakeWorker(), FILES) as address:
        with pytest.raises(ModelMismatchError):
            await ask(address, "0f" * 32)


@pytest.mark.parametrize("names", [["config.json"] * 3, ["x" * 10_000], ["weights.bin"]])
async def test_names_of_files_that_are_not_there_or_too_many_are_refused(names: list[str]) -> None:
    async with serving(FakeWorker(), FILES) as address, grpc.aio.insecure_channel(address) as channel:
        call = worker_pb2_grpc.WorkerServiceStub(channel).GetModelFiles(worker_pb2.GetModelFilesRequest(names=names))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    error = from_rpc_error(caught.value)
    assert (error.reason, error.field) == ("INVALID_FIELD", "names")
    assert len(error.message) < 200
