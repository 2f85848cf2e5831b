"""One request after the other, each to the best place that has room: what the simple policies share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence

from quartet.discovery.place import Place
from router.policy.base import Candidate, Decision, Pending, Placement, Snapshot


class GreedyPolicy(ABC):
    """Places requests in order; what differs is how a place is chosen among those that would do.

    Backfilling: each request that finds no room fences the eligible decode place with the most room, and nobody behind
    it is placed there. So small requests may use what a large one can't, and still can't starve it: the room at its
    place only grows, and if another place gets more, that one is fenced next time.
    """

    def __init__(self, local_prefill_max_tokens: int) -> None:
        """Requests of up to ``local_prefill_max_tokens`` tokens are prefilled where they are decoded."""
        self._local_prefill_max_tokens = local_prefill_max_tokens

    @abstractmethod
    def choose_prefill(self, candidates: Sequence[Candidate], tally: Tally) -> Candidate:
        """One of ``candidates``, of which there is at least one."""

    @abstractmethod
    def choose_decode(self, candidates: Sequence[Candidate], tally: Tally) -> Candidate:
        """One of ``candidates``, of which there is at least one; all have room."""

    def assign(self, waiting: Sequence[Pending], snapshot: Snapshot) -> Decision:
        """Choose places for ``waiting``; ``None`` keeps a request in the router's queue."""
        tally = Tally()
        fenced: set[Place] = set()
        placements: list[Placement | None] = []
        for pending in waiting:
            if len(fenced) == len(snapshot.decode):
                break
            placements.append(self._place(pending, snapshot, tally, fenced))
        return Decision(placements + [None] * (len(waiting) - len(placements)))

    def _place(self, pending: Pending, snapshot: Snapshot, tally: Tally, fenced: set[Place]) -> Placement | None:
        eligible = [place for place in snapshot.decode if place.place not in fenced and can_ever_hold(place, pending)]
        roomy = [place for place in eligible if tally.has_room(place, pending)]
        if not roomy:
            if eligible:
                fenced.add(max(eligible, key=tally.num_free).place)
            return None
        decode = self.choose_decode(welcome(roomy, pending), tally)
        prefill = self._prefill(pending, snapshot, tally)
        tally.add(pending, prefill, decode)
        return Placement(None if prefill is None else prefill.place, decode.place)

    def _prefill(self, pending: Pending, snapshot: Snapshot, tally: Tally) -> Candidate | None:
        if pending.num_tokens <= self._local_prefill_max_tokens:
            return None
        able = [
            place
            for place in snapshot.prefill
            if place.serves(pending.adapter) and place.num_blocks(pending.num_tokens) <= place.num_total_blocks
        ]
        for place in able:
            if place.place == pending.prefer_prefill:
                return place
        return self.choose_prefill(welcome(able, pending), tally) if able else None


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
        self._num_tokens[(prefill or decode).place] += pending.num_tokens


def can_ever_hold(candidate: Candidate, pending: Pending) -> bool:
    """Whether ``pending`` can be decoded there, were it empty."""
    num_blocks = candidate.num_blocks(pending.num_most_tokens)
    return num_blocks <= candidate.num_total_blocks and candidate.serves(pending.adapter)


def welcome(candidates: Sequence[Candidate], pending: Pending) -> Sequence[Candidate]:
    """Those that did not just fail ``pending``; if there are none, all."""
    return [place for place in candidates if place.place.worker_id not in pending.avoid] or candidates
