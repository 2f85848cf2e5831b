"""Which request each policy sends to which rank."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.discovery.base import Rank
from router.policy.base import Candidate, Pending, Placement, Policy, Snapshot
from router.policy.greedy import LeastLoadedPolicy, PowerOfTwoPolicy, RoundRobinPolicy
from router.policy.kv_aware import KvAwareConfig, KvAwarePolicy
from router.policy.session_affinity import SessionAffinityPolicy
from router.policy.split import SplitPolicy

_LOCAL_MAX = 16
_PREFILL_BY_LENGTH = [
    lambda: RoundRobinPolicy(_LOCAL_MAX),
    lambda: LeastLoadedPolicy(_LOCAL_MAX, random.Random(0)),
    lambda: PowerOfTwoPolicy(_LOCAL_MAX, random.Random(0)),
    lambda: SplitPolicy(LeastLoadedPolicy(_LOCAL_MAX, random.Random(0)), RoundRobinPolicy(0)),
    lambda: SessionAffinityPolicy(LeastLoadedPolicy(_LOCAL_MAX, random.Random(0))),
]
_POLICIES = [
    *_PREFILL_BY_LENGTH,
    lambda: KvAwarePolicy(
        random.Random(0),
        # It plans all that wait at once, as the others do.
        KvAwareConfig(gather_s=0.0, local_prefill_max_tokens=_LOCAL_MAX, num_planned_per_rank=12),
    ),
]
each_policy = pytest.mark.parametrize("make_policy", _POLICIES, ids=lambda make_policy: make_policy().name)
# Those that go by a prompt's length and preference where others weigh costs.
each_that_prefills_by_length = pytest.mark.parametrize(
    "make_policy", _PREFILL_BY_LENGTH, ids=lambda make_policy: make_policy().name
)


def candidate(
    name: str,
    *,
    total: int = 100,
    used: int = 0,
    promised: int = 0,
    queued: int = 0,
    requests: int = 0,
    max_requests: int = 0,
    adapters: tuple[str, ...] = (),
) -> Candidate:
    return Candidate(
        rank=Rank(name),
        num_total_blocks=total,
        block_size=10,
        num_used_blocks=used,
        num_promised_blocks=promised,
        num_requests=requests,
        max_requests=max_requests,
        num_queued_tokens=queued,
        adapters=frozenset(adapters),
    )


def pending(
    num_tokens: int = 100,
    *,
    reserve: int = 0,
    later: int = 0,
    adapter: str = "",
    avoid: tuple[str, ...] = (),
    prefer: str | None = None,
) -> Pending:
    return Pending(
        num_tokens=num_tokens,
        num_reserved_tokens=num_tokens + reserve,
        num_most_tokens=num_tokens + reserve + later,
        adapter=adapter,
        avoid=frozenset(avoid),
        prefer_prefill=None if prefer is None else Rank(prefer),
    )


def route(placement: Placement | None) -> tuple[str | None, str]:
    assert placement is not None
    return placement.prefill and placement.prefill.worker_id, placement.decode.worker_id


def decodes(placements: Sequence[Placement | None]) -> list[str | None]:
    return [placement and placement.decode.worker_id for placement in placements]


@each_that_prefills_by_length
def test_long_prompts_are_prefilled_at_prefill_ranks_and_short_ones_where_they_are_decoded(make_policy) -> None:
    snapshot = Snapshot([candidate("p")], [candidate("d")])
    long, short = make_policy().assign([pending(_LOCAL_MAX + 1), pending(_LOCAL_MAX)], snapshot).placements
    assert route(long) == ("p", "d")
    assert route(short) == (None, "d")


@each_policy
def test_without_prefill_ranks_the_decode_rank_prefills(make_policy) -> None:
    [placement] = make_policy().assign([pending()], Snapshot([], [candidate("d")])).placements
    assert route(placement) == (None, "d")


@each_policy
def test_a_prompt_too_long_for_every_prefill_rank_is_prefilled_at_its_decode_rank(make_policy) -> None:
    [placement] = (
        make_policy().assign([pending(200)], Snapshot([candidate("p", total=19)], [candidate("d")])).placements
    )
    assert route(placement) == (None, "d")


@each_policy
def test_a_rank_gets_no_more_requests_than_it_runs_at_once(make_policy) -> None:
    ranks = [candidate("d0", requests=5, max_requests=6), candidate("d1", requests=4, max_requests=6), candidate("d2")]
    placed = decodes(make_policy().assign([pending(10)] * 12, Snapshot([], ranks)).placements)
    # The third one does not say how many it runs at once, so it gets as many as have room.
    assert placed.count("d0") <= 1
    assert placed.count("d1") <= 2
    full = Snapshot([candidate("p")], [candidate("d0", requests=7, max_requests=6), ranks[1]])
    placed = decodes(make_policy().assign([pending(10)] * 12, full).placements)
    assert (placed.count("d1"), placed.count(None)) == (2, 10)


@each_policy
def test_a_prompt_waits_while_the_batch_of_every_prefill_rank_is_full(make_policy) -> None:
    busy = [candidate("p0", requests=2, max_requests=2), candidate("p1", requests=1, max_requests=2)]
    placed = (
        make_policy().assign([pending(_LOCAL_MAX + 1)] * 3, Snapshot(busy, [candidate("d", total=1000)])).placements
    )
    assert [route(placement) for placement in placed if placement is not None] == [("p1", "d")]
    placed = make_policy().assign([pending(_LOCAL_MAX + 1)], Snapshot(busy[:1], [candidate("d")])).placements
    assert placed == [None]


@each_policy
def test_without_free_blocks_at_a_decode_rank_a_request_waits(make_policy) -> None:
    full = candidate("d", total=100, used=50, promised=40)
    assert make_policy().assign([pending(100, reserve=1)], Snapshot([candidate("p")], [full])).placements == [None]
    assert make_policy().assign([pending(100)], Snapshot([candidate("p")], [full])).placements != [None]


@each_policy
def test_without_decode_ranks_every_request_waits(make_policy) -> None:
    assert make_policy().assign([pending(), pending()], Snapshot([candidate("p")], [])).placements == [None, None]


@each_policy
def test_requests_assigned_at_once_share_the_free_blocks(make_policy) -> None:
    placements = (
        make_policy()
        .assign([pending(100)] * 12, Snapshot([], [candidate("d1", total=50), candidate("d2", total=50)]))
        .placements
    )
    assert Counter(decodes(placements)) == {"d1": 5, "d2": 5, None: 2}
    assert placements[-2:] == [None, None]


@each_policy
def test_a_worker_that_just_failed_the_request_is_avoided_if_another_can_take_it(make_policy) -> None:
    snapshot = Snapshot([candidate("p1"), candidate("p2")], [candidate("d1"), candidate("d2")])
    for _ in range(20):
        [placement] = make_policy().assign([pending(avoid=("p1", "d2"))], snapshot).placements
        assert route(placement) == ("p2", "d1")
    only = Snapshot([candidate("p1")], [candidate("d2")])
    [placement] = make_policy().assign([pending(avoid=("p1", "d2"))], only).placements
    assert route(placement) == ("p1", "d2")


@each_that_prefills_by_length
def test_the_preferred_prefill_rank_is_taken_while_it_exists(make_policy) -> None:
    busy, idle = candidate("busy", queued=10_000), candidate("idle")
    [placement] = make_policy().assign([pending(prefer="busy")], Snapshot([idle, busy], [candidate("d")])).placements
    assert placement is not None and placement.prefill == Rank("busy")
    [placement] = make_policy().assign([pending(prefer="gone")], Snapshot([idle], [candidate("d")])).placements
    assert placement is not None and placement.prefill == Rank("idle")


@each_policy
def test_an_adapter_is_asked_only_of_those_that_serve_it(make_policy) -> None:
    snapshot = Snapshot(
        [candidate("p1"), candidate("p2", adapters=("lora",))], [candidate("d1"), candidate("d2", adapters=("lora",))]
    )
    for _ in range(10):
        [placement] = make_policy().assign([pending(adapter="lora")], snapshot).placements
        assert route(placement) == ("p2", "d2")


@each_policy
def test_a_large_request_is_not_starved_by_small_ones_behind_it(make_policy) -> None:
    ranks = [candidate("d1", total=100, used=30), candidate("d2", total=100, used=60)]
    placements = make_policy().assign([pending(800), *[pending(100)] * 6], Snapshot([], ranks)).placements
    # It reserves d1, which has the most room; the small ones use what is left of d2.
    assert decodes(placements) == [None, "d2", "d2", "d2", "d2", None, None]


@each_policy
def test_a_request_that_no_rank_can_ever_hold_does_not_block_others(make_policy) -> None:
    placements = (
        make_policy().assign([pending(1001), pending(100)], Snapshot([], [candidate("d", total=100)])).placements
    )
    assert decodes(placements) == [None, "d"]


@each_policy
def test_a_rank_too_small_for_the_longest_answer_of_a_request_is_skipped(make_policy) -> None:
    small, large = candidate("small", total=20), candidate("large", total=100, used=80)
    [placement] = make_policy().assign([pending(100, later=101)], Snapshot([], [small, large])).placements
    assert decodes([placement]) == ["large"]
    [placement] = make_policy().assign([pending(100, later=100)], Snapshot([], [small])).placements
    assert decodes([placement]) == ["small"]
    full = candidate("large", total=100, used=95)
    assert make_policy().assign([pending(100, later=101)], Snapshot([], [small, full])).placements == [None]


@each_policy
@given(st.lists(st.integers(1, 400), max_size=12), st.lists(st.integers(0, 60), min_size=1, max_size=4))
def test_no_rank_is_ever_overbooked(make_policy, lengths: list[int], used: list[int]) -> None:
    candidates = [candidate(f"d{i}", total=60, used=used[i]) for i in range(len(used))]
    placements = make_policy().assign([pending(length) for length in lengths], Snapshot([], candidates)).placements
    assert len(placements) == len(lengths)
    taken: Counter[str] = Counter()
    for length, placement in zip(lengths, placements, strict=True):
        if placement is not None:
            taken[placement.decode.worker_id] += -(-length // 10)
    for rank in candidates:
        assert taken[rank.rank.worker_id] <= rank.num_free_for_booking


def test_round_robin_takes_turns_by_name() -> None:
    policy: Policy = RoundRobinPolicy(_LOCAL_MAX)
    snapshot = Snapshot([candidate("p2"), candidate("p1")], [candidate("d3"), candidate("d1"), candidate("d2")])
    placements = policy.assign([pending()] * 4, snapshot).placements + policy.assign([pending()], snapshot).placements
    assert decodes(placements) == ["d1", "d2", "d3", "d1", "d2"]
    assert [placement and placement.prefill for placement in placements[:3]] == [Rank("p1"), Rank("p2"), Rank("p1")]


def test_least_loaded_decodes_where_the_smallest_share_is_taken() -> None:
    ranks = [candidate("small", total=50, used=20), candidate("large", total=200, used=60)]
    [placement] = LeastLoadedPolicy(_LOCAL_MAX, random.Random(1)).assign([pending()], Snapshot([], ranks)).placements
    assert placement is not None and placement.decode.worker_id == "large"


def test_least_loaded_counts_promised_blocks_like_used_ones() -> None:
    ranks = [candidate("used", used=10), candidate("promised", promised=30)]
    assert decodes(
        LeastLoadedPolicy(_LOCAL_MAX, random.Random(1)).assign([pending()], Snapshot([], ranks)).placements
    ) == ["used"]


def test_least_loaded_prefills_where_the_fewest_tokens_wait() -> None:
    ranks = [candidate("p1", queued=500), candidate("p2", queued=100)]
    placements = (
        LeastLoadedPolicy(_LOCAL_MAX, random.Random(1))
        .assign([pending(300)] * 3, Snapshot(ranks, [candidate("d")]))
        .placements
    )
    assert [placement and placement.prefill and placement.prefill.worker_id for placement in placements] == [
        "p2",
        "p2",
        "p1",
    ]


def test_power_of_two_takes_the_less_loaded_of_two_and_so_never_the_worst() -> None:
    prefill = [candidate("p1", queued=100), candidate("p2", queued=500), candidate("p3", queued=900)]
    decode = [candidate("d1", used=10), candidate("d2", used=20), candidate("d3", used=40)]
    policy = PowerOfTwoPolicy(_LOCAL_MAX, random.Random(1))
    routes = [route(policy.assign([pending()], Snapshot(prefill, decode)).placements[0]) for _ in range(300)]
    # Of three pairs, two have the best one in them.
    for chosen, best in ((Counter(one for one, _ in routes), "p1"), (Counter(other for _, other in routes), "d1")):
        assert len(chosen) == 2
        assert chosen.keys() & {"p3", "d3"} == set()
        assert 160 < chosen[best] < 240


def test_least_loaded_breaks_near_ties_at_random() -> None:
    ranks = [candidate("a", used=40), candidate("b", used=41), candidate("c", used=60)]
    policy = LeastLoadedPolicy(_LOCAL_MAX, random.Random(3))
    chosen = Counter(decodes([policy.assign([pending()], Snapshot([], ranks)).placements[0] for _ in range(100)]))
    assert chosen.keys() == {"a", "b"}
    assert min(chosen.values()) > 20
