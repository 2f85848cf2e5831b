"""mTLS: who gets in, and files that can't be used."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives import serialization
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quartet.errors import ConfigError, PermissionDeniedError, UnauthenticatedError, WorkerUnavailableError
from quartet.rpc import channels
from quartet.rpc.audience import caller_identity
from quartet.rpc.channels import Dialer, TlsConfig, TlsFiles, check_pair, create_channel
from quartet.rpc.errors import from_rpc_error
from quartet.rpc.server import RpcServer, ServerConfig, Service
from tests.certificates import CertificateAuthority, end_of
from tests.rpc.conftest import StartServer
from tests.rpc.services import generic_service

DRAIN = "/quartet.v1.WorkerService/Drain"


async def return_caller(request: bytes, context: Any) -> bytes:
    identity = caller_identity(context.auth_context())
    return identity.name.encode() if identity else b"nobody"


def service() -> Service:
    return generic_service("quartet.v1.WorkerService", {"Drain": grpc.unary_unary_rpc_method_handler(return_caller)})


async def start(start_server: StartServer, authority: CertificateAuthority, **changes: bool) -> str:
    tls = replace(authority.issue("server", "quartet://default/worker/w1"), **changes)
    _, address = await start_server([service()], ServerConfig(tls=tls))
    return address


async def drain_as(address: str, tls: TlsConfig) -> bytes:
    async with create_channel(address, tls) as channel:
        return bytes(await channel.unary_unary(DRAIN)(b"", timeout=30))


async def test_an_operator_may_drain_and_is_known_by_name(
    start_server: StartServer, authority: CertificateAuthority
) -> None:
    address = await start(start_server, authority)
    assert await drain_as(address, authority.issue("operator", "quartet://default/operator/olga")) == b"olga"


async def test_a_client_may_not_drain(start_server: StartServer, authority: CertificateAuthority) -> None:
    address = await start(start_server, authority)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await drain_as(address, authority.issue("client", "quartet://default/client/carl"))
    assert isinstance(from_rpc_error(caught.value), PermissionDeniedError)


async def test_a_client_that_may_not_drain_is_refused_before_its_request_is_read(
    start_server: StartServer, authority: CertificateAuthority
) -> None:
    address = await start(start_server, authority)
    async with create_channel(address, authority.issue("client", "quartet://default/client/carl")) as channel:
        call = channel.stream_unary(DRAIN)(timeout=30)  # it never sends one
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
    assert isinstance(from_rpc_error(caught.value), PermissionDeniedError)


async def test_an_operator_of_another_namespace_is_refused(
    start_server: StartServer, authority: CertificateAuthority
) -> None:
    address = await start(start_server, authority)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await drain_as(address, authority.issue("foreign", "quartet://other/operator/olga"))
    assert isinstance(from_rpc_error(caught.value), PermissionDeniedError)


async def test_a_certificate_without_an_identity_is_refused(
    start_server: StartServer, authority: CertificateAuthority
) -> None:
    address = await start(start_server, authority)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await drain_as(address, authority.issue("nobody"))
    assert isinstance(from_rpc_error(caught.value), UnauthenticatedError)


async def test_health_is_open_to_every_identity(start_server: StartServer, authority: CertificateAuthority) -> None:
    address = await start(start_server, authority)
    async with create_channel(address, authority.issue("client", "quartet://default/client/carl")) as channel:
        response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
    assert response.status == health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize("how", ["in the clear", "without a certificate", "by another authority"])
async def test_strangers_do_not_even_connect(
    start_server: StartServer, authority: CertificateAuthority, other_authority: CertificateAuthority, how: str
) -> None:
    address = await start(start_server, authority)
    async with stranger(how, address, authority, other_authority) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(DRAIN)(b"", timeout=30)
    assert isinstance(from_rpc_error(caught.value), WorkerUnavailableError)


def stranger(how: str, address: str, authority: CertificateAuthority, other: CertificateAuthority) -> grpc.aio.Channel:
    if how == "in the clear":
        return create_channel(address, None)
    if how == "without a certificate":
        credentials = grpc.ssl_channel_credentials(authority.ca_file.read_bytes())
        return grpc.aio.secure_channel(address, credentials)
    tls = replace(other.issue("operator", "quartet://default/operator/mallory"), ca_file=authority.ca_file)
    return create_channel(address, tls)


async def test_a_channel_refuses_a_server_of_another_authority(
    start_server: StartServer, authority: CertificateAuthority, other_authority: CertificateAuthority
) -> None:
    address = await start(start_server, authority)
    tls = replace(authority.issue("operator", "quartet://default/operator/olga"), ca_file=other_authority.ca_file)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await drain_as(address, tls)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_server_is_verified_by_the_configured_name(
    start_server: StartServer, authority: CertificateAuthority
) -> None:
    address = await start(start_server, authority)
    tls = authority.issue("operator", "quartet://default/operator/olga")
    assert await drain_as(address, replace(tls, server_name="localhost")) == b"olga"
    with pytest.raises(grpc.aio.AioRpcError):
        await drain_as(address, replace(tls, server_name="elsewhere.example"))


async def test_without_client_certificates_a_caller_is_a_client(
    start_server: StartServer, authority: CertificateAuthority
) -> None:
    address = await start(start_server, authority, require_client_cert=False)
    credentials = grpc.ssl_channel_credentials(authority.ca_file.read_bytes())
    async with grpc.aio.secure_channel(address, credentials) as channel:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(DRAIN)(b"", timeout=30)
    assert isinstance(from_rpc_error(caught.value), UnauthenticatedError)


@pytest.mark.parametrize("setting", ["ca_file", "cert_file", "key_file"])
@pytest.mark.parametrize("content", [None, b"not a certificate"], ids=["missing", "rubbish"])
async def test_a_file_that_cannot_be_used_is_named(
    authority: CertificateAuthority, tmp_path: Path, setting: str, content: bytes | None
) -> None:
    path = tmp_path / "file.pem"
    if content is not None:
        path.write_bytes(content)
    tls = replace(authority.issue("server"), **{setting: path})
    with pytest.raises(ConfigError, match=rf"tls\.{setting}.*file\.pem"):
        create_channel("127.0.0.1:1", tls)
    with pytest.raises(ConfigError, match=rf"tls\.{setting}.*file\.pem"):
        await RpcServer(ServerConfig(tls=tls), []).start()


async def test_a_process_dials_on_while_its_files_are_missing_and_with_new_ones_once_they_are_there(
    start_server: StartServer, authority: CertificateAuthority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = await start(start_server, authority)
    own = CertificateFolder(authority, tmp_path)
    own.renew("olga")
    dialer = Dialer(own.tls)
    own.tls.cert_file.unlink()
    assert await drain_by(dialer, address) == b"olga"
    own.tls.cert_file.write_bytes(b"half writ")
    assert await drain_by(dialer, address) == b"olga"
    assert await drain_by(dialer, address) == b"olga"
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 2 and all("tls.cert_file" in warning for warning in warnings)
    # The certificate is there before its key: a channel would keep the two for ever.
    own.renew("oscar", only="cert_file")
    assert await drain_by(dialer, address) == b"olga"
    assert "can't be used together" in caplog.text
    own.renew("oscar")
    assert await drain_by(dialer, address) == b"oscar"
    own.tls.key_file.unlink()
    assert await drain_by(dialer, address) == b"oscar"


class CertificateFolder:
    """An operator's certificate that is renewed in place."""

    def __init__(self, authority: CertificateAuthority, directory: Path) -> None:
        self._authority = authority
        self.tls = TlsConfig(ca_file=authority.ca_file, cert_file=directory / "own.pem", key_file=directory / "own.key")

    def renew(self, name: str, *, only: str = "", days: int = 365) -> None:
        files = self._authority.issue(name, f"quartet://default/operator/{name}", valid=timedelta(days=days))
        for setting in [only] if only else ["cert_file", "key_file"]:
            getattr(self.tls, setting).write_bytes(getattr(files, setting).read_bytes())


async def drain_by(dialer: Dialer, address: str) -> bytes:
    async with dialer.open(address) as channel:
        return bytes(await channel.unary_unary(DRAIN)(b"", timeout=30))


async def test_a_server_says_when_the_certificate_ends_that_new_connections_get(
    start_server: StartServer, authority: CertificateAuthority, tmp_path: Path
) -> None:
    own = CertificateFolder(authority, tmp_path)
    own.renew("first", days=10)
    server, _ = await start_server([service()], ServerConfig(tls=own.tls))
    first = server.certificate_end()
    assert first == end_of(own.tls)
    own.renew("second", only="cert_file", days=300)
    assert server.certificate_end() == first, "its key is not there yet"
    own.renew("second", days=300)
    assert server.certificate_end() == end_of(own.tls) != first  # although nobody has connected
    in_the_clear, _ = await start_server([service()])
    assert in_the_clear.certificate_end() is None


async def test_a_server_counts_changes_of_its_files_whether_anybody_connects_or_not(
    authority: CertificateAuthority, tmp_path: Path
) -> None:
    own, counted = CertificateFolder(authority, tmp_path), list[bool]()
    own.renew("first")
    server = RpcServer(ServerConfig(tls=own.tls), [], count_reload=counted.append)
    await server.start()
    server.certificate_end()
    assert counted == []
    own.tls.key_file.unlink()
    for _ in range(2):
        server.certificate_end()
    assert counted == [False]
    own.renew("second")
    server.certificate_end()
    assert counted == [False, True]
    await server.drain(0)


async def test_who_dials_says_when_the_first_certificate_ends_that_an_open_channel_has(
    authority: CertificateAuthority, tmp_path: Path
) -> None:
    own = CertificateFolder(authority, tmp_path)
    own.renew("first", days=10)
    dialer = Dialer(own.tls)
    first = dialer.certificate_end()
    assert first == end_of(own.tls)
    old = dialer.open("127.0.0.1:1")
    own.renew("second", days=300)
    new = dialer.open("127.0.0.1:1")
    assert dialer.certificate_end() == first, "the open channel connects with it again"
    await old.close()
    del old
    assert dialer.certificate_end() == end_of(own.tls)
    await new.close()
    assert Dialer(None).certificate_end() is None


def test_files_that_do_not_fit_or_have_a_password_are_refused_at_the_start(
    authority: CertificateAuthority, tmp_path: Path
) -> None:
    one, other = authority.issue("one"), authority.issue("other")
    locked = tmp_path / "locked.key"
    key = serialization.load_pem_private_key(one.key_file.read_bytes(), None)
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    for key_file in (other.key_file, locked):
        with pytest.raises(ConfigError, match="can't be used together"):
            Dialer(replace(one, key_file=key_file))


def test_files_that_change_while_they_are_read_are_read_again(
    authority: CertificateAuthority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = CertificateFolder(authority, tmp_path)
    own.renew("olga")
    files = TlsFiles(own.tls, "dialling")
    of_olga = files.current()
    own.renew("oscar")

    def check_then_replace(*given: Any) -> None:
        check_pair(*given)
        own.renew("otto")
        monkeypatch.setattr(channels, "check_pair", check_pair)

    monkeypatch.setattr(channels, "check_pair", check_then_replace)
    assert files.current() is of_olga, "oscar's was checked, and is not there any more"
    of_otto = files.current()
    assert (of_otto.key, of_otto.cert) == (own.tls.key_file.read_bytes(), own.tls.cert_file.read_bytes())
    assert of_otto.cert != of_olga.cert and files.current() is of_otto


def test_a_file_that_cannot_be_used_at_the_start_of_a_process_is_named(
    authority: CertificateAuthority, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"tls\.key_file"):
        Dialer(replace(authority.issue("server"), key_file=tmp_path / "none"))


async def test_new_connections_get_files_that_were_replaced_and_running_ones_go_on(
    start_server: StartServer,
    authority: CertificateAuthority,
    other_authority: CertificateAuthority,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    served = TlsConfig(ca_file=tmp_path / "ca.pem", cert_file=tmp_path / "cert.pem", key_file=tmp_path / "key.pem")

    def install(issued: TlsConfig) -> None:
        for name in ("ca_file", "cert_file", "key_file"):
            getattr(served, name).write_bytes(getattr(issued, name).read_bytes())

    def operator(issuer: CertificateAuthority) -> TlsConfig:
        return issuer.issue("operator", "quartet://default/operator/olga")

    install(authority.issue("server", "quartet://default/worker/w1"))
    _, address = await start_server([service()], ServerConfig(tls=served))
    async with Dialer(operator(authority)).open(address) as running:
        assert await running.unary_unary(DRAIN)(b"", timeout=30) == b"olga"
        install(other_authority.issue("server", "quartet://default/worker/w1"))
        async with Dialer(operator(other_authority)).open(address) as channel:
            assert await channel.unary_unary(DRAIN)(b"", timeout=30) == b"olga"
        async with Dialer(operator(authority)).open(address) as channel:  # neither trusts the other any more
            with pytest.raises(grpc.aio.AioRpcError):
                await channel.unary_unary(DRAIN)(b"", timeout=30)
        assert await running.unary_unary(DRAIN)(b"", timeout=30) == b"olga"
    served.cert_file.write_bytes(operator(authority).cert_file.read_bytes())  # not that of the key
    async with Dialer(operator(other_authority)).open(address) as channel:
        assert await channel.unary_unary(DRAIN)(b"", timeout=30) == b"olga"
    assert "the certificates of before" in caplog.text
