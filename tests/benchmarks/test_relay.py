"""The relay benchmark: its messages between processes, its sums, and one small run of each way on real servers."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.children import ChildEndedError, start_child
from benchmarks.many_streams import run as run_many_streams
from benchmarks.paced_clock import MAX_STREAMS, PacedClock
from benchmarks.progress import LiveLine
from benchmarks.relay import Spread, spreads
from benchmarks.relay_client import Tally
from benchmarks.relay_floor import (
    ACCEPTED,
    DELTA,
    FINISHED,
    make_place_response,
    make_start_bytes,
    open_floor,
)
from benchmarks.relay_load import Clients, Job, Load, LoadFailedError, Way, Window, make_start
from benchmarks.relay_measure import Case, Figures, Measurer, Windows, medians, stream_jobs
from benchmarks.relay_stack import RelayStack
from benchmarks.table import relay_tables
from quartet.config import build
from quartet.rpc.channels import create_channel
from quartet.v1 import router_pb2, router_pb2_grpc

TWO_WINDOWS = Windows(warm_up_s=0.1, window_s=0.5, round_size=2, num_rounds=1)
TINY = Windows(warm_up_s=0.1, window_s=0.5, round_size=1, num_rounds=1)


def figures(value: float) -> Figures:
    return Figures(**dict.fromkeys(Figures.__dataclass_fields__, value))


async def test_a_job_and_a_window_arrive_as_they_were_sent() -> None:
    job = Job(router_address="127.0.0.1:1", clock_path="/c", way=Way.SESSION, load=Load.REQUESTS, count=3)
    window = Window(
        duration_s=1.5,
        num_tokens=3,
        num_messages=2,
        num_requests=1,
        errors={"UNAVAILABLE: gone": 1},
        latencies_us=[12, 3_000_000, 0],
    )
    async with start_child("tests.benchmarks.echo_child") as child:
        assert build(Job, await child.ask(job)) == job
        assert Window(**await child.ask(window)) == window


def test_latency_counts_from_the_step_that_made_each_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = PacedClock(tmp_path / "clock", create=True)
    clock.set_period(1)
    clock.begin(5, 0, 0)
    clock.note_step(0, 1_000_000, 1, 0)
    clock.note_step(1, 3_000_000, 1, 0)
    tally = Tally(clock)
    tally.tokens(5, 0, 2, 4_000_000)
    window = tally.read()
    assert list(window.latencies_us) == [3_000, 1_000]
    assert window.num_tokens == 2
    tally.begin()
    assert not tally.read().latencies_us


def test_medians_are_taken_figure_by_figure() -> None:
    assert medians([figures(3.0), figures(1.0), figures(2.0)]) == figures(2.0)


def test_clients_of_one_load_share_no_seed() -> None:
    stack = SimpleNamespace(address=lambda _way: "127.0.0.1:1", clock_path="/c")
    for way in Way:
        jobs = stream_jobs(stack, Case(way=way, num_streams=1024, with_text=False))
        seeds = [seed for job in jobs for seed in range(job.first_seed, job.first_seed + job.count)]
        assert sorted(seeds) == list(range(1024))


def test_the_table_shows_measured_figures_beside_their_limits_and_names_gaps() -> None:
    share = {
        "router_cpu_us_per_token": {"generate": 29.5, "place_per_client": 0.97},
        "decode_cpu_us_per_token": {"generate": 3.25, "place_per_request": 52.07},
        "by_way": {"generate": vars(figures(1.25))},
    }
    empty: dict[str, dict[str, float]] = {"router_cpu_us_per_token": {}, "decode_cpu_us_per_token": {}, "by_way": {}}
    report = {
        "streams_256": {"ids": share, "text": empty},
        "streams_1024": {"ids": empty, "text": empty},
        "router_cpu_ms_per_request": {"session": 0.74},
        "requests": {},
        "request_floor": {"session": {"router_cpu_ms_per_request": 0.37, "requests_per_s": 1000.0}},
        "floor": {"generate_256": {"router_cpu_us_per_token": 25.5, "decode_cpu_us_per_token": 2.0}},
        "idle": {"router_share": 0.01, "decode_share": 0.02},
        "ratio_to_grpc": {"generate_256": 1.25, "request_session": 3.0},
        "ratio_to_grpc_spread": {
            "generate_256": {"runs": [1.25, 1.0, 1.5], "lowest": 0.5, "highest": 2.25},
            "request_session": {"runs": [3.0], "lowest": 2.0, "highest": 4.0},
        },
        "failed": {"session, 256 streams, ids": "UNIMPLEMENTED: not here"},
    }
    tables = relay_tables(json.loads(json.dumps(report)))
    assert "| generate, 256 streams, ids: Router us a token | 29.50 | <= 30 | 26 | 25.50 | 1.16 |" in tables
    missing = "not measured"
    assert f"| session, 256 streams, ids: Router us a token | {missing} | <= 4 |  | {missing} | {missing} |" in tables
    assert "| place_per_client, 256 streams, ids: Router us a token | 0.97 | 0 |  |  |  |" in tables
    assert "| place_per_request, 256 streams, ids: Decode us a token | 52.07 | stated |  |  |  |" in tables
    assert "| session, a request of one token: Router ms | 0.74 | <= 0.4 | 0.2 | 0.37 | 2.00 |" in tables
    assert "- session, 256 streams, ids was not measured: UNIMPLEMENTED: not here" in tables
    assert "| generate, 256 streams: a token | 1.25 | <= 1.35 |  | 1.00, 1.50 | 0.50, 2.25 |" in tables
    assert "| session, a request of one token | 3.00 | <= 3.2 | 2.5 | 3.00, 3.00 | 2.00, 4.00 |" in tables
    del report["ratio_to_grpc"], report["request_floor"]  # as reports were before it was measured
    older = f"| session, a request of one token: Router ms | 0.74 | <= 0.4 | 0.2 | {missing} | {missing} |"
    assert older in relay_tables(report)


@pytest.mark.bench
@pytest.mark.e2e
async def test_every_way_is_measured_on_real_servers(tmp_path: Path) -> None:
    with LiveLine() as line:
        async with RelayStack(tmp_path / "log", line.say) as stack:
            measurer = Measurer(stack, line, TINY)
            for way in Way:
                [found] = await measurer.streams(Case(way=way, num_streams=10, with_text=way is Way.SESSION))
                assert found.offered_tokens_per_s == 500
                assert found.tokens_per_s > 0
                # A wrong clock, or a wrong step of it, would be off by whole steps or below 0.
                assert 0 < found.added_latency_ms_p50 <= found.added_latency_ms_p99
                assert found.router_cpu_us_per_token > 0 < found.decode_cpu_us_per_token
                assert found.decode_engine_cpu_us_per_token > 0
                assert found.tokens_per_message >= 1
                [request] = await measurer.requests(way, 2, 128)
                assert request.requests_per_s > 0 < request.router_cpu_ms_per_request


class BareLoad:
    """Reads, in its windows, how many tokens the real engine gives out."""

    def __init__(self, clock: PacedClock) -> None:
        self.num_tokens: list[int] = []
        self._clock = clock

    async def window(self) -> None:
        await asyncio.sleep(0.1)  # what was on its way when the load was paused
        before = self._clock.num_tokens
        await asyncio.sleep(0.3)
        self.num_tokens.append(self._clock.num_tokens - before)


@pytest.mark.bench
@pytest.mark.e2e
async def test_the_router_rests_while_the_bare_relay_has_its_window(tmp_path: Path) -> None:
    with LiveLine() as line:
        async with RelayStack(tmp_path / "log", line.say) as stack:
            measurer, bare = Measurer(stack, line, TWO_WINDOWS), BareLoad(stack.clock)
            case = Case(way=Way.GENERATE, num_streams=10, with_text=False)
            assert all(found.tokens_per_s > 0 for found in await measurer.streams(case, bare))
            assert all(found.requests_per_s > 0 for found in await measurer.requests(Way.SESSION, 2, 128, bare))
    assert bare.num_tokens == [0, 0, 0, 0]


def test_the_ratio_to_grpc_is_the_median_of_the_runs_and_keeps_its_spread() -> None:
    runs = [{"generate_256": [1.0, 9.0, 2.0]}, {"generate_256": [3.0], "session_256": [4.0]}, {"generate_256": [1.5]}]
    found = spreads(runs)
    assert found["generate_256"] == Spread(runs=[2.0, 3.0, 1.5], lowest=1.0, highest=9.0)
    assert found["session_256"] == Spread(runs=[4.0], lowest=4.0, highest=4.0)


@pytest.mark.bench
@pytest.mark.e2e
async def test_a_bare_relay_is_measured_by_either_way() -> None:
    for way in (Way.GENERATE, Way.SESSION, Way.HTTP):
        async with open_floor(way, Load.STREAMS, 20, TINY) as bare:
            for _ in range(2):
                await bare.window()
        for floor in (window.per_token(20) for window in bare.found):
            assert floor.router_cpu_us_per_token > 0 < floor.decode_cpu_us_per_token
        assert len(bare.found) == 2


@pytest.mark.bench
@pytest.mark.e2e
async def test_a_bare_relay_of_requests_is_measured_by_every_way() -> None:
    for way in (Way.GENERATE, Way.SESSION, Way.PLACE_PER_CLIENT):
        async with open_floor(way, Load.REQUESTS, 2, TINY, num_prompt_tokens=128) as bare:
            for _ in range(2):
                await bare.window()
        for floor in (window.per_request() for window in bare.found):
            assert floor.router_cpu_ms_per_request > 0 < floor.requests_per_s
        assert len(bare.found) == 2


@pytest.mark.e2e
async def test_a_child_that_ends_instead_of_answering_is_an_error() -> None:
    async with start_child("benchmarks.no_such_module") as child:
        with pytest.raises(ChildEndedError, match="no_such_module ended without an answer, with exit code 1"):
            await child.read()


@pytest.mark.bench
@pytest.mark.e2e
async def test_messages_of_a_bare_relay_are_as_long_as_real_ones(tmp_path: Path) -> None:
    rng = random.Random(1)
    start = make_start(rng, seed=MAX_STREAMS, num_prompt_tokens=128, num_output_tokens=1, with_text=False)
    request = router_pb2.GenerateRequest(start=start)
    assert len(make_start_bytes(128)) == pytest.approx(request.ByteSize(), rel=0.1)
    async with (
        RelayStack(tmp_path / "log", lambda _: None) as stack,
        create_channel(stack.router_address, None) as channel,
    ):
        router = router_pb2_grpc.RouterServiceStub(channel)
        sizes = [answer.ByteSize() async for answer in router.Generate(iter([request]))]
        assert [len(message) for message in (ACCEPTED, DELTA, FINISHED)] == pytest.approx(sizes, rel=0.2)
        placed = await router.Place(router_pb2.PlaceRequest(start=start))
        assert len(make_place_response(128)) == pytest.approx(placed.ByteSize(), rel=0.1)


@pytest.mark.bench
@pytest.mark.e2e
async def test_a_load_that_fails_is_reported_not_measured(tmp_path: Path) -> None:
    async with RelayStack(tmp_path / "log", lambda _: None) as stack:
        job = Job(
            router_address=stack.router_address,
            clock_path=str(stack.clock_path),
            way=Way.GENERATE,
            count=2,
            num_output_tokens=1 << 30,  # no model has room for so many
        )
        with pytest.raises(LoadFailedError, match="INVALID_ARGUMENT"):
            async with Clients([job]):
                pass


@pytest.mark.bench
@pytest.mark.e2e
async def test_many_streams_are_each_followed_to_their_end() -> None:
    results = await run_many_streams(50, 5)
    assert set(results.bursts) == {"generate", "session", "sessions_8"}
    for burst in results.bursts.values():
        assert burst.num_refused_or_lost == 0
        assert (burst.outcome.num_complete, burst.outcome.num_accepted) == (50, 50)
        assert burst.outcome.max_open > 1
        assert burst.router.peak >= burst.router.before > 0
