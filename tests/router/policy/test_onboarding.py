"""What a rank has of a prompt below the device is worth what it takes to load it, and no more than to compute it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.discovery.base import Rank
from quartet.events.load import OnboardTime, StepTime
from router.policy.base import Candidate, LowerTokens, Option, Pending, Placement, Snapshot
from router.policy.forecast import CostWeights, Job, Plan, PrefillForecast
from router.policy.greedy import LeastLoadedPolicy
from router.policy.kv_aware import KvAwareConfig, KvAwarePolicy, shortlist
from router.policy.onboarding import start_at
from router.policy.split import SplitPolicy

#: A tenth of a second for a thousand tokens, which come from the host in an eighth of that, from disk in half.
STEP_TIME = StepTime(prefill_base_s=0.01, prefill_s_per_token=1e-4)
ONBOARD_TIME = OnboardTime(host_s_per_token=1.25e-5, disk_s_per_token=5e-5)
SLOW_DISK = OnboardTime(host_s_per_token=1.25e-5, disk_s_per_token=2e-4)


def candidate(name: str, onboard_time: OnboardTime = ONBOARD_TIME, **changes: object) -> Candidate:
    settings: dict[str, object] = {
        "num_total_blocks": 1000,
        "block_size": 10,
        "max_step_tokens": 2000,
        "step_time": STEP_TIME,
        **changes,
    }
    return Candidate(rank=Rank(name), onboard_time=onboard_time, **settings)  # type: ignore[arg-type]


def pending(**cached: tuple[int, int, int]) -> Pending:
    """A thousand tokens, of which each rank has so many on the device, on the host and on disk."""
    return Pending(
        num_tokens=1000,
        num_reserved_tokens=1000,
        num_most_tokens=1000,
        num_cached_tokens={Rank(name): sum(counts) for name, counts in cached.items()},
        lower_tokens={Rank(name): LowerTokens(*counts[1:]) for name, counts in cached.items() if any(counts[1:])},
    )


def policy() -> KvAwarePolicy:
    return KvAwarePolicy(random.Random(0), KvAwareConfig(gather_s=0.0))


def explained(request: Pending, *candidates: Candidate) -> dict[str, Option]:
    return {option.rank.worker_id: option for option in policy().explain(request, Snapshot([], candidates))}


def chosen(request: Pending, *candidates: Candidate) -> str:
    [placement] = policy().assign([request], Snapshot([], candidates)).placements
    assert placement is not None
    return placement.decode.worker_id


@pytest.mark.parametrize(
    ("counts", "best"),
    [
        ({"a": (800, 0, 0), "b": (0, 800, 0), "c": (0, 0, 800)}, "a"),
        ({"a": (0, 0, 800), "b": (0, 800, 0), "c": (100, 0, 0)}, "b"),
        ({"a": (0, 0, 800), "b": (100, 0, 0)}, "a"),
        ({"a": (700, 0, 0), "b": (0, 980, 0)}, "b"),
        ({"a": (790, 0, 0), "b": (0, 0, 800)}, "a"),
    ],
)
def test_a_faster_tier_goes_before_a_slower_one_unless_too_little_is_there(
    counts: dict[str, tuple[int, int, int]], best: str
) -> None:
    assert chosen(pending(**counts), *map(candidate, counts)) == best


def test_the_time_of_loading_is_a_term_of_the_cost() -> None:
    request = pending(device=(800, 0, 0), host=(300, 500, 0), disk=(0, 400, 400))
    options = explained(request, *map(candidate, ("device", "host", "disk", "nothing")))
    onboard_s = {name: option.terms["onboard_s"] for name, option in options.items()}
    assert onboard_s == pytest.approx(
        {"device": 0, "host": 500 * 1.25e-5, "disk": 400 * (1.25e-5 + 5e-5), "nothing": 0}
    )
    assert {name: option.num_cached_tokens for name, option in options.items()} == {
        "device": 800,
        "host": 800,
        "disk": 800,
        "nothing": 0,
    }
    weights = KvAwareConfig().weights
    first_s = onboard_s["disk"] + 0.03
    assert options["disk"].cost == pytest.approx(
        first_s * (1 + weights.impatience_per_s * first_s) + weights.work * 0.03
    )


def test_what_a_disk_brings_later_than_it_is_computed_counts_as_nothing() -> None:
    slow = [candidate("disk", SLOW_DISK), candidate("nothing", SLOW_DISK)]
    options = explained(pending(disk=(0, 0, 800)), *slow)
    assert options["disk"].num_cached_tokens == options["disk"].terms["onboard_s"] == 0
    assert options["disk"].cost == options["nothing"].cost
    [placement] = policy().assign([pending(disk=(0, 0, 800))], Snapshot([], slow[:1])).placements
    assert placement is not None
    assert placement.num_cached_tokens == 0


def test_before_a_slow_disk_the_hosts_part_is_loaded() -> None:
    start = start_at(candidate("a", SLOW_DISK), pending(a=(100, 300, 400)))
    assert start == (400, pytest.approx(300 * 1.25e-5))


def test_until_steps_are_measured_all_is_loaded() -> None:
    start = start_at(candidate("a", SLOW_DISK, is_measured=False), pending(a=(100, 300, 400)))
    assert start == (800, pytest.approx(300 * 1.25e-5 + 400 * 2e-4))


def test_blocks_that_take_an_unknown_time_count_as_on_the_device() -> None:
    options = explained(pending(a=(0, 400, 400), b=(800, 0, 0)), candidate("a", OnboardTime()), candidate("b"))
    assert options["a"].num_cached_tokens == 800
    assert options["a"].cost == options["b"].cost


def test_a_load_delays_its_own_request_only() -> None:
    def plan(onboard_s: list[float]) -> Plan:
        load, other = (
            Job(number=number, num_tokens=1000, age_s=0.0, priority=0, num_missing=[missing], num_shared=[0, 0], **more)
            for number, missing, more in ((0, 100, {"onboard_s": onboard_s}), (1, 1000, {}))
        )
        return PrefillForecast(0, candidate("a"), 0.0, CostWeights()).plan([load, other])

    with_load, without = plan([0.08]), plan([])
    assert with_load.first_token_in_s == without.first_token_in_s == pytest.approx([0.02, 0.13])
    impatience = CostWeights().impatience_per_s
    assert with_load.cost - without.cost == pytest.approx(0.08 + impatience * (0.1**2 - 0.02**2))


def test_of_very_many_ranks_those_are_listed_that_have_loaded_first() -> None:
    ranks = [candidate(name) for name in ("free", "disk", "device")]
    request = pending(disk=(0, 0, 900), device=(500, 0, 0))
    # Ready after 0.045 + 0.02 and 0.06 s more. Two are free first.
    free_in_s = [0.0, 0.9, 0.9]
    listed = [(request, lambda _number: True)]
    assert shortlist(listed, [*ranks, candidate("free-too")], [*free_in_s, 0.1], 2, 0) == [0, 2, 3]


def test_ranks_that_only_decode_load_nothing() -> None:
    split = SplitPolicy(LeastLoadedPolicy(0, random.Random(0)), policy())
    options = split.explain(pending(d=(0, 0, 900)), Snapshot([candidate("p")], [candidate("d")]))
    [decodes] = [option for option in options if option.is_decode]
    assert decodes.terms["onboard_s"] == 0


counts = st.integers(0, 400)
times = st.sampled_from([0.0, 1e-6, 1e-5, 5e-5, 1e-4, 2e-4])


@given(counts=st.tuples(counts, counts, counts), host_s=times, disk_s=times)
def test_a_rank_begins_as_soon_as_it_can(counts: tuple[int, int, int], host_s: float, disk_s: float) -> None:
    num_device, num_host, num_disk = counts
    rank = candidate("a", OnboardTime(host_s_per_token=host_s, disk_s_per_token=disk_s))
    request = Pending(
        num_tokens=1300,
        num_reserved_tokens=1300,
        num_most_tokens=1300,
        num_cached_tokens={rank.rank: sum(counts)},
        lower_tokens={rank.rank: LowerTokens(num_host, num_disk)},
    )
    start = start_at(rank, request)

    def ready_in_s(num_cached: int, onboard_s: float) -> float:
        return onboard_s + STEP_TIME.prefill_s(1300 - num_cached)

    ways = [
        (num_device, 0.0),
        (num_device + num_host, num_host * host_s),
        (sum(counts), num_host * host_s + num_disk * disk_s),
    ]
    assert start in [(num_cached, pytest.approx(onboard_s)) for num_cached, onboard_s in ways]
    assert ready_in_s(*start) == pytest.approx(min(ready_in_s(*way) for way in ways))


def test_nothing_of_a_prompt_that_is_handed_in_is_computed_or_loaded() -> None:
    request = pending(here=(100, 300, 300))
    request.is_handed_in = True
    assert start_at(candidate("here"), request) == (999, 0.0)
    assert Placement(None, Rank("here")).num_missing_tokens(request) == request.num_missing_tokens(Rank("here")) == 1
