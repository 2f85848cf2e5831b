"""One policy for where prompts are computed, another one for where what is handed off is decoded."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

from router.policy.base import Candidate, Decision, Option, Pending, Placement, Policy, Snapshot
from router.policy.remaining import Remaining


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
        """How ``pending`` stands at each place; where it is handed off, the second tells of those that decode."""
        options = self._prefill.explain(pending, snapshot)
        [placement] = copy.deepcopy(self._prefill).assign([pending], snapshot).placements
        if not _is_handed_off(placement):
            return options
        prefill = [option for option in options if not option.is_decode]
        decode = self._decode.explain(_prefilled(pending, snapshot), _for_decode(snapshot))
        return prefill + [
            replace(option, num_cached_tokens=pending.num_cached_tokens.get(option.place, 0)) for option in decode
        ]


def _is_handed_off(placement: Placement | None) -> bool:
    return placement is not None and placement.prefill is not None


def _prefilled(pending: Pending, snapshot: Snapshot) -> Pending:
    """It as places that decode see it: nothing is left to compute."""
    cached = {place.place: pending.num_tokens for place in snapshot.decode}
    return replace(pending, num_cached_tokens=cached, needs_media=frozenset())


def _for_decode(snapshot: Snapshot) -> Snapshot:
    """The places that decode, as one that is handed off sees them: prompts that wait there don't hold it up."""
    return replace(snapshot, prefill=(), decode=[_without_prompts(place) for place in snapshot.decode])


def _without_prompts(place: Candidate) -> Candidate:
    return Candidate(
        place=place.place,
        num_total_blocks=place.num_total_blocks,
        block_size=place.block_size,
        num_used_blocks=place.num_used_blocks,
        num_promised_blocks=place.num_promised_blocks,
        adapters=place.adapters,
        num_decoding=place.num_decoding,
        num_context_tokens=place.num_context_tokens,
        max_step_tokens=place.max_step_tokens,
        step_time=place.step_time,
    )
