"""``quartet routers``, and ``--etcd`` of the commands that ask a router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from typer.testing import CliRunner

from cli.app import app
from quartet.discovery.base import CONTRACT_VERSION
from quartet.discovery.etcd import EtcdRegistry
from quartet.discovery.etcd_client import EtcdConfig
from tests.client.conftest import StartRouter
from tests.client.fake_router import FakeRouter
from tests.discovery.records import make_router
from tests.etcd_server import EtcdServer

NAMESPACE = "cli-routers"


@pytest.fixture
async def registry(shared_etcd: EtcdServer) -> AsyncIterator[EtcdRegistry]:
    registry = EtcdRegistry(EtcdConfig(endpoints=(shared_etcd.endpoint,), namespace=NAMESPACE))
    yield registry
    await registry.close()


async def run(*arguments: str) -> str:
    result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


async def test_routers_are_listed_with_their_addresses_and_found_by_other_commands(
    registry: EtcdRegistry, shared_etcd: EtcdServer, start_router: StartRouter
) -> None:
    address = await start_router(FakeRouter())
    found = ("--etcd", shared_etcd.endpoint, "--namespace", NAMESPACE)
    assert "router-0" not in await run("routers", *found)
    await registry.register(make_router(grpc_address=address, contract_version=CONTRACT_VERSION))
    listed = await run("routers", *found)
    for part in ("router-0", address, "127.0.0.1:8000", "127.0.0.1:9090", "tcp://127.0.0.1:50049", "40000"):
        assert part in listed
    assert await run("generate", "Hi", *found) == "one two three\n"


async def test_an_etcd_without_routers_is_said_so(shared_etcd: EtcdServer) -> None:
    result = await asyncio.to_thread(
        CliRunner().invoke, app, ["workers", "--etcd", shared_etcd.endpoint, "--namespace", "nobody"]
    )
    assert result.exit_code == 1
    assert "discovery lists no router" in result.output
