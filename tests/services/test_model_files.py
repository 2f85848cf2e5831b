"""A worker gives the text files of its own model, and of no other."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from quartet.discovery.base import WorkerRecord
from quartet.errors import ModelFilesError, ModelMismatchError
from quartet.events.kv import KvSnapshot, StoredBlocks
from quartet.events.load import WorkerLoad
from quartet.rpc.errors import from_rpc_error
from quartet.rpc.server import RpcServer, ServerConfig
from quartet.streams.worker_client import DrainOutcome, WorkerClient
from quartet.v1 import worker_pb2, worker_pb2_grpc
from services.workers.servicer import WorkerServicer, worker_service
from tests.router.records import make_load, make_record
from tests.services.stream_workers import until

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
async def serving(
    worker: FakeWorker, files: Mapping[str, bytes] | Callable[[], Mapping[str, bytes]], address: str = "127.0.0.1:0"
) -> AsyncIterator[str]:
    """``host:port`` of a server of ``worker``, which gives ``files``."""
    servicer = WorkerServicer(files if callable(files) else lambda: files)
    servicer.serve(worker)
    server = RpcServer(ServerConfig(address=address), [worker_service(servicer)])
    port = await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.drain(0)


async def ask(address: str, fingerprint: str) -> dict[str, bytes]:
    async with grpc.aio.insecure_channel(address) as channel:
        client = WorkerClient(channel)
        return await client.model_files(FILES, model_fingerprint=fingerprint, max_size_bytes=100, timeout_s=60)


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


def ask_raw(channel: grpc.aio.Channel) -> Any:
    return worker_pb2_grpc.WorkerServiceStub(channel).GetModelFiles(worker_pb2.GetModelFilesRequest())


class Disk:
    """Counts how often the files are read, and keeps those that read them waiting until they may."""

    def __init__(self) -> None:
        self.num_reads = 0
        self.may_read = threading.Event()

    def read(self) -> dict[str, bytes]:
        self.num_reads += 1
        assert self.may_read.wait(30)
        return {"tokenizer.json": bytes(4 << 20)}


async def test_calls_that_are_open_together_share_one_reading_of_the_files() -> None:
    disk = Disk()
    async with serving(FakeWorker(), disk.read) as address, grpc.aio.insecure_channel(address) as channel:
        async with asyncio.timeout(30):
            calls = [ask_raw(channel) for _ in range(4)]
            gone = calls.pop()
            await until(lambda: disk.num_reads == 1)
            gone.cancel()
            disk.may_read.set()
            for call in calls:
                assert (await call.read()).file.size_bytes == 4 << 20
            late = ask_raw(channel)
            await late.read()
            assert disk.num_reads == 1
            for call in [*calls, late]:
                call.cancel()


async def test_a_failed_reading_fails_its_calls_and_the_next_call_reads_again() -> None:
    outcomes: list[Mapping[str, bytes] | ModelFilesError] = [FILES, ModelFilesError("the disk is gone")]

    def read() -> Mapping[str, bytes]:
        outcome = outcomes.pop()
        if isinstance(outcome, ModelFilesError):
            raise outcome
        return outcome

    async with serving(FakeWorker(), read) as address:
        with pytest.raises(ModelFilesError):
            await ask(address, "")
        assert await ask(address, "") == FILES


async def test_the_files_go_with_the_last_call_that_gives_them() -> None:
    class Files(dict[str, bytes]):
        """Can be watched."""

    known: list[weakref.ref[Files]] = []

    def read() -> Files:
        files = Files(FILES)
        known.append(weakref.ref(files))
        return files

    async with serving(FakeWorker(), read) as address:
        for _ in range(2):
            assert await ask(address, "") == FILES
        gc.collect()
        assert [files() for files in known] == [None, None]


@pytest.mark.parametrize("method", ["GetModelFiles", "StreamKvSnapshot"])
async def test_a_connection_has_few_of_the_calls_that_give_much(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.workers.servicer._MAX_FILE_CALLS_OF_CONNECTION", 2)
    monkeypatch.setattr("services.workers.servicer._MAX_SNAPSHOTS_OF_CONNECTION", 2)
    many = KvSnapshot(0, [StoredBlocks(0, dict.fromkeys(range(1_000_000)))])
    worker, files = FakeWorker(snapshot=many), {"tokenizer.json": bytes(4 << 20)}
    async with (
        serving(worker, files) as address,
        grpc.aio.insecure_channel(address) as channel,
        asyncio.timeout(30),
    ):
        calls = [channel.unary_stream(f"/quartet.v1.WorkerService/{method}")(b"") for _ in range(2)]
        for call in calls:
            assert await call.read()  # and takes no more
        refused = channel.unary_stream(f"/quartet.v1.WorkerService/{method}")(b"")
        assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in calls:
            call.cancel()
