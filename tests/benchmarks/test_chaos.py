"""Chaos: the same plan for the same seed, a proxy that cuts, delays and heals, and counts of what went wrong."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from benchmarks.chaos import EpisodeResult, Fault, plan_episode, summed
from benchmarks.chaos_fleet import ETCD, FleetConfig
from benchmarks.chaos_proxy import TcpProxy
from quartet.engine.settings import EngineKind
from services.topology.launch import free_port

HERE, PROXY = "127.0.0.1", "127.0.0.2"


def make_result(number: int = 0, **changes: object) -> EpisodeResult:
    counts = {"requests": 8, "breaks": 1, "lost": 0, "wrong": 0, "overdue": 0, "held": 0, "recovery_s": 0.5}
    return EpisodeResult(number=number, strikes=["kill etcd"], **(counts | changes))  # type: ignore[arg-type]


def test_an_episode_is_a_function_of_seed_and_number() -> None:
    config = FleetConfig()
    assert plan_episode(7, 3, config) == plan_episode(7, 3, config)
    assert plan_episode(7, 3, config) != plan_episode(7, 4, config)
    assert plan_episode(7, 3, config) != plan_episode(8, 3, config)


def test_every_fault_strikes_every_kind_of_process_that_it_can() -> None:
    config = FleetConfig(engine=EngineKind.TORCH, num_encode=1)
    strikes = [strike for number in range(400) for strike in plan_episode(0, number, config).strikes]

    found = {(strike.fault, strike.target.partition("-")[0]) for strike in strikes}

    everybody = {"encode", "prefill", "decode", "router", ETCD}
    expected = {(fault, target) for fault in (Fault.KILL, Fault.FREEZE, Fault.CUT, Fault.DELAY) for target in everybody}
    expected |= {(Fault.DRAIN, target) for target in everybody - {ETCD}}
    assert found == expected | {(Fault.LOSE, ETCD), (Fault.ROLL, "prefill")}


@pytest.mark.parametrize("count", ["lost", "wrong", "overdue", "held"])
def test_a_single_failure_shows_in_the_sums_and_names_its_episode(count: str) -> None:
    results = [make_result(0), make_result(1, **{count: 1})]

    found = summed(0, EngineKind.MOCK, results, {})

    assert getattr(found, count) == 1
    assert [result.number for result in found.failed] == [1]


def test_a_fleet_that_does_not_recover_is_a_failure() -> None:
    found = summed(0, EngineKind.MOCK, [make_result(0), make_result(1, recovery_s=None)], {})
    assert [result.number for result in found.failed] == [1]
    assert found.recovery_s.longest == 60.0


async def test_a_proxy_passes_both_ways_until_it_is_cut_and_again_when_healed() -> None:
    async with echo_server() as port, TcpProxy(PROXY, HERE, port) as proxy:
        reader, writer = await asyncio.open_connection(PROXY, port)
        assert await ask(reader, writer) == b"hello"

        await proxy.cut()
        assert await reader.read() == b""
        late_reader, late_writer = await asyncio.open_connection(PROXY, port)
        assert await late_reader.read() == b""

        proxy.heal()
        again_reader, again_writer = await asyncio.open_connection(PROXY, port)
        assert await ask(again_reader, again_writer) == b"hello"
        for each in (writer, late_writer, again_writer):
            each.close()


async def test_a_proxy_delays_each_way() -> None:
    async with echo_server() as port, TcpProxy(PROXY, HERE, port) as proxy:
        reader, writer = await asyncio.open_connection(PROXY, port)
        await ask(reader, writer)
        proxy.delay_s = 0.05
        began = time.monotonic()
        await ask(reader, writer)
        assert time.monotonic() - began >= 0.1
        writer.close()


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    writer.write(b"hello")
    return await asyncio.wait_for(reader.readexactly(5), 30.0)


@asynccontextmanager
async def echo_server() -> AsyncIterator[int]:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(100):
            writer.write(chunk)
        writer.close()

    port = free_port()
    server = await asyncio.start_server(echo, HERE, port)
    try:
        yield port
    finally:
        server.close()
