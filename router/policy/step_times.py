"""Step times for places that have not told theirs yet: a worker that just started is most likely like its fellows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median_low

from router.policy.base import Candidate

# As a prompt to compare places by.
_NUM_TOKENS = 1000


def with_step_times(places: Sequence[Candidate], others: Sequence[Candidate] = ()) -> Sequence[Candidate]:
    """``places``, of which those that were never measured take a measured one's times: the median of its own kind.

    Where none of ``places`` was measured, one of ``others`` stands in; where none of these was either, nothing changes.
    """
    if all(place.is_measured for place in places):
        return places
    measured = [place for place in places if place.is_measured] or [place for place in others if place.is_measured]
    if not measured:
        return places
    times_s = [place.step_time.prefill_s(_NUM_TOKENS) for place in measured]
    usual = measured[times_s.index(median_low(times_s))].step_time
    return [place if place.is_measured else replace(place, step_time=usual, is_measured=True) for place in places]
