"""Etcd asks who calls: certificates and passwords that are wrong, in the clear or missing; tokens that expire."""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from aetcd import rpc
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from quartet.config import build
from quartet.discovery import etcd_client
from quartet.discovery.base import WorkerAdded
from quartet.discovery.create import DiscoveryConfig, create_registry
from quartet.discovery.etcd import EtcdRegistry
from quartet.discovery.etcd_access import EtcdTls
from quartet.discovery.etcd_client import EtcdClient, EtcdConfig
from quartet.errors import ConfigError, DiscoveryError
from services.topology.launch import free_port
from tests.certificates import CertificateAuthority
from tests.discovery.records import TIMEOUT_S, eventually, make_record, read_until, synchronised
from tests.discovery.tcp_proxy import TcpProxy
from tests.etcd_server import EtcdServer

USER, PASSWORD = "quartet", "correct horse"
PREFIX = "/quartet/"


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> EtcdTls:
    files = CertificateAuthority(tmp_path_factory.mktemp("certificates")).issue("etcd-client")
    return EtcdTls(ca_file=files.ca_file, cert_file=files.cert_file, key_file=files.key_file)


@pytest.fixture
def password_file(tmp_path: Path) -> Path:
    return write_secret(tmp_path / "password", PASSWORD + "\n")


@pytest.fixture
def guarded_etcd(etcd_binary: Path, tmp_path: Path) -> Iterator[EtcdServer]:
    """An etcd that asks for a user and forgets its tokens when it ends."""
    yield from serve_guarded(EtcdServer(etcd_binary, tmp_path / "etcd", {"bcrypt-cost": "4"}))


@pytest.fixture
def forgetful_etcd(etcd_binary: Path, tmp_path: Path) -> Iterator[EtcdServer]:
    """An etcd that asks for a user and whose tokens expire after two seconds, however much they are used."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    files = {"pub-key": tmp_path / "jwt.pub", "priv-key": tmp_path / "jwt.key"}
    encoding = serialization.Encoding.PEM
    files["pub-key"].write_bytes(
        key.public_key().public_bytes(encoding, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    files["priv-key"].write_bytes(
        key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    token = ",".join(["jwt", "sign-method=RS256", "ttl=2s", *(f"{name}={path}" for name, path in files.items())])
    options = {"bcrypt-cost": "4", "auth-token": token}
    yield from serve_guarded(EtcdServer(etcd_binary, tmp_path / "etcd", options))


def serve_guarded(server: EtcdServer) -> Iterator[EtcdServer]:
    server.start()
    try:
        server.enable_auth(USER, PASSWORD, PREFIX)
        yield server
    finally:
        server.kill()


def write_secret(path: Path, content: str) -> Path:
    path.write_text(content)
    path.chmod(0o600)
    return path


def configure(server: EtcdServer, password_file: Path, **changes: Any) -> EtcdConfig:
    settings = {"user": USER, "password_file": password_file, "lease_ttl_s": 2, "request_timeout_s": 5.0, **changes}
    return EtcdConfig(endpoints=(server.endpoint,), **settings)


@pytest.mark.parametrize("endpoint", ["db:2379", "https://db:2379"])
def test_a_tls_block_encrypts_every_endpoint(endpoint: str, tls: EtcdTls, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[str, object, dict[str, object]]] = []
    monkeypatch.setattr(etcd_client, "open_channel", lambda *arguments: opened.append(arguments))
    for block in (EtcdTls(), replace(tls, cert_file=None, key_file=None), replace(tls, server_name="etcd.internal")):
        _, end = etcd_client._open_channel(EtcdConfig(endpoints=(endpoint,), tls=block), endpoint)
        assert (end is None) == (block.cert_file is None)
        address, credentials, options = opened.pop()
        assert address == "db:2379"
        assert isinstance(credentials, grpc.ChannelCredentials)
        assert options.get("grpc.ssl_target_name_override") == block.server_name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cert_file": "c.pem", "key_file": "k.pem"}, r"^discovery\.etcd\.cert_file: unknown; .*\btls\b"),
        ({"ca_file": "ca.pem"}, r"^discovery\.etcd\.ca_file: unknown"),
        ({"tls": {"cert_file": "c.pem"}}, r"^discovery\.etcd\.tls\.key_file: is missing"),
        ({"tls": {"key_file": "k.pem"}}, r"^discovery\.etcd\.tls\.cert_file: is missing"),
        ({"endpoints": ["https://db:2379"]}, r"^discovery\.etcd\.endpoints: .*takes the setting tls"),
        ({"endpoints": ["db:2379", "http://db-1:2379"], "tls": {}}, r"^discovery\.etcd\.endpoints: http://db-1.*clear"),
        ({"endpoints": ["db"]}, r"^discovery\.etcd\.endpoints: must be host:port"),
        ({"user": "quartet"}, r"^discovery\.etcd\.password_file: is missing"),
        ({"password_file": "p"}, r"^discovery\.etcd\.user: is missing"),
        ({"endpoints": ["db:2379"], "user": "quartet", "password_file": "p"}, r"^discovery\.etcd\.user: .*clear"),
    ],
)
def test_settings_that_would_not_encrypt_what_they_seem_to_are_refused_by_name(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(DiscoveryConfig, {"etcd": settings}, "discovery")


@pytest.mark.parametrize("setting", ["ca_file", "cert_file", "key_file"])
@pytest.mark.parametrize("content", [None, "rubbish"])
def test_a_certificate_that_cannot_be_used_at_the_start_is_named(
    setting: str, content: str | None, tls: EtcdTls, tmp_path: Path
) -> None:
    path = tmp_path / "file.pem"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=rf"^discovery\.etcd\.tls\.{setting}: .*file\.pem"):
        create_registry(DiscoveryConfig(etcd=EtcdConfig(tls=replace(tls, **{setting: path}))))


async def test_a_certificate_that_is_gone_at_a_failover_is_a_discovery_error(tmp_path: Path) -> None:
    files = CertificateAuthority(tmp_path).issue("etcd-client")
    config = EtcdConfig(
        endpoints=tuple(f"127.0.0.1:{free_port()}" for _ in range(2)),
        tls=EtcdTls(ca_file=files.ca_file, cert_file=files.cert_file, key_file=files.key_file),
        request_timeout_s=0.2,
    )
    client = EtcdClient(config)
    files.cert_file.unlink()
    for _ in config.endpoints:
        with pytest.raises(DiscoveryError, match=r"discovery\.etcd\.tls\.cert_file: cannot read"):
            await client.list(PREFIX)
        with pytest.raises(DiscoveryError, match=r"discovery\.etcd\.tls\.cert_file: cannot read"):
            async with client.keep_alive():
                pass
    await client.close()


async def test_a_registration_outlives_a_certificate_that_is_gone_for_a_while(
    shared_etcd: EtcdServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "quartet.discovery")
    files = CertificateAuthority(tmp_path).issue("both-ends")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.cert_file, files.key_file)
    context.set_alpn_protocols(["h2"])
    plain = EtcdConfig(endpoints=(shared_etcd.endpoint,), namespace=secrets.token_hex(4), lease_ttl_s=2)
    async with (
        TcpProxy(shared_etcd.endpoint, tls=context) as first,
        TcpProxy(shared_etcd.endpoint, tls=context) as other,
    ):
        tls = EtcdTls(ca_file=files.ca_file, cert_file=files.cert_file, key_file=files.key_file)
        registry = EtcdRegistry(replace(plain, endpoints=(first.endpoint, other.endpoint), tls=tls))
        registration = await registry.register(make_record())
        hidden = files.cert_file.rename(tmp_path / "hidden.pem")
        await first.cut()

        async def is_noticed() -> bool:
            return "cert_file: cannot read" in caplog.text

        async def is_renewed() -> bool:
            return other.num_connections > 0  # nothing but the registration dials it

        async def is_listed() -> bool:
            return await registry.workers() == [registration.record]

        await eventually(is_noticed)
        hidden.rename(files.cert_file)
        await eventually(is_renewed)
        await eventually(is_listed)
        await registry.close()


@pytest.mark.parametrize(
    ("content", "fault"), [("", "is empty"), ("\n", "is empty"), ("\udcff", "UTF-8"), (None, "cannot read")]
)
def test_a_password_that_cannot_be_used_at_the_start_is_named(content: str | None, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "password"
    if content is not None:
        path.write_bytes(content.encode(errors="surrogateescape"))
        path.chmod(0o600)
    with pytest.raises(ConfigError, match=rf"^discovery\.etcd\.password_file: .*{fault}"):
        EtcdClient(EtcdConfig(user=USER, password_file=path))


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o601])
def test_a_password_whose_file_everybody_may_open_is_refused(password_file: Path, mode: int) -> None:
    password_file.chmod(mode)
    with pytest.raises(ConfigError, match=r"^discovery\.etcd\.password_file: .*open to everybody"):
        EtcdClient(EtcdConfig(user=USER, password_file=password_file))


async def test_workers_and_watches_of_a_user_live_on_when_etcd_forgets_its_tokens(
    guarded_etcd: EtcdServer, password_file: Path
) -> None:
    config = configure(guarded_etcd, password_file)
    worker, reader = EtcdRegistry(config), EtcdRegistry(config)
    registration = await worker.register(make_record("kept"))
    watch = reader.watch()
    assert await synchronised(watch) == [WorkerAdded(registration.record)]

    await asyncio.to_thread(guarded_etcd.restart)
    late = await worker.register(make_record("late"))
    await read_until(watch, WorkerAdded(late.record))
    assert await reader.workers() == [registration.record, late.record]
    for registry in (worker, reader):
        await registry.close()


async def test_a_token_that_expired_is_replaced(forgetful_etcd: EtcdServer, password_file: Path) -> None:
    caller, follower = (EtcdClient(configure(forgetful_etcd, password_file)) for _ in range(2))
    await caller.put(f"{PREFIX}a", b"1", lease_id=0)
    revision = (await follower.list(PREFIX)).revision
    for client in (caller, follower):
        await token_expires(client)

    # A lone call notices it and is repeated.
    assert [value.key for value in (await caller.list(PREFIX)).values] == [f"{PREFIX}a"]
    # A watch breaks by it, and a later one stands: the answer to each break is to begin again.
    with pytest.raises(DiscoveryError, match="invalid auth token"):
        await follower.follow(PREFIX, revision, ignore, ignore)
    opened = asyncio.Event()

    async def follow() -> None:
        while True:
            with suppress(DiscoveryError):
                await follower.follow(PREFIX, revision, opened.set, ignore)

    following = asyncio.create_task(follow())
    async with asyncio.timeout(TIMEOUT_S):
        await opened.wait()
    following.cancel()
    await asyncio.wait({following})
    for client in (caller, follower):
        await client.close()


async def token_expires(client: EtcdClient) -> None:
    """Wait until etcd refuses the token that ``client`` has now."""
    tokens = client._tokens
    assert tokens is not None
    metadata = tokens._metadata
    async with grpc.aio.insecure_channel(client.config.endpoints[0]) as channel:
        kv = rpc.KVStub(channel)

        async def is_refused() -> bool:
            try:
                await kv.Range(rpc.RangeRequest(key=PREFIX.encode()), metadata=metadata, timeout=TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                return error.code() is grpc.StatusCode.UNAUTHENTICATED
            return False

        await eventually(is_refused)


async def test_calls_that_find_no_token_ask_for_it_once(guarded_etcd: EtcdServer, password_file: Path) -> None:
    client = EtcdClient(configure(guarded_etcd, password_file))
    asked: list[object] = []
    log_in = client._tokens._log_in  # type: ignore[union-attr]

    async def counted(*arguments: Any) -> Any:
        asked.append(arguments)
        return await log_in(*arguments)

    client._tokens._log_in = counted  # type: ignore[union-attr, method-assign]
    await asyncio.gather(*(client.list(PREFIX) for _ in range(8)))
    assert len(asked) == 1
    await client.close()


async def test_what_etcd_does_not_allow_a_caller_is_a_discovery_error_without_the_password(
    guarded_etcd: EtcdServer, password_file: Path, tmp_path: Path
) -> None:
    wrong = configure(guarded_etcd, write_secret(tmp_path / "wrong", "battery staple"))
    nobody = replace(wrong, user="", password_file=None)
    for config, prefix, reason in (
        (wrong, PREFIX, "invalid user ID or password"),
        (nobody, PREFIX, "user name is empty"),
        (configure(guarded_etcd, password_file), "/elsewhere/", "permission denied"),
    ):
        client = EtcdClient(config)
        with pytest.raises(DiscoveryError, match=reason) as refused:
            await client.list(prefix)
        assert "battery" not in str(refused.value) and PASSWORD not in str(refused.value)
        await client.close()


async def test_a_user_reaches_an_etcd_that_asks_for_none(shared_etcd: EtcdServer, password_file: Path) -> None:
    client = EtcdClient(configure(shared_etcd, password_file))
    await client.list(PREFIX)
    await client.close()


def ignore(*_: object) -> None:
    """Do nothing."""
