"""Requests of a session stay together, within bounds."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from quartet.discovery.base import Rank
from router.policy.base import Candidate, Decision, Pending, Snapshot
from router.policy.greedy import LeastLoadedPolicy, RoundRobinPolicy
from router.policy.kv_aware import KvAwarePolicy
from router.policy.session_affinity import SessionAffinityPolicy, rendezvous_order
from tests.router.policy.test_explain_policies import by_name, candidate, pending


def policy(seed: int = 0, **settings: float) -> SessionAffinityPolicy:
    return SessionAffinityPolicy(LeastLoadedPolicy(0, random.Random(seed)), **settings)


def fleet(num_prefill: int, num_decode: int, **settings: object) -> Snapshot:
    return Snapshot(
        [candidate(f"p{number}", **settings) for number in range(num_prefill)],
        [candidate(f"d{number}", **settings) for number in range(num_decode)],
    )


def routes(
    chosen: SessionAffinityPolicy, waiting: Sequence[Pending], snapshot: Snapshot
) -> list[tuple[Rank | None, Rank]]:
    placements = chosen.assign(waiting, snapshot).placements
    assert None not in placements
    return [(placement.prefill, placement.decode) for placement in placements if placement is not None]


def without(snapshot: Snapshot, rank: Rank) -> Snapshot:
    return Snapshot(*([one for one in kind if one.rank != rank] for kind in (snapshot.prefill, snapshot.decode)))


def changed(snapshot: Snapshot, rank: Rank, **settings: object) -> Snapshot:
    kinds = (
        [candidate(one.rank.worker_id, **settings) if one.rank == rank else one for one in kind]
        for kind in (snapshot.prefill, snapshot.decode)
    )
    return Snapshot(*kinds)


def test_requests_of_one_session_go_to_the_same_ranks_from_every_router() -> None:
    snapshot = fleet(4, 4)
    for session in range(20):
        request = pending(session_key=f"session-{session}")
        assert len({routes(policy(seed), [request], snapshot)[0] for seed in range(5)}) == 1


def test_sessions_spread_over_all_ranks() -> None:
    snapshot = fleet(4, 4, num_total_blocks=100_000)
    found = routes(policy(), [pending(10, session_key=str(session)) for session in range(400)], snapshot)
    for chosen in (Counter(prefill for prefill, _ in found), Counter(decode for _, decode in found)):
        assert len(chosen) == 4
        assert max(chosen.values()) < 150


def test_requests_without_a_session_are_assigned_by_the_wrapped_policy() -> None:
    snapshot = fleet(0, 3)
    inner, alone = SessionAffinityPolicy(RoundRobinPolicy(0)), RoundRobinPolicy(0)
    waiting = [pending()] * 7
    assert inner.assign(waiting, snapshot) == alone.assign(waiting, snapshot)
    assert inner.explain(pending(), snapshot) == alone.explain(pending(), snapshot)


def test_a_request_takes_one_place_in_the_batch_that_prefills_and_decodes_it() -> None:
    snapshot = fleet(0, 1, max_requests=2)
    assert len(routes(policy(), [pending(session_key="a"), pending()], snapshot)) == 2


@given(st.integers(2, 6), st.text(min_size=1), st.data())
def test_a_rank_that_goes_moves_only_its_own_sessions(num_ranks: int, key: str, data: st.DataObject) -> None:
    snapshot = fleet(0, num_ranks)
    [(_, home)] = routes(policy(), [pending(session_key=key)], snapshot)
    gone = data.draw(st.sampled_from([candidate.rank for candidate in snapshot.decode]))
    [(_, after)] = routes(policy(), [pending(session_key=key)], without(snapshot, gone))
    assert after == home if gone != home else after != home


loads = st.tuples(st.integers(0, 50), st.integers(0, 1000))


@given(st.text(min_size=1), st.lists(loads, min_size=3, max_size=3), st.lists(loads, min_size=3, max_size=3))
def test_a_session_stays_whatever_the_loads_within_bounds(
    key: str, prefill: list[tuple[int, int]], decode: list[tuple[int, int]]
) -> None:
    empty = fleet(3, 3, max_step_tokens=1000)
    kinds = (
        [
            candidate(f"{name}{number}", num_used_blocks=used, num_queued_tokens=queued, max_step_tokens=1000)
            for number, (used, queued) in enumerate(found)
        ]
        for name, found in (("p", prefill), ("d", decode))
    )
    request = pending(100, session_key=key)
    assert routes(policy(1), [request], Snapshot(*kinds)) == routes(policy(2), [request], empty)


def test_a_home_with_too_large_a_share_taken_is_passed_over_for_the_next_until_it_has_less() -> None:
    snapshot, request = fleet(0, 4), pending(session_key="s")
    order = rendezvous_order("s", snapshot.decode)
    busy = changed(snapshot, order[0].rank, num_used_blocks=60)
    assert routes(policy(), [request], busy) == [(None, order[1].rank)]
    # As full as that, but no fuller than the others: it is not it that is overloaded.
    full = Snapshot([], [candidate(f"d{number}", num_used_blocks=60) for number in range(4)])
    assert routes(policy(), [request], full) == [(None, order[0].rank)]
    half = changed(snapshot, order[0].rank, num_used_blocks=50)
    assert routes(policy(), [request], half) == [(None, order[0].rank)]


def test_a_home_with_a_long_queue_is_passed_over() -> None:
    snapshot, request = fleet(4, 1, max_step_tokens=1000), pending(session_key="s")
    order = rendezvous_order("s", snapshot.prefill)
    [(prefill, _)] = routes(policy(), [request], snapshot)
    assert prefill == order[0].rank
    for num_queued_tokens, home in ((1400, order[0].rank), (1500, order[1].rank)):
        # A step and 1.25 times the mean, of which its own queue is a fourth.
        queued = changed(snapshot, order[0].rank, num_queued_tokens=num_queued_tokens, max_step_tokens=1000)
        [(prefill, _)] = routes(policy(), [request], queued)
        assert prefill == home


def test_a_burst_of_one_session_overflows_to_other_ranks() -> None:
    snapshot = fleet(0, 4, num_total_blocks=10_000, max_step_tokens=1000)
    found = routes(policy(), [pending(100, session_key="s")] * 100, snapshot)
    chosen = Counter(decode for _, decode in found)
    order = [candidate.rank for candidate in rendezvous_order("s", snapshot.decode)]
    assert len(chosen) > 1
    assert chosen[order[0]] == max(chosen.values())
    assert max(chosen.values()) * 100 <= 1.25 * 100 * 100 / 4 + 1000 + 100


def test_a_home_that_just_failed_the_request_is_avoided_while_another_rank_can_take_it() -> None:
    snapshot = fleet(0, 3)
    home = rendezvous_order("s", snapshot.decode)[0].rank
    [(_, chosen)] = routes(policy(), [pending(session_key="s", avoid=frozenset({home.worker_id}))], snapshot)
    assert chosen != home
    only = Snapshot([], [candidate for candidate in snapshot.decode if candidate.rank == home])
    [(_, chosen)] = routes(policy(), [pending(session_key="s", avoid=frozenset({home.worker_id}))], only)
    assert chosen == home


def test_after_a_failed_transfer_it_prefills_where_its_blocks_are() -> None:
    snapshot = fleet(3, 1)
    last = rendezvous_order("s", snapshot.prefill)[-1].rank
    [(prefill, _)] = routes(policy(), [pending(session_key="s", prefer_prefill=last)], snapshot)
    assert prefill == last


sizes = st.lists(
    st.tuples(st.integers(1, 400), st.sampled_from(["", "a", "b", "c"]), st.integers(0, 1)), max_size=14
).map(lambda found: sorted(found, key=lambda entry: -entry[2]))


@given(sizes, st.lists(st.integers(0, 60), min_size=1, max_size=4), st.booleans())
def test_no_rank_is_ever_overbooked(waiting: list[tuple[int, str, int]], used: list[int], is_kv_aware: bool) -> None:
    inner = KvAwarePolicy(random.Random(0)) if is_kv_aware else LeastLoadedPolicy(0, random.Random(0))
    candidates = [
        candidate(f"d{number}", num_total_blocks=60, num_used_blocks=count) for number, count in enumerate(used)
    ]
    pendings = [pending(size, session_key=key, priority=priority) for size, key, priority in waiting]
    placements = SessionAffinityPolicy(inner).assign(pendings, Snapshot([], candidates)).placements
    assert len(placements) == len(pendings)
    taken = Counter[Rank]()
    for request, placement in zip(pendings, placements, strict=True):
        if placement is not None:
            taken[placement.decode] += -(-request.num_tokens // 10)
    assert all(taken[candidate.rank] <= candidate.num_free_for_booking for candidate in candidates)


def test_a_large_request_is_not_starved_by_small_ones_of_sessions_behind_it() -> None:
    ranks = [candidate("d0", num_used_blocks=30), candidate("d1", num_used_blocks=60)]
    waiting = [pending(800), *(pending(100, session_key=str(number)) for number in range(6))]
    placements = policy().assign(waiting, Snapshot([], ranks)).placements
    assert placements[0] is None
    # It reserves d0, which has the most room.
    assert {placement.decode for placement in placements if placement is not None} <= {Rank("d1")}


def test_higher_priority_has_the_room_first_whatever_the_session() -> None:
    rank: Candidate = candidate("d0", num_used_blocks=85)
    waiting = [pending(100, session_key="a", priority=1), pending(100, session_key="b"), pending(10, session_key="a")]
    placements = policy().assign(waiting, Snapshot([], [rank])).placements
    assert [placement is not None for placement in placements] == [True, False, False]


class CountingPolicy(LeastLoadedPolicy):
    """Counts how often it is asked."""

    num_looks = 0

    def assign(self, queued: Sequence[Pending], snapshot: Snapshot) -> Decision:
        self.num_looks += 1
        return super().assign(queued, snapshot)


def test_the_base_policy_is_asked_once_for_each_priority_however_they_are_mixed() -> None:
    base = CountingPolicy(0, random.Random(0))
    waiting = [pending(10, priority=-(number % 3)) for number in range(60)]
    placements = SessionAffinityPolicy(base).assign(waiting, fleet(2, 2, num_used_blocks=80)).placements
    assert base.num_looks == 3
    assert [placement is not None for placement in placements] == [number % 3 < 2 for number in range(60)]


def test_the_obstacle_of_other_ranks_names_the_sessions_home() -> None:
    snapshot = fleet(2, 2)
    request = pending(session_key="s")
    [(prefill, decode)] = routes(policy(), [request], snapshot)
    assert prefill is not None
    options = by_name(policy().explain(request, snapshot))
    for name, option in options.items():
        home = decode if option.is_decode else prefill
        is_home = name == home.worker_id
        assert option.obstacle == ("" if is_home else f"its session belongs to {home}")
        assert (option.cost is not None) == is_home
