"""A worker's files are taken only if they are what it announced."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence

import grpc
import pytest

from quartet.errors import ModelFilesError, ServingError, WorkerUnavailableError
from quartet.rpc.server import RpcServer, ServerConfig, Service
from quartet.streams.worker_client import WorkerClient
from quartet.v1 import worker_pb2 as pb
from quartet.v1 import worker_pb2_grpc

_ALLOWED = ("tokenizer.json", "config.json")


class Files(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(self, responses: Sequence[pb.GetModelFilesResponse]) -> None:
        self._responses = responses

    async def GetModelFiles(self, request, context) -> AsyncIterator[pb.GetModelFilesResponse]:
        for response in self._responses:
            yield response


def announced(name: str, data: bytes, **changes: object) -> pb.GetModelFilesResponse:
    fields = {"name": name, "size_bytes": len(data), "sha256": hashlib.sha256(data).digest(), **changes}
    return pb.GetModelFilesResponse(file=pb.ModelFile(**fields))


def part(data: bytes) -> pb.GetModelFilesResponse:
    return pb.GetModelFilesResponse(data=data)


async def fetch(*responses: pb.GetModelFilesResponse, max_size_bytes: int = 1000) -> dict[str, bytes]:
    add = worker_pb2_grpc.add_WorkerServiceServicer_to_server
    service = Service("quartet.v1.WorkerService", lambda server: add(Files(responses), server))
    server = RpcServer(ServerConfig(), [service])
    port = await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            return await WorkerClient(channel).model_files(_ALLOWED, max_size_bytes=max_size_bytes, timeout_s=10)
    finally:
        await server.drain(0)


async def test_files_come_in_parts_and_in_any_order() -> None:
    responses = [announced("config.json", b"{}"), part(b"{"), part(b"}"), announced("tokenizer.json", b"")]
    assert await fetch(*responses) == {"config.json": b"{}", "tokenizer.json": b""}


async def test_files_that_are_not_on_the_list_are_dropped() -> None:
    responses = [announced("../../evil.py", b"x"), part(b"x"), announced("config.json", b"{}"), part(b"{}")]
    assert await fetch(*responses) == {"config.json": b"{}"}


@pytest.mark.parametrize(
    "responses",
    [
        [part(b"x")],
        [announced("config.json", b"{}"), part(b"{")],
        [announced("config.json", b"{}", size_bytes=3), part(b"{}")],
        [announced("config.json", b"{}"), part(b"{]")],
        [announced("config.json", b"{}", sha256=b""), part(b"{}")],
        [announced("other", b"x" * 1001), part(b"x" * 1001)],
    ],
)
async def test_files_that_differ_from_their_announcement_are_refused(responses: list[pb.GetModelFilesResponse]) -> None:
    with pytest.raises(ModelFilesError):
        await fetch(*responses)


async def test_a_worker_that_is_not_there_is_unavailable() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        client = WorkerClient(channel)
        with pytest.raises(WorkerUnavailableError):
            await client.model_files(_ALLOWED, max_size_bytes=1000, timeout_s=10)
        with pytest.raises(ServingError):
            await client.info(10)
