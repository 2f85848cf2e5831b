"""Several routers keep out of each other's way, though each learns late what the others placed."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.discovery.base import Rank
from quartet.events.load import StepTime
from router.policy.base import Candidate, Peers, Pending, Snapshot
from router.policy.forecast import AT_ONCE
from router.policy.kv_aware import KvAwareConfig, KvAwarePolicy, PeerConfig, PeerTurns, PeerWaits

CONFIG = PeerConfig(report_s=0.1, doubt_s=0.5, saving_share=0.75)


def candidates(num_ranks: int) -> list[Candidate]:
    step_time = StepTime(prefill_base_s=0.01, prefill_s_per_token=1e-4)
    return [
        Candidate(rank=Rank(f"{number:02}"), num_total_blocks=1000, block_size=10, step_time=step_time)
        for number in range(num_ranks)
    ]


def pending(num_tokens: int, *, cached: dict[str, int] | None = None, arrived_at: float = 0.0) -> Pending:
    return Pending(
        num_tokens=num_tokens,
        num_reserved_tokens=num_tokens,
        num_most_tokens=num_tokens,
        arrived_at=arrived_at,
        num_cached_tokens={Rank(name): count for name, count in (cached or {}).items()},
    )


def policy() -> KvAwarePolicy:
    return KvAwarePolicy(random.Random(0), KvAwareConfig(gather_s=0.0, peers=CONFIG))


def test_a_router_without_peers_holds_no_request_back() -> None:
    assert PeerWaits(candidates(3), candidates(3), Peers(), CONFIG).defer([10, None, 10], 0.0, 0.0) is AT_ONCE


@given(num_ranks=st.integers(1, 12), num_routers=st.integers(2, 5), seed=st.integers(0, 9))
def test_each_rank_is_open_to_one_router_at_once_and_to_the_others_in_turn(
    num_ranks: int, num_routers: int, seed: int
) -> None:
    ranks = candidates(num_ranks)
    by_rank: dict[Rank, list[float]] = {candidate.rank: [] for candidate in ranks}
    for number in range(num_routers):
        shown = random.Random(seed + number).sample(ranks, len(ranks))  # each sees them in its own order
        waits = PeerWaits(shown, shown, Peers(number=number, num_routers=num_routers), CONFIG)
        deferral = waits.defer([10] * num_ranks, 0.0, 0.0)
        for candidate, until_s in zip(shown, deferral.until_s or [0.0] * num_ranks, strict=True):
            by_rank[candidate.rank].append(until_s)
    wanted = pytest.approx([distance * CONFIG.report_s for distance in range(num_routers)])
    assert all(sorted(waits_s) == wanted for waits_s in by_rank.values())


def test_other_routers_ranks_are_held_back_and_the_waited_time_counts() -> None:
    waits = PeerWaits(candidates(2), candidates(2), Peers(number=0, num_routers=2), CONFIG)
    assert waits.defer([10, 10], 0.0, 0.0).until_s == [0.0, 0.1]
    assert waits.defer([10, 10], 0.0, 0.0).starts_in_s == pytest.approx([0.0, 0.6])
    assert waits.defer([10, 10], 0.04, 0.0).until_s == pytest.approx([0.0, 0.06])
    assert waits.defer([10, 10], 5.0, 0.0).until_s == [0.0, 0.0]


def test_a_prompt_does_not_wait_for_a_rank_that_has_most_of_its_blocks() -> None:
    waits = PeerWaits(candidates(2), candidates(2), Peers(number=0, num_routers=2), CONFIG)
    assert waits.defer([100, 25], 0.0, 0.0).until_s == [0.0, 0.0]
    assert waits.defer([100, 26], 0.0, 0.0).until_s == [0.0, 0.1]
    assert waits.defer([None, 26], 0.0, 0.0).until_s == [0.0, 0.1]


def test_routers_with_the_same_snapshot_send_to_different_ranks() -> None:
    ranks = candidates(4)
    sent: Counter[Rank] = Counter()
    for number in range(2):
        snapshot = Snapshot([], ranks, peers=Peers(number=number, num_routers=2))
        decision = policy().assign([pending(1000), pending(1000)], snapshot)
        sent.update(placement.decode for placement in decision.placements if placement is not None)
    assert sorted(sent.values()) == [1, 1, 1, 1]


def test_a_rank_of_another_router_that_stays_free_is_taken() -> None:
    ranks = [*candidates(1), Candidate(rank=Rank("01"), num_total_blocks=1000, block_size=10, step_ends_at=9.0)]
    first, later = (
        policy().assign([pending(1000)], Snapshot([], ranks, now=now, peers=Peers(number=1, num_routers=2)))
        for now in (0.0, 0.2)
    )
    assert first.placements == [None]
    assert first.poll_again_in_s == pytest.approx(0.1)
    assert [placement and placement.decode for placement in later.placements] == [Rank("00")]


def test_a_long_prompt_waits_a_moment_for_others_and_a_short_one_does_not() -> None:
    waiting = KvAwarePolicy(random.Random(0), KvAwareConfig(gather_s=0.002, gather_share=0.02))
    ranks = candidates(1)
    [short] = waiting.assign([pending(100)], Snapshot([], ranks)).placements
    assert short is not None
    decision = waiting.assign([pending(9000)], Snapshot([], ranks))
    assert decision.placements == [None]
    assert decision.poll_again_in_s == pytest.approx(0.002)
    [gathered] = waiting.assign([pending(9000)], Snapshot([], ranks, now=0.002)).placements
    assert gathered is not None


def test_the_router_that_a_rank_belongs_to_does_not_depend_on_the_other_candidates() -> None:
    everybody, peers = candidates(9), Peers(number=1, num_routers=3)
    whole = PeerWaits(everybody, everybody, peers, CONFIG).defer([10] * 9, 0.0, 0.0)
    some = PeerWaits(everybody[4:], everybody, peers, CONFIG).defer([10] * 5, 0.0, 0.0)
    assert list(some.until_s) == list(whole.until_s[4:])


TURNS = PeerConfig(turn_s=0.004, open_s=0.002)


def open_to(num_ranks: int, num_routers: int, now: float, ahead_s: float = 0.0) -> list[list[float]]:
    """By router, for how long it sends nothing to each rank."""
    ranks, found = candidates(num_ranks), []
    for number in range(num_routers):
        peers = Peers(number=number, num_routers=num_routers, tell_bookings=True, clock_ahead_s=ahead_s)
        found.append(list(PeerTurns(ranks, ranks, peers, TURNS, now).defer([10] * num_ranks, 0.0, 0.0).until_s))
    return found


@given(num_ranks=st.integers(1, 12), num_routers=st.integers(2, 20), time_ms=st.integers(0, 5000))
def test_each_rank_is_one_routers_at_a_time_and_every_routers_in_turn(
    num_ranks: int, num_routers: int, time_ms: int
) -> None:
    now = time_ms / 1e3 + 1e-6
    by_rank = list(zip(*open_to(num_ranks, num_routers, now), strict=True))
    is_open = time_ms % 4 < 2
    for waits_s in by_rank:
        assert sum(wait_s == 0.0 for wait_s in waits_s) == is_open
        turns = sorted(round(((now + wait_s) % (0.004 * num_routers)) / 0.004 - 0.25 * is_open) for wait_s in waits_s)
        assert len({round((now + wait_s) / 0.004 - 0.25) for wait_s in waits_s}) == num_routers, turns


def test_more_routers_than_ranks_are_spread_evenly_over_the_turns() -> None:
    waits_s = open_to(2, 8, 1e-6)
    # Every router has the next of both ranks within half a cycle, not one of the two at the end of a whole one.
    assert max(map(min, waits_s)) <= 4 * 0.004


def test_routers_with_clocks_that_differ_agree_by_the_common_one() -> None:
    ranks = candidates(4)
    ones = Peers(number=0, num_routers=4, tell_bookings=True, clock_ahead_s=100.0)
    others = Peers(number=0, num_routers=4, tell_bookings=True, clock_ahead_s=7.0)
    first = PeerTurns(ranks, ranks, ones, TURNS, 0.005).defer([10] * 4, 0.0, 0.0)
    second = PeerTurns(ranks, ranks, others, TURNS, 93.005).defer([10] * 4, 0.0, 0.0)
    assert first.until_s == pytest.approx(second.until_s)


def test_a_short_prompt_waits_for_no_turn() -> None:
    peers = Peers(number=0, num_routers=2, tell_bookings=True)
    closed = 0.003  # no rank is open to any router
    [[short], [long]] = [
        policy().assign([pending(num_tokens)], Snapshot([], candidates(2), now=closed, peers=peers)).placements
        for num_tokens in (100, 9000)
    ]
    assert short is not None
    assert long is None


def test_a_router_that_comes_late_to_its_turn_takes_it() -> None:
    peers = Peers(number=1, num_routers=4, tell_bookings=True)
    late = KvAwarePolicy(random.Random(0), KvAwareConfig(gather_s=0.0, peers=TURNS))

    def send(now: float) -> bool:
        [placement] = late.assign([pending(9000)], Snapshot([], candidates(1), now=now, peers=peers)).placements
        return placement is not None

    # Its turn is from 4 to 6 ms.
    assert [send(now) for now in (0.001, 0.002, 0.011)] == [False, False, True]
    assert not send(0.012), "that turn is taken"
    assert not send(9.999), "and one that was missed long ago is over"


def test_a_prompt_that_was_gathered_until_its_turn_was_over_waits_for_the_next() -> None:
    peers = Peers(number=0, num_routers=2, tell_bookings=True)
    gathering = KvAwarePolicy(random.Random(0), KvAwareConfig(gather_s=0.0019, gather_share=1.0, peers=TURNS))

    def send(now: float) -> bool:
        [placement] = gathering.assign([pending(9000)], Snapshot([], candidates(1), now=now, peers=peers)).placements
        return placement is not None

    # Its turns are from 0 to 2 and from 8 to 10 ms; at 2.4 another router's is too near for it to be told in time.
    assert [send(now) for now in (0.0, 0.0024, 0.0081)] == [False, False, True]


def test_a_turn_that_was_not_needed_is_over() -> None:
    peers = Peers(number=1, num_routers=4, tell_bookings=True)
    kept = KvAwarePolicy(random.Random(0), KvAwareConfig(gather_s=0.0, peers=TURNS))
    wanted, other = candidates(2)
    to_wanted = pending(9000, cached={"00": 8000})
    to_other = pending(9000, cached={"01": 8000})
    snapshots = [Snapshot([], [wanted, other], now=now, peers=peers) for now in (0.0061, 0.0075, 0.0265)]
    first, _, last = (
        kept.assign([one], at) for one, at in zip((to_wanted, to_other, to_wanted), snapshots, strict=True)
    )
    assert first.placements == last.placements == [None]
