"""What is left of a snapshot where one decision is made of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quartet.discovery.place import Place
from router.policy.base import Candidate, Pending, Placement, Snapshot
from router.policy.room import Tally, can_ever_hold

_NOTHING_TAKEN = Tally()


class Remaining:
    """A snapshot, less what was given out of it since."""

    def __init__(self, snapshot: Snapshot) -> None:
        """Nothing is given out yet."""
        self._snapshot = snapshot
        self._prefill = {place.place: place for place in snapshot.prefill}
        self._decode = {place.place: place for place in snapshot.decode}

    @property
    def snapshot(self) -> Snapshot:
        """The places as they are now, without those that were fenced."""
        return replace(self._snapshot, prefill=tuple(self._prefill.values()), decode=tuple(self._decode.values()))

    def at(self, prefill: Place | None, decode: Place) -> Snapshot:
        """These places alone."""
        prefills = [] if prefill is None else [self._prefill[prefill]]
        decodes = [self._decode[decode]] if decode in self._decode else []
        return replace(self._snapshot, prefill=prefills, decode=decodes)

    def decide(self, waiting: Sequence[Pending], placements: Sequence[Placement | None]) -> None:
        """Those were decided about: take what they were given; fence a place for whom there was no room anywhere."""
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
        places = self._decode if placement.prefill is None else self._prefill
        place = places[placement.prefills_at]
        num_missing = pending.num_missing_tokens(place.place)
        places[place.place] = replace(
            place,
            num_queued_tokens=place.num_queued_tokens + num_missing,
            num_unbegun_tokens=place.num_unbegun_tokens + num_missing,
        )

    def _fence(self, pending: Pending) -> None:
        """Where it is room that ``pending`` waits for, nobody behind it takes that; see ``GreedyPolicy``."""
        eligible: list[Candidate] = [place for place in self._decode.values() if can_ever_hold(place, pending)]
        if eligible and not any(_NOTHING_TAKEN.has_room(place, pending) for place in eligible):
            del self._decode[max(eligible, key=_NOTHING_TAKEN.num_free).place]
