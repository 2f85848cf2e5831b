"""``quartet trace``: the file that it writes, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.traces.format import read_trace
from cli.traces.generate import TraceConfig, generate
from tests.cli.conftest import RunCli


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
async def test_the_file_holds_what_was_generated_and_is_summed_up(tmp_path: Path, run_cli: RunCli, name: str) -> None:
    path = tmp_path / name
    result = await run_cli("trace", "--requests", "30", "--seed", "5", "--out", str(path))
    assert result.exit_code == 0, result.output
    assert read_trace(path) == list(generate(TraceConfig(max_requests=30, seed=5)))
    assert f"{path}: 30 requests in " in result.stdout


async def test_options_say_what_the_trace_is_like(tmp_path: Path, run_cli: RunCli) -> None:
    path = tmp_path / "trace.jsonl"
    options = (
        "--duration 40 --arrivals bursts --rate 5 --burst-size 10 --burst-spread 0 --turns 1 --length-sigma 0 "
        "--message-tokens 100 --output-tokens 7 --system-tokens 50 --system-prompts 2 --zipf 0 --think-time 1 "
        "--max-input-tokens 140"
    )
    result = await run_cli("trace", *options.split(), "--out", str(path))
    assert result.exit_code == 0, result.output
    requests = read_trace(path)
    assert {(request.num_input_tokens, request.num_output_tokens) for request in requests} == {(140, 7)}
    times = [request.arrival_s for request in requests]
    assert {times.count(time) for time in times} == {10}
    assert max(times) < 40


@pytest.mark.parametrize(
    ("options", "code", "shown"),
    [
        ("", 2, "--duration"),
        ("--requests 0", 2, "--requests"),
        ("--requests 5 --rate 0", 1, "rate: must be above 0"),
        ("--requests 5 --turns 0.5", 1, "num_turns: must be at least 1"),
        ("--requests 5 --arrivals never", 2, "--arrivals"),
    ],
)
async def test_impossible_options_are_refused_and_no_file_is_written(
    tmp_path: Path, run_cli: RunCli, options: str, code: int, shown: str
) -> None:
    path = tmp_path / "trace.jsonl"
    result = await run_cli("trace", *options.split(), "--out", str(path))
    assert result.exit_code == code
    assert shown in result.output
    assert not path.exists()


async def test_a_file_that_cannot_be_written_is_reported(tmp_path: Path, run_cli: RunCli) -> None:
    path = tmp_path / "no" / "trace.jsonl"
    result = await run_cli("trace", "--requests", "1", "--out", str(path))
    assert result.exit_code == 1
    assert f"quartet: can't write {path}: No such file" in result.output
