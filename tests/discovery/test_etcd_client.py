"""The etcd client against servers that behave badly, and over TLS."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from quartet.discovery.etcd import EtcdRegistry
from quartet.discovery.etcd_access import EtcdTls
from quartet.discovery.etcd_client import EtcdClient, EtcdConfig
from quartet.errors import DiscoveryError
from quartet.rpc.channels import TlsConfig
from services.topology.launch import free_port
from tests.certificates import CertificateAuthority
from tests.discovery.records import TIMEOUT_S, make_record
from tests.discovery.tcp_proxy import TcpProxy
from tests.etcd_server import EtcdServer


class BadEtcd(grpc.GenericRpcHandler):
    """Takes every call, and either ends it with CANCELLED, as etcd ends watches at its shutdown, or never answers."""

    def __init__(self, *, is_silent: bool) -> None:
        self._is_silent = is_silent

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        return grpc.stream_stream_rpc_method_handler(self._answer)

    async def _answer(self, requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if self._is_silent:
            await asyncio.Event().wait()
        await context.abort(grpc.StatusCode.CANCELLED, "etcdserver: cancelled")


@pytest.fixture(params=["cancels", "is silent"])
async def bad_client(request: pytest.FixtureRequest) -> AsyncIterator[EtcdClient]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((BadEtcd(is_silent=request.param == "is silent"),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = EtcdClient(EtcdConfig(endpoints=(f"127.0.0.1:{port}",), request_timeout_s=0.2))
    yield client
    await client.close()
    await server.stop(None)


async def test_a_server_that_cancels_or_is_silent_is_an_error_and_cancels_no_task_of_ours(
    bad_client: EtcdClient,
) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(DiscoveryError):
            await bad_client.list("/")
        with pytest.raises(DiscoveryError):
            await bad_client.follow("/", 1, _ignore, _ignore)
        with pytest.raises(DiscoveryError):
            async with bad_client.keep_alive() as stream:
                await stream.renew(1)


async def test_our_own_cancellation_stays_one(etcd: EtcdServer) -> None:
    client = EtcdClient(EtcdConfig(endpoints=(etcd.endpoint,)))
    opened = asyncio.Event()
    following = asyncio.create_task(client.follow("/", 1, opened.set, _ignore))
    await asyncio.wait_for(opened.wait(), TIMEOUT_S)
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(following, TIMEOUT_S)
    await client.close()


async def test_a_quiet_watch_is_distinguished_from_a_dead_one(etcd: EtcdServer) -> None:
    client = EtcdClient(EtcdConfig(endpoints=(etcd.endpoint,), request_timeout_s=0.8))
    following = asyncio.create_task(client.follow("/", 1, _ignore, _ignore))
    # Twice the silence after which a watch without answers ends.
    done, _ = await asyncio.wait({following}, timeout=2 * 1.6)
    assert not done
    following.cancel()
    await asyncio.wait({following})
    await client.close()


async def test_calls_that_fail_at_one_endpoint_together_go_to_the_next_together(etcd: EtcdServer) -> None:
    client = EtcdClient(EtcdConfig(endpoints=(f"127.0.0.1:{free_port()}", etcd.endpoint), request_timeout_s=TIMEOUT_S))
    assert await asyncio.gather(*(client.get("/a") for _ in range(2))) == [None, None]
    await client.close()


async def test_a_renewal_waits_no_longer_than_a_third_of_the_lease_whatever_other_calls_may_take() -> None:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((BadEtcd(is_silent=True),))
    endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    client = EtcdClient(EtcdConfig(endpoints=(endpoint,), lease_ttl_s=1, request_timeout_s=10 * TIMEOUT_S))
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(DiscoveryError):
            async with client.keep_alive() as stream:
                await stream.renew(1)
    await client.close()
    await server.stop(None)


async def test_a_conditional_put_changes_nothing_unless_all_conditions_hold(etcd: EtcdServer) -> None:
    client = EtcdClient(EtcdConfig(endpoints=(etcd.endpoint,)))
    assert await client.put_if("/a", b"1", 0, revision=0, absent=["/b", "/c"])
    first = await client.get("/a")
    assert first is not None
    assert not await client.put_if("/a", b"2", 0, revision=0)
    assert not await client.put_if("/a", b"2", 0, revision=first.revision - 1)
    assert not await client.put_if("/a", b"2", 0, revision=first.revision, absent=["/b", "/a"])
    assert await client.get("/a") == first
    assert await client.put_if("/a", b"2", 0, revision=first.revision, absent=["/b"])
    second = await client.get("/a")
    assert second is not None
    assert (second.value, second.revision) == (b"2", first.revision + 1)
    await client.close()


async def test_mutual_tls_works_and_a_client_without_a_certificate_is_refused(etcd: EtcdServer, tmp_path: Path) -> None:
    files = CertificateAuthority(tmp_path).issue("both-ends")
    async with TcpProxy(etcd.endpoint, tls=_server_context(files)) as proxy:
        mutual = EtcdRegistry(
            EtcdConfig(
                endpoints=(f"https://{proxy.endpoint}",),
                tls=EtcdTls(ca_file=files.ca_file, cert_file=files.cert_file, key_file=files.key_file),
            )
        )
        registration = await mutual.register(make_record())
        assert await mutual.workers() == [registration.record]
        await mutual.close()

        for config in (
            EtcdConfig(endpoints=(proxy.endpoint,), tls=EtcdTls(ca_file=files.ca_file), request_timeout_s=0.5),
            EtcdConfig(endpoints=(f"https://{proxy.endpoint}",), tls=EtcdTls(), request_timeout_s=0.5),
            EtcdConfig(endpoints=(proxy.endpoint,), request_timeout_s=0.5),
        ):
            refused = EtcdRegistry(config)
            with pytest.raises(DiscoveryError):
                await refused.workers()
            await refused.close()


def _server_context(files: TlsConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.cert_file, files.key_file)
    context.load_verify_locations(files.ca_file)
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["h2"])
    return context


def _ignore(*_: object) -> None:
    """Do nothing."""
