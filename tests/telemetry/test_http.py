"""/metrics, /livez and /readyz over real HTTP."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from http.client import HTTPConnection

import pytest
from prometheus_client import CollectorRegistry, Counter

from quartet.errors import ConfigError
from quartet.telemetry.http import Probes, TelemetryServer
from quartet.telemetry.targets import Target


@dataclass
class State:
    is_alive: bool = True
    is_ready: bool = True


@dataclass
class Running:
    server: TelemetryServer
    port: int
    state: State


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    registry, state = CollectorRegistry(), State()
    Counter("quartet_test_requests", "For this test.", registry=registry).inc(3)
    probes = Probes(is_alive=lambda: state.is_alive, is_ready=lambda: state.is_ready)
    server = TelemetryServer("127.0.0.1:0", registry, probes)
    yield Running(server, server.start(), state)
    await server.close()


async def get(port: int, path: str, accept: str = "") -> tuple[int, str, str]:
    def fetch() -> tuple[int, str, str]:
        connection = HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", path, headers={"Accept": accept})
        response = connection.getresponse()
        body = response.read().decode()
        connection.close()
        return response.status, body, response.headers["Content-Type"]

    return await asyncio.to_thread(fetch)


async def test_metrics_are_served_in_both_formats(running: Running) -> None:
    status, body, content_type = await get(running.port, "/metrics?name=x")
    assert (status, "quartet_test_requests_total 3.0" in body) == (200, True)
    assert content_type.startswith("text/plain")
    _, body, content_type = await get(running.port, "/metrics", "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith("# EOF\n")


async def test_probes_report_the_state(running: Running) -> None:
    assert (await get(running.port, "/livez"))[0] == 200
    assert (await get(running.port, "/readyz"))[0] == 200
    running.state.is_ready = False
    assert (await get(running.port, "/livez"))[0] == 200
    assert (await get(running.port, "/readyz"))[0] == 503
    running.state.is_alive = False
    assert (await get(running.port, "/livez"))[0] == 503


async def test_other_paths_are_not_found(running: Running) -> None:
    assert (await get(running.port, "/"))[0] == 404


async def test_only_a_process_that_knows_others_lists_them(running: Running) -> None:
    assert (await get(running.port, "/prometheus/targets"))[0] == 404
    target = Target(address="10.0.0.1:9000", role="decode", worker_id="decode-0", namespace="here")
    probes = Probes(is_alive=lambda: True, is_ready=lambda: True)
    server = TelemetryServer("127.0.0.1:0", CollectorRegistry(), probes, lambda is_near: [target] if is_near else [])
    try:
        status, body, content_type = await get(server.start(), "/prometheus/targets")
    finally:
        await server.close()
    assert (status, content_type) == (200, "application/json")
    assert '"targets": ["10.0.0.1:9000"]' in body


async def test_a_silent_client_delays_no_other(running: Running) -> None:
    with socket.create_connection(("127.0.0.1", running.port)):
        assert (await get(running.port, "/livez"))[0] == 200
        async with asyncio.timeout(5):
            await running.server.close()
    with pytest.raises(ConnectionRefusedError):
        await get(running.port, "/livez")


async def test_it_can_be_closed_twice_or_unstarted(running: Running) -> None:
    await running.server.close()
    await running.server.close()
    probes = Probes(is_alive=lambda: True, is_ready=lambda: True)
    await TelemetryServer("127.0.0.1:0", CollectorRegistry(), probes).close()


@pytest.mark.parametrize("address", ["127.0.0.1:x", "127.0.0.1:99999", "192.0.2.1:0", "nonsense", ":9090"])
def test_an_address_that_cannot_be_listened_on_is_named(address: str) -> None:
    probes = Probes(is_alive=lambda: True, is_ready=lambda: True)
    with pytest.raises(ConfigError, match=f"http_address.*{address}"):
        TelemetryServer(address, CollectorRegistry(), probes).start()


async def test_a_port_that_is_taken_is_named(running: Running) -> None:
    probes = Probes(is_alive=lambda: True, is_ready=lambda: True)
    with pytest.raises(ConfigError, match=str(running.port)):
        TelemetryServer(f"127.0.0.1:{running.port}", CollectorRegistry(), probes).start()
