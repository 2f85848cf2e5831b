"""A router process that must not go on: its background tasks, its probes and its end."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http.client import HTTPConnection
from pathlib import Path
from unittest import mock

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckResponse

from quartet.discovery.base import Role, WorkerSet
from quartet.discovery.create import DiscoveryConfig
from quartet.discovery.etcd_client import EtcdConfig
from quartet.errors import DrainingError, ModelUnavailableError, ServingError
from quartet.rpc.channels import TlsConfig
from quartet.rpc.errors import from_rpc_error
from quartet.rpc.server import ServerConfig
from quartet.v1 import router_pb2 as pb
from quartet.v1 import router_pb2_grpc
from router import process as router_process
from router.config import RouterConfig
from router.generate import GenerateRun
from router.process import RouterProcess
from router.workers import WorkerTable
from services.topology.launch import draw_events_key
from tests.fakes.memory_registry import MemoryRegistry
from tests.router.system import running_system
from tests.router.test_servicer import generate, make_start

TIMEOUT_S = 50.0


class BrokenRegistry(MemoryRegistry):
    """Its watch raises once it is told to, as a record does that nobody thought of."""

    def __init__(self) -> None:
        super().__init__()
        self.must_break = asyncio.Event()

    async def _feed(self, workers: WorkerSet) -> None:
        workers.replace([])
        await self.must_break.wait()
        raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")


class Router:
    """A router process that runs as a task."""

    def __init__(self, config: RouterConfig) -> None:
        self.stop = asyncio.Event()
        self.num_failures = 0
        self.process = RouterProcess(config, on_failure=self._failed)
        self.task = asyncio.create_task(self.process.run(self.stop))

    def _failed(self) -> None:
        self.num_failures += 1

    async def wait_listening(self) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not self.process.address:
                assert not self.task.done(), self.task
                await asyncio.sleep(0.005)


@asynccontextmanager
async def running(config: RouterConfig) -> AsyncIterator[Router]:
    router = Router(config)
    try:
        await router.wait_listening()
        yield router
    finally:
        router.stop.set()
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.wait([router.task])


async def probe(address: str, path: str = "/readyz") -> int:
    def get() -> int:
        connection = HTTPConnection(address, timeout=TIMEOUT_S)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        finally:
            connection.close()

    return await asyncio.to_thread(get)


async def watch_health(address: str) -> AsyncIterator[int]:
    async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(TIMEOUT_S):
        async for response in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
            yield response.status


@pytest.fixture
def free_http(free_port: Callable[[], int]) -> str:
    return f"127.0.0.1:{free_port()}"


def make_config(http_address: str, **changes: object) -> RouterConfig:
    settings: dict[str, object] = {
        "server": ServerConfig(),
        "http_address": http_address,
        "required_roles": (),
        "drain_timeout_s": 2.0,
        **changes,
    }
    return RouterConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(("has_tls", "callers"), [(False, ["", "", ""]), (True, ["front", None, None])])
def test_who_names_a_tenant_counts_for_what_may_be_untaken(
    tmp_path: Path, has_tls: bool, callers: list[str | None]
) -> None:
    config = RouterConfig()
    if has_tls:
        tls = TlsConfig(ca_file=Path("ca.pem"), cert_file=Path("cert.pem"), key_file=Path("key.pem"))
        config = RouterConfig(
            server=ServerConfig(tls=tls), events_key_file=draw_events_key(tmp_path), trusted_gateways=("front",)
        )
    process = RouterProcess(config)
    table, unused = mock.Mock(spec=WorkerTable), mock.Mock()
    names, budgets = process._servicer(unused, table, unused)._names, process._untaken_budgets(table)
    for identity, named in (("front", "customer"), ("front", ""), ("acme", "customer")):
        names.tenant(identity, named)
    assert [budgets._caller(tenant) for tenant in ("customer", "front", "acme")] == callers


async def test_an_exception_in_discovery_ends_the_router_and_first_its_readiness(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, free_http: str
) -> None:
    registry = BrokenRegistry()
    monkeypatch.setattr(router_process, "create_registry", lambda _config: registry)
    async with running(make_config(free_http)) as router:
        statuses = watch_health(router.process.address)
        async for status in statuses:
            if status == HealthCheckResponse.SERVING:
                break
        assert await probe(free_http) == 200
        registry.must_break.set()
        assert await anext(statuses) == HealthCheckResponse.NOT_SERVING
        with pytest.raises(Exception, match="surrogates"):
            await asyncio.wait_for(router.task, TIMEOUT_S)
        assert router.num_failures == 1
        [logged] = [record for record in caplog.records if "the task discovery has ended" in record.message]
        assert logged.exc_info is not None


@pytest.mark.parametrize("ends_with", ["raise RuntimeError('a bug')", "return"])
async def test_a_task_that_ends_gives_the_process_an_exit_code(tmp_path: Path, ends_with: str) -> None:
    code = f"""
import sys
import router.process, router.__main__
async def keep_up(index):
    {ends_with}
router.process.keep_up = keep_up
router.__main__.main()
"""
    discovery = f"discovery={{kind: file, file: {{directory: {tmp_path}}}}}"
    arguments = ["--set", "server.address=127.0.0.1:0", "--set", discovery]
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, *arguments, stdout=PIPE, stderr=STDOUT)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 1
    assert "the task index-upkeep has ended" in output.decode()
    assert ("RuntimeError: a bug" in output.decode()) == ("bug" in ends_with)


async def test_a_router_that_cannot_reach_etcd_is_not_ready_and_knows_that_it_does_not_know(
    free_port: Callable[[], int], free_http: str
) -> None:
    etcd = EtcdConfig(endpoints=(f"127.0.0.1:{free_port()}",), request_timeout_s=0.1)
    config = make_config(free_http, discovery=DiscoveryConfig(etcd=etcd))
    async with running(config) as router, grpc.aio.insecure_channel(router.process.address) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        for call in (
            lambda: generate(stub, make_start(model="tiny")),
            lambda: generate(stub, make_start()),
            lambda: stub.GetModel(pb.GetModelRequest(name="tiny")),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call()
            error = from_rpc_error(caught.value)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            assert isinstance(error, ModelUnavailableError) and error.retry_delay_s
        check = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert check.status == HealthCheckResponse.NOT_SERVING
        assert [await probe(free_http), await probe(free_http, "/livez")] == [503, 200]


async def test_a_draining_router_is_not_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_http: str) -> None:
    async with running_system(tmp_path, monkeypatch, "decode-0", gated=("decode-0",), http_address=free_http) as (
        system,
        stub,
    ):
        await system.wait_serving()
        assert await probe(free_http) == 200
        call = stub.Generate()
        await call.write(pb.GenerateRequest(start=make_start()))
        async with asyncio.timeout(TIMEOUT_S):
            await call.read()
            watch = stub.WatchWorkers(pb.WatchWorkersRequest())
            await watch.read()
            system.router.stop.set()
            with pytest.raises(grpc.aio.AioRpcError):  # it drains
                while await watch.read() is not grpc.aio.EOF:
                    pass
            assert [await probe(free_http), await probe(free_http, "/livez")] == [503, 200]
            assert not system.router.task.done(), "it still serves what runs"
        call.cancel()
        await system.router.end()


async def test_requests_that_outlast_a_drain_are_told_why_before_their_calls_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    abort = GenerateRun.abort

    def abort_slowly(run: GenerateRun, error: ServingError) -> None:
        asyncio.get_running_loop().call_later(0.2, abort, run, error)

    monkeypatch.setattr(GenerateRun, "abort", abort_slowly)
    monkeypatch.setattr(router_process, "_LAST_WORDS_S", TIMEOUT_S)
    async with running_system(tmp_path, monkeypatch, "decode-0", gated=("decode-0",), drain_timeout_s=0.05) as (
        system,
        stub,
    ):
        call = stub.Generate()
        await call.write(pb.GenerateRequest(start=make_start()))
        async with asyncio.timeout(TIMEOUT_S):
            await call.read()
            system.router.stop.set()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                while await call.read() is not grpc.aio.EOF:
                    pass
        assert isinstance(from_rpc_error(caught.value), DrainingError)
        await system.router.end()


async def test_a_router_is_ready_while_each_required_role_has_a_ready_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_http: str
) -> None:
    roles = (Role.PREFILL, Role.DECODE)
    async with running_system(tmp_path, monkeypatch, http_address=free_http, required_roles=roles) as (system, _stub):
        statuses = watch_health(system.address)
        assert await anext(statuses) == HealthCheckResponse.NOT_SERVING
        system.start_worker("decode-0")
        await system.wait_ready()
        assert await probe(free_http) == 503
        system.start_worker("prefill-0")
        assert await anext(statuses) == HealthCheckResponse.SERVING
        assert await probe(free_http) == 200
        await system.workers.pop("prefill-0").end()
        assert await anext(statuses) == HealthCheckResponse.NOT_SERVING
        assert await probe(free_http) == 503
        await statuses.aclose()


async def test_a_blocked_event_loop_shows_in_the_probes(tmp_path: Path, free_port: Callable[[], int]) -> None:
    """The loop of a real process is blocked; the probes answer from a thread of their own."""
    http = f"127.0.0.1:{free_port()}"
    code = """
import asyncio, sys, threading
import quartet.supervision, router.process, router.__main__
must_block = threading.Event()
def read_line():
    sys.stdin.readline()
    must_block.set()
async def keep_up(index):
    threading.Thread(target=read_line, daemon=True).start()
    while not must_block.is_set():
        await asyncio.sleep(0.01)
    threading.Event().wait()
router.process.keep_up = keep_up
watch = quartet.supervision.LoopWatch
router.process.LoopWatch = lambda: watch(blocked_after_s=0.5, dead_after_s=1.0, tick_s=0.1)
router.__main__.main()
"""
    discovery = f"discovery={{kind: file, file: {{directory: {tmp_path}}}}}"
    arguments = ["--set", "server.address=127.0.0.1:0", "--set", discovery, "--set", "required_roles=[]"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, *arguments, "--set", f"http_address={http}", stdin=PIPE, stdout=PIPE, stderr=STDOUT
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while b"router serving on" not in await process.stdout.readline():
                assert process.returncode is None
            process.stdin.write(b"\n")
            while [await probe(http), await probe(http, "/livez")] != [503, 503]:  # noqa: ASYNC110 - polled
                await asyncio.sleep(0.02)
            while b"the event loop is blocked at" not in await process.stdout.readline():
                assert process.returncode is None
    finally:
        process.send_signal(signal.SIGKILL)
        await process.wait()
