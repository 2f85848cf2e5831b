"""``quartet replay``: its table, its figures, its picture, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cli.traces.format import TraceRequest, write_trace
from cli.traces.generate import Arrivals, TraceConfig, generate
from tests.cli.conftest import RunCli

_NUM_REQUESTS = 12
_PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl.gz"
    write_trace(generate(TraceConfig(arrivals=Arrivals(rate=8.0), max_requests=_NUM_REQUESTS, seed=5)), path)
    return str(path)


async def test_the_table_has_a_row_for_each_policy(trace: str, run_cli: RunCli) -> None:
    result = await run_cli("replay", trace, "--policy", "dynamo_16,round_robin", "--workers", "2", "--speed", "1.5")
    assert result.exit_code == 0, result.output
    title, *lines = result.stdout.splitlines()
    assert title.strip() == f"trace.jsonl.gz, {_NUM_REQUESTS} requests at 1.5x, 2 workers"
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert [row[0] for row in rows] == ["dynamo_16", "round_robin"]
    for row in rows:
        assert [len(row[column].split(" / ")) for column in (1, 2, 3)] == [4, 4, 4]
        assert row[8:10] == [str(_NUM_REQUESTS), "0"]


async def test_without_policies_named_kv_aware_is_held_against_round_robin(trace: str, run_cli: RunCli) -> None:
    result = await run_cli("replay", trace, "--workers", "2", "--prefill-workers", "1", "--json", "-")
    assert result.exit_code == 0, result.output
    assert list(json.loads(result.stdout)["policies"]) == ["kv_aware", "round_robin"]
    assert "2 workers and 1 that only prefill" in result.stderr, "the table goes where it is not in the way"


async def test_figures_are_written_as_documented(trace: str, run_cli: RunCli, tmp_path: Path) -> None:
    path = tmp_path / "new" / "figures.json"
    options = (
        "--policy round_robin,least_loaded --requests 10 --workers 3 --routers 2 --load-age-ms 50 --seed 4 "
        "--bookings-age-ms 2 --blocks 2000 --block-size 32 --good-ttft-ms 1e9 --good-itl-ms 0 --session-ttl 9"
    )
    result = await run_cli("replay", trace, *options.split(), "--json", str(path))
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    assert report["benchmark"] == "replay"
    assert {"command", "started_at", "commit", "versions", "machine"} < report.keys()
    assert (report["trace"], report["num_requests"], report["speed"], report["seed"]) == ("trace.jsonl.gz", 10, 1, 4)
    fleet = report["fleet"]
    assert (fleet["num_workers"], fleet["num_routers"], fleet["load_age_s"]) == (3, 2, 0.05)
    assert fleet["bookings_age_s"] == 0.002
    assert (fleet["engine"]["num_blocks"], fleet["engine"]["block_size"]) == (2000, 32)
    assert fleet["engine"]["retention"] == {"ttl_s": 9, "share": 0.5}
    assert fleet["objectives"] == {"ttft_ms": 1e9, "itl_ms": 0}
    assert report["policies"].keys() == {"round_robin", "least_loaded"}
    for figures in report["policies"].values():
        for name in ("ttft_ms", "itl_ms", "e2e_ms", "session_ttft_ms"):
            spread = figures[name]
            assert spread.keys() == {"mean", "p50", "p90", "p95", "p99"}
            assert 0 < spread["p50"] <= spread["p90"] <= spread["p95"] <= spread["p99"]
        assert 0 <= figures["reuse_ratio"] < 1 <= figures["imbalance"] <= 3
        assert (figures["requests_completed"], figures["requests_refused"]) == (10, 0)
        assert figures["goodput_per_s"] == 0, "no token follows another within 0 ms"
        assert min(figures[name] for name in ("output_tokens_per_s", "duration_s", "cpu_s")) > 0


async def test_the_same_seed_gives_the_same_figures(trace: str, run_cli: RunCli) -> None:
    async def figures() -> dict[str, object]:
        options = ("--policy", "power_of_two", "--workers", "3", "--seed", "7", "--json", "-")
        result = await run_cli("replay", trace, *options)
        assert result.exit_code == 0, result.output
        policy: dict[str, object] = json.loads(result.stdout)["policies"]["power_of_two"]
        del policy["cpu_s"]
        return policy

    assert await figures() == await figures()


async def test_the_policies_are_drawn(trace: str, run_cli: RunCli, tmp_path: Path) -> None:
    path = tmp_path / "new" / "policies.png"
    result = await run_cli("replay", trace, "--policy", "round_robin,dynamo_1", "--plot", str(path))
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(_PNG_MAGIC)


@pytest.mark.parametrize(
    ("options", "code", "shown"),
    [
        (
            "--policy kv_aware,best",
            1,
            "quartet: INVALID_ARGUMENT INVALID_FIELD (policy): there is no policy 'best'; there are kv_aware,",
        ),
        ("--policy round_robin,", 1, "there is no policy ''"),
        ("--speed 0", 2, "--speed"),
        ("--speed nan", 2, "--speed"),
        ("--speed inf", 2, "--speed"),
        ("--requests 0", 2, "--requests"),
        ("--seed -1", 2, "--seed"),
        ("--workers 0", 2, "--workers"),
        ("--prefill-workers -1", 2, "--prefill-workers"),
        ("--transfer-gb-per-s 0", 2, "--transfer-gb-per-s"),
        ("--routers 0", 2, "--routers"),
        ("--load-age-ms nan", 2, "--load-age-ms"),
        ("--blocks 0", 2, "--blocks"),
        ("--block-size 0.5", 2, "--block-size"),
        ("--good-itl-ms -1", 2, "--good-itl-ms"),
        ("--session-ttl inf", 2, "--session-ttl"),
        ("--session-ttl -1", 2, "--session-ttl"),
        ("--session-share 0", 2, "--session-share"),
        ("--session-share 1.1", 2, "--session-share"),
        ("--plot policies.txt", 2, "--plot"),
        ("--json .", 2, "--json"),
    ],
)
async def test_impossible_options_are_refused(trace: str, run_cli: RunCli, options: str, code: int, shown: str) -> None:
    result = await run_cli("replay", trace, *options.split())
    assert result.exit_code == code
    assert shown in result.stderr
    assert not result.stdout


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        (None, "quartet: can't read {path}: No such file"),
        ("", "quartet: {path} holds no requests"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1}', "line 1: input_length must be a whole number"),
        (
            '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [7]}',
            "quartet: INVALID_ARGUMENT INVALID_FIELD (hash_ids): request 1 has 1 hash_ids for 513 tokens",
        ),
    ],
)
async def test_a_trace_that_cannot_be_used_is_reported(
    tmp_path: Path, run_cli: RunCli, content: str | None, shown: str
) -> None:
    path = tmp_path / "bad.jsonl"
    if content is not None:
        path.write_text(content)
    result = await run_cli("replay", str(path))
    assert result.exit_code == 1
    assert shown.format(path=path) in result.stderr
    assert not result.stdout


@pytest.mark.parametrize("option", ["--json", "--plot"])
async def test_a_file_that_cannot_be_written_is_reported_beside_the_table(
    trace: str, run_cli: RunCli, tmp_path: Path, option: str
) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "replay.png"
    result = await run_cli("replay", trace, "--policy", "round_robin", option, str(path))
    assert result.exit_code == 1
    assert f"quartet: can't write {path}: " in result.stderr
    assert "round_robin" in result.stdout


async def test_tiers_are_those_of_the_options(trace: str, run_cli: RunCli) -> None:
    options = "--policy round_robin --host-blocks 300 --disk-blocks 900 --host-gb-per-s 30 --disk-gb-per-s 4"
    result = await run_cli("replay", trace, *options.split(), "--json", "-")
    assert result.exit_code == 0, result.output
    tiers = json.loads(result.stdout)["fleet"]["engine"]["tiers"]
    assert (tiers["host"]["num_blocks"], tiers["disk"]["num_blocks"]) == (300, 900)
    assert (tiers["host_gb_per_s"], tiers["disk_gb_per_s"]) == (30, 4)


async def test_the_table_says_what_came_from_lower_tiers(tmp_path: Path, run_cli: RunCli) -> None:
    prompt = TraceRequest(arrival_s=0.0, num_input_tokens=1088, num_output_tokens=1, hash_ids=(1, 2, 3))
    other = TraceRequest(arrival_s=9.0, num_input_tokens=2560, num_output_tokens=1, hash_ids=(4, 5, 6, 7, 8))
    write_trace([prompt, other, replace(prompt, arrival_s=18.0)], path := tmp_path / "again.jsonl")
    options = "--policy round_robin --workers 1 --blocks 40 --host-blocks 100"
    result = await run_cli("replay", str(path), *options.split())
    assert result.exit_code == 0, result.output
    assert "0.216 (0.216 host)" in result.stdout


async def test_without_a_host_there_is_no_disk(trace: str, run_cli: RunCli) -> None:
    result = await run_cli("replay", trace, "--disk-blocks", "100")
    assert result.exit_code == 2
    assert "needs --host-blocks" in result.output
