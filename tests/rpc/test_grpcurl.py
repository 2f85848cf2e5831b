"""What a person with grpcurl sees: services by reflection, errors with their details."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from quartet.errors import QueueFullError
from quartet.rpc.server import Service
from quartet.v1 import worker_pb2, worker_pb2_grpc
from tests.rpc.conftest import StartServer

pytestmark = pytest.mark.grpcurl


class Full(worker_pb2_grpc.WorkerServiceServicer):
    async def GetInfo(self, request: worker_pb2.GetInfoRequest, context: Any) -> worker_pb2.GetInfoResponse:
        raise QueueFullError("come back later", field="priority", retry_delay_s=2.5)


def service() -> Service:
    name = "quartet.v1.WorkerService"
    return Service(name, lambda server: worker_pb2_grpc.add_WorkerServiceServicer_to_server(Full(), server))


async def run(binary: Path, *arguments: str) -> tuple[int, str, str]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(str(binary), "-plaintext", *arguments, stdout=pipe, stderr=pipe)
    async with asyncio.timeout(30):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_services_are_listed_and_described(start_server: StartServer, grpcurl: Path) -> None:
    _, address = await start_server([service()])
    code, listed, _ = await run(grpcurl, address, "list")
    assert code == 0
    assert "quartet.v1.WorkerService" in listed and "grpc.health.v1.Health" in listed
    code, described, _ = await run(grpcurl, address, "describe", "quartet.v1.WorkerService")
    assert code == 0
    assert "rpc GetInfo" in described


async def test_an_error_shows_its_reason_field_and_delay(start_server: StartServer, grpcurl: Path) -> None:
    _, address = await start_server([service()])
    code, _, shown = await run(grpcurl, "-format-error", address, "quartet.v1.WorkerService/GetInfo")
    assert code != 0
    status = json.loads(shown)
    assert status["message"] == "come back later"
    details = {detail["@type"].rpartition(".")[2]: detail for detail in status["details"]}
    assert details["ErrorInfo"]["reason"] == "QUEUE_FULL"
    assert details["BadRequest"]["field_violations"][0]["field"] == "priority"
    assert details["RetryInfo"]["retry_delay"] == "2.500s"
