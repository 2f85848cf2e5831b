"""How the overload benchmark looks for the peak, and its short form end to end: that it measures what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.overload import Plan, next_level

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("sweep", "level"),
    [
        ({}, 1),
        ({1: 100.0}, 2),
        ({1: 100.0, 2: 190.0, 4: 191.0}, 8),
        ({1: 100.0, 2: 190.0, 4: 191.0, 8: 189.0}, None),
        ({1: 100.0, 2: 190.0, 4: 191.0, 8: 250.0}, 16),
    ],
)
def test_the_sweep_doubles_until_two_levels_brought_nothing(sweep: dict[int, float], level: int | None) -> None:
    assert next_level(Plan(), sweep) == level


def test_the_sweep_ends_at_its_bound() -> None:
    assert next_level(Plan(max_concurrency=4), {1: 1.0, 2: 2.0, 4: 4.0}) is None


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("overload")
    command = ["--short", "--json", str(directory / "overload.json"), "--plot", str(directory / "overload.png")]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.overload", *command],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (directory / "overload.png").read_bytes().startswith(b"\x89PNG")
    written: dict[str, Any] = json.loads((directory / "overload.json").read_text())
    return written


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_the_report_sets_twice_the_load_of_the_peak_against_the_peak(report: dict[str, Any]) -> None:
    peak, over = report["peak"], report["overload"]
    assert peak["tokens_per_s"] > 0
    assert over["concurrency"] == 2 * peak["concurrency"]
    assert over["ratio"] == pytest.approx(over["tokens_per_s"] / peak["tokens_per_s"], rel=1e-4)
    assert [phase["load"]["concurrency"] for phase in report["sweep"]][:2] == [1, 2]
    assert over["phase"]["cpu"]["share"].keys() >= {"client", "router", "prefill-0", "decode-0"}
    assert report["versions"].keys() >= {"torch", "transformers"}


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_under_overload_no_work_is_done_twice(report: dict[str, Any]) -> None:
    over = report["overload"]
    evidence = over["phase"]["evidence"]
    assert over["requests_finished"] > 0
    assert (over["requests_failed"], over["requests_refused"]) == (0, 0)
    assert (over["hand_offs_expired"], over["preemptions"], over["prompts_prefilled_twice"]) == (0, 0, 0)
    assert evidence["tokens_computed_again"] == 0
    # All went over the whole path: prefilled remotely, taken over by decode.
    assert evidence["prompts_prefilled"] == over["requests_finished"] == evidence["hand_offs"]["released"]
