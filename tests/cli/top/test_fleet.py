"""Figures and rows of ``quartet top``, which are the page's."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from cli.top import command
from cli.top.fleet import (
    CACHE_S,
    GONE_S,
    KEPT_S,
    RATE_S,
    STATES,
    TTFT_S,
    Fleet,
    Series,
    milliseconds,
    short,
)
from tests.cli.top.fleets import state, worker

STATIC = Path(__file__).parents[3] / "router/page/static"


def constants(file: str) -> dict[str, float]:
    found = re.findall(r"^const (\w+) = ([\d_]+);", (STATIC / file).read_text(), re.MULTILINE)
    return {name: float(value) for name, value in found}


def test_windows_and_words_are_those_of_the_page() -> None:
    charts, fleet = constants("charts.js"), constants("fleet.js")
    assert [charts[name] for name in ("KEPT_S", "RATE_S", "TTFT_S", "CACHE_S")] == [KEPT_S, RATE_S, TTFT_S, CACHE_S]
    assert fleet["GONE_MS"] == 1000 * GONE_S
    assert constants("main.js")["MAX_SILENCE_MS"] == 1000 * command.MAX_SILENCE_S
    [words] = re.findall(r"const STATES = \{(.*?)\};", (STATIC / "fleet.js").read_text(), re.DOTALL)
    assert dict(re.findall(r'(\w+): "([^"]*)"', words)) == dict(STATES)


def test_rates_are_over_five_seconds() -> None:
    fleet = Fleet()
    fleet.take(state(outcomes={"length": 100}, num_output_tokens=5000), 0.0)
    assert (fleet.figures().requests_per_s, fleet.figures().tokens_per_s) == (None, None)
    fleet.take(state(outcomes={"length": 100}, num_output_tokens=5000), 10.0)
    fleet.take(state(outcomes={"length": 110, "timeout": 5}, num_output_tokens=5100), 15.0)
    assert (fleet.figures().requests_per_s, fleet.figures().tokens_per_s) == (3.0, 20.0)


def test_the_median_lies_evenly_within_its_bucket() -> None:
    fleet = Fleet()
    fleet.take(state(ttft_counts=(9, 0, 0, 0)), 0.0)
    assert fleet.figures().ttft_p50_s is None
    # Of the new ones two are below 0.1 s, six between that and 0.2 s, two above: the fifth is the third of those six.
    fleet.take(state(ttft_counts=(11, 6, 2, 0)), 10.0)
    assert fleet.figures().ttft_p50_s == pytest.approx(0.15)
    fleet.take(state(ttft_counts=(11, 6, 2, 90)), 14.0)
    assert fleet.figures().ttft_p50_s == pytest.approx(0.4), "the last bucket has no upper bound"


def test_cache_hits_and_failures_are_over_thirty_seconds() -> None:
    fleet = Fleet()
    fleet.take(state(num_prompt_tokens=100, num_cached_tokens=100, num_failed=3), 0.0)
    assert (fleet.figures().cached_share, fleet.figures().num_failed) == (None, 0)
    fleet.take(state(num_prompt_tokens=300, num_cached_tokens=150, num_failed=5), 30.0)
    assert (fleet.figures().cached_share, fleet.figures().num_failed) == (0.25, 2)
    fleet.take(state(num_prompt_tokens=400, num_cached_tokens=250, num_failed=5), 60.0)
    assert (fleet.figures().cached_share, fleet.figures().num_failed) == (1.0, 0)


def test_another_routers_counts_are_not_compared() -> None:
    fleet = Fleet()
    fleet.take(state(num_output_tokens=5000), 0.0)
    fleet.take(state(router_id="router-2", num_output_tokens=10), 1.0)
    assert fleet.figures().tokens_per_s is None
    assert len(fleet.lines.points) == 1
    fleet.take(state(router_id="router-2", num_output_tokens=20), 2.0)
    assert fleet.figures().tokens_per_s == 10.0


def test_a_worker_that_is_gone_is_shown_for_a_while_without_load() -> None:
    fleet = Fleet()
    fleet.take(state(worker("decode-0", num_running=3, num_total_blocks=9)), 0.0)
    fleet.take(state(), 10.0)
    [row] = fleet.rows(10.0 + GONE_S)
    assert (row.worker_id, row.state, row.num_running, row.num_blocks) == ("decode-0", "gone", 0, 0)
    assert fleet.rows(11.0 + GONE_S) == []
    fleet.take(state(worker("decode-0")), 200.0)
    assert [row.state for row in fleet.rows(200.0)] == ["ready"]


def test_a_worker_that_comes_back_as_it_was_stays_and_can_stall() -> None:
    fleet = Fleet()
    fleet.take(state(worker("decode-0", num_running=1, num_steps=7)), 0.0)
    fleet.take(state(), 1.0)
    fleet.take(state(worker("decode-0", num_running=1, num_steps=7)), 2.0)
    late_s = 10.0 + GONE_S
    fleet.take(state(worker("decode-0", num_running=1, num_steps=7)), late_s)
    assert [row.state for row in fleet.rows(late_s)] == ["ready"]
    assert fleet.stalled_ranks(GONE_S, late_s) == [("decode-0", 0, late_s)]


def test_steps_are_counted_by_epoch() -> None:
    fleet = Fleet()
    fleet.take(state(worker("decode-0", num_steps=1000)), 0.0)
    fleet.take(state(worker("decode-0", num_steps=1100)), 5.0)
    assert [row.steps_per_s for row in fleet.rows(5.0)] == [20.0]
    again = worker("decode-0", num_steps=10)
    again = replace(again, record=replace(again.record, epoch=10))
    fleet.take(state(again), 6.0)
    assert [row.steps_per_s for row in fleet.rows(6.0)] == [None]


def test_a_series_keeps_few_values_and_always_the_last() -> None:
    series: Series[int] = Series(10.0)
    for number in range(1000):
        series.add(number / 10, number)
    assert series.points[-1] == (99.9, 999)
    assert len(series.points) <= 22
    assert series.before(5.0)[0] == pytest.approx(94.9, abs=0.5)
    assert series.before(500.0) == series.points[0]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (0.25, "0.25"), (9, "9"), (12.34, "12.3"), (950, "950"), (12345, "12.3k"), (4.56e6, "4.56M")],
)
def test_numbers_are_short(value: float, shown: str) -> None:
    assert short(value) == shown


def test_times_to_the_first_token_are_as_on_the_page() -> None:
    assert [milliseconds(seconds) for seconds in (0.0454, 1.234, 12.34)] == ["45 ms", "1.23 s", "12.3 s"]
