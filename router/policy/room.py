"""Which rank can take which request: room, fit and media, what one ``assign`` has given out, backfill reservations.

``Tally`` counts what an ``assign`` has given out on top of its snapshot, and ``Backfill`` keeps a rank for each request
without room. The functions below them say whether a request fits a rank, and if not why. ``with_step_times`` lends step
times to ranks that have not reported theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median_low

from quartet.discovery.base import Rank
from router.policy.base import Candidate, Pending, Snapshot

#: The obstacle of a rank that could take a request, but just failed it while other ranks did not.
JUST_FAILED = "just failed it"

# A rank that others prefill for may have one more request for each so many that it runs.
_FED_PART = 4

# Tokens of the prompt by which ``with_step_times`` compares ranks.
_NUM_TOKENS = 1000


class Tally:
    """What one ``assign`` has given out so far, on top of its snapshot."""

    def __init__(self) -> None:
        self._num_blocks: dict[Rank, int] = {}
        self._num_requests: dict[Rank, int] = {}
        self._num_tokens: dict[Rank, int] = {}

    def num_free(self, candidate: Candidate) -> int:
        """Blocks of a decode rank that are still free."""
        return candidate.num_free_for_booking - self._num_blocks.get(candidate.rank, 0)

    def num_taken(self, candidate: Candidate) -> int:
        """Blocks of a decode rank that are used or promised."""
        return candidate.num_total_blocks - self.num_free(candidate)

    def taken_share(self, candidate: Candidate) -> float:
        """Share of a decode rank's blocks that is used or promised."""
        return self.num_taken(candidate) / max(candidate.num_total_blocks, 1)

    def num_queued_tokens(self, candidate: Candidate) -> int:
        """Prompt tokens that wait at a rank that prefills."""
        return candidate.num_queued_tokens + self._num_tokens.get(candidate.rank, 0)

    def can_run(self, candidate: Candidate) -> bool:
        """Whether a rank may have one more request: its batch is not full."""
        if not candidate.max_requests:
            return True
        return candidate.num_requests + self._num_requests.get(candidate.rank, 0) < candidate.max_requests

    def has_room(self, candidate: Candidate, pending: Pending) -> bool:
        """Whether ``pending`` fits a decode rank now."""
        num_blocks = candidate.num_blocks(pending.num_reserved_tokens)
        if num_blocks > candidate.num_free_for_booking - self._num_blocks.get(candidate.rank, 0):
            return False
        return not candidate.max_requests or self.can_run(candidate)

    def add(self, pending: Pending, prefill: Candidate | None, decode: Candidate) -> None:
        """Count ``pending`` in."""
        num_blocks = decode.num_blocks(pending.num_reserved_tokens)
        self._num_blocks[decode.rank] = self._num_blocks.get(decode.rank, 0) + num_blocks
        self._num_requests[decode.rank] = self._num_requests.get(decode.rank, 0) + 1
        if prefill is not None:
            self._num_requests[prefill.rank] = self._num_requests.get(prefill.rank, 0) + 1
        rank = (prefill or decode).rank
        self._num_tokens[rank] = self._num_tokens.get(rank, 0) + pending.num_missing_tokens(rank)


#: Of an ``assign`` that has given out nothing; nothing is added to it.
NOTHING_TAKEN = Tally()


class Backfill:
    """The backfill reservations of one ``assign``: a request without room reserves the emptiest rank.

    Later requests may not use a reserved rank. So small requests may use what a large one can't, and still can't
    starve it: the room on its rank only grows. If another rank gets more room, that one is reserved next time.

    Attributes:
        reserved: the ranks that are reserved so far.
    """

    def __init__(self) -> None:
        self.reserved: frozenset[Rank] = frozenset()

    def unreserved(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Those of ``candidates`` that no earlier request has reserved."""
        if not self.reserved:
            return candidates
        return [candidate for candidate in candidates if candidate.rank not in self.reserved]

    def reserve(self, pending: Pending, unreserved: Sequence[Candidate], tally: Tally) -> None:
        """Reserve the emptiest of ``unreserved`` that could ever hold ``pending``; none has room now.

        Ranks whose batch is full come last.
        """
        eligible = [candidate for candidate in unreserved if can_ever_hold(candidate, pending)]
        if eligible:
            self.reserved |= {max(eligible, key=lambda one: (tally.can_run(one), tally.num_free(one))).rank}


def can_ever_hold(candidate: Candidate, pending: Pending) -> bool:
    """Whether ``pending`` could be decoded there if the rank were empty."""
    if pending.is_local and not can_prefill_here(candidate, pending):
        return False
    num_blocks = candidate.num_blocks(pending.num_most_tokens)
    return num_blocks <= candidate.num_total_blocks and candidate.takes(pending)


def can_prefill(candidate: Candidate, pending: Pending) -> bool:
    """Whether ``pending`` could be prefilled there, at a rank that only prefills, if the rank were empty."""
    if pending.is_local or (pending.needs_media and not pending.needs_media <= candidate.media):
        return False
    return candidate.takes(pending) and candidate.num_blocks(pending.num_tokens) <= candidate.num_total_blocks


def can_prefill_here(candidate: Candidate, pending: Pending) -> bool:
    """Whether a rank that decodes may prefill ``pending`` too."""
    return not pending.needs_media or (pending.needs_media <= candidate.media and not pending.is_remote)


def not_avoided(candidates: Sequence[Candidate], pending: Pending) -> Sequence[Candidate]:
    """Those that did not just fail ``pending``; if there are none, all."""
    if not pending.avoid:
        return candidates
    return [candidate for candidate in candidates if candidate.rank.worker_id not in pending.avoid] or candidates


def can_decode_now(candidate: Candidate, pending: Pending, tally: Tally) -> bool:
    """Whether ``pending`` fits there beside what runs there and what ``tally`` has given out."""
    return can_ever_hold(candidate, pending) and tally.has_room(candidate, pending)


def decode_choices(candidates: Sequence[Candidate], pending: Pending, tally: Tally) -> Sequence[Candidate]:
    """Those where ``pending`` can be decoded now, without those that it avoids if there are others."""
    return not_avoided([one for one in candidates if can_decode_now(one, pending, tally)], pending)


def with_way(pending: Pending, snapshot: Snapshot) -> Pending:
    """``pending``, whose ``is_local`` also says whether no rank that only prefills takes the media that it needs."""
    if not pending.needs_media:
        return pending
    if pending.is_local and not any(can_prefill_here(candidate, pending) for candidate in snapshot.decode):
        pending = replace(pending, is_local=False)  # it would wait for ever
    is_local = not any(can_prefill(candidate, pending) for candidate in snapshot.prefill)
    return pending if is_local is pending.is_local else replace(pending, is_local=is_local)


def prefill_obstacle(candidate: Candidate, pending: Pending) -> str:
    """Why ``pending`` can't be prefilled now at a rank that only prefills; empty: it can."""
    if can_prefill(candidate, pending):
        return "" if NOTHING_TAKEN.can_run(candidate) else full_batch(candidate)
    return _no_media(candidate, pending) or _misfit(candidate, pending, pending.num_tokens)


def decode_obstacle(candidate: Candidate, pending: Pending, tally: Tally) -> str:
    """Why ``pending`` can't be decoded there now; empty: it can."""
    if not can_ever_hold(candidate, pending):
        no_media = _no_media(candidate, pending) if pending.is_local else ""
        return no_media or _misfit(candidate, pending, pending.num_most_tokens)
    if not tally.can_run(candidate):
        return full_batch(candidate)
    if not tally.has_room(candidate, pending):
        num_needed, num_free = candidate.num_blocks(pending.num_reserved_tokens), max(tally.num_free(candidate), 0)
        return f"no room: {num_free} blocks free of {num_needed} needed"
    return ""


def max_requests(max_running: int, *, is_fed: bool) -> int:
    """How many requests a rank may have that runs ``max_running`` at once; 0: unknown.

    ``is_fed``: others prefill for it. Then it may have a quarter more: while these are prefilled and moved, its places
    would stay empty. So at most that many wait there.
    """
    return max_running + -(-max_running // _FED_PART) if is_fed else max_running


def full_batch(candidate: Candidate) -> str:
    """What hinders requests from going to a rank whose batch is full."""
    return f"its batch is full: {candidate.num_requests} requests of at most {candidate.max_requests}"


def with_step_times(candidates: Sequence[Candidate], others: Sequence[Candidate] = ()) -> Sequence[Candidate]:
    """Give each of ``candidates`` without measured step times the median of the measured ones.

    A worker that just started is most likely as fast as its fellows. If none of ``candidates`` was measured, ``others``
    stand in; if none of these was measured either, nothing changes.
    """
    measured = [one for one in candidates if one.is_measured]
    if len(measured) == len(candidates):
        return candidates
    measured = measured or [one for one in others if one.is_measured]
    if not measured:
        return candidates
    times_s = [candidate.step_time.prefill_s(_NUM_TOKENS) for candidate in measured]
    usual = measured[times_s.index(median_low(times_s))].step_time
    return [one if one.is_measured else replace(one, step_time=usual, is_measured=True) for one in candidates]


def _no_media(candidate: Candidate, pending: Pending) -> str:
    missing = sorted(pending.needs_media - candidate.media)
    return f"does not take media as {', '.join(missing)}" if missing else ""


def _misfit(candidate: Candidate, pending: Pending, num_tokens: int) -> str:
    if not candidate.serves(pending.adapter):
        return f"does not serve the adapter {pending.adapter}"
    if pending.num_most_tokens >= candidate.max_model_len:
        return f"takes sequences of at most {candidate.max_model_len} tokens"
    if lacking := candidate.lacks & pending.sampling_fields:
        return f"does not honour {min(lacking)}"
    return f"too small: {candidate.num_total_blocks} blocks of {candidate.num_blocks(num_tokens)} needed"
