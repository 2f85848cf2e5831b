"""Two versions of the Router are measured by turns, and pairs of windows show what a change costs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.relay_measure import Windows
from benchmarks.relay_versions import compare, make_change
from benchmarks.table import relay_versions_tables

REPOSITORY = Path(__file__).resolve().parents[2]
# Long enough for a request to end in each, also on a busy machine.
TWO_WINDOWS = Windows(warm_up_s=0.1, window_s=2.0, round_size=2, num_rounds=1)


def test_the_change_is_the_median_of_pairs_whatever_the_machines_speed_was() -> None:
    speeds = [1.0 + number % 7 for number in range(30)]
    change = make_change(speeds, [speed * (1.02 + 0.001 * number) for number, speed in enumerate(speeds)])
    assert change.times == pytest.approx(1.0345)
    # Of 30 fair coins 10 to 20 show heads in 95 of 100 throws: the median lies between the ranks 10 and 21.
    assert [change.lowest, change.highest] == pytest.approx([1.029, 1.040])


def test_what_is_told_is_certain_by_95_percent_and_not_by_about_that() -> None:
    # Of 8 fair coins 2 to 6 show heads in 93 of 100 throws.
    change = make_change([1.0] * 8, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    assert (change.lowest, change.highest) == (1.0, 8.0)


def test_few_pairs_leave_everything_between_the_least_and_the_most_possible() -> None:
    change = make_change([1.0, 1.0], [3.0, 2.0])
    assert (change.lowest, change.times, change.highest) == (2.0, 2.5, 3.0)


def test_the_table_shows_each_load_with_its_unit_and_what_was_before() -> None:
    load = {"before": [1.0, 3.0], "after": [2.0, 4.0], "times": 1.5, "lowest": 1.25, "highest": 2.0}
    report = {"loads": {"request_place": load, "http_256": load}, "before": {"revision": "0123456789abcdef"}}
    table = relay_versions_tables(report)
    assert "| place, a request of one token | 2.00 ms | 3.00 ms | 1.500 | 1.250 to 2.000 |" in table
    assert "| http, 256 streams: a token | 2.00 us | 3.00 us | 1.500 | 1.250 to 2.000 |" in table
    assert "Before: commit 0123456789ab." in table


@pytest.mark.bench
@pytest.mark.e2e
async def test_both_versions_have_their_windows_by_turns() -> None:
    names = ["request_session", "session_256"]
    results = await compare(REPOSITORY, Path(sys.executable), names, TWO_WINDOWS)
    assert list(results.loads) == names
    for change in results.loads.values():
        assert len(change.before) == len(change.after) == 2
        assert min(*change.before, *change.after) > 0
