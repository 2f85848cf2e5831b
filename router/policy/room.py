"""Who fits where, and what one ``assign`` has given out so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from statistics import median_low

from quartet.discovery.base import Rank
from router.policy.base import Candidate, Pending, Snapshot


class Tally:
    """What one ``assign`` has given out so far, on top of its snapshot."""

    def __init__(self) -> None:
        self._num_blocks: Counter[Rank] = Counter()
        self._num_tokens: Counter[Rank] = Counter()

    def num_free(self, candidate: Candidate) -> int:
        """Blocks of a decode rank that are still to be had."""
        return candidate.num_free_for_booking - self._num_blocks[candidate.rank]

    def num_taken(self, candidate: Candidate) -> int:
        """Blocks of a decode rank that are used or spoken for."""
        return candidate.num_total_blocks - self.num_free(candidate)

    def num_queued_tokens(self, candidate: Candidate) -> int:
        """Prompt tokens that wait at a rank that prefills."""
        return candidate.num_queued_tokens + self._num_tokens[candidate.rank]

    def has_room(self, candidate: Candidate, pending: Pending) -> bool:
        """Whether ``pending`` fits a decode rank now."""
        return candidate.num_blocks(pending.num_reserved_tokens) <= self.num_free(candidate)

    def add(self, pending: Pending, prefill: Candidate | None, decode: Candidate) -> None:
        """Count ``pending`` in."""
        self._num_blocks[decode.rank] += decode.num_blocks(pending.num_reserved_tokens)
        rank = (prefill or decode).rank
        self._num_tokens[rank] += pending.num_missing_tokens(rank)


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
    """Whether a rank that decodes may prefill ``pending`` too."""
    return not pending.needs_media or (pending.needs_media <= candidate.media and not pending.is_remote)


def with_way(pending: Pending, snapshot: Snapshot) -> Pending:
    """``pending`` with whether a rank that only prefills takes it with the media that it needs."""
    if not pending.needs_media:
        return pending
    is_local = not any(can_prefill(rank, pending) for rank in snapshot.prefill)
    return pending if is_local is pending.is_local else replace(pending, is_local=is_local)


def welcome(candidates: Sequence[Candidate], pending: Pending) -> Sequence[Candidate]:
    """Those that did not just fail ``pending``; if there are none, all."""
    return [candidate for candidate in candidates if candidate.rank.worker_id not in pending.avoid] or candidates


def decode_choices(candidates: Sequence[Candidate], pending: Pending, tally: Tally) -> Sequence[Candidate]:
    """Those where ``pending`` can be decoded now, and that are welcome."""
    able = [rank for rank in candidates if can_ever_hold(rank, pending) and tally.has_room(rank, pending)]
    return welcome(able, pending)


# Why a request can't go to a rank now, in words.

#: Of a rank that could take it, while others can that did not.
JUST_FAILED = "just failed it"


def prefill_obstacle(candidate: Candidate, pending: Pending) -> str:
    """Why ``pending`` can't be prefilled at a rank that only prefills; empty: it can."""
    if can_prefill(candidate, pending):
        return ""
    return _no_media(candidate, pending) or _misfit(candidate, pending, pending.num_tokens)


def decode_obstacle(candidate: Candidate, pending: Pending, tally: Tally) -> str:
    """Why ``pending`` can't be decoded there now; empty: it can."""
    if not can_ever_hold(candidate, pending):
        no_media = _no_media(candidate, pending) if pending.is_local else ""
        return no_media or _misfit(candidate, pending, pending.num_most_tokens)
    if not tally.has_room(candidate, pending):
        num_needed, num_free = candidate.num_blocks(pending.num_reserved_tokens), max(tally.num_free(candidate), 0)
        return f"no room: {num_free} blocks free of {num_needed} needed"
    return ""


def _no_media(candidate: Candidate, pending: Pending) -> str:
    missing = sorted(pending.needs_media - candidate.media)
    return f"does not take media as {', '.join(missing)}" if missing else ""


def _misfit(candidate: Candidate, pending: Pending, num_tokens: int) -> str:
    if not candidate.serves(pending.adapter):
        return f"does not serve the adapter {pending.adapter}"
    return f"too small: {candidate.num_total_blocks} blocks of {candidate.num_blocks(num_tokens)} needed"


# Step times for places that have not told theirs yet: a worker that just started is most likely like its fellows.

# As a prompt to compare places by.
_NUM_TOKENS = 1000


def with_step_times(candidates: Sequence[Candidate], others: Sequence[Candidate] = ()) -> Sequence[Candidate]:
    """``ranks``, of which those that were never measured take a measured one's times: the median of its own kind.

    Where none of ``ranks`` was measured, one of ``others`` stands in; where none of these was either, nothing changes.
    """
    if all(candidate.is_measured for candidate in candidates):
        return candidates
    measured = [candidate for candidate in candidates if candidate.is_measured] or [
        candidate for candidate in others if candidate.is_measured
    ]
    if not measured:
        return candidates
    times_s = [candidate.step_time.prefill_s(_NUM_TOKENS) for candidate in measured]
    usual = measured[times_s.index(median_low(times_s))].step_time
    return [
        candidate if candidate.is_measured else replace(candidate, step_time=usual, is_measured=True)
        for candidate in candidates
    ]
