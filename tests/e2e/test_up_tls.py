"""``quartet up --tls``: everything works as without it, and nothing is open to who should not call it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import ssl
import stat
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import grpc
import pytest
import pytest_asyncio
import zmq
import zmq.asyncio
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from zmq.utils.monitor import recv_monitor_message

from quartet.client import QuartetClient, RequestPath, Sampling, WorkerStatus
from quartet.client.routers import MADE_UP_DETAILS, MAX_OPENINGS
from quartet.discovery.etcd_access import EtcdTls
from quartet.discovery.etcd_client import EtcdClient, EtcdConfig
from quartet.errors import DiscoveryError
from quartet.events.curve import EventsKey, read_events_key
from quartet.rpc.certificate_end import certificate_end
from quartet.rpc.channels import TlsConfig, create_channel
from services.topology.launch import draw_events_key
from tests.e2e.fork_server import ForkServer
from tests.e2e.grpcurl import parse_messages
from tests.e2e.test_multimodal import CAPTION, arguments_of
from tests.e2e.up import Up
from tests.rpc.test_audience import TABLE, methods

pytestmark = [
    pytest.mark.usefixtures("etcd_binary"),
    pytest.mark.asyncio(loop_scope="module"),
]

TIMEOUT_S = 90.0
WORKER_SERVICES = {"WorkerService", "TransferService"}
SERVICES = {
    "router": {"RouterService"},
    "encode-0": {"EncodeService", *WORKER_SERVICES},
    "prefill-0": {"PrefillService", *WORKER_SERVICES},
    "decode-0": {"DecodeService", *WORKER_SERVICES},
}
HANDSHAKE_FAILED = (
    zmq.Event.HANDSHAKE_FAILED_AUTH,
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL,
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL,
    zmq.Event.DISCONNECTED,
)
STANDARD_SERVICES = {"Health", "ServerReflection", "Channelz"}


@dataclass(frozen=True)
class Run:
    """One running topology, and the directory of its files."""

    up: Up
    directory: Path

    @property
    def certificates(self) -> Path:
        return self.directory / "certificates"

    def identity(self, name: str) -> TlsConfig:
        files = self.certificates / "grpc"
        return TlsConfig(ca_file=files / "ca.pem", cert_file=files / f"{name}.pem", key_file=files / f"{name}.key")

    async def workers(self) -> Mapping[str, WorkerStatus]:
        async with QuartetClient(self.up.router_address, tls=self.identity("operator")) as client:
            return {worker.record.worker_id: worker for worker in await client.list_workers()}

    async def addresses(self) -> Mapping[str, str]:
        workers = await self.workers()
        return {"router": self.up.router_address} | {name: it.record.grpc_address for name, it in workers.items()}

    async def metrics(self) -> Mapping[str, str]:
        """The page of each process, by its name."""
        [http] = {found[0] for line in self.up.lines if (found := re.search(r"https://[^/]+", line))}
        _, key = (self.directory / "http_keys").read_text().split()
        trusted = ssl.create_default_context(cafile=str(self.identity("client").ca_file))
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session:
            async with session.get(f"{http}/prometheus/targets", ssl=trusted) as response:
                groups = await response.json()
            pages = {}
            for group in groups:
                async with session.get(f"http://{group['targets'][0]}/metrics") as response:
                    labels = group["labels"]
                    is_router = labels["__meta_quartet_role"] == "router"
                    pages["router" if is_router else labels["__meta_quartet_worker_id"]] = await response.text()
        return pages

    async def wait_counted(self, what: str, name: str) -> None:
        """Wait until the process of that name has counted one change of its certificate as ``what``."""
        line = f'\nquartet_process_{what}_total{{file="grpc_certificate"}} 1.0\n'
        async with asyncio.timeout(TIMEOUT_S):
            while line not in (await self.metrics())[name]:  # a scrape looks at the files, and may show it itself
                pass


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def run(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> AsyncIterator[Run]:
    directory = tmp_path_factory.mktemp("up")
    async with Up(directory, *arguments_of("epd_multimodal_image"), "--tls", python=fork_server.python) as up:
        await up.wait_ready()
        [export] = [line for line in up.lines if line.startswith("export QUARTET_TLS_CA=")]
        variables = dict(word.split("=", 1) for word in shlex.split(export)[1:])
        yield Run(up, Path(variables["QUARTET_TLS_CA"]).parents[2])
        await up.end(signal.SIGINT)
        assert list((directory / ".run").iterdir()) == []


async def test_every_line_that_is_printed_works(run: Run) -> None:
    generated = await run.up.paste("quartet generate ", "--image")
    assert generated.out.strip() == CAPTION, generated.err
    workers = await run.up.paste("quartet workers")
    assert all(name in workers.out for name in SERVICES if name != "router"), workers.err
    chat = await run.up.paste("curl ")
    assert json.loads(chat.out)["usage"]["completion_tokens"] > 0, chat.err


@pytest.mark.grpcurl
async def test_every_line_of_grpcurl_that_is_printed_works(run: Run) -> None:
    streamed = await run.up.paste("grpcurl ", "base64")
    assert "finished" in parse_messages(streamed.out)[-1], streamed.err


async def test_a_client_gets_the_same_answer_on_every_path(run: Run) -> None:
    sampling = Sampling(temperature=0.0, max_tokens=16, ignore_eos=True)
    async with QuartetClient(run.up.router_address, tls=run.identity("client")) as client:
        answers = [
            await client.complete(token_ids=range(40, 140), sampling=sampling, path=path) for path in RequestPath
        ]
    assert len({answer.choices[0].token_ids for answer in answers}) == 1


async def test_only_the_owner_can_read_a_key_of_the_run(run: Run) -> None:
    files = [path for path in run.directory.rglob("*") if path.is_file()]
    keys = {
        path for path in files if b"PRIVATE KEY" in path.read_bytes() or path.name in ("events_key", "signing_keys")
    }
    assert {path.name for path in keys} >= {"events_key", "signing_keys", "operator.key", "etcd.key", "decode-0.key"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in keys} == {0o600}


@pytest.mark.parametrize(
    ("identity", "audience"),
    [("client", "client"), ("operator", "operator"), ("router", "peer"), ("decode-0", "peer")],
)
async def test_every_service_refuses_whoever_a_method_is_not_for(run: Run, identity: str, audience: str) -> None:
    for name, address in (await run.addresses()).items():
        async with create_channel(address, run.identity(identity)) as channel:
            offered = await services_of(channel)
            assert {service.rpartition(".")[2] for service in offered} == SERVICES[name] | STANDARD_SERVICES
            for method in methods():
                service = method[1:].rpartition("/")[0]
                if service in offered and audience not in listed(method):
                    assert await outcome(channel, method) is grpc.StatusCode.PERMISSION_DENIED, (name, method)


async def test_each_process_says_when_its_certificates_end(run: Run) -> None:
    pages = await run.metrics()
    assert pages.keys() == SERVICES.keys()
    for name, page in pages.items():
        found = re.findall(
            r'^quartet_process_certificate_end_timestamp_seconds\{use="(\w+)"\} (\S+)$', page, re.MULTILINE
        )
        ends = {use: float(end) for use, end in found}
        of_etcd = ends.pop("etcd")
        assert of_etcd == certificate_end((run.certificates / "etcd/client.pem").read_bytes())
        end = certificate_end(run.identity(name).cert_file.read_bytes())
        # Encode workers dial nobody, and only routers serve HTTP.
        uses = {"encode-0": ["grpc"], "router": ["grpc", "dial", "http"]}.get(name, ["grpc", "dial"])
        assert ends == dict.fromkeys(uses, end), name


async def test_each_process_counts_a_certificate_that_it_can_not_use(run: Run) -> None:
    for name in SERVICES:
        cert_file = run.identity(name).cert_file
        away = cert_file.rename(cert_file.with_suffix(".away"))
        try:
            await run.wait_counted("failed_reloads", name)
        finally:
            away.rename(cert_file)
        await run.wait_counted("reloads", name)


async def test_nobody_without_a_certificate_of_the_run_gets_in(run: Run) -> None:
    for name, address in (await run.addresses()).items():
        nameless = grpc.ssl_channel_credentials(run.identity("client").ca_file.read_bytes())
        for channel in (grpc.aio.insecure_channel(address), grpc.aio.secure_channel(address, nameless)):
            async with channel:
                code = await outcome(channel, "/grpc.health.v1.Health/Check")
                assert code is grpc.StatusCode.UNAVAILABLE, name


async def test_only_processes_of_the_run_reach_its_etcd(run: Run) -> None:
    [command] = [command for command in run.up.processes().values() if "--data-dir=" in command]
    [url] = [word.split("=", 1)[1] for word in command.split() if word.startswith("--advertise-client-urls=")]
    of_etcd = run.certificates / "etcd"
    client = run.identity("client")
    config = EtcdConfig(
        endpoints=(url,),
        tls=EtcdTls(ca_file=of_etcd / "ca.pem", cert_file=of_etcd / "client.pem", key_file=of_etcd / "client.key"),
    )
    assert config.tls is not None
    assert len(await list_keys(config)) == len(SERVICES)
    for refused in (
        replace(config, tls=EtcdTls(ca_file=config.tls.ca_file)),
        replace(config, tls=replace(config.tls, cert_file=client.cert_file, key_file=client.key_file)),
        replace(config, endpoints=(url.removeprefix("https://"),), tls=None),
    ):
        with pytest.raises(DiscoveryError):
            await list_keys(replace(refused, request_timeout_s=0.5))


async def test_events_are_for_who_has_their_key(run: Run, tmp_path: Path) -> None:
    key, another = (read_events_key(path) for path in (run.directory / "events_key", draw_events_key(tmp_path)))
    for worker in (await run.workers()).values():
        address = worker.record.events_address
        assert await lets_in(address, key)
        assert not await lets_in(address, another)
        # It knows whom to expect there, and is not expected itself.
        assert not await lets_in(address, replace(another, public=key.public), own=another)
        assert not await lets_in(address, None)


async def test_a_worker_that_died_comes_back_with_its_certificate(run: Run) -> None:
    [pid] = [pid for pid, command in run.up.processes().items() if "-m services.decode" in command]
    epoch = (await run.workers())["decode-0"].record.epoch
    os.kill(pid, signal.SIGKILL)
    await run.up.wait_logged("decode-0 serves again")
    assert (await run.workers())["decode-0"].record.epoch != epoch


def listed(method: str) -> set[str]:
    return TABLE.get(method) or TABLE[method.rpartition("/")[0] + "/*"]


async def services_of(channel: grpc.aio.Channel) -> set[str]:
    """Full names of what is offered, by reflection."""
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    [response] = [it async for it in stub.ServerReflectionInfo(iter([request]), timeout=TIMEOUT_S)]
    return {service.name for service in response.list_services_response.service}


async def outcome(channel: grpc.aio.Channel, method: str) -> grpc.StatusCode:
    """The status of a call with one empty message.

    If the server refuses the call before that is written, gRPC may make up a status: then it is asked again.
    """
    for _ in range(MAX_OPENINGS):
        call = channel.stream_stream(method)(iter([b""]), timeout=TIMEOUT_S)
        code: grpc.StatusCode = await call.code()
        if await call.details() != MADE_UP_DETAILS:
            break
    return code


async def list_keys(config: EtcdConfig) -> list[str]:
    client = EtcdClient(config)
    try:
        return [value.key for value in (await client.list("/quartet/")).values]
    finally:
        await client.close()


async def lets_in(address: str, key: EventsKey | None, own: EventsKey | None = None) -> bool:
    """Whether a socket of events lets in a subscriber with ``key``; its ``own`` pair, if given, stands for itself."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    if key is not None:
        key.dial_with(socket)
    if own is not None:
        socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
    monitor = socket.get_monitor_socket()
    try:
        socket.connect(address)
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                event = (await recv_monitor_message(monitor))["event"]
                if event in (zmq.Event.HANDSHAKE_SUCCEEDED, *HANDSHAKE_FAILED):
                    return event == zmq.Event.HANDSHAKE_SUCCEEDED
    finally:
        socket.disable_monitor()
        socket.close(0)
        context.destroy(0)
