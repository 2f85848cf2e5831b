"""One command runs all benchmarks: whatever one of them does, the others run and the page is filled."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from benchmarks.__main__ import Benchmark, run_all

_MODULE = "tests.benchmarks.fake_benchmark"
GOOD = Benchmark("many_streams", ("--like", "many_streams"), _MODULE)
BROKEN = Benchmark("transfer", ("--exit-code", "3"), _MODULE)
FOUND_SOMETHING = Benchmark("relay", ("--like", "relay", "--exit-code", "1"), _MODULE)
ENDLESS = Benchmark("disagg", ("--hangs",), _MODULE)


@pytest.fixture
def page(tmp_path: Path) -> Path:
    page = tmp_path / "page.md"
    names = ("many_streams", "transfer", "relay", "total")
    page.write_text("".join(f"<!-- table: {name} -->\n<!-- end -->\n" for name in names))
    return page


def table(page: Path, name: str) -> str:
    return page.read_text().partition(f"<!-- table: {name} -->\n")[2].partition("<!-- end -->")[0]


def is_running(pid: int) -> bool:
    """Whether it has not ended; a zombie has."""
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def test_when_all_are_done_their_tables_are_filled(tmp_path: Path, page: Path) -> None:
    assert run_all([GOOD], tmp_path, page) == 0
    assert "| sessions_8 | 2000 |" in table(page, "many_streams")
    assert "| many_streams | " in table(page, "total")


def test_a_benchmark_that_fails_leaves_the_others_their_run_and_their_table(
    tmp_path: Path, page: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_all([BROKEN, FOUND_SOMETHING, GOOD], tmp_path, page) == 1
    assert "| sessions_8 | 2000 |" in table(page, "many_streams")
    assert "not measured yet" in table(page, "transfer")
    errors = capfd.readouterr().err
    assert "failed: transfer; it has no figures\n" in errors
    assert "failed: relay; its table shows what it measured\n" in errors
    assert "failed: many_streams" not in errors
    total = json.loads((tmp_path / "total.json").read_text())
    assert [(run["name"], run["is_done"]) for run in total["runs"]] == [
        ("transfer", False),
        ("relay", False),
        ("many_streams", True),
    ]
    assert total["command"] == "python -m benchmarks"
    rounding_s = 0.002  # the file has milliseconds
    assert total["duration_s"] + rounding_s >= sum(run["duration_s"] for run in total["runs"]) > 0


def test_figures_of_an_earlier_run_are_marked_as_old(
    tmp_path: Path, page: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_all([GOOD], tmp_path, page)
    assert run_all([Benchmark("many_streams", ("--exit-code", "1"), _MODULE)], tmp_path, page) == 1
    assert "failed: many_streams; its table shows what was measured before\n" in capfd.readouterr().err


def test_a_benchmark_that_never_ends_is_ended_with_all_that_it_started(
    tmp_path: Path, page: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_all([ENDLESS, GOOD], tmp_path, page, time_limit_s=5) == 1
    errors = capfd.readouterr().err
    assert "not done within 5 s\n" in errors
    assert "failed: disagg; it has no figures\n" in errors
    assert "| sessions_8 | 2000 |" in table(page, "many_streams")
    child = int((tmp_path / "disagg.pid").read_text())
    deadline = time.monotonic() + 10
    while is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)
