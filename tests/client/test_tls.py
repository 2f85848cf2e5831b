"""The client where the router wants certificates: it shows its own, and reports what is wrong with others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from quartet.client import QuartetClient
from quartet.errors import PermissionDeniedError, RouterUnavailableError
from quartet.rpc.server import RpcServer, ServerConfig
from tests.certificates import CertificateAuthority
from tests.client.fake_router import FakeRouter


@pytest.fixture
def authority(tmp_path: Path) -> CertificateAuthority:
    return CertificateAuthority(tmp_path / "ours")


@pytest.fixture
async def address(authority: CertificateAuthority) -> AsyncIterator[str]:
    """Of a router that serves by mTLS."""
    config = ServerConfig(tls=authority.issue("router", "quartet://default/router/r1"))
    server = RpcServer(config, [FakeRouter().service()])
    yield f"127.0.0.1:{await server.start()}"
    await server.drain(0)


async def test_a_client_is_served_as_what_its_certificate_says(address: str, authority: CertificateAuthority) -> None:
    async with QuartetClient(address, tls=authority.issue("carl", "quartet://default/client/carl")) as client:
        assert (await client.complete("Hi")).text == "one two three"
        with pytest.raises(PermissionDeniedError):
            await client.list_workers()
    async with QuartetClient(address, tls=authority.issue("olga", "quartet://default/operator/olga")) as client:
        assert await client.list_workers() == []


async def test_a_wrong_authority_or_none_is_reported_with_the_address(address: str, tmp_path: Path) -> None:
    strangers = CertificateAuthority(tmp_path / "theirs").issue("carl", "quartet://default/client/carl")
    for tls in (strangers, None):
        async with QuartetClient(address, tls=tls) as client:
            with pytest.raises(RouterUnavailableError, match=address):
                await client.complete("Hi")
