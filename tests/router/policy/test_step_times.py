"""Ranks that have not reported how long their steps take."""

from __future__ import annotations

from quartet.discovery.base import Rank
from quartet.events.load import StepTime
from router.policy.base import Candidate
from router.policy.room import with_step_times


def candidate(name: str, *, s_per_token: float | None) -> Candidate:
    """``None``: it was never measured."""
    step_time = StepTime() if s_per_token is None else StepTime(prefill_s_per_token=s_per_token)
    is_measured = s_per_token is not None
    return Candidate(rank=Rank(name), num_total_blocks=100, block_size=32, step_time=step_time, is_measured=is_measured)


def test_a_new_rank_is_assumed_to_be_as_fast_as_its_fellows() -> None:
    ranks = [candidate("a", s_per_token=1e-3), candidate("b", s_per_token=None), candidate("c", s_per_token=3e-3)]
    [a, b, c] = with_step_times([*ranks, candidate("d", s_per_token=2e-3)])[:3]
    assert (a, c) == (ranks[0], ranks[2])
    assert b.is_measured
    assert b.step_time.prefill_s_per_token == 2e-3


def test_if_no_fellow_was_measured_the_ranks_of_the_other_role_are_used() -> None:
    [alone] = with_step_times([candidate("a", s_per_token=None)], [candidate("p", s_per_token=1e-3)])
    assert alone.step_time.prefill_s_per_token == 1e-3


def test_if_no_rank_was_measured_no_time_is_made_up() -> None:
    ranks = [candidate("a", s_per_token=None)]
    assert with_step_times(ranks, [candidate("p", s_per_token=None)]) is ranks
