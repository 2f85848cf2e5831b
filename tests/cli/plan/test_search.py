"""The search for the smallest fleet, and the answer that it gives: on fleets whose latencies follow a formula."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.plan.search import Plan, Shape, Target, Tried, find, judge
from cli.replay.results import PolicyResult, Spread

TTFT = Target(latency="ttft", percent=95, limit_ms=1000)
ITL = Target(latency="itl", percent=95, limit_ms=50)


def result(ttft_ms: float, itl_ms: float) -> PolicyResult:
    return PolicyResult(
        ttft_ms=Spread(p50=ttft_ms / 2, p95=ttft_ms, p99=2 * ttft_ms),
        itl_ms=Spread(p50=itl_ms / 2, p95=itl_ms, p99=2 * itl_ms),
        e2e_ms=Spread(),
        reuse_ratio=0.0,
        imbalance=1.0,
        requests_refused=0,
        requests_completed=1,
        goodput_per_s=0.0,
        output_tokens_per_s=0.0,
        duration_s=1.0,
        cpu_s=0.0,
    )


class Fleets:
    """Fleets whose replay meets the targets where ``is_enough`` says so."""

    def __init__(self, is_enough: Callable[[Shape], bool], *, give_up: bool = False) -> None:
        self.asked: list[tuple[Shape, bool]] = []
        self._is_enough = is_enough
        self._give_up = give_up

    def __call__(self, shape: Shape, is_whole: bool) -> Tried:
        self.asked.append((shape, is_whole))
        if self._is_enough(shape):
            return judge(shape, result(900 / shape.size, 40 / shape.num_decode), [TTFT, ITL])
        if self._give_up and not is_whole:
            return Tried(shape=shape, result=None, given_up="given up: too late")
        return judge(shape, result(8000 / shape.size, 60), [TTFT, ITL])

    def find(self, max_workers: int = 8) -> Plan:
        plan = find(self, max_workers)
        assert len(self.asked) == len(set(self.asked)), "each fleet is replayed once"
        return plan


def test_a_result_is_held_against_each_target() -> None:
    tried = judge(Shape(1, 2), result(800, 60), [TTFT, ITL])
    assert not tried.meets
    assert tried.missed == [ITL]
    assert tried.strain == pytest.approx(1.2)
    assert tried.reason == "ITL p95 60 ms over 50"
    assert judge(Shape(1, 2), result(1000, 50), [TTFT, ITL]).meets, "a limit may be reached"
    assert judge(Shape(1, 2), result(800, 60), [Target(latency="itl", percent=50, limit_ms=30)]).meets


def test_where_fewer_workers_of_two_kinds_suffice_the_answer_is_to_disaggregate() -> None:
    plan = Fleets(lambda shape: shape.size >= 6 or (shape.num_prefill >= 2 and shape.num_decode >= 2)).find()
    assert plan.chosen is plan.disaggregated
    assert plan.chosen is not None
    assert plan.chosen.shape == Shape(2, 2)
    assert plan.aggregated is not None
    assert plan.aggregated.shape == Shape(0, 6)
    assert plan.beside.shape == Shape(0, 4), "the aggregated fleet of the same size is replayed, too"
    assert plan.verdict() == (
        "Disaggregate: 2 Prefill and 2 Decode meet the targets. 4 workers that do both miss them "
        "(TTFT p95 2000 ms over 1000, ITL p95 60 ms over 50); 6 meet them."
    )


def test_where_both_take_as_many_workers_the_simpler_fleet_is_chosen() -> None:
    plan = Fleets(lambda shape: shape.size >= 3).find()
    assert plan.chosen is not None
    assert plan.chosen.shape == Shape(0, 3)
    assert plan.disaggregated is not None
    assert plan.disaggregated.shape == Shape(1, 2), "of two splits the one with the least strain"
    assert plan.verdict() == (
        "No need to disaggregate: 3 workers that do both meet the targets, and come to 30% of the tightest. "
        "As many of two kinds, 1 Prefill and 2 Decode, come to 40%."
    )


def test_where_workers_that_do_both_need_fewer_the_answer_is_not_to_disaggregate() -> None:
    plan = Fleets(lambda shape: shape.is_aggregated and shape.size >= 3).find()
    assert plan.verdict() == ("Don't disaggregate: 3 workers that do both meet the targets; no 3 of two kinds do.")


def test_one_worker_that_suffices_needs_no_comparison() -> None:
    fleets = Fleets(lambda _shape: True)
    plan = fleets.find()
    assert plan.verdict() == "Don't disaggregate: 1 worker that does both meets the targets."
    assert {shape for shape, _ in fleets.asked} == {Shape(0, 8), Shape(0, 4), Shape(0, 2), Shape(0, 1)}


def test_where_only_two_kinds_suffice_the_aggregated_fleets_reason_is_named() -> None:
    def is_enough(shape: Shape) -> bool:
        return shape.num_prefill >= 1 and shape.num_decode >= 3

    plan = Fleets(is_enough).find(4)
    assert plan.aggregated is None
    assert plan.verdict() == (
        "Disaggregate: 1 Prefill and 3 Decode meet the targets. 4 workers that do both miss them "
        "(TTFT p95 2000 ms over 1000, ITL p95 60 ms over 50), and more were not tried."
    )
    plan = Fleets(is_enough).find(8)
    assert [tried.shape.size for tried in plan.tried if tried.shape.is_aggregated] == [4, 8]
    assert plan.verdict().endswith("ITL p95 60 ms over 50), and so do 8."), "5 to 7 were not replayed"


def test_where_none_suffices_the_nearest_is_named() -> None:
    plan = Fleets(lambda _shape: False).find(4)
    assert plan.chosen is None
    assert plan.verdict() == (
        "No fleet of 4 workers meets the targets. The nearest, 4 workers that do both, misses them: "
        "TTFT p95 2000 ms over 1000, ITL p95 60 ms over 50. "
        "1 Prefill and 3 Decode: TTFT p95 2000 ms over 1000, ITL p95 60 ms over 50."
    )
    assert {tried.shape for tried in plan.tried} == {Shape(0, 4), Shape(1, 3), Shape(2, 2), Shape(3, 1)}


def test_a_replay_that_was_given_up_is_run_to_its_end_where_it_is_compared() -> None:
    fleets = Fleets(lambda shape: shape.num_prefill >= 2 and shape.num_decode >= 2, give_up=True)
    plan = fleets.find(5)
    assert plan.chosen is not None
    assert plan.chosen.shape == Shape(2, 2)
    assert plan.beside.result is not None
    assert [shape for shape, is_whole in fleets.asked if is_whole] == [Shape(0, 4)]


def test_where_none_suffices_the_likeliest_disaggregated_fleet_is_not_given_up() -> None:
    asked: list[tuple[Shape, bool]] = []

    def try_shape(shape: Shape, is_whole: bool) -> Tried:
        asked.append((shape, is_whole))
        if is_whole:
            return judge(shape, result(2000 if shape.is_aggregated else 1100, 40), [TTFT, ITL])
        at_s = 30.0 if shape == Shape(3, 2) else 10.0
        return Tried(shape=shape, result=None, given_up="given up: too late", given_up_at_s=at_s)

    plan = find(try_shape, 5)
    assert [shape for shape, is_whole in asked if is_whole] == [Shape(0, 5), Shape(3, 2)]
    assert plan.nearest.shape == Shape(3, 2)
    assert plan.nearest_other is plan.beside
    assert plan.verdict() == (
        "No fleet of 5 workers meets the targets. The nearest of those replayed to their end, 3 Prefill and 2 Decode, "
        "misses them: TTFT p95 1100 ms over 1000. 5 workers that do both: TTFT p95 2000 ms over 1000."
    )


@given(
    prefill=st.integers(1, 6),
    decode=st.integers(1, 6),
    both=st.integers(1, 14),
    max_workers=st.integers(1, 12),
)
def test_the_smallest_fleet_is_found_with_few_replays(prefill: int, decode: int, both: int, max_workers: int) -> None:
    def is_enough(shape: Shape) -> bool:
        return shape.size >= both or (shape.num_prefill >= prefill and shape.num_decode >= decode)

    fleets = Fleets(is_enough)
    plan = fleets.find(max_workers)
    least = min(both, prefill + decode)
    if least > max_workers:
        assert plan.chosen is None
    else:
        assert plan.chosen is not None
        assert plan.chosen.shape.size == least
        assert plan.chosen.shape.is_aggregated is (both == least)
    assert plan.beside.shape.is_aggregated
    assert len(fleets.asked) <= 3 * max_workers + 6, "of the many fleets of up to that size"
