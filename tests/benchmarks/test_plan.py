"""Plans beside live fleets: the fleets that are compared are the same, and the bar is on the median of the runs."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.plan import CASES, Case, Latencies, LiveRun, compare, foretell, spread_of, take_precedence, topology
from cli.bench.measure import DurationHistogram
from quartet.discovery.base import Role
from services.topology.topology import plan_workers


def run(ttft_p50: float, ttft_p95: float, num_failed: int = 0) -> LiveRun:
    latencies = Latencies(ttft_p50=ttft_p50, ttft_p95=ttft_p95, itl_p50=70.0, itl_p95=80.0)
    return LiveRun(latencies=latencies, num_failed=num_failed, others_cores=0.0, client_cpu_share=0.0)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_each_case_starts_the_fleet_that_it_foretells(case: Case) -> None:
    roles = [plan.role for plan in plan_workers(topology(case), num_cores=1)]
    assert roles.count(Role.PREFILL) == case.shape.num_prefill
    assert roles.count(Role.DECODE) == case.shape.num_decode


def test_the_bar_is_on_ttft_p50_and_p95_of_the_median_run() -> None:
    case = CASES["aggregated"]
    replayed = foretell(case, 12)
    p50, p95 = replayed.ttft_ms.p50, replayed.ttft_ms.p95
    near = compare("aggregated", case, replayed, [run(p50, 1.1 * p95), run(p50, 0.9 * p95), run(9 * p50, 9 * p95)])
    assert near.meets_bar
    assert near.error["ttft_p50"] == pytest.approx(0)
    assert near.error["ttft_p95"] == pytest.approx(1 / 1.1 - 1)
    far = compare("aggregated", case, replayed, [run(p50, 1.2 * p95)])
    assert not far.meets_bar


def test_a_case_with_a_failed_request_misses_the_bar() -> None:
    case = CASES["aggregated"]
    replayed = foretell(case, 12)
    runs = [run(replayed.ttft_ms.p50, replayed.ttft_ms.p95, num_failed) for num_failed in (0, 1, 0)]
    assert not compare("aggregated", case, replayed, runs).meets_bar
    assert compare("aggregated", case, replayed, [runs[0], runs[2]]).meets_bar


def test_percentiles_of_live_runs_are_those_of_replays() -> None:
    histogram = DurationHistogram()
    for number in range(1, 101):
        histogram.add(number / 10)
    spread = spread_of(histogram)
    assert spread.p50 == pytest.approx(5_050, rel=0.01)
    assert spread.p95 == pytest.approx(9_505, rel=0.01)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may take precedence")
@pytest.mark.parametrize("is_in_a_session", [True, False])
def test_precedence_is_that_of_all_threads(is_in_a_session: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_kwargs: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    if not is_in_a_session:  # then Linux knows no group of it
        monkeypatch.setattr(Path, "write_text", refuse)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        try:
            take_precedence([child.pid])
            assert os.getpriority(os.PRIO_PROCESS, child.pid) == -20
        finally:
            child.kill()
