"""The grid: bands, defaults, overrides, and what comes next where a pool can't take a request."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.global_router.grid import (
    Axis,
    Cell,
    Grid,
    PoolState,
    PriorityOverride,
    choose,
    fallback_order,
    retry_order,
)

_GRID = Grid(Axis(0, 1000, 2), Axis(100, 400, 3), ((0, 1, 2), (3, 4, 5)))


@pytest.mark.parametrize(
    ("row", "column", "pool"),
    [(0, 100, 0), (499, 199, 0), (500, 200, 4), (999, 399, 5), (1000, 400, 5), (-5, 0, 0), (10**9, 10**9, 5)],
)
def test_a_value_outside_belongs_to_the_outermost_band(row: float, column: float, pool: int) -> None:
    assert _GRID.select(row, column).pool == pool


def test_a_missing_target_is_the_middle_and_zero_is_a_target() -> None:
    assert _GRID.select(0, None) == Cell(0, 1, 1)
    assert _GRID.select(0, 0.0) == Cell(0, 0, 0)


def test_the_first_override_that_has_the_priority_counts_before_the_table() -> None:
    overrides = (
        PriorityOverride(min_priority=5, max_priority=9, target_pool=5),
        PriorityOverride(min_priority=9, max_priority=20, target_pool=2),
    )
    grid = Grid(_GRID.rows, _GRID.columns, _GRID.mapping, overrides)
    assert [grid.select(0, 100, priority).pool for priority in (4, 5, 9, 10, 21)] == [0, 5, 5, 2, 0]
    assert grid.select(0, 100, 9).is_override


@given(
    minimum=st.floats(0, 1e6),
    width=st.floats(1e-3, 1e6),
    resolution=st.integers(1, 50),
    value=st.floats(allow_nan=False) | st.none(),
)
def test_every_value_has_a_band_that_holds_it_or_is_outermost(
    minimum: float, width: float, resolution: int, value: float | None
) -> None:
    axis = Axis(minimum, minimum + width, resolution)
    index = axis.index(value)
    assert 0 <= index < resolution
    low, high = axis.band(index)
    slack = 1e-6 * (axis.maximum + 1)
    wanted = axis.middle if value is None else value
    assert low - slack <= wanted or index == 0
    assert wanted <= high + slack or index == resolution - 1


@given(st.lists(st.floats(-1e9, 1e9), min_size=2), st.integers(1, 20))
def test_bands_are_in_the_order_of_values(values: list[float], resolution: int) -> None:
    axis = Axis(-100, 100, resolution)
    indices = [axis.index(value) for value in sorted(values)]
    assert indices == sorted(indices)


def test_infinity_has_a_band() -> None:
    assert Axis(0, 1, 4).index(math.inf) == 3


def test_retries_go_from_slow_to_fast() -> None:
    assert retry_order(2, (0, 1, 2, 3)) == [1, 0]
    assert retry_order(0, (0, 1, 2)) == []
    assert retry_order(3, (5, 1, 1, 9)) == [0, 1, 2]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), st.data())
def test_each_pool_is_offered_a_request_once_and_its_own_first(priorities: list[int], data: st.DataObject) -> None:
    selected = data.draw(st.integers(0, len(priorities) - 1))
    order = fallback_order(selected, priorities)
    assert sorted(order) == list(range(len(priorities)))
    assert order[0] == selected
    num_equal = priorities.count(priorities[selected])
    retries = retry_order(selected, priorities)
    assert order[num_equal : num_equal + len(retries)] == retries


def test_a_pool_without_ready_workers_is_passed_over() -> None:
    states = [PoolState(), PoolState(obstacle="no decode worker is ready"), PoolState()]
    choice = choose(Cell(0, 0, 1), (0, 1, 2), states)
    assert choice.pool == 0
    assert [(option.pool, option.why) for option in choice.options] == [
        (1, "no decode worker is ready"),
        (0, "the first that can take it"),
        (2, "another pool comes first"),
    ]


def test_a_full_pool_gives_way_and_where_all_are_full_the_least_full_takes_it() -> None:
    full, fuller, free = (PoolState(num_requests=number, max_requests=4) for number in (4, 9, 3))
    assert choose(Cell(0, 0, 0), (0, 1), [full, free]).pool == 1
    choice = choose(Cell(0, 0, 0), (0, 1), [fuller, full])
    assert (choice.pool, [option.why for option in choice.options]) == (1, ["full", "the least full"])


def test_a_pool_that_failed_a_request_does_not_get_it_again() -> None:
    choice = choose(Cell(0, 0, 0), (0, 1), [PoolState(), PoolState()], failed={0})
    assert choice.pool == 1
    assert choose(Cell(0, 0, 0), (0, 1), [PoolState(), PoolState()], failed={0, 1}).pool is None


def test_a_pool_of_unknown_size_is_never_full() -> None:
    assert not PoolState(num_requests=1000).is_full
