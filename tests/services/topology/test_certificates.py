"""The certificates of one run: what lies on the disk, and what each of them is good for."""

from __future__ import annotations

import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quartet.discovery.base import Role
from quartet.rpc.audience import Identity, IdentityKind, caller_identity, parse_identity
from quartet.rpc.channels import TlsConfig, create_channel
from quartet.rpc.server import RpcServer, ServerConfig
from services.topology.certificates import CertificateAuthority, RunCertificates, issue_run_certificates

ROLES = {"decode-0": Role.DECODE, "router": Role.ROUTER}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run") / "certificates"


@pytest.fixture(scope="module")
def run(directory: Path) -> RunCertificates:
    return issue_run_certificates(directory, "prod", ROLES)


def certificate_of(tls: TlsConfig) -> x509.Certificate:
    return x509.load_pem_x509_certificate(tls.cert_file.read_bytes())


def identity_of(tls: TlsConfig) -> Identity | None:
    names = certificate_of(tls).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    [uri] = names.get_values_for_type(x509.UniformResourceIdentifier)
    return parse_identity(uri)


def public_key(certificate: Path) -> bytes:
    key = x509.load_pem_x509_certificate(certificate.read_bytes()).public_key()
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def test_only_the_owner_can_open_the_keys_and_the_authorities_own_are_nowhere(
    run: RunCertificates, directory: Path
) -> None:
    files = [path for path in directory.rglob("*") if path.is_file()]
    keys = {path for path in files if b"PRIVATE KEY" in path.read_bytes()}
    assert {path.stem for path in keys} == {*ROLES, "client", "operator", "etcd"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in keys} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in [directory, *directory.iterdir()]} == {0o700}
    authorities = {key.with_name("ca.pem") for key in keys}
    holders = {public_key(key.with_suffix(".pem")) for key in keys}
    assert len(holders) == len(keys) and holders.isdisjoint(map(public_key, authorities))
    assert run.operator.ca_file in authorities and run.etcd.ca_file in authorities
    assert run.operator.ca_file != run.etcd.ca_file


def test_each_certificate_names_its_holder(run: RunCertificates) -> None:
    assert identity_of(run.processes["decode-0"]) == Identity("prod", IdentityKind.WORKER, "decode-0")
    assert identity_of(run.processes["router"]) == Identity("prod", IdentityKind.ROUTER, "router")
    assert identity_of(run.operator) == Identity("prod", IdentityKind.OPERATOR, "operator")
    assert identity_of(run.client) == Identity("prod", IdentityKind.CLIENT, "client")


@asynccontextmanager
async def serving(tls: TlsConfig) -> AsyncIterator[str]:
    server = RpcServer(ServerConfig(tls=tls, namespace="prod"), [])
    yield f"127.0.0.1:{await server.start()}"
    await server.drain(0)


async def check(address: str, tls: TlsConfig) -> grpc.StatusCode:
    async with create_channel(address, tls) as channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=90)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def test_who_only_dials_cannot_serve(run: RunCertificates) -> None:
    for server, code in (
        (run.processes["decode-0"], grpc.StatusCode.OK),
        (run.client, grpc.StatusCode.UNAVAILABLE),
        (run.operator, grpc.StatusCode.UNAVAILABLE),
    ):
        usages = certificate_of(server).extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert (ExtendedKeyUsageOID.SERVER_AUTH in usages) is (code is grpc.StatusCode.OK)
        async with serving(server) as address:
            assert await check(address, run.processes["router"]) is code


async def test_a_certificate_for_etcd_opens_no_service(run: RunCertificates) -> None:
    of_etcd = run.etcd_client
    assert of_etcd.cert_file is not None and of_etcd.key_file is not None
    mixed = TlsConfig(ca_file=run.operator.ca_file, cert_file=of_etcd.cert_file, key_file=of_etcd.key_file)
    async with serving(run.processes["decode-0"]) as address:
        assert await check(address, mixed) is grpc.StatusCode.UNAVAILABLE


def test_the_longest_names_fit(tmp_path: Path) -> None:
    name = "w" * 128
    CertificateAuthority(tmp_path, name).issue(name, uris=[f"quartet://{name}/worker/{name}"], hosts=["localhost"])
    [certificate] = x509.load_pem_x509_certificates((tmp_path / f"{name}.pem").read_bytes())
    san = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    uris = [uri.encode() for uri in san.get_values_for_type(x509.UniformResourceIdentifier)]
    assert caller_identity({"x509_subject_alternative_name": uris}) == Identity(name, IdentityKind.WORKER, name)
