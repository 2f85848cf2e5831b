"""``quartet plan``: its table, its answer, its figures, its picture, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from cli.traces.format import BLOCK_SIZE, TraceRequest, write_trace
from cli.traces.generate import Arrivals, SessionConfig, TraceConfig, generate
from quartet.api.convert.fleet import to_worker_status
from quartet.discovery.base import Role
from tests.cli.conftest import RunCli
from tests.cli.plan.fleets import status
from tests.client.conftest import StartRouter
from tests.client.fake_router import FakeRouter

_NUM_REQUESTS = 40
_PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
# Prompts of a second each, of which one worker can't compute two a second.
_SLOW = "--set engine.mock.timing.prefill_base=1000 --set engine.scheduler.max_num_batched_tokens=100000"

# All prompts go to Prefill workers, where there are any.
_APART = "--set router.overrides.policy.name=round_robin"


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl.gz"
    sessions = SessionConfig(message_tokens=400.0, output_tokens=20.0, system_tokens=0.0, length_sigma=0.2)
    config = TraceConfig(arrivals=Arrivals(rate=2.0), sessions=sessions, max_requests=_NUM_REQUESTS, seed=5)
    write_trace(generate(config), path)
    return str(path)


async def test_it_shows_all_fleets_that_it_tried_an_answer_and_a_command(trace: str, run_cli: RunCli) -> None:
    result = await run_cli("plan", trace, "--ttft-p95", "400", "--itl-p95", "100", "--max-workers", "3")
    assert result.exit_code == 0, result.output
    title, *lines = result.stdout.splitlines()
    assert title.startswith("trace.jsonl.gz, 40 requests at 1x (")
    assert "steps of mock_fleet; wanted: TTFT p95 <= 400 ms, ITL p95 <= 100 ms" in title
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert ["0", "1"] in [row[:2] for row in rows]
    for row in rows:
        assert [len(row[column].split(" / ")) for column in (2, 3)] == [3, 3]
        assert row[-1] == "met"
    *_, verdict, command = lines
    assert verdict == "Don't disaggregate: 1 worker that does both meets the targets."
    assert command == "Start it: quartet up mock_fleet --replicas prefill=0 --replicas decode=1"


async def test_its_figures_are_written_as_documented(trace: str, run_cli: RunCli, tmp_path: Path) -> None:
    path, picture = tmp_path / "new" / "plan.json", tmp_path / "new" / "plan.png"
    options = f"--ttft-p50 1500 --ttft-p95 2500 --itl-p99 800 --max-workers 5 --requests 30 --rate 1 {_SLOW} {_APART}"
    result = await run_cli("plan", trace, *options.split(), "--json", str(path), "--plot", str(picture))
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(_PNG_MAGIC)
    report = json.loads(path.read_text())
    assert report["benchmark"] == "plan"
    assert {"command", "started_at", "commit", "versions", "machine", "policy", "fleet"} < report.keys()
    assert (report["trace"], report["num_requests"], report["num_left_out"]) == ("trace.jsonl.gz", 30, 0)
    assert report["steps"] == "of mock_fleet"
    assert report["fleet"]["engine"]["timing"]["prefill_base"] == 1000
    assert report["targets"] == [
        {"latency": "ttft", "percent": 50, "limit_ms": 1500},
        {"latency": "ttft", "percent": 95, "limit_ms": 2500},
        {"latency": "itl", "percent": 99, "limit_ms": 800},
    ]
    tried = {(each["num_prefill"], each["num_decode"]): each for each in report["tried"]}
    chosen = (report["chosen"]["num_prefill"], report["chosen"]["num_decode"])
    assert chosen[0] >= 1, "a prompt of a second is far longer than the target between tokens"
    assert tried[chosen]["meets"]
    assert tried[chosen]["strain"] <= 1
    assert tried[chosen]["result"]["ttft_ms"]["p95"] <= 2500
    assert 0 < tried[chosen]["result"]["prefill_busy"] <= 1
    beside = (0, sum(chosen))
    assert report["beside"] == {"num_prefill": 0, "num_decode": beside[1]}
    assert tried[beside]["result"] is not None
    assert tried[beside]["reason"].startswith(("TTFT", "ITL"))
    assert report["verdict"].startswith("Disaggregate: ")
    assert report["start"].endswith(f"--replicas prefill={chosen[0]} --replicas decode={chosen[1]}")
    assert "--set engine.mock.timing.prefill_base=1000" in report["start"], "what was planned is what is started"


async def test_a_fleet_that_is_far_too_small_is_not_replayed_to_its_end(trace: str, run_cli: RunCli) -> None:
    options = f"--ttft-p95 1500 --max-workers 4 --rate 3 --json - {_SLOW}"
    result = await run_cli("plan", trace, *options.split())
    assert result.exit_code == 0, result.output
    given_up = [tried for tried in json.loads(result.stdout)["tried"] if tried["result"] is None]
    assert {tried["reason"] for tried in given_up} == {"given up: 7.5% of first tokens later than 1500 ms"}


async def test_requests_that_no_worker_can_hold_are_left_out(run_cli: RunCli, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    requests = [
        TraceRequest(arrival_s=number, num_input_tokens=length, num_output_tokens=2, hash_ids=(number,))
        for number, length in enumerate((100, 200, 500))
    ]
    write_trace(requests, path)
    options = ("--ttft-p95", "1000", "--max-workers", "1", "--set", "engine.max_model_len=300")
    result = await run_cli("plan", str(path), *options)
    assert result.exit_code == 0, result.output
    assert "Left out, as a worker takes no longer ones: 1 of 3 requests." in result.stdout
    refused = await run_cli("plan", str(path), *options[:-1], "engine.max_model_len=50")
    assert refused.exit_code == 1
    assert "TRACE: a worker holds 50 tokens, and each request has more" in refused.output


async def test_the_rate_that_is_asked_for_is_that_of_the_requests_that_are_replayed(
    run_cli: RunCli, tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace([_request(number, 100 if number % 2 else 500) for number in range(10)], path)
    options = "--ttft-p95 1000 --max-workers 1 --set engine.max_model_len=300 --rate 2".split()
    result = await run_cli("plan", str(path), *options)
    assert result.exit_code == 0, result.output
    # Of those at 1, 3, 5, 7 and 9 s, five in 8 s.
    assert "5 requests at 3.2x (2 a second)" in result.stdout


@pytest.mark.parametrize(
    ("arrivals_s", "load", "few"),
    [
        ((0.0,), "1 request", "Only 1 request: "),
        ((0.0, 0.0), "2 requests, all at once", "p95 of TTFT rests on the slowest 1 of them, p99 on the slowest 1"),
        (range(99), "99 requests at 1x (1.01 a second)", "p95 of TTFT rests on the slowest 4 of them"),
        (range(100), "100 requests at 1x (1.01 a second)", ""),
    ],
)
async def test_a_trace_of_few_requests_says_how_little_its_percentiles_rest_on(
    run_cli: RunCli, tmp_path: Path, arrivals_s: Sequence[float], load: str, few: str
) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace([_request(arrival_s, 100) for arrival_s in arrivals_s], path)
    result = await run_cli("plan", str(path), "--ttft-p95", "1000", "--max-workers", "1", "--json", "-")
    assert result.exit_code == 0, result.output
    assert f"trace.jsonl, {load}; steps of mock_fleet; wanted" in result.stderr
    [warning] = json.loads(result.stdout)["warnings"] or [""]
    assert few in warning
    assert bool(few) == bool(warning) == ("Note: " in result.stderr)


async def test_a_fleet_whose_topology_is_not_known_is_planned_with_a_policy_that_is_named(
    trace: str, run_cli: RunCli, start_router: StartRouter
) -> None:
    router = FakeRouter()
    router.workers = [to_worker_status(status(Role.DECODE, 0, num_total_blocks=1000))]
    options = ("--ttft-p95", "1e6", "--max-workers", "1", "--from-fleet", "--router", await start_router(router))
    result = await run_cli("plan", trace, *options)
    assert result.exit_code == 0, result.output
    title, *_, start = result.stdout.splitlines()
    assert "measured by the running fleet; policy kv_aware, the default, as there is no --topology; wanted" in title
    assert start == "To start it, give quartet up the fleet's topology and --replicas prefill=0 --replicas decode=1."
    topology = ("--topology", "mock_fleet", "--set", "router.overrides.policy.name=round_robin")
    known = await run_cli("plan", trace, *options, *topology)
    assert known.exit_code == 0, known.output
    assert "measured by the running fleet; wanted" in known.stdout


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        ("", True),
        ("--set router.overrides.policy.margin_s=0.1", False),
        (_APART, False),  # it does not go by forecasts
        ("--set engine.mock.speed_up=10", False),
    ],
)
async def test_steps_that_are_long_for_the_policys_margin_are_warned_of(
    run_cli: RunCli, tmp_path: Path, options: str, warns: bool
) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace([_request(number, length) for number, length in enumerate((10, 100, 5000))], path)
    timing = "--set engine.mock.timing.prefill_base=900 --set engine.mock.timing.prefill_linear=1"
    result = await run_cli("plan", str(path), *f"--ttft-p95 1e6 --max-workers 1 {timing} {options}".split())
    assert result.exit_code == 0, result.output
    warning = (
        "Note: A step with a prompt of 100 tokens takes 1000 ms, for which policy.margin_s, 5 ms, is short. Live, "
        "prompts may come too late for the next step and have a longer TTFT: "
        "try --set router.overrides.policy.margin_s=0.1."
    )
    assert (warning in result.stdout.splitlines()) is warns


async def test_a_target_between_tokens_is_refused_where_answers_have_one(run_cli: RunCli, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace([_request(number, 100, num_output_tokens=1) for number in range(3)], path)
    options = ("--ttft-p95", "1000", "--max-workers", "1")
    refused = await run_cli("plan", str(path), *options, "--itl-p99", "50")
    assert refused.exit_code == 1
    assert "--itl-p99: there are no values: all answers in the trace have one token" in refused.output
    result = await run_cli("plan", str(path), *options, "--json", str(tmp_path / "plan.json"))
    assert result.exit_code == 0, result.output
    assert "no values" in result.stdout
    [tried] = json.loads((tmp_path / "plan.json").read_text())["tried"]
    assert tried["result"]["itl_ms"] is None


def _request(arrival_s: float, num_input_tokens: int, num_output_tokens: int = 2) -> TraceRequest:
    """Whose prompt no other request shares, given that none comes at the same time."""
    num_blocks = -(-num_input_tokens // BLOCK_SIZE)
    hash_ids = tuple(round(1000 * arrival_s) + number for number in range(num_blocks))
    return TraceRequest(
        arrival_s=arrival_s,
        num_input_tokens=num_input_tokens,
        num_output_tokens=num_output_tokens,
        hash_ids=hash_ids,
    )


@pytest.mark.parametrize(
    ("options", "code", "shown"),
    [
        ("", 2, "at least one is needed, such as --ttft-p95 2000 --itl-p95 50"),
        ("--ttft-p95 0", 2, "must be above 0, and finite"),
        ("--ttft-p95 9 --rate 2 --speed 2", 2, "each of them sets the pace: give one"),
        ("--ttft-p95 9 --from-fleet --set engine.num_blocks=9", 2, "needs --topology"),
        ("--ttft-p95 9 --rate 0", 2, "must be above 0, and finite"),
        ("--ttft-p95 9 --decode-step-ms nan", 2, "must be above 0, and finite"),
        ("--ttft-p95 9 --prefill-base-ms -1", 2, "must be at least 0, and finite"),
        ("--ttft-p95 9 --plot plan.txt", 2, "must end in one of"),
        ("--ttft-p95 9 --topology nothing", 1, "there is no file nothing"),
        ("--ttft-p95 9 --topology disagg", 1, "prefill_tokens_per_s: is missing, or --from-fleet"),
        ("--ttft-p95 9 --topology global", 1, "global_router: a plan is for one pool"),
        (
            "--ttft-p95 9 --set engine.data_parallel_size=2",
            1,
            "engine.data_parallel_size: a plan is for workers of one",
        ),
    ],
)
async def test_what_can_not_be_planned_is_refused_by_name(
    trace: str, run_cli: RunCli, options: str, code: int, shown: str
) -> None:
    result = await run_cli("plan", trace, *options.split())
    assert result.exit_code == code, result.output
    assert shown in " ".join(result.output.replace("│", " ").split())
