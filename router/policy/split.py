"""One policy for where prompts are computed, another one for where what is handed off is decoded."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

from quartet.discovery.base import Rank
from router.policy.base import Candidate, Decision, Option, Pending, Placement, Policy, Snapshot
from router.policy.room import Tally, can_ever_hold


class SplitPolicy:
    """The first says who goes now, and where each is prefilled; the second, where what is handed off is decoded.

    A request that is prefilled where it is decoded is the first one's choice alone.
    """

    def __init__(self, prefill: Policy, decode: Policy) -> None:
        """Each keeps its own turn and luck."""
        self._prefill = prefill
        self._decode = decode

    @property
    def name(self) -> str:
        """What its users know it by."""
        return f"split({self._prefill.name}, {self._decode.name})"

    def assign(self, waiting: Sequence[Pending], snapshot: Snapshot) -> Decision:
        """Choose places for ``waiting``; ``None`` keeps a request in the router's queue."""
        first = self._prefill.assign(waiting, snapshot)
        placements = list(first.placements)
        handed_off = [(index, placement) for index, placement in enumerate(placements) if _is_handed_off(placement)]
        if not handed_off:
            return first
        remaining = Remaining(snapshot)
        for pending, placement in zip(waiting, placements, strict=True):
            if placement is not None and placement.prefill is None:
                remaining.decide([pending], [placement])
        second = self._decode.assign(
            [_prefilled(waiting[index], snapshot) for index, _ in handed_off], _for_decode(remaining.snapshot)
        )
        for (index, placement), decoded in zip(handed_off, second.placements, strict=True):
            assert placement is not None, "it is handed off"
            placements[index] = None if decoded is None else replace(placement, decode=decoded.decode)
        looks = [look_s for look_s in (first.look_again_in_s, second.look_again_in_s) if look_s is not None]
        return Decision(placements, min(looks, default=None))

    def explain(self, pending: Pending, snapshot: Snapshot) -> Sequence[Option]:
        """How ``pending`` stands at each rank; where it is handed off, the second tells of those that decode."""
        options = self._prefill.explain(pending, snapshot)
        [placement] = copy.deepcopy(self._prefill).assign([pending], snapshot).placements
        if not _is_handed_off(placement):
            return options
        prefill = [option for option in options if not option.is_decode]
        decode = self._decode.explain(_prefilled(pending, snapshot), _for_decode(snapshot))
        return prefill + [
            replace(option, num_cached_tokens=pending.num_cached_tokens.get(option.rank, 0)) for option in decode
        ]


def _is_handed_off(placement: Placement | None) -> bool:
    return placement is not None and placement.prefill is not None


def _prefilled(pending: Pending, snapshot: Snapshot) -> Pending:
    """It as places that decode see it: nothing is left to compute."""
    cached = {candidate.rank: pending.num_tokens for candidate in snapshot.decode}
    return replace(pending, num_cached_tokens=cached, needs_media=frozenset())


def _for_decode(snapshot: Snapshot) -> Snapshot:
    """The ranks that decode, as one that is handed off sees them: prompts that wait there don't hold it up."""
    return replace(snapshot, prefill=(), decode=[_without_prompts(rank) for rank in snapshot.decode])


def _without_prompts(candidate: Candidate) -> Candidate:
    return Candidate(
        rank=candidate.rank,
        num_total_blocks=candidate.num_total_blocks,
        block_size=candidate.block_size,
        num_used_blocks=candidate.num_used_blocks,
        num_promised_blocks=candidate.num_promised_blocks,
        adapters=candidate.adapters,
        num_decoding=candidate.num_decoding,
        num_context_tokens=candidate.num_context_tokens,
        max_step_tokens=candidate.max_step_tokens,
        step_time=candidate.step_time,
    )


# What is left of a snapshot where one decision is made of several.

_NOTHING_TAKEN = Tally()


class Remaining:
    """A snapshot, less what was given out of it since."""

    def __init__(self, snapshot: Snapshot) -> None:
        """Nothing is given out yet."""
        self._snapshot = snapshot
        self._prefill = {candidate.rank: candidate for candidate in snapshot.prefill}
        self._decode = {candidate.rank: candidate for candidate in snapshot.decode}

    @property
    def snapshot(self) -> Snapshot:
        """The ranks as they are now, without those that were fenced."""
        return replace(self._snapshot, prefill=tuple(self._prefill.values()), decode=tuple(self._decode.values()))

    def at(self, prefill: Rank | None, decode: Rank) -> Snapshot:
        """These ranks alone."""
        prefills = [] if prefill is None else [self._prefill[prefill]]
        decodes = [self._decode[decode]] if decode in self._decode else []
        return replace(self._snapshot, prefill=prefills, decode=decodes)

    def decide(self, waiting: Sequence[Pending], placements: Sequence[Placement | None]) -> None:
        """Those were decided about: take what they were given; fence a rank for whom there was no room anywhere."""
        decided = list(zip(waiting, placements, strict=True))
        for pending, placement in decided:
            if placement is not None:
                self._take(pending, placement)
        # Only now: policies differ in where they let others pass one that waits.
        for pending, placement in decided:
            if placement is None:
                self._fence(pending)

    def _take(self, pending: Pending, placement: Placement) -> None:
        decode = self._decode[placement.decode]
        self._decode[placement.decode] = replace(
            decode,
            num_promised_blocks=decode.num_promised_blocks + decode.num_blocks(pending.num_reserved_tokens),
        )
        ranks = self._decode if placement.prefill is None else self._prefill
        candidate = ranks[placement.prefills_at]
        num_missing = pending.num_missing_tokens(candidate.rank)
        ranks[candidate.rank] = replace(
            candidate,
            num_queued_tokens=candidate.num_queued_tokens + num_missing,
            num_unbegun_tokens=candidate.num_unbegun_tokens + num_missing,
        )

    def _fence(self, pending: Pending) -> None:
        """Where it is room that ``pending`` waits for, nobody behind it takes that; see ``GreedyPolicy``."""
        eligible: list[Candidate] = [rank for rank in self._decode.values() if can_ever_hold(rank, pending)]
        if eligible and not any(_NOTHING_TAKEN.has_room(rank, pending) for rank in eligible):
            del self._decode[max(eligible, key=_NOTHING_TAKEN.num_free).rank]
