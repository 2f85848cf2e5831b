"""The policy that forecasts, plans for all at once, and binds late."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product
from statistics import mean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.discovery.base import Rank
from quartet.events.load import StepTime
from router.policy.base import Candidate, Decision, Pending, Snapshot
from router.policy.forecast import CostWeights, Job, PrefillForecast
from router.policy.joint import JointAssignment
from router.policy.kv_aware import KvAwareConfig, KvAwarePolicy

BLOCK_SIZE = 10
#: A tenth of a second for a thousand tokens, and a hundredth for each step.
STEP_TIME = StepTime(prefill_base_s=0.01, prefill_s_per_token=1e-4, decode_base_s=0.01)


def candidate(name: str, *, total: int = 1000, used: int = 0, ends_in_s: float = 0.0, unbegun: int = 0) -> Candidate:
    return Candidate(
        rank=Rank(name),
        num_total_blocks=total,
        block_size=BLOCK_SIZE,
        num_used_blocks=used,
        step_ends_at=ends_in_s,
        num_unbegun_tokens=unbegun,
        max_step_tokens=2000,
        step_time=STEP_TIME,
    )


def pending(num_tokens: int, *, cached: dict[str, int] | None = None, first_hash: int = 0, **more: Any) -> Pending:
    return Pending(
        num_tokens=num_tokens,
        num_reserved_tokens=num_tokens,
        num_most_tokens=num_tokens,
        num_cached_tokens={Rank(name): count for name, count in (cached or {}).items()},
        sequence_hashes=range(first_hash, first_hash + num_tokens // BLOCK_SIZE) if first_hash else (),
        **more,
    )


def policy(**config: Any) -> KvAwarePolicy:
    return KvAwarePolicy(random.Random(0), KvAwareConfig(**{"gather_s": 0.0} | config))


def decodes(decision: Decision) -> list[str | None]:
    return [None if placement is None else placement.decode.worker_id for placement in decision.placements]


def test_a_prompt_goes_where_most_of_it_is_cached() -> None:
    snapshot = Snapshot([], [candidate("a"), candidate("b"), candidate("c")])
    [placement] = policy().assign([pending(1000, cached={"a": 100, "b": 900})], snapshot).placements
    assert placement is not None
    assert placement.decode == Rank("b")
    assert placement.num_cached_tokens == 900
    prefill_s = 0.01 + 100 * 1e-4
    weights = CostWeights()
    assert placement.cost == pytest.approx(prefill_s * (1 + weights.work + weights.impatience_per_s * prefill_s))


def test_a_cache_is_not_worth_any_wait() -> None:
    busy, idle = candidate("busy", ends_in_s=0.5), candidate("idle")
    prompt = pending(1000, cached={"busy": 900})
    assert decodes(policy().assign([prompt], Snapshot([], [busy, idle]))) == ["idle"]


def test_a_request_waits_for_the_cache_if_that_is_sooner_and_the_decision_says_when_to_poll_again() -> None:
    busy, idle = candidate("busy", ends_in_s=0.02), candidate("idle")
    prompt = pending(1000, cached={"busy": 900})
    decision = policy(margin_s=0.005).assign([prompt], Snapshot([], [busy, idle]))
    assert decodes(decision) == [None]
    assert decision.poll_again_in_s == pytest.approx(0.02 - 0.005)


def test_a_short_prompt_goes_first_and_a_long_one_waits_for_its_turn() -> None:
    waiting = [pending(1900), pending(100)]
    assert decodes(policy().assign(waiting, Snapshot([], [candidate("a")]))) == [None, "a"]


def test_small_prompts_share_a_step() -> None:
    waiting = [pending(20), pending(30), pending(25)]
    assert decodes(policy().assign(waiting, Snapshot([], [candidate("a")]))) == ["a", "a", "a"]


def test_a_long_prompt_that_has_waited_past_the_patience_goes_before_a_short_one() -> None:
    waiting = [pending(1900, arrived_at=0.0), pending(100, arrived_at=999.9)]
    snapshot = Snapshot([], [candidate("a")], now=1000.0)
    assert decodes(policy().assign(waiting, snapshot))[0] == "a"


def test_priority_goes_before_length() -> None:
    waiting = [pending(1900, priority=1), pending(100)]
    assert decodes(policy().assign(waiting, Snapshot([], [candidate("a")])))[0] == "a"


def test_equal_prompts_that_come_at_once_share_one_rank() -> None:
    waiting = [pending(1500, first_hash=1), pending(1510, first_hash=1)]
    one, other = decodes(policy().assign(waiting, Snapshot([], [candidate("a"), candidate("b")])))
    # The second needs ten tokens more where the first one is, and goes with it or right after it.
    assert one is not None
    assert other in (one, None)


def test_different_prompts_that_come_at_once_spread_over_the_ranks() -> None:
    waiting = [pending(1500, first_hash=1), pending(1500, first_hash=1000)]
    assert set(decodes(policy().assign(waiting, Snapshot([], [candidate("a"), candidate("b")])))) == {"a", "b"}


def test_prompts_queued_at_a_rank_count_as_its_time() -> None:
    snapshot = Snapshot([], [candidate("a", unbegun=5000), candidate("b", ends_in_s=0.003)])
    assert decodes(policy().assign([pending(100)], snapshot)) == ["b"]


def test_prefill_ranks_take_prompts_that_would_delay_decodes() -> None:
    snapshot = Snapshot([candidate("p")], [candidate("d", ends_in_s=0.3)])
    [placement] = policy().assign([pending(1000)], snapshot).placements
    assert placement is not None
    assert placement.prefill == Rank("p")
    assert placement.decode == Rank("d")


def test_a_worker_that_just_failed_the_request_is_avoided_while_others_can_take_it() -> None:
    ranks = [candidate("a"), candidate("b")]
    prompt = pending(100, cached={"a": 90}, avoid=frozenset({"a"}))
    assert decodes(policy().assign([prompt], Snapshot([], ranks))) == ["b"]
    assert decodes(policy().assign([prompt], Snapshot([], ranks[:1]))) == ["a"]


@given(
    frees=st.lists(st.integers(0, 30), min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, 200), min_size=1, max_size=12),
    seed=st.integers(0, 99),
)
def test_no_rank_is_given_more_than_its_free_blocks(frees: list[int], sizes: list[int], seed: int) -> None:
    candidates = [candidate(str(number), total=100, used=100 - free) for number, free in enumerate(frees)]
    waiting = [pending(size) for size in sizes]
    placements = KvAwarePolicy(random.Random(seed)).assign(waiting, Snapshot([], candidates)).placements
    taken: Counter[Rank] = Counter()
    for item, placement in zip(waiting, placements, strict=True):
        if placement is not None:
            taken[placement.decode] += candidates[0].num_blocks(item.num_reserved_tokens)
    assert all(taken[rank.rank] <= rank.num_free_for_booking for rank in candidates)
    if any(candidates[0].num_blocks(size) <= max(frees) for size in sizes[:1]):
        assert any(placements), "an idle rank with room takes what comes first in its plan"


def forecasts(count: int) -> list[PrefillForecast]:
    return [
        PrefillForecast(number, candidate(str(number), ends_in_s=0.05 * number), 0.0, CostWeights())
        for number in range(count)
    ]


def random_jobs(rng: random.Random, count: int, num_forecasts: int) -> list[Job]:
    shared = [[0] * count for _ in range(count)]
    if rng.random() < 0.5:  # two of them begin alike
        one, other = rng.sample(range(count), 2)
        shared[one][other] = shared[other][one] = 90
    sizes = [rng.randint(100, 4000) for _ in range(count)]
    return [
        Job(
            number=number,
            num_tokens=sizes[number],
            age_s=0.0,
            priority=0,
            num_missing=[max(sizes[number] - rng.choice((0, 0, 50, 1000)), 1) for _ in range(num_forecasts)],
            num_shared=shared[number],
        )
        for number in range(count)
    ]


def test_a_plan_is_hardly_dearer_than_the_best_of_all() -> None:
    rng = random.Random(3)
    ratios = []
    for _ in range(60):
        count = rng.randint(2, 5)
        jobs = random_jobs(rng, count, 3)
        found = sum(plan.cost for plan in JointAssignment(forecasts(3), jobs, rng).plans)
        best = min(
            sum(
                forecast.plan([job for job, chosen in zip(jobs, choice, strict=True) if chosen == forecast.number]).cost
                for forecast in forecasts(3)
            )
            for choice in product(range(3), repeat=count)
        )
        ratios.append(found / best)
    assert min(ratios) > 1 - 1e-9
    assert mean(ratios) < 1.005
    assert max(ratios) < 1.06


def test_a_turn_does_not_depend_on_the_order_of_the_jobs() -> None:
    jobs = random_jobs(random.Random(5), 5, 1)
    [forecast] = forecasts(1)
    forth = forecast.plan(jobs)
    [other] = forecasts(1)
    assert other.plan(jobs[::-1]) == forth


def test_a_request_that_binds_at_once_reserves_the_rank_that_will_be_free_soonest() -> None:
    ranks = [candidate("late", ends_in_s=0.5), candidate("later", ends_in_s=0.6)]
    waiting = [pending(1900, binds_at_once=True), pending(1900, binds_at_once=True), pending(1900)]
    assert decodes(policy().assign(waiting, Snapshot([], ranks))) == ["late", "later", None]


def test_only_prompts_up_to_the_limit_are_prefilled_where_they_are_decoded() -> None:
    snapshot = Snapshot([candidate("p", ends_in_s=0.004)], [candidate("d")])
    for limit, expected in ((None, None), (100, None), (99, Rank("p")), (0, Rank("p"))):
        chooser = policy(local_prefill_max_tokens=limit)
        [placement] = chooser.assign([pending(100)], snapshot).placements
        assert placement is not None and placement.prefill == expected, limit
    too_small = candidate("p", total=5)
    [placement] = chooser.assign([pending(100)], Snapshot([too_small], [candidate("d")])).placements
    assert placement is not None and placement.prefill is None


@given(
    ends_in_s=st.lists(st.sampled_from([0.0, 0.004, 0.0051, 0.02, 0.3]), min_size=1, max_size=3),
    unbegun=st.sampled_from([0, 1, 500, 5000]),
    num_spare_tokens=st.sampled_from([0, 50]),
    is_measured=st.booleans(),
    limit=st.sampled_from([None, 0, 100]),
    queued=st.lists(st.tuples(st.sampled_from([1, 100, 101, 3000]), st.booleans(), st.booleans()), max_size=5),
)
def test_while_all_ranks_are_busy_nothing_is_planned_and_nothing_would_have_been_bound(
    ends_in_s: list[float],
    unbegun: int,
    num_spare_tokens: int,
    is_measured: bool,
    limit: int | None,
    queued: list[tuple[int, bool, bool]],
) -> None:
    prefill = [candidate(f"p{number}", ends_in_s=one, unbegun=unbegun) for number, one in enumerate(ends_in_s)]
    prefill[0].num_spare_tokens, prefill[0].is_measured = num_spare_tokens, is_measured
    snapshot = Snapshot(prefill, [candidate("d")])
    waiting = [pending(count, is_local=is_local, binds_at_once=at_once) for count, is_local, at_once in queued]
    quick, thorough = policy(local_prefill_max_tokens=limit), policy(local_prefill_max_tokens=limit)
    thorough._busy_s = lambda *_arguments: 0.0  # type: ignore[method-assign]
    decision, planned = quick.assign(waiting, snapshot), thorough.assign(waiting, snapshot)
    assert decision.placements == planned.placements
    if planned.poll_again_in_s is not None:
        assert decision.poll_again_in_s is not None
        assert decision.poll_again_in_s <= planned.poll_again_in_s + 1e-9


def test_waiting_for_busy_ranks_costs_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefillForecast, "plan", lambda *_arguments: pytest.fail("it planned"))
    snapshot = Snapshot([candidate("p", ends_in_s=0.03)], [candidate("d")])
    decision = policy(local_prefill_max_tokens=0, margin_s=0.005).assign([pending(100)] * 60, snapshot)
    assert decision.placements == [None] * 60
    assert decision.poll_again_in_s == pytest.approx(0.025)
