"""The router as a process of its own."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from pathlib import Path
from urllib.request import urlopen

import grpc
import pytest

from quartet.config import build
from quartet.errors import ConfigError
from quartet.rpc.channels import is_serving
from quartet.v1 import router_pb2 as pb
from quartet.v1.router_pb2_grpc import RouterServiceStub
from router.config import RouterConfig
from services.topology.launch import free_port
from tests.e2e.fork_server import ForkServer

_TIMEOUT_S = 100.0


async def start(*arguments: str, python: str | Path = sys.executable) -> Process:
    return await asyncio.create_subprocess_exec(python, "-m", "router", *arguments, stdout=PIPE, stderr=STDOUT)


async def read_until(process: Process, marker: str) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(_TIMEOUT_S):
        while line := (await process.stdout.readline()).decode():
            if marker in line:
                return line
    raise AssertionError(f"it ended without saying {marker!r}")


def metrics_at(address: str) -> str:
    with urlopen(f"http://{address}/metrics", timeout=_TIMEOUT_S) as response:
        return str(response.read().decode())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_router_prints_its_address_and_ends_on_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    config = tmp_path / "router.yaml"
    config.write_text(
        f"server: {{address: '127.0.0.1:0'}}\ndiscovery: {{kind: file, file: {{directory: {tmp_path}}}}}\n"
    )
    process = await start("--config", str(config), "--set", "drain_timeout_s=3", "--set", "required_roles=[]")
    try:
        line = await read_until(process, "router serving on ")
        address, _, http_address = line.split("router serving on ")[1].partition(", metrics and probes on ")
        assert await is_serving(address)
        assert await is_serving(address, service="quartet.v1.RouterService")
        page = await asyncio.to_thread(metrics_at, http_address.strip())
        assert "quartet_router_running_requests" in page
        for queue in ("room", "media", "encode", "prompts"):
            assert f'quartet_router_queue_usage_ratio{{queue="{queue}"}} 0.0' in page
        assert 'vllm:lora_requests_info{max_lora="0",running_lora_adapters="",waiting_lora_adapters=""}' in page
        for outcome in ("length", "timeout", "worker_unavailable"):
            assert f'quartet_router_requests_total{{outcome="{outcome}"}} 0.0' in page
        process.send_signal(number)
        async with asyncio.timeout(_TIMEOUT_S):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()


async def test_a_router_whose_log_nobody_reads_serves_and_ends_on_a_signal(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    address, (reader, writer) = f"127.0.0.1:{free_port()}", os.pipe()
    os.write(writer, bytes(fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)))  # it is full
    config = tmp_path / "router.yaml"
    config.write_text(f"server: {{address: '{address}'}}\ndiscovery: {{kind: file, file: {{directory: {tmp_path}}}}}\n")
    command = [fork_server.python, "-m", "router", "--config", str(config), "--set", "required_roles=[]"]
    process = await asyncio.create_subprocess_exec(*command, stderr=writer)
    try:
        async with asyncio.timeout(_TIMEOUT_S), grpc.aio.insecure_channel(address) as channel:
            await channel.channel_ready()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await RouterServiceStub(channel).Explain(pb.ExplainRequest())
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            process.terminate()
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
        os.close(reader)
        os.close(writer)


async def test_an_impossible_setting_ends_the_router_with_one_line_that_names_it(fork_server: ForkServer) -> None:
    process = await start("--set", "polciy=round_robin", python=fork_server.python)
    async with asyncio.timeout(_TIMEOUT_S):
        output, _ = await process.communicate()
    assert process.returncode == 1
    assert "did you mean policy" in output.decode()
    assert len(output.decode().strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"server": {"address": "0.0.0.0:0"}}, "server.address"),
        ({"http_address": "0.0.0.0:9090"}, "http_address"),
        ({"http_address": "9090"}, "http_address"),
        ({"policy": "best"}, "policy"),
        ({"attempts": {"max_attempts": 0}}, "attempts.max_attempts"),
        ({"attempts": {"max_lost_workers": 0}}, "attempts.max_lost_workers"),
        ({"attempts": {"prefill_timeout_s": 0}}, "attempts.prefill_timeout_s"),
        ({"admission": {"max_queue_length": 0}}, "admission.max_queue_length"),
        ({"admission": {"max_queued_prompt_bytes": 0}}, "admission.max_queued_prompt_bytes"),
        ({"admission": {"queue_timeout_s": 0}}, "admission.queue_timeout_s"),
        ({"drain_timeout_s": 0}, "drain_timeout_s"),
        ({"required_roles": ["router"]}, "required_roles"),
        ({"required_roles": ["decoder"]}, "required_roles"),
        ({"policy": {"local_prefill_max_tokens": -1}}, "policy.local_prefill_max_tokens"),
    ],
)
def test_an_impossible_setting_is_refused_by_its_path(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build(RouterConfig, settings)
