"""Fixtures of the gRPC tests: certificates, and servers that end with their test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from quartet.rpc.server import RpcServer, ServerConfig, Service
from tests.certificates import CertificateAuthority

StartServer = Callable[..., Awaitable[tuple[RpcServer, str]]]


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    return CertificateAuthority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def other_authority(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    return CertificateAuthority(Path(tmp_path_factory.mktemp("other-certificates")))


@pytest.fixture
async def start_server() -> AsyncIterator[StartServer]:
    """Starts an ``RpcServer``; answers it and its address."""
    servers: list[RpcServer] = []

    async def start(
        services: Sequence[Service], config: ServerConfig | None = None, *, num_listeners: int = 1
    ) -> tuple[RpcServer, str]:
        server = RpcServer(config or ServerConfig(), services, num_listeners=num_listeners)
        servers.append(server)
        return server, f"127.0.0.1:{await server.start()}"

    yield start
    for server in servers:
        await server.drain(0)
