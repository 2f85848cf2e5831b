"""``quartet routers``, and ``--etcd`` of the commands that ask a router."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.app import app
from quartet.discovery.base import CONTRACT_VERSION
from quartet.discovery.etcd import EtcdRegistry
from quartet.discovery.etcd_client import EtcdClient, EtcdConfig
from quartet.errors import DiscoveryError
from tests.client.conftest import StartRouter
from tests.client.fake_router import FakeRouter
from tests.discovery.records import make_record, make_router
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


@pytest.fixture
def guarded_etcd(etcd_binary: Path, tmp_path: Path) -> Iterator[EtcdServer]:
    """An etcd that asks for a user: ``quartet`` may write all of the namespace, ``reader`` read its routers."""
    server = EtcdServer(etcd_binary, tmp_path / "etcd", {"bcrypt-cost": "4"})
    server.start()
    try:
        server.add_reader("reader", "read", f"/quartet/{NAMESPACE}/router/")
        server.enable_auth("quartet", "write", f"/quartet/{NAMESPACE}/")
        yield server
    finally:
        server.kill()


async def test_a_user_who_may_only_read_routers_finds_them(
    guarded_etcd: EtcdServer, start_router: StartRouter, tmp_path: Path
) -> None:
    files = {name: tmp_path / name for name in ("read", "write")}
    for name, file in files.items():
        file.write_text(f"{name}\n")
        file.chmod(0o600)
    at = EtcdConfig(endpoints=(guarded_etcd.endpoint,), namespace=NAMESPACE)
    registry = EtcdRegistry(replace(at, user="quartet", password_file=files["write"]))
    address = await start_router(FakeRouter())
    await registry.register(make_record())
    await registry.register(make_router(grpc_address=address, contract_version=CONTRACT_VERSION))
    found = ("--etcd", guarded_etcd.endpoint, "--namespace", NAMESPACE)
    user = ("--etcd-user", "reader", "--etcd-password-file", str(files["read"]))
    assert address in await run("routers", *found, *user)
    assert await run("generate", "Hi", *found, *user) == "one two three\n"
    assert f"{guarded_etcd.endpoint} answers" in await run("doctor", *found, *user)
    for command in (["routers"], ["generate", "Hi"], ["doctor"]):
        result = await asyncio.to_thread(CliRunner().invoke, app, [*command, *found])
        assert result.exit_code == 1 and "user name is empty" in result.output, result.output
    reader = EtcdClient(replace(at, user="reader", password_file=files["read"]))
    for refused in (reader.list(f"/quartet/{NAMESPACE}/"), reader.put(f"/quartet/{NAMESPACE}/router/mine", b"", 0)):
        with pytest.raises(DiscoveryError, match="permission denied"):
            await refused
    await reader.close()
    await registry.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--etcd-user", "reader"], "--etcd-user, --etcd-password-file: one without the other"),
        (["--etcd-password-file", "nothing"], "--etcd-password-file: there is no file nothing"),
        (["--etcd-key", __file__], "--etcd-cert, --etcd-key: one without the other"),
        (
            ["--etcd", "db.example.com:2379", "--etcd-user", "reader", "--etcd-password-file", __file__],
            "--etcd: user: .*in the clear",
        ),
    ],
)
@pytest.mark.parametrize("command", [["routers"], ["generate", "Hi"], ["doctor"]], ids=lambda command: command[0])
def test_access_to_etcd_that_is_not_whole_is_refused_by_the_option(
    command: list[str], given: list[str], message: str
) -> None:
    result = CliRunner().invoke(app, [*command, *given])
    assert result.exit_code == 1
    assert re.search(message, result.output), result.output
