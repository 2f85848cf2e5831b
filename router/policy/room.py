"""Who fits where, and what one ``assign`` has given out so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from statistics import median_low

from quartet.discovery.base import Place
from router.policy.base import Candidate, Pending, Snapshot


class Tally:
    """What one ``assign`` has given out so far, on top of its snapshot."""

    def __init__(self) -> None:
        self._num_blocks: Counter[Place] = Counter()
        self._num_tokens: Counter[Place] = Counter()

    def num_free(self, candidate: Candidate) -> int:
        """Blocks of a decode place that are still to be had."""
        return candidate.num_free_for_booking - self._num_blocks[candidate.place]

    def num_taken(self, candidate: Candidate) -> int:
        """Blocks of a decode place that are used or spoken for."""
        return candidate.num_total_blocks - self.num_free(candidate)

    def num_queued_tokens(self, candidate: Candidate) -> int:
        """Prompt tokens that wait at a place that prefills."""
        return candidate.num_queued_tokens + self._num_tokens[candidate.place]

    def has_room(self, candidate: Candidate, pending: Pending) -> bool:
        """Whether ``pending`` fits a decode place now."""
        return candidate.num_blocks(pending.num_reserved_tokens) <= self.num_free(candidate)

    def add(self, pending: Pending, prefill: Candidate | None, decode: Candidate) -> None:
        """Count ``pending`` in."""
        self._num_blocks[decode.place] += decode.num_blocks(pending.num_reserved_tokens)
        place = (prefill or decode).place
        self._num_tokens[place] += pending.num_missing_tokens(place)


def can_ever_hold(candidate: Candidate, pending: Pending) -> bool:
    """Whether ``pending`` can be decoded there, were it empty."""
    if pending.is_local and not can_prefill_here(candidate, pending):
        return False
    num_blocks = candidate.num_blocks(pending.num_most_tokens)
    return num_blocks <= candidate.num_total_blocks and candidate.serves(pending.adapter)


def can_prefill(candidate: Candidate, pending: Pending) -> bool:
    """Whether ``pending`` can be prefilled there, were it empty."""
    if pending.needs_media and not pending.needs_media <= candidate.media:
        return False
    return candidate.serves(pending.adapter) and candidate.num_blocks(pending.num_tokens) <= candidate.num_total_blocks


def can_prefill_here(candidate: Candidate, pending: Pending) -> bool:
    """Whether a place that decodes may prefill ``pending`` too."""
    return not pending.needs_media or (pending.needs_media <= candidate.media and not pending.is_remote)


def with_way(pending: Pending, snapshot: Snapshot) -> Pending:
    """``pending`` with whether a place that only prefills takes it with the media that it needs."""
    if not pending.needs_media:
        return pending
    is_local = not any(can_prefill(place, pending) for place in snapshot.prefill)
    return pending if is_local is pending.is_local else replace(pending, is_local=is_local)


def welcome(candidates: Sequence[Candidate], pending: Pending) -> Sequence[Candidate]:
    """Those that did not just fail ``pending``; if there are none, all."""
    return [place for place in candidates if place.place.worker_id not in pending.avoid] or candidates


def decode_choices(candidates: Sequence[Candidate], pending: Pending, tally: Tally) -> Sequence[Candidate]:
    """Those where ``pending`` can be decoded now, and that are welcome."""
    able = [place for place in candidates if can_ever_hold(place, pending) and tally.has_room(place, pending)]
    return welcome(able, pending)


# Why a request can't go to a place now, in words.

#: Of a place that could take it, while others can that did not.
JUST_FAILED = "just failed it"


def prefill_obstacle(place: Candidate, pending: Pending) -> str:
    """Why ``pending`` can't be prefilled at a place that only prefills; empty: it can."""
    if can_prefill(place, pending):
        return ""
    return _no_media(place, pending) or _misfit(place, pending, pending.num_tokens)


def decode_obstacle(place: Candidate, pending: Pending, tally: Tally) -> str:
    """Why ``pending`` can't be decoded there now; empty: it can."""
    if not can_ever_hold(place, pending):
        no_media = _no_media(place, pending) if pending.is_local else ""
        return no_media or _misfit(place, pending, pending.num_most_tokens)
    if not tally.has_room(place, pending):
        num_needed, num_free = place.num_blocks(pending.num_reserved_tokens), max(tally.num_free(place), 0)
        return f"no room: {num_free} blocks free of {num_needed} needed"
    return ""


def _no_media(place: Candidate, pending: Pending) -> str:
    missing = sorted(pending.needs_media - place.media)
    return f"does not take media as {', '.join(missing)}" if missing else ""


def _misfit(place: Candidate, pending: Pending, num_tokens: int) -> str:
    if not place.serves(pending.adapter):
        return f"does not serve the adapter {pending.adapter}"
    return f"too small: {place.num_total_blocks} blocks of {place.num_blocks(num_tokens)} needed"


# Step times for places that have not told theirs yet: a worker that just started is most likely like its fellows.

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
