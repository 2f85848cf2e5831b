"""What policies explain of a request's ranks is what they do."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.discovery.base import Rank
from quartet.events.load import OnboardTime, StepTime
from router.policy.base import Candidate, LowerTokens, Option, Pending, Policy, Snapshot
from router.policy.greedy import LeastLoadedPolicy, PowerOfTwoPolicy, RoundRobinPolicy
from router.policy.kv_aware import KvAwareConfig, KvAwarePolicy
from router.policy.session_affinity import SessionAffinityPolicy
from router.policy.split import SplitPolicy

_BLOCK_SIZE = 10
_POLICIES: dict[str, Callable[[], Policy]] = {
    "kv_aware": lambda: KvAwarePolicy(random.Random(0)),
    "least_loaded": lambda: LeastLoadedPolicy(0, random.Random(0)),
    "round_robin": lambda: RoundRobinPolicy(0),
    "power_of_two": lambda: PowerOfTwoPolicy(0, random.Random(0)),
    "split": lambda: SplitPolicy(KvAwarePolicy(random.Random(0)), LeastLoadedPolicy(0, random.Random(0))),
    "split_the_other_way": lambda: SplitPolicy(LeastLoadedPolicy(0, random.Random(0)), KvAwarePolicy(random.Random(0))),
    "sessions": lambda: SessionAffinityPolicy(KvAwarePolicy(random.Random(0))),
}
# Two costs that differ by less are a tie to the policy.
_TIES = {"kv_aware": 1.0, "least_loaded": 1.05}
each_policy = pytest.mark.parametrize("name", _POLICIES)
each_weighing_policy = pytest.mark.parametrize("name", _TIES)


def candidate(name: str, **changes: object) -> Candidate:
    settings: dict[str, object] = {"num_total_blocks": 100, "block_size": _BLOCK_SIZE, **changes}
    return Candidate(rank=Rank(name), **settings)  # type: ignore[arg-type]


def pending(num_tokens: int = 100, **changes: object) -> Pending:
    sizes = dict.fromkeys(("num_tokens", "num_reserved_tokens", "num_most_tokens"), num_tokens)
    return Pending(**{**sizes, **changes})  # type: ignore[arg-type]


def by_name(options: object) -> dict[str, Option]:
    return {option.rank.worker_id: option for option in options}  # type: ignore[attr-defined]


ranks = st.builds(
    dict,
    num_used_blocks=st.integers(0, 60),
    num_promised_blocks=st.integers(0, 40),
    num_requests=st.integers(0, 9),
    max_requests=st.sampled_from([0, 0, 0, 4, 8]),
    num_queued_tokens=st.integers(0, 2000),
    num_unbegun_tokens=st.integers(0, 2000),
    step_ends_at=st.sampled_from([0.0, 5.001, 5.2]),
    num_decoding=st.integers(0, 5),
    onboard_time=st.builds(
        OnboardTime,
        host_s_per_token=st.sampled_from([0.0, 1e-6, 1e-5]),
        disk_s_per_token=st.sampled_from([0.0, 1e-5, 1e-4]),
    ),
)
snapshots = st.builds(
    lambda prefill, decode: Snapshot(
        [candidate(f"p{number}", **settings) for number, settings in enumerate(prefill)],
        [candidate(f"d{number}", **settings) for number, settings in enumerate(decode)],
        now=5.0,
    ),
    st.lists(ranks, max_size=3),
    st.lists(ranks, min_size=1, max_size=4),
)
pendings = st.builds(
    lambda num_tokens, cached, is_below, avoid, session_key: pending(
        num_tokens,
        num_cached_tokens={Rank(name): min(count, num_tokens) for name, count in cached.items()},
        lower_tokens={
            Rank(name): LowerTokens(min(count, num_tokens) // 2, min(count, num_tokens) // 4)
            for name, count in cached.items()
            if is_below
        },
        avoid=avoid,
        session_key=session_key,
        arrived_at=4.5,
    ),
    st.integers(1, 900),
    st.dictionaries(st.sampled_from(["p0", "p1", "d0", "d1"]), st.integers(0, 500)),
    st.booleans(),
    st.frozensets(st.sampled_from(["p0", "d0", "d1"])),
    st.sampled_from(["", "one", "other"]),
)


@each_policy
@given(request=pendings, snapshot=snapshots)
def test_the_chosen_rank_has_no_obstacle_and_the_explained_cost(
    name: str, request: Pending, snapshot: Snapshot
) -> None:
    policy = _POLICIES[name]()
    options = by_name(policy.explain(request, snapshot))
    assert list(options) == [rank.rank.worker_id for rank in (*snapshot.prefill, *snapshot.decode)]
    [placement] = policy.assign([request], snapshot).placements
    if placement is None:
        return
    computes = options[placement.prefills_at.worker_id]
    assert not computes.obstacle
    assert not options[placement.decode.worker_id].obstacle
    assert placement.cost == (None if computes.cost is None else pytest.approx(computes.cost))
    assert placement.num_cached_tokens == computes.num_cached_tokens


@each_weighing_policy
@given(request=pendings, snapshot=snapshots)
def test_the_chosen_rank_is_among_the_cheapest(name: str, request: Pending, snapshot: Snapshot) -> None:
    policy = _POLICIES[name]()
    options = policy.explain(request, snapshot)
    [placement] = policy.assign([request], snapshot).placements
    if placement is None:
        return
    chosen = by_name(options)[placement.prefills_at.worker_id]
    # kv_aware weighs all that can prefill with each other, the others those of one kind.
    costs = [
        option.cost
        for option in options
        if option.cost is not None and (name == "kv_aware" or option.is_decode == chosen.is_decode)
    ]
    assert chosen.cost is not None
    # A microsecond is no reason for kv_aware to move a request.
    assert chosen.cost <= min(costs) * _TIES[name] + 1e-6


@each_policy
@given(request=pendings, snapshot=snapshots)
def test_without_a_rank_that_can_decode_a_request_waits(name: str, request: Pending, snapshot: Snapshot) -> None:
    policy = _POLICIES[name]()
    can_decode = any(option.is_decode and not option.obstacle for option in policy.explain(request, snapshot))
    [placement] = policy.assign([request], snapshot).placements
    assert placement is None or can_decode


@each_policy
def test_explaining_changes_neither_turn_nor_chance(name: str) -> None:
    snapshot = Snapshot([candidate("p0"), candidate("p1")], [candidate(f"d{number}") for number in range(4)])
    asked, unasked = _POLICIES[name](), _POLICIES[name]()
    for _ in range(20):
        asked.explain(pending(), snapshot)
        assert asked.assign([pending()], snapshot) == unasked.assign([pending()], snapshot)


@each_policy
def test_a_copy_of_a_policy_decides_as_the_original_would(name: str) -> None:
    snapshot = Snapshot([candidate("p0"), candidate("p1")], [candidate(f"d{number}") for number in range(4)])
    policy = _POLICIES[name]()
    for _ in range(20):
        predicted = copy.deepcopy(policy).assign([pending()], snapshot)
        assert policy.assign([pending()], snapshot) == predicted


@each_policy
def test_explain_names_the_obstacle_of_each_rank(name: str) -> None:
    prefill = [
        candidate("small", num_total_blocks=9),
        candidate("failed", adapters=frozenset({"lora"})),
        candidate("free", adapters=frozenset({"lora"})),
    ]
    decode = [
        candidate("full", num_used_blocks=70, num_promised_blocks=21, adapters=frozenset({"lora"})),
        candidate("small-too", num_total_blocks=9, adapters=frozenset({"lora"})),
        candidate("base", adapters=frozenset()),
        candidate("free-too", adapters=frozenset({"lora"})),
    ]
    request = pending(100, adapter="lora", avoid=frozenset({"failed"}))
    options = by_name(_POLICIES[name]().explain(request, Snapshot(prefill, decode)))
    assert {name: option.obstacle for name, option in options.items()} == {
        "small": "does not serve the adapter lora",
        "failed": "just failed it",
        "free": "",
        "full": "no room: 9 blocks free of 10 needed",
        "small-too": "too small: 9 blocks of 10 needed",
        "base": "does not serve the adapter lora",
        "free-too": "",
    }
    assert all(option.cost is None and not option.terms for option in options.values() if option.obstacle)


@each_policy
def test_a_full_batch_is_an_obstacle(name: str) -> None:
    full: dict[str, object] = {"num_requests": 5, "max_requests": 4}
    snapshot = Snapshot([candidate("p", **full), candidate("p-free")], [candidate("d", **full), candidate("d-free")])
    options = by_name(_POLICIES[name]().explain(pending(100), snapshot))
    obstacle = "its batch is full: 5 requests of at most 4"
    assert {name: option.obstacle for name, option in options.items() if option.obstacle} == dict.fromkeys(
        "pd", obstacle
    )
    assert options["p"].cost is options["d"].cost is None


def test_a_short_prompt_has_an_obstacle_at_prefill_ranks() -> None:
    snapshot = Snapshot([candidate("p")], [candidate("d")])
    options = by_name(RoundRobinPolicy(100).explain(pending(100), snapshot))
    assert options["p"].obstacle == "prompts of up to 100 tokens are prefilled where they are decoded"
    assert not by_name(RoundRobinPolicy(99).explain(pending(100), snapshot))["p"].obstacle


def test_a_preferred_prefill_rank_is_an_obstacle_at_the_other_ranks() -> None:
    snapshot = Snapshot([candidate("p0"), candidate("p1")], [candidate("d")])
    options = by_name(RoundRobinPolicy(0).explain(pending(100, prefer_prefill=Rank("p1")), snapshot))
    assert (options["p0"].obstacle, options["p1"].obstacle) == ("its blocks are at p1/0", "")


def test_least_loaded_weighs_queues_by_tokens_and_free_blocks_by_share() -> None:
    snapshot = Snapshot(
        [candidate("p", num_queued_tokens=30)], [candidate("d", num_used_blocks=20, num_promised_blocks=5)]
    )
    options = by_name(LeastLoadedPolicy(0, random.Random(0)).explain(pending(), snapshot))
    assert (options["p"].cost, options["p"].cost_unit) == (30, "tokens")
    assert (options["d"].cost, options["d"].cost_unit) == (0.25, "share")
    assert (options["p"].terms, options["d"].terms) == ({"queued_tokens": 30}, {"taken_share": 0.25})


@given(request=pendings, snapshot=snapshots)
def test_the_terms_of_kv_aware_add_up_to_its_cost(request: Pending, snapshot: Snapshot) -> None:
    for option in KvAwarePolicy(random.Random(0)).explain(request, snapshot):
        if option.cost is not None:
            seconds = [value for name, value in option.terms.items() if name.endswith("_s")]
            assert option.cost == pytest.approx(sum(seconds))
            assert option.cost_unit == "s"


def test_kv_aware_counts_what_a_transfer_takes() -> None:
    config = KvAwareConfig(transfer_s_per_token=1e-3)
    snapshot = Snapshot([candidate("p")], [candidate("d")])
    options = by_name(KvAwarePolicy(random.Random(0), config).explain(pending(200), snapshot))
    assert options["p"].terms["transfer_s"] == pytest.approx(0.2 * config.weights.decode_delay)
    assert options["d"].terms["transfer_s"] == 0


def test_kv_aware_prefills_where_it_decodes_if_that_costs_less_than_moving() -> None:
    # The decode rank is busy for 50 ms more; moving 200 tokens takes 0.2 or 2 s, of which a tenth counts.
    def prefills_at(transfer_s_per_token: float) -> str | None:
        config = KvAwareConfig(transfer_s_per_token=transfer_s_per_token, margin_s=1.0)
        snapshot = Snapshot([candidate("p")], [candidate("d", step_ends_at=0.05)])
        [placement] = KvAwarePolicy(random.Random(0), config).assign([pending(200)], snapshot).placements
        return placement and placement.prefills_at.worker_id

    assert prefills_at(1e-3) == "p"
    assert prefills_at(1e-2) == "d"


def test_kv_aware_describes_each_term() -> None:
    step_time = StepTime(prefill_base_s=0.01, prefill_s_per_token=1e-4)
    rank = candidate("d", step_time=step_time, step_ends_at=5.03, num_used_blocks=10)
    request = pending(200, num_cached_tokens={Rank("d"): 100}, arrived_at=4.5)
    [option] = KvAwarePolicy(random.Random(0)).explain(request, Snapshot([], [rank], now=5.0))
    assert option.num_cached_tokens == 100
    assert option.terms["wait_s"] == pytest.approx(0.5 + 0.03)
    assert option.terms["prefill_s"] == pytest.approx(0.02)
    assert option.terms["taken_share"] == pytest.approx(0.1)
