"""Chaos: the same plan for the same seed, who plays it, a proxy that cuts and delays, and counts of what went wrong."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager

import pytest

from benchmarks import chaos
from benchmarks.chaos import Play, play_on_fleets, summed
from benchmarks.chaos_episodes import EPISODES_PER_FLEET, EpisodeResult, Fault, plan_episode, play_all
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

    found = summed(0, EngineKind.MOCK, 2, results, {})

    assert getattr(found, count) == 1
    assert [result.number for result in found.failed] == [1]


def test_a_fleet_that_does_not_recover_is_a_failure() -> None:
    found = summed(0, EngineKind.MOCK, 1, [make_result(0), make_result(1, recovery_s=None)], {})
    assert [result.number for result in found.failed] == [1]
    assert found.recovery_s.longest == 60.0


async def test_the_fleet_that_is_free_takes_the_next_episode_and_results_are_in_order_of_their_numbers() -> None:
    last_is_done = asyncio.Event()
    played: list[list[int]] = []
    seen: list[int] = []

    @asynccontextmanager
    async def start() -> AsyncIterator[Play]:
        own: list[int] = []
        played.append(own)

        async def play(number: int) -> EpisodeResult:
            own.append(number)
            if number == 0:
                await last_is_done.wait()
            elif number == 4:
                last_is_done.set()
            return make_result(number)

        yield play

    results = await play_on_fleets(range(5), 2, start, lambda result: seen.append(result.number))

    assert played == [[0], [1, 2, 3, 4]]
    assert seen == [1, 2, 3, 4, 0]
    assert [result.number for result in results] == [0, 1, 2, 3, 4]


async def test_what_one_fleet_raises_ends_the_others() -> None:
    others_play, ended = asyncio.Event(), list[int]()

    @asynccontextmanager
    async def start() -> AsyncIterator[Play]:
        async def play(number: int) -> EpisodeResult:
            if number == 0:
                await others_play.wait()
                raise RuntimeError("an undisturbed request failed")
            others_play.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(number)
            raise AssertionError("nobody sets that event")

        yield play

    with pytest.raises(ExceptionGroup) as raised:
        await play_on_fleets(range(5), 2, start, lambda result: None)
    assert raised.group_contains(RuntimeError, match="an undisturbed request failed")
    assert ended == [1]


async def test_a_fleet_that_does_not_recover_is_replaced() -> None:
    assert await played_by_each(range(5), {1, 2}) == [[0, 1], [2], [3, 4]]


async def test_no_fleet_is_started_where_no_episode_is_left() -> None:
    assert await played_by_each(range(2), {1}) == [[0, 1]]
    assert await played_by_each(range(EPISODES_PER_FLEET), ()) == [list(range(EPISODES_PER_FLEET))]
    assert await played_by_each((), ()) == []


async def test_a_fleet_is_replaced_after_its_last_episode() -> None:
    assert await played_by_each(range(EPISODES_PER_FLEET + 1), ()) == [
        list(range(EPISODES_PER_FLEET)),
        [EPISODES_PER_FLEET],
    ]


async def played_by_each(numbers: Sequence[int], fatal: Collection[int]) -> list[list[int]]:
    """The episodes of each fleet that ``play_all`` started, where none recovers from the ``fatal`` ones."""
    played: list[list[int]] = []
    running: set[FakeFleet] = set()
    results: list[EpisodeResult] = []

    async def orders() -> AsyncIterator[int]:
        for number in numbers:
            yield number

    @asynccontextmanager
    async def start() -> AsyncIterator[FakeFleet]:
        assert not running, "one ends before the next one starts"
        fleet = FakeFleet(fatal)
        played.append(fleet.played)
        running.add(fleet)
        yield fleet
        running.remove(fleet)

    await play_all(orders(), start, results.append)
    assert [result.number for result in results] == list(numbers)
    assert not running
    return played


class FakeFleet:
    """Recovers from all episodes but the ``fatal`` ones."""

    def __init__(self, fatal: Collection[int]) -> None:
        self.played: list[int] = []
        self._fatal = fatal

    async def play(self, number: int) -> EpisodeResult:
        self.played.append(number)
        return make_result(number, recovery_s=None if number in self._fatal else 0.5)


@pytest.mark.parametrize("options", [["--episodes", "3", "--fleets", "4"], ["--only", "7", "--fleets", "2"]])
def test_more_fleets_than_episodes_are_refused(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["chaos", "--json", "-", *options])
    with pytest.raises(SystemExit, match="2"):
        chaos.main()
    assert "--fleets: must be at least 1, and at most the number of episodes" in capsys.readouterr().err


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
