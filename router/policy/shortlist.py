"""Of very many places, those worth planning for: forecasts for all of them would take longer than they gain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import nsmallest
from itertools import islice

from router.policy.base import Candidate, Pending


def shortlist(
    pendings: Sequence[tuple[Pending, Callable[[int], bool]]],
    places: Sequence[Candidate],
    free_in_s: Sequence[float],
    length: int,
    first: int,
) -> list[int]:
    """Numbers of places, ascending.

    Args:
        pendings: what is to be planned, each with whether it can go to a place at all.
        places: all of them; one is known by its position.
        free_in_s: by place, when it has computed what it was given.
        length: for each request, so many of those that are free first are taken, and half as many of those that have
            some of it and would have computed the rest first.
        first: where to begin among places that are free together: always the same would be sent everything.
    """
    by_freedom = sorted([*range(first, len(places)), *range(first)], key=free_in_s.__getitem__)
    numbers = {place.place: number for number, place in enumerate(places)}
    chosen: set[int] = set()
    for pending, can_go in pendings:
        able = (number for number in by_freedom if can_go(number))
        chosen.update(islice(_welcome(able, places, pending), length))
        known = [numbers[place] for place in pending.num_cached_tokens if place in numbers]
        known = [number for number in known if number not in chosen and can_go(number)]
        ends_in_s = {number: free_in_s[number] + _prefill_s(places[number], pending) for number in known}
        chosen.update(nsmallest(length // 2, known, key=ends_in_s.__getitem__))
    return sorted(chosen)


def _prefill_s(place: Candidate, pending: Pending) -> float:
    return place.step_time.prefill_s(pending.num_missing_tokens(place.place))


def _welcome(numbers: Iterator[int], places: Sequence[Candidate], pending: Pending) -> Iterator[int]:
    """Those that did not just fail ``pending``; if there are none, all."""
    if not pending.avoid:
        return numbers
    able = list(numbers)
    return iter([number for number in able if places[number].place.worker_id not in pending.avoid] or able)
