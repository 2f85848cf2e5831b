"""Durations in buckets: what is read off is near to what was put in."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.bench.histogram import DurationHistogram

DURATIONS = st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=200)


@given(DURATIONS, st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_is_within_half_a_per_cent_of_the_value_of_that_rank(values: list[float], share: float) -> None:
    histogram = DurationHistogram()
    for value in values:
        histogram.add(value)
    exact = sorted(values)[math.ceil(share * len(values)) - 1]
    assert histogram.quantile_s(share) == pytest.approx(exact, rel=0.0051)


@given(DURATIONS)
def test_mean_and_maximum_are_exact(values: list[float]) -> None:
    histogram = DurationHistogram()
    for value in values:
        histogram.add(value)
    assert histogram.count == len(values)
    assert histogram.sum_s == pytest.approx(sum(values))
    assert histogram.max_s == max(values)


def test_a_count_stands_for_as_many_equal_durations() -> None:
    histogram = DurationHistogram()
    histogram.add(0.001, 98)
    histogram.add(1.0, 2)
    assert histogram.count == 100
    assert histogram.quantile_s(0.9) == pytest.approx(0.001, rel=0.01)
    assert histogram.quantile_s(0.99) == pytest.approx(1.0, rel=0.01)


def test_what_is_out_of_range_is_counted_at_its_end() -> None:
    histogram = DurationHistogram()
    for value in (0.0, 1e-9, 1e9):
        histogram.add(value)
    assert histogram.count == 3
    assert histogram.quantile_s(0.5) < 2e-6
    assert histogram.quantile_s(1.0) > 1e4


def test_the_distribution_ascends_to_the_whole() -> None:
    histogram = DurationHistogram()
    for value in (0.3, 0.1, 0.2, 0.1):
        histogram.add(value)
    values, shares = histogram.distribution()
    assert values.tolist() == pytest.approx([0.1, 0.2, 0.3], rel=0.01)
    assert shares.tolist() == [0.5, 0.75, 1.0]


def test_without_durations_there_is_nothing_to_read_off() -> None:
    histogram = DurationHistogram()
    assert (histogram.count, histogram.quantile_s(0.5)) == (0, 0.0)
    assert [array.tolist() for array in histogram.distribution()] == [[], []]
