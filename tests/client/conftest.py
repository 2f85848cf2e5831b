"""Fixtures of the client's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from quartet.rpc.server import RpcServer, ServerConfig, Service
from tests.client.fake_router import FakeRouter

StartRouter = Callable[..., Awaitable[str]]


@pytest.fixture
async def start_router() -> AsyncIterator[StartRouter]:
    """Serves a ``FakeRouter``, at an address if one is given, and the worker it sends to; answers its address."""
    servers: list[RpcServer] = []

    async def serve(address: str, services: list[Service]) -> str:
        server = RpcServer(ServerConfig(address=address), services)
        servers.append(server)
        return f"127.0.0.1:{await server.start()}"

    async def start(router: FakeRouter, address: str = "127.0.0.1:0") -> str:
        router.worker_address = await serve("127.0.0.1:0", router.worker.services())
        return await serve(address, [router.service()])

    yield start
    for server in servers:
        await server.drain(0)
