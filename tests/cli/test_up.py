"""When a topology counts as ready: not before the router and every worker of it serve."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator

import pytest
from typer.testing import CliRunner

from cli.app import app
from cli.up import wait_ready
from quartet.rpc.server import RpcServer, ServerConfig
from quartet.v1 import router_pb2
from tests.client.fake_router import FakeRouter, worker_status


class Servers:
    """A fake router and a worker that offers health alone."""

    def __init__(self) -> None:
        self.fake = FakeRouter()
        self.router = RpcServer(ServerConfig(), [self.fake.service()])
        self.worker = RpcServer(ServerConfig(), [])
        self.reports: asyncio.Queue[str] = asyncio.Queue()

    async def start(self) -> None:
        self.router_address = f"127.0.0.1:{await self.router.start()}"
        self.worker_address = f"127.0.0.1:{await self.worker.start()}"

    def announce(self, state: router_pb2.WorkerState.ValueType) -> None:
        status = worker_status("decode-0", state=state)
        status.record.grpc_address = self.worker_address
        self.fake.workers = [worker_status("a-strangers"), status]

    async def reported(self) -> str:
        async with asyncio.timeout(60):
            return await self.reports.get()


@pytest.fixture
async def servers() -> AsyncIterator[Servers]:
    servers = Servers()
    await servers.start()
    yield servers
    await servers.router.drain(0)
    await servers.worker.drain(0)


async def test_missing_workers_are_reported_until_none_is_missing(servers: Servers) -> None:
    waiting = asyncio.create_task(wait_ready(servers.router_address, ["decode-0"], servers.reports.put_nowait))
    assert await servers.reported() == "waiting for router, decode-0"
    await servers.router.set_serving(None, True)
    assert await servers.reported() == "waiting for decode-0"
    servers.announce(router_pb2.WORKER_STATE_JOINING)
    assert await servers.reported() == "waiting for decode-0 (joining)"
    servers.announce(router_pb2.WORKER_STATE_READY)
    assert await servers.reported() == "waiting for decode-0 (not serving)"
    assert not waiting.done()
    await servers.worker.set_serving(None, True)
    async with asyncio.timeout(60):
        await waiting
    assert servers.reports.empty()


async def test_a_missing_router_is_waited_for(servers: Servers) -> None:
    waiting = asyncio.create_task(wait_ready("127.0.0.1:1", ["decode-0"], servers.reports.put_nowait))
    assert await servers.reported() == "waiting for router, decode-0"
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


def test_what_the_system_refuses_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(text: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), text)

    monkeypatch.setattr("cli.up.find_topology", closed)
    result = CliRunner().invoke(app, ["up", "/etc/x.yaml"])
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit), "no traceback"
    assert "quartet: [Errno 13] Permission denied: '/etc/x.yaml'" in result.output
