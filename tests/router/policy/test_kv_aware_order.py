"""kv_aware keeps the order of the queue where it matters: no request waits for ever behind others that fit better."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from quartet.discovery.base import Rank
from quartet.events.load import StepTime
from router.policy.base import Candidate, Peers, Pending, Policy, Snapshot
from router.policy.kv_aware import KvAwareConfig, KvAwarePolicy
from router.policy.session_affinity import SessionAffinityPolicy

_STEP_TIME = StepTime(prefill_base_s=0.01, prefill_s_per_token=1e-4)


def candidate(name: str, *, total: int = 1000, used: int = 0, ends_at: float = 0.0, spare: int = 0) -> Candidate:
    return Candidate(
        rank=Rank(name),
        num_total_blocks=total,
        block_size=10,
        num_used_blocks=used,
        num_spare_tokens=spare,
        step_ends_at=ends_at,
        max_step_tokens=2000,
        step_time=_STEP_TIME,
    )


def pending(num_tokens: int, *, reserved: int | None = None, arrived_at: float = 0.0, key: str = "") -> Pending:
    most = reserved or num_tokens
    return Pending(
        num_tokens=num_tokens,
        num_reserved_tokens=most,
        num_most_tokens=most,
        arrived_at=arrived_at,
        session_key=key,
    )


def policy() -> KvAwarePolicy:
    return KvAwarePolicy(random.Random(0), KvAwareConfig(gather_s=0.0, overtaken_s=3.0))


def test_a_long_prompt_goes_before_those_behind_it_once_it_has_waited_long() -> None:
    snapshots = [Snapshot([], [candidate("d")], now=now) for now in (1.0, 3.5)]
    waiting = [pending(1900), *[pending(50, arrived_at=3.4)] * 100]
    early, late = (policy().assign(waiting, snapshot).placements for snapshot in snapshots)
    assert early[0] is None and any(early)
    assert late[0] is not None
    # Not because it is old: one that stands ahead of it, by its tenant's share or its priority, may still be served.
    reordered = policy().assign([pending(50, arrived_at=0.4), pending(1900)], snapshots[1]).placements
    assert reordered[0] is not None


def test_prompts_that_have_waited_long_do_not_go_before_one_of_a_tenant_that_had_less() -> None:
    flood = [pending(1900, arrived_at=0.0), pending(1900, arrived_at=0.1)]
    placements = (
        policy().assign([pending(50, arrived_at=8.9), *flood], Snapshot([], [candidate("d")], now=9.0)).placements
    )
    assert [placement is not None for placement in placements] == [True, False, False]


@pytest.mark.parametrize("with_prefill", [False, True])
@pytest.mark.parametrize(("spare", "num_bound"), [(0, 0), (49, 0), (50, 1), (149, 2), (1000, 3)])
def test_short_prompts_go_to_a_rank_in_the_middle_of_a_long_one_as_far_as_it_takes_them(
    with_prefill: bool, spare: int, num_bound: int
) -> None:
    busy, other = candidate("busy", ends_at=5.0, spare=spare), candidate("decode", ends_at=5.0)
    snapshot = Snapshot([busy], [other]) if with_prefill else Snapshot([], [busy])
    waiting = [pending(size) for size in (50, 60, 70, 1900)]
    config = KvAwareConfig(gather_s=0.0, num_planned_per_rank=8, local_prefill_max_tokens=0 if with_prefill else None)
    placements = KvAwarePolicy(random.Random(0), config).assign(waiting, snapshot).placements
    assert [placement is not None for placement in placements] == [number < num_bound for number in range(4)]


@pytest.mark.parametrize("with_prefill", [False, True])
def test_the_first_in_the_queue_get_the_last_places_and_not_the_shortest_or_oldest(with_prefill: bool) -> None:
    prefill = [candidate("p")] if with_prefill else []
    ranks = [replace(candidate(name), num_requests=7, max_requests=8) for name in ("a", "b")]
    # The first two are those of a tenant that had less; the others came before, and some of them are due.
    first = [pending(300, arrived_at=8.5), pending(400, arrived_at=8.5)]
    others = [pending(50, arrived_at=arrived_at) for arrived_at in (2.0, 4.0, 8.0, 8.4)]
    placements = policy().assign([*first, *others], Snapshot(prefill, ranks, now=9.0)).placements
    assert any(placements)
    assert not any(placements[2:])


@pytest.mark.parametrize("with_prefill", [False, True])
def test_blocks_kept_for_a_large_request_are_not_taken_by_small_ones(with_prefill: bool) -> None:
    prefill = [candidate("p")] if with_prefill else []
    ranks = [candidate("a", total=100, used=60), candidate("b", total=100, used=70)]
    large, small = pending(800), [pending(100) for _ in range(20)]
    placements = policy().assign([large, *small], Snapshot(prefill, ranks)).placements
    assert placements[0] is None
    decodes = {placement.decode for placement in placements if placement is not None}
    assert decodes == {Rank("b")}, "where there is more room they would take what it waits for"


def test_all_choices_that_bind_at_once_are_planned_however_many_they_are() -> None:
    choices = [
        Pending(num_tokens=100, num_reserved_tokens=100, num_most_tokens=100, binds_at_once=True) for _ in range(64)
    ]
    for ranks in ([candidate("d")], [candidate("d", ends_at=5.0)]):
        placements = policy().assign([*[pending(100)] * 50, *choices], Snapshot([], ranks)).placements
        assert None not in placements[50:]


def test_a_request_kept_behind_a_group_is_polled_again_when_the_groups_step_ends() -> None:
    decision = policy().assign([pending(1900), pending(1800)], Snapshot([], [candidate("d")]))
    assert [placement is None for placement in decision.placements] == [True, False]
    assert decision.poll_again_in_s == pytest.approx(0.01 + 0.18 - 0.005)


def test_requests_beyond_the_planning_limit_are_polled_again_at_once() -> None:
    waiting = [pending(1500 + number) for number in range(100)]
    ranks = [candidate(f"d{number:02}") for number in range(100)]
    decision = policy().assign(waiting, Snapshot([], ranks))
    assert any(decision.placements)
    assert decision.poll_again_in_s is not None and decision.poll_again_in_s < 0.001


@pytest.mark.parametrize("number", [0, 1])
def test_a_session_waits_for_other_routers_only_as_often_as_its_rank_is_theirs(number: int) -> None:
    candidates = [candidate(f"d{index}") for index in range(8)]
    names = [rank.rank for rank in candidates]
    snapshot = Snapshot([], candidates, peers=Peers(number=number, num_routers=2, ranks=names))
    chooser: Policy = SessionAffinityPolicy(policy())
    num_at_once = 0
    for session in range(16):
        decision = chooser.assign([pending(1000, key=f"session {session}")], snapshot)
        num_at_once += decision.placements[0] is not None
    assert 3 <= num_at_once <= 13, "half of the ranks are this router's"


def test_no_request_is_kept_for_a_rank_whose_steps_were_never_measured() -> None:
    known = candidate("d", ends_at=5.0)
    waiting = [pending(1900), pending(1900), pending(50)]
    assert not any(policy().assign(waiting, Snapshot([], [known])).placements)
    unknown = replace(known, is_measured=False)
    assert all(policy().assign(waiting, Snapshot([], [unknown])).placements)
