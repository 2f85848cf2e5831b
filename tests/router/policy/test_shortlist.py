"""The shortlist: ranks worth planning for, of very many."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from quartet.discovery.base import Rank
from quartet.events.load import StepTime
from router.policy.base import Candidate, Pending, Snapshot
from router.policy.kv_aware import KvAwareConfig, KvAwarePolicy, shortlist

_STEP_TIME = StepTime(prefill_base_s=0.01, prefill_s_per_token=1e-4)


def candidate(number: int, *, ends_at: float = 0.0, used: int = 0) -> Candidate:
    return Candidate(
        rank=Rank(f"d{number:03}"),
        num_total_blocks=1000,
        block_size=10,
        num_used_blocks=used,
        step_ends_at=ends_at,
        step_time=_STEP_TIME,
        max_step_tokens=8192,
    )


def pending(cached: dict[int, int], avoid: frozenset[str] = frozenset()) -> Pending:
    return Pending(
        num_tokens=1000,
        num_reserved_tokens=1000,
        num_most_tokens=1000,
        avoid=avoid,
        num_cached_tokens={Rank(f"d{number:03}"): tokens for number, tokens in cached.items()},
    )


def listed(candidates: list[Candidate], request: Pending, *, length: int = 4, first: int = 0) -> list[int]:
    free_in_s = [rank.step_ends_at for rank in candidates]
    return shortlist([(request, lambda number: number != 7)], candidates, free_in_s, length, first)


def test_the_shortlist_has_the_ranks_free_first_and_those_with_most_cached_for_the_wait() -> None:
    ranks = [candidate(number, ends_at=0.1 * number) for number in range(20)]
    assert listed(ranks, pending({})) == [0, 1, 2, 3]
    # Ready after 1.0 + 0.01, 1.2 + 0.02, 0.9 + 0.1 and, of which nothing comes, at rank 7.
    assert listed(ranks, pending({10: 1000, 12: 900, 9: 100, 7: 1000})) == [0, 1, 2, 3, 9, 10]


def test_among_equal_ranks_the_shortlist_begins_at_the_given_one() -> None:
    assert listed([candidate(number) for number in range(20)], pending({}), first=18) == [0, 1, 18, 19]


def test_ranks_that_just_failed_are_listed_only_if_no_other_is_left() -> None:
    candidates = [candidate(number) for number in range(8)]
    assert listed(candidates, pending({}, frozenset({"d000", "d002"}))) == [1, 3, 4, 5]
    everybody = frozenset(rank.rank.worker_id for rank in candidates)
    assert listed(candidates, pending({}, everybody)) == [0, 1, 2, 3]


@given(
    ends=st.lists(st.floats(0, 0.02), min_size=30, max_size=30),
    cached=st.dictionaries(st.integers(0, 29), st.integers(0, 100).map(lambda blocks: 10 * blocks), max_size=10),
    seed=st.integers(0, 9),
)
def test_with_a_shortlist_a_request_goes_where_it_would_have_gone_or_where_it_costs_the_same(
    ends: list[float], cached: dict[int, int], seed: int
) -> None:
    ranks = [candidate(number, ends_at=ends_at) for number, ends_at in enumerate(ends)]
    snapshot, request = Snapshot([], ranks), pending(cached)
    whole = KvAwarePolicy(random.Random(seed), KvAwareConfig(shortlist_length=100, margin_s=1.0, gather_s=0.0))
    short = KvAwarePolicy(random.Random(seed), KvAwareConfig(shortlist_length=6, margin_s=1.0, gather_s=0.0))
    [expected], [found] = (policy.assign([request], snapshot).placements for policy in (whole, short))
    assert expected is not None and expected.cost is not None
    assert found is not None and found.cost is not None
    # A second of a rank's work weighs half as much as a second's wait; the list is made by the wait alone.
    assert found.cost <= expected.cost * 1.5


def test_the_only_rank_with_free_blocks_among_very_many_is_found() -> None:
    ranks = [candidate(number, used=950) for number in range(99)] + [candidate(99)]
    policy = KvAwarePolicy(random.Random(0), KvAwareConfig(gather_s=0.0))
    [placement] = policy.assign([pending({})], Snapshot([], ranks)).placements
    assert placement is not None
    assert placement.decode == Rank("d099")
