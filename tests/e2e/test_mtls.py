"""Everything over mutual TLS: certificates say who is who, and who may call what."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from quartet.client import QuartetClient, RequestPath, Sampling
from quartet.errors import PermissionDeniedError, ServingError
from quartet.rpc.channels import TlsConfig
from quartet.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
    transfer_pb2,
    transfer_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from tests import tiny
from tests.certificates import CertificateAuthority, end_of
from tests.e2e import placed
from tests.e2e.conftest import StartStack
from tests.e2e.fork_server import ForkServer
from tests.e2e.stack import Stack, StackConfig

_TIMEOUT_S = 90.0
_START_TIMEOUT_S = 150.0


@dataclass(frozen=True)
class Identities:
    """Who there is."""

    servers: dict[str, TlsConfig]
    client: TlsConfig
    operator: TlsConfig
    # Of the same authority, but of another deployment.
    stranger: TlsConfig


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> Identities:
    authority = CertificateAuthority(tmp_path_factory.mktemp("certificates"))

    def issue(kind: str, name: str, namespace: str = "default") -> TlsConfig:
        return authority.issue(f"{namespace}-{name}", f"quartet://{namespace}/{kind}/{name}")

    workers = {name: issue("worker", name) for name in ("prefill-0", "decode-0")}
    return Identities(
        servers=workers | {"router": issue("router", "router")},
        client=issue("client", "alice"),
        operator=issue("operator", "bob"),
        stranger=issue("client", "mallory", "elsewhere"),
    )


@pytest.fixture(scope="module")
def tls_stack(start_stack: StartStack, identities: Identities) -> Stack:
    config = StackConfig(
        # Shared memory has no TLS to prove.
        worker={"transfer.ways": ["grpc"]},
        tls=identities.servers,
        operator=identities.operator,
    )
    return start_stack(config)


@pytest.fixture
def call(tls_stack: Stack) -> Iterator[Callable[..., grpc.StatusCode]]:
    """A function that makes one call with an identity and returns its status code."""

    def make(name: str, identity: TlsConfig, method: Callable[[grpc.Channel], Any]) -> grpc.StatusCode:
        with tls_stack.channel(name, identity) as channel:
            try:
                answer = method(channel)
                # A stream's status comes with its end.
                if not hasattr(answer, "DESCRIPTOR"):
                    list(answer)
            except grpc.RpcError as error:
                code: grpc.StatusCode = error.code()
                return code
            return grpc.StatusCode.OK

    yield make


def get_models(channel: grpc.Channel) -> Any:
    return router_pb2_grpc.RouterServiceStub(channel).GetModel(router_pb2.GetModelRequest(), timeout=_TIMEOUT_S)


def list_workers(channel: grpc.Channel) -> Any:
    return router_pb2_grpc.RouterServiceStub(channel).ListWorkers(router_pb2.ListWorkersRequest(), timeout=_TIMEOUT_S)


def decode(channel: grpc.Channel) -> Any:
    return decode_pb2_grpc.DecodeServiceStub(channel).Decode(iter([decode_pb2.DecodeRequest()]), timeout=_TIMEOUT_S)


def prefill(channel: grpc.Channel) -> Any:
    requests = iter([prefill_pb2.PrefillRequest()])
    return prefill_pb2_grpc.PrefillServiceStub(channel).Prefill(requests, timeout=_TIMEOUT_S)


def pull(channel: grpc.Channel) -> Any:
    return transfer_pb2_grpc.TransferServiceStub(channel).Pull(iter([transfer_pb2.PullRequest()]), timeout=_TIMEOUT_S)


def drain(channel: grpc.Channel) -> Any:
    return worker_pb2_grpc.WorkerServiceStub(channel).Drain(worker_pb2.DrainRequest(), timeout=_TIMEOUT_S)


def get_info(channel: grpc.Channel) -> Any:
    return worker_pb2_grpc.WorkerServiceStub(channel).GetInfo(worker_pb2.GetInfoRequest(), timeout=_TIMEOUT_S)


async def test_a_client_generates_through_prefill_and_decode_on_every_path(
    tls_stack: Stack, identities: Identities
) -> None:
    async with QuartetClient(tls_stack.router_address, tls=identities.client) as client:
        sampling = Sampling(temperature=0.0, max_tokens=16, ignore_eos=True)
        for path in RequestPath:
            completion = await client.complete(token_ids=range(40, 140), sampling=sampling, path=path)
            assert len(completion.choices[0].token_ids) == 16 and completion.text
            assert completion.choices[0].finished.usage.num_attempts == 1
    # The blocks crossed, so the workers have let each other in.
    prefilled = tls_stack.metrics("prefill-0").value("quartet_worker_requests_total", outcome="prefilled")
    assert prefilled == len(RequestPath)
    assert tls_stack.metrics("decode-0").value("quartet_worker_transfer_bytes_total", way="grpc") > 0
    await asyncio.to_thread(tls_stack.wait_blocks_returned, timeout_s=25)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("prefill-0", prefill),
        ("prefill-0", pull),
        ("decode-0", drain),
        ("decode-0", get_info),
        ("router", list_workers),
    ],
)
def test_methods_for_peers_and_operators_are_refused_to_clients(
    call: Callable[..., grpc.StatusCode], identities: Identities, name: str, method: Callable[[grpc.Channel], Any]
) -> None:
    assert call(name, identities.client, method) is grpc.StatusCode.PERMISSION_DENIED


def test_each_process_says_when_its_certificate_ends(tls_stack: Stack, identities: Identities) -> None:
    for name, tls in identities.servers.items():
        metrics = tls_stack.metrics(name)
        for use in ("grpc", "dial"):
            end = metrics.value("quartet_process_certificate_end_timestamp_seconds", use=use)
            assert end == end_of(tls), (name, use)


def test_each_gets_what_is_theirs(call: Callable[..., grpc.StatusCode], identities: Identities) -> None:
    assert call("router", identities.client, get_models) is grpc.StatusCode.OK
    assert call("router", identities.operator, list_workers) is grpc.StatusCode.OK
    assert call("decode-0", identities.operator, get_info) is grpc.StatusCode.OK
    # Let in, and answered that the message says nothing.
    assert call("decode-0", identities.client, decode) is grpc.StatusCode.INVALID_ARGUMENT
    assert call("decode-0", identities.servers["router"], decode) is grpc.StatusCode.INVALID_ARGUMENT
    assert call("prefill-0", identities.servers["decode-0"], pull) is grpc.StatusCode.INVALID_ARGUMENT
    assert call("decode-0", identities.servers["prefill-0"], drain) is grpc.StatusCode.PERMISSION_DENIED


def test_a_client_decodes_what_a_router_signed_and_nothing_else(tls_stack: Stack, identities: Identities) -> None:
    with tls_stack.channel("router", identities.client) as router:
        choice = placed.place(router)
        expected = placed.generate(router)
    with tls_stack.channel("decode-0", identities.client) as worker:
        [refused] = placed.decode(worker, placed.unsigned_start()).failures
        decoded = placed.decode(worker, placed.signed_start(choice.stream))
    assert isinstance(refused, PermissionDeniedError)
    assert [*choice.token_ids, *decoded.token_ids] == expected
    with tls_stack.channel("decode-0", identities.servers["router"]) as worker:
        assert placed.decode(worker, placed.unsigned_start()).token_ids == expected
    with tls_stack.channel("decode-0", identities.operator) as worker:
        [refused] = placed.decode(worker, placed.unsigned_start()).failures
    assert isinstance(refused, PermissionDeniedError)
    tls_stack.wait_blocks_returned(timeout_s=25)


async def test_a_peer_of_another_deployment_is_refused(tls_stack: Stack, identities: Identities) -> None:
    async with QuartetClient(tls_stack.router_address, tls=identities.stranger) as client:
        with pytest.raises(PermissionDeniedError):
            await client.complete("hello", sampling=Sampling(max_tokens=1))


@pytest.mark.parametrize("name", ["router", "prefill-0", "decode-0"])
def test_a_peer_without_a_certificate_is_refused(tls_stack: Stack, identities: Identities, name: str) -> None:
    address = tls_stack.processes[name].grpc_address
    nameless = grpc.ssl_channel_credentials(root_certificates=identities.client.ca_file.read_bytes())
    for channel in (grpc.secure_channel(address, nameless), grpc.insecure_channel(address)):
        with channel, pytest.raises(grpc.RpcError) as refused:
            get_models(channel) if name == "router" else get_info(channel)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_router_of_another_authority_is_not_trusted(tls_stack: Stack, tmp_path: Path) -> None:
    own = CertificateAuthority(tmp_path).issue("alice", "quartet://default/client/alice")
    async with QuartetClient(tls_stack.router_address, tls=own) as client:
        with pytest.raises(ServingError):
            await client.complete("hello", sampling=Sampling(max_tokens=1))


@pytest.mark.parametrize("module", ["router", "services.prefill", "services.decode"])
def test_in_the_clear_no_process_serves_the_network_unless_configured_to(
    module: str, tmp_path: Path, fork_server: ForkServer
) -> None:
    settings: dict[str, object] = {"server": {"address": "0.0.0.0:0"}}
    if module != "router":
        settings["model_path"] = str(tiny.CHECKPOINT)
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(settings))
    command = [fork_server.python, "-m", module, "--config", str(config)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=_START_TIMEOUT_S, check=False)
    assert ended.returncode == 1
    assert "server.address" in ended.stderr and "tls" in ended.stderr and "insecure" in ended.stderr
    assert "Traceback" not in ended.stderr
