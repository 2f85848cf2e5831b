"""The benchmark of several live routers: what it sends, what telling costs, and its table."""

from __future__ import annotations

from dataclasses import asdict

from benchmarks.routers import FleetResult, Results, TellingCost, Workload, make_prompts, measure_telling
from benchmarks.table import routers_tables


async def test_what_is_told_is_heard_and_both_take_time() -> None:
    cost = await measure_telling(20)
    assert cost.tell_us > 0
    assert cost.hear_us > 0


def test_each_fleet_gets_the_same_lengths_and_nothing_that_another_has_cached() -> None:
    first, second = (make_prompts(Workload(bursts=2), fleet) for fleet in (0, 1))
    assert len(first) == 3, "one goes before those that count"
    assert [[len(prompt) for prompt in burst] for burst in first] == [
        [len(prompt) for prompt in burst] for burst in second
    ]
    assert all(ones[0] != others[0] for ones, others in zip(first, second, strict=True))


def test_the_table_has_a_row_for_each_fleet_and_what_telling_costs() -> None:
    fleet = FleetResult(
        num_routers=4,
        is_silent=True,
        ttft_ms_mean=510.4,
        ttft_ms_p50=470.0,
        ttft_ms_p99=1200.0,
        ttft_ratio=1.234,
        router_cpu_ms=20.0,
        requests_finished=120,
        requests_failed=0,
    )
    telling = TellingCost(tell_us=11.4, hear_us=14.6)
    report = asdict(Results(workload=Workload(), num_workers=8, telling=telling, fleets=[fleet]))
    lines = routers_tables(report).splitlines()
    assert lines[2] == "| 4, silent | 510 | 470 | 1200 | 1.23 | 20.00 | 120, 0 |"
    assert lines[-1] == "CPU of a start that goes alone: 11 us to tell of it, 15 us to hear of it."
