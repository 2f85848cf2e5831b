"""Policies as a router's configuration names them, and two of them together."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.config import build
from quartet.discovery.base import Rank
from quartet.errors import ConfigError
from router.policy.base import Pending, Policy, Snapshot
from router.policy.create import PolicyConfig, PolicyName, create_policy
from tests.router.policy.test_explain_policies import candidate, pending, snapshots

names = st.sampled_from(list(PolicyName))
configs = st.builds(
    PolicyConfig,
    name=names,
    prefill_name=st.none() | names,
    decode_name=st.none() | names,
    session_affinity=st.booleans(),
    local_prefill_max_tokens=st.sampled_from([0, 100]),
)
waitings = st.lists(
    st.builds(
        lambda size, key, cached: pending(size, session_key=key, num_cached_tokens={Rank("d0"): min(cached, size)}),
        st.integers(1, 900),
        st.sampled_from(["", "a", "b"]),
        st.integers(0, 300),
    ),
    max_size=10,
)


def create(**settings: object) -> Policy:
    return create_policy(build(PolicyConfig, settings), random.Random(0))


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "kv_aware"),
        *(({"name": name.value}, name.value) for name in PolicyName),
        ({"name": "round_robin", "decode_name": "least_loaded"}, "split(round_robin, least_loaded)"),
        ({"name": "least_loaded", "prefill_name": "kv_aware"}, "split(kv_aware, least_loaded)"),
        ({"name": "least_loaded", "decode_name": "least_loaded"}, "least_loaded"),
        (
            {"prefill_name": "kv_aware", "decode_name": "power_of_two", "session_affinity": True},
            "session_affinity(split(kv_aware, power_of_two))",
        ),
    ],
)
def test_a_configuration_makes_the_policy_that_it_names(settings: dict[str, object], name: str) -> None:
    assert create(**settings).name == name


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("local_prefill_max_tokens", -1),
        ("margin_s", -0.1),
        ("transfer_s_per_token", -1e-9),
        ("session_max_load_factor", 0.9),
        ("name", "best"),
    ],
)
def test_impossible_values_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: "):
        build(PolicyConfig, {field: value})


def test_short_prompts_are_prefilled_where_they_are_decoded_as_configured() -> None:
    snapshot = Snapshot([candidate("p")], [candidate("d")])
    for num_tokens, is_remote in ((100, False), (101, True)):
        policy = create(name="least_loaded", local_prefill_max_tokens=100)
        [placement] = policy.assign([pending(num_tokens)], snapshot).placements
        assert placement is not None
        assert (placement.prefill is not None) == is_remote


def test_a_slow_network_makes_kv_aware_prefill_where_it_decodes() -> None:
    snapshot = Snapshot([candidate("p")], [candidate("d", num_decoding=1)])
    for transfer_s_per_token, is_remote in ((0.0, True), (1.0, False)):
        [placement] = create(transfer_s_per_token=transfer_s_per_token).assign([pending()], snapshot).placements
        assert placement is not None
        assert (placement.prefill is not None) == is_remote


@given(configs, waitings, snapshots, st.integers(0, 9))
def test_no_policy_overbooks_a_rank_and_the_same_seed_gives_the_same_decisions(
    config: PolicyConfig, waiting: Sequence[Pending], snapshot: Snapshot, seed: int
) -> None:
    decisions = [create_policy(config, random.Random(seed)).assign(waiting, snapshot) for _ in range(2)]
    assert decisions[0] == decisions[1]
    placements = decisions[0].placements
    assert len(placements) == len(waiting)
    prefill, decode = ({candidate.rank for candidate in kind} for kind in (snapshot.prefill, snapshot.decode))
    taken = Counter[Rank]()
    for request, placement in zip(waiting, placements, strict=True):
        if placement is not None:
            assert placement.prefill is None or placement.prefill in prefill
            assert placement.decode in decode
            assert placement.num_cached_tokens == request.num_cached_tokens.get(placement.prefills_at, 0)
            taken[placement.decode] += -(-request.num_reserved_tokens // 10)
    assert all(taken[candidate.rank] <= max(candidate.num_free_for_booking, 0) for candidate in snapshot.decode)


def test_the_prefill_and_the_decode_policy_each_choose_their_own_rank() -> None:
    policy = create(prefill_name="least_loaded", decode_name="round_robin")
    prefill = [candidate("p0", num_queued_tokens=50), candidate("p1")]
    decode = [candidate("d0"), candidate("d1", num_used_blocks=50)]
    placements = policy.assign([pending(10)] * 4, Snapshot(prefill, decode)).placements
    assert [placement and placement.prefill for placement in placements] == [Rank("p1")] * 4
    assert [placement and placement.decode for placement in placements] == [Rank("d0"), Rank("d1")] * 2


def test_if_a_prompt_is_prefilled_at_its_decode_rank_the_prefill_policy_chooses_the_rank() -> None:
    policy = create(prefill_name="least_loaded", decode_name="round_robin")
    decode = [candidate("d0", num_used_blocks=50), candidate("d1")]
    placements = policy.assign([pending(10)] * 3, Snapshot([], decode)).placements
    assert [placement and placement.decode for placement in placements] == [Rank("d1")] * 3


def test_prompts_queued_at_a_decode_rank_do_not_delay_a_hand_off_to_it() -> None:
    policy = create(prefill_name="least_loaded", decode_name="kv_aware")
    busy = candidate("d", num_unbegun_tokens=10_000)
    [placement] = policy.assign([pending()], Snapshot([candidate("p")], [busy])).placements
    assert placement is not None
    assert placement.decode == Rank("d")
