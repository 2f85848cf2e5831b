"""One policy decides where prompts are computed, another one where requests that are handed off are decoded.

``Remaining`` is the snapshot for policies that make one decision out of several: what is left after each of them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

from quartet.discovery.base import Rank
from router.policy.base import Candidate, Decision, Option, Pending, Placement, Policy, Snapshot
from router.policy.room import NOTHING_TAKEN, Backfill, decode_choices


class SplitPolicy:
    """The first policy decides which requests go now and where they are prefilled, the second where they are decoded.

    A request that is prefilled where it is decoded is the first one's choice alone.
    """

    def __init__(self, prefill: Policy, decode: Policy) -> None:
        """Each keeps its own turn and random numbers."""
        self._prefill = prefill
        self._decode = decode

    @property
    def name(self) -> str:
        """The name that users know."""
        return f"split({self._prefill.name}, {self._decode.name})"

    def assign(self, queued: Sequence[Pending], snapshot: Snapshot) -> Decision:
        """Choose ranks for ``queued``; ``None`` keeps a request in the router's queue."""
        first = self._prefill.assign(queued, snapshot)
        placements = list(first.placements)
        handed_off = [(index, placement) for index, placement in enumerate(placements) if _is_handed_off(placement)]
        if not handed_off:
            return first
        remaining = Remaining(snapshot)
        for pending, placement in zip(queued, placements, strict=True):
            if placement is not None and placement.prefill is None:
                remaining.decide([pending], [placement])
        second = self._decode.assign(
            [_prefilled(queued[index], snapshot) for index, _ in handed_off], _for_decode(remaining.snapshot)
        )
        for (index, placement), decoded in zip(handed_off, second.placements, strict=True):
            assert placement is not None, "it is handed off"
            placements[index] = None if decoded is None else replace(placement, decode=decoded.decode)
        polls_s = [poll_s for poll_s in (first.poll_again_in_s, second.poll_again_in_s) if poll_s is not None]
        return Decision(placements, min(polls_s, default=None))

    def explain(self, pending: Pending, snapshot: Snapshot) -> Sequence[Option]:
        """How each rank suits ``pending``; if it would be handed off, the second policy explains the decode ranks."""
        options = self._prefill.explain(pending, snapshot)
        [placement] = copy.deepcopy(self._prefill).assign([pending], snapshot).placements
        if not _is_handed_off(placement):
            return options
        prefill = [option for option in options if not option.is_decode]
        decode = self._decode.explain(_prefilled(pending, snapshot), _for_decode(snapshot))
        return prefill + [
            replace(option, num_cached_tokens=pending.num_cached_tokens.get(option.rank, 0)) for option in decode
        ]


class Remaining:
    """A snapshot, less what was given out since."""

    def __init__(self, snapshot: Snapshot) -> None:
        """Nothing is given out yet."""
        self._snapshot = snapshot
        self._prefill = {candidate.rank: candidate for candidate in snapshot.prefill}
        self._decode = {candidate.rank: candidate for candidate in snapshot.decode}
        self._backfill = Backfill()

    @property
    def snapshot(self) -> Snapshot:
        """The ranks as they are now, without those that are reserved."""
        return replace(self._snapshot, prefill=tuple(self._prefill.values()), decode=self._unreserved())

    def at(self, prefill: Rank | None, decode: Rank) -> Snapshot:
        """These ranks alone; a decode rank that is reserved is left out."""
        prefills = [] if prefill is None else [self._prefill[prefill]]
        decodes = [] if decode in self._backfill.reserved else [self._decode[decode]]
        return replace(self._snapshot, prefill=prefills, decode=decodes)

    def decide(self, queued: Sequence[Pending], placements: Sequence[Placement | None]) -> None:
        """Subtract what the placed ones of ``queued`` take. Each other one that no rank has room for reserves one."""
        decided = list(zip(queued, placements, strict=True))
        for pending, placement in decided:
            if placement is not None:
                self._take(pending, placement)
        # After all of them are subtracted: policies differ in which requests they let overtake one that waits.
        for pending, placement in decided:
            if placement is None and not decode_choices(self._unreserved(), pending, NOTHING_TAKEN):
                self._backfill.reserve(pending, self._unreserved(), NOTHING_TAKEN)

    def _unreserved(self) -> Sequence[Candidate]:
        return self._backfill.unreserved(tuple(self._decode.values()))

    def _take(self, pending: Pending, placement: Placement) -> None:
        decode = self._decode[placement.decode]
        self._decode[placement.decode] = replace(
            decode,
            num_promised_blocks=decode.num_promised_blocks + decode.num_blocks(pending.num_reserved_tokens),
            num_requests=decode.num_requests + 1,
        )
        pool = self._decode if placement.prefill is None else self._prefill
        prefill = pool[placement.prefills_at]
        num_missing = pending.num_missing_tokens(prefill.rank)
        pool[prefill.rank] = replace(
            prefill,
            num_requests=prefill.num_requests + (placement.prefill is not None),
            num_queued_tokens=prefill.num_queued_tokens + num_missing,
            num_unbegun_tokens=prefill.num_unbegun_tokens + num_missing,
        )


def _is_handed_off(placement: Placement | None) -> bool:
    return placement is not None and placement.prefill is not None


def _prefilled(pending: Pending, snapshot: Snapshot) -> Pending:
    """It as ranks that only decode it see it: nothing is left to compute."""
    cached = {candidate.rank: pending.num_tokens for candidate in snapshot.decode}
    return replace(pending, num_cached_tokens=cached, lower_tokens={}, needs_media=frozenset())


def _for_decode(snapshot: Snapshot) -> Snapshot:
    """The ranks that decode, as a request that is handed off sees them: prompts that wait there don't delay it."""
    return replace(snapshot, prefill=(), decode=[_without_prompts(one) for one in snapshot.decode])


def _without_prompts(candidate: Candidate) -> Candidate:
    return replace(candidate, num_queued_tokens=0, num_unbegun_tokens=0, step_ends_at=0.0, is_measured=True)
