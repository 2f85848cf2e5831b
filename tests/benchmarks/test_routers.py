"""The benchmark of several live routers: what it sends and what telling costs."""

from __future__ import annotations

from benchmarks.routers import Workload, make_prompts, measure_telling


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
