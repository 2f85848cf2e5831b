"""Whom a request is accounted to, by certificate."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import grpc
import pytest

from quartet.rpc.channels import TlsConfig, create_channel
from quartet.rpc.errors import from_rpc_error
from quartet.rpc.server import ServerConfig
from quartet.v1 import router_pb2 as pb
from services.topology.launch import draw_events_key
from tests.certificates import CertificateAuthority
from tests.router.session_reader import SessionReader
from tests.router.system import TIMEOUT_S, Stub, System, running_system
from tests.router.test_servicer import generate, make_start


async def tenant_of(system: System, tls: TlsConfig | None, claimed: str, caplog: pytest.LogCaptureFixture) -> str:
    """The tenant that the log names; that no model is there makes no difference to it."""
    caplog.clear()
    async with create_channel(system.address, tls) as channel, asyncio.timeout(TIMEOUT_S):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(Stub(channel), make_start(tenant=claimed))
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    [record] = [record for record in caplog.records if record.name == "router.request_log"]
    return str(record.quartet_fields.get("tenant", ""))


async def test_a_tenant_is_the_certificates_name_unless_a_trusted_gateway_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="router")
    authority = CertificateAuthority(tmp_path / "certificates")
    client = authority.issue("client", "quartet://default/client/acme")
    gateway = authority.issue("gateway", "quartet://default/client/front")
    server = ServerConfig(tls=authority.issue("router", "quartet://default/router/r1"))
    key_file, gateways = draw_events_key(tmp_path), ("front",)
    async with running_system(
        tmp_path, monkeypatch, server=server, events_key_file=key_file, trusted_gateways=gateways
    ) as (system, _stub):
        assert await tenant_of(system, client, "", caplog) == "acme"
        assert await tenant_of(system, client, "somebody-else", caplog) == "acme"
        assert await tenant_of(system, gateway, "customer", caplog) == "customer"
        assert await tenant_of(system, gateway, "", caplog) == "front"
        # Looking at the fleet is for operators.
        async with create_channel(system.address, client) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await Stub(channel).ListWorkers(pb.ListWorkersRequest())
        assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED


async def test_an_identity_bound_to_tenants_may_use_no_other_in_any_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="router")
    authority = CertificateAuthority(tmp_path / "certificates")
    front = authority.issue("gateway", "quartet://default/client/front")
    server = ServerConfig(tls=authority.issue("router", "quartet://default/router/r1"))
    key_file, bound = draw_events_key(tmp_path), {"front": ("eu-1", "eu-*")}
    async with running_system(
        tmp_path, monkeypatch, server=server, events_key_file=key_file, identity_tenants=bound
    ) as (system, _stub):
        assert await tenant_of(system, front, "eu-7", caplog) == "eu-7"
        assert await tenant_of(system, front, "", caplog) == "eu-1"
        start = make_start(tenant="us-1")
        async with create_channel(system.address, front) as channel, asyncio.timeout(TIMEOUT_S):
            stub = Stub(channel)
            calls = (
                generate(stub, start),
                stub.Place(pb.PlaceRequest(start=start)),
                stub.Explain(pb.ExplainRequest(start=start)),
            )
            for call in calls:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                error = from_rpc_error(caught.value)
                assert (caught.value.code(), error.field) == (grpc.StatusCode.PERMISSION_DENIED, "tenant")
            session = SessionReader(stub)
            await session.start(0, start)
            await session.half_close()
            await session.read_all()
            failure = session.received[0].failure
            assert failure is not None and (failure.reason, failure.field) == ("PERMISSION_DENIED", "tenant")


async def test_only_routers_say_on_a_session_where_a_prompt_is_prefilled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = CertificateAuthority(tmp_path / "certificates")
    server = ServerConfig(tls=authority.issue("router", "quartet://default/router/r1"), trusted_namespaces=("global",))
    reasons = {"default/client/acme": "PERMISSION_DENIED", "global/router/r1": "INVALID_FIELD"}
    async with running_system(tmp_path, monkeypatch, server=server, events_key_file=draw_events_key(tmp_path)) as (
        system,
        _stub,
    ):
        for number, (holder, reason) in enumerate(reasons.items()):
            tls = authority.issue(f"holder-{number}", f"quartet://{holder}")
            async with create_channel(system.address, tls) as channel, asyncio.timeout(TIMEOUT_S):
                session = SessionReader(Stub(channel))
                await session.start(0, make_start(), prefill_namespaces=["nowhere"])
                await session.start(1, make_start(), sent_at_unix_ns=5)
                await session.half_close()
                await session.read_all()
            failure, timed = session.received[0].failure, session.received[1].failure
            assert failure is not None and (failure.reason, failure.field) == (reason, "prefill_namespaces")
            is_refused = timed is not None and (timed.reason, timed.field) == (reason, "sent_at_unix_ns")
            assert is_refused == (reason == "PERMISSION_DENIED")


async def test_callers_that_may_call_generate_may_call_explain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = CertificateAuthority(tmp_path / "certificates")
    server = ServerConfig(tls=authority.issue("router", "quartet://default/router/r1"))
    # That no model is there is said to those who may know.
    codes = {
        "client": grpc.StatusCode.UNAVAILABLE,
        "operator": grpc.StatusCode.UNAVAILABLE,
        "worker": grpc.StatusCode.PERMISSION_DENIED,
    }
    key_file = draw_events_key(tmp_path)
    async with running_system(tmp_path, monkeypatch, server=server, events_key_file=key_file) as (system, _stub):
        for kind, code in codes.items():
            tls = authority.issue(kind, f"quartet://default/{kind}/someone")
            async with create_channel(system.address, tls) as channel, asyncio.timeout(TIMEOUT_S):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await Stub(channel).Explain(pb.ExplainRequest(start=make_start()))
            assert caught.value.code() == code, kind


@pytest.mark.parametrize(("address", "tenant"), [("127.0.0.1:0", "acme"), ("0.0.0.0:0", "")])
async def test_without_certificates_a_tenant_is_believed_on_loopback_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, address: str, tenant: str
) -> None:
    caplog.set_level(logging.INFO, logger="router")
    server = ServerConfig(address=address, insecure=True)
    async with running_system(tmp_path, monkeypatch, server=server) as (system, _stub):
        assert await tenant_of(system, None, "acme", caplog) == tenant
