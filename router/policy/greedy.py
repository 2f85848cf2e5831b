"""One request after the other, each to the best rank that has room: what the simple policies share."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from quartet.discovery.base import Rank
from router.policy.base import Candidate, Decision, Option, Pending, Placement, Snapshot
from router.policy.room import (
    JUST_FAILED,
    Tally,
    can_ever_hold,
    can_prefill,
    decode_choices,
    decode_obstacle,
    prefill_obstacle,
    welcome,
)


@dataclass(frozen=True)
class Weight:
    """What a simple policy weighs a rank by; less is better. ``name`` ends with the unit."""

    name: str
    unit: str
    value: float


class GreedyPolicy(ABC):
    """Places requests in order; what differs is how a rank is chosen among those that would do.

    Backfilling: each request that finds no room fences the eligible decode rank with the most room, and nobody behind
    it is placed there. So small requests may use what a large one can't, and still can't starve it: the room at its
    place only grows, and if another rank gets more, that one is fenced next time.
    """

    def __init__(self, local_prefill_max_tokens: int) -> None:
        """Requests of up to ``local_prefill_max_tokens`` tokens are prefilled where they are decoded."""
        self._local_prefill_max_tokens = local_prefill_max_tokens

    @property
    @abstractmethod
    def name(self) -> str:
        """What its users know it by."""

    @abstractmethod
    def choose_prefill(self, candidates: Sequence[Candidate], tally: Tally) -> Candidate:
        """One of ``candidates``, of which there is at least one."""

    @abstractmethod
    def choose_decode(self, candidates: Sequence[Candidate], tally: Tally) -> Candidate:
        """One of ``candidates``, of which there is at least one; all have room."""

    @abstractmethod
    def weigh_prefill(self, candidate: Candidate, tally: Tally) -> Weight | None:
        """What ``choose_prefill`` goes by; ``None``: by nothing that a rank has."""

    @abstractmethod
    def weigh_decode(self, candidate: Candidate, tally: Tally) -> Weight | None:
        """What ``choose_decode`` goes by; ``None``: by nothing that a rank has."""

    def assign(self, waiting: Sequence[Pending], snapshot: Snapshot) -> Decision:
        """Choose places for ``waiting``; ``None`` keeps a request in the router's queue."""
        tally = Tally()
        fenced: set[Rank] = set()
        placements: list[Placement | None] = []
        for pending in waiting:
            if len(fenced) == len(snapshot.decode):
                break
            placements.append(self._place(pending, snapshot, tally, fenced))
        return Decision(placements + [None] * (len(waiting) - len(placements)))

    def explain(self, pending: Pending, snapshot: Snapshot) -> Sequence[Option]:
        """How ``pending`` stands at each rank, were it all that waits."""
        tally = Tally()
        prefill = {candidate.rank for candidate in self._prefill_choices(pending, snapshot)}
        decode = {candidate.rank for candidate in decode_choices(snapshot.decode, pending, tally)}
        return [
            *(
                _option(candidate, pending, self.weigh_prefill(candidate, tally))
                if candidate.rank in prefill
                else _option(candidate, pending, obstacle=self._why_not_prefill(candidate, pending))
                for candidate in snapshot.prefill
            ),
            *(
                _option(candidate, pending, self.weigh_decode(candidate, tally), is_decode=True)
                if candidate.rank in decode
                else _option(
                    candidate,
                    pending,
                    is_decode=True,
                    obstacle=decode_obstacle(candidate, pending, tally) or JUST_FAILED,
                )
                for candidate in snapshot.decode
            ),
        ]

    def _place(self, pending: Pending, snapshot: Snapshot, tally: Tally, fenced: set[Rank]) -> Placement | None:
        unfenced = [candidate for candidate in snapshot.decode if candidate.rank not in fenced]
        choices = decode_choices(unfenced, pending, tally)
        if not choices:
            if eligible := [candidate for candidate in unfenced if can_ever_hold(candidate, pending)]:
                fenced.add(max(eligible, key=tally.num_free).rank)
            return None
        decode = self.choose_decode(choices, tally)
        able = self._prefill_choices(pending, snapshot)
        prefill = self.choose_prefill(able, tally) if able else None
        weight = self.weigh_decode(decode, tally) if prefill is None else self.weigh_prefill(prefill, tally)
        tally.add(pending, prefill, decode)
        return Placement(
            None if prefill is None else prefill.rank,
            decode.rank,
            pending.num_cached_tokens.get((prefill or decode).rank, 0),
            None if weight is None else weight.value,
        )

    def _prefill_choices(self, pending: Pending, snapshot: Snapshot) -> Sequence[Candidate]:
        """The ranks that would prefill it as well as any; none: its decode rank does."""
        if self._is_short(pending):
            return ()
        able = [candidate for candidate in snapshot.prefill if can_prefill(candidate, pending)]
        return [candidate for candidate in able if candidate.rank == pending.prefer_prefill] or welcome(able, pending)

    def _why_not_prefill(self, candidate: Candidate, pending: Pending) -> str:
        if self._is_short(pending):
            return f"prompts of up to {self._local_prefill_max_tokens} tokens are prefilled where they are decoded"
        if obstacle := prefill_obstacle(candidate, pending):
            return obstacle
        return (
            JUST_FAILED if candidate.rank.worker_id in pending.avoid else f"its blocks are at {pending.prefer_prefill}"
        )

    def _is_short(self, pending: Pending) -> bool:
        # Which decode rank takes media is not looked at before one is chosen.
        return pending.num_tokens <= self._local_prefill_max_tokens and not pending.needs_media


def _option(
    candidate: Candidate, pending: Pending, weight: Weight | None = None, *, is_decode: bool = False, obstacle: str = ""
) -> Option:
    return Option(
        rank=candidate.rank,
        is_decode=is_decode,
        num_cached_tokens=pending.num_cached_tokens.get(candidate.rank, 0),
        cost=None if weight is None else weight.value,
        cost_unit="" if weight is None else weight.unit,
        terms={} if weight is None else {weight.name: weight.value},
        obstacle=obstacle,
    )


# The rank with the least to do.

# Costs this close count as equal. The choice among equals is random, so that several routers with the same
# picture don't all send to the same rank.
_TIE = 1.05


class LeastLoadedPolicy(GreedyPolicy):
    """Prefills where the fewest tokens wait, decodes where the smallest share of the blocks is taken."""

    def __init__(self, local_prefill_max_tokens: int, rng: random.Random) -> None:
        """``rng`` breaks ties."""
        super().__init__(local_prefill_max_tokens)
        self._rng = rng

    @property
    def name(self) -> str:
        """What its users know it by."""
        return "least_loaded"

    def choose_prefill(self, candidates: Sequence[Candidate], tally: Tally) -> Candidate:
        """The one with the shortest queue, in tokens."""
        return self._cheapest(candidates, [self.weigh_prefill(candidate, tally).value for candidate in candidates])

    def choose_decode(self, candidates: Sequence[Candidate], tally: Tally) -> Candidate:
        """The one with the smallest share of blocks used or promised."""
        return self._cheapest(candidates, [self.weigh_decode(candidate, tally).value for candidate in candidates])

    def weigh_prefill(self, candidate: Candidate, tally: Tally) -> Weight:
        """Prompt tokens that wait there."""
        return Weight("queued_tokens", "tokens", float(tally.num_queued_tokens(candidate)))

    def weigh_decode(self, candidate: Candidate, tally: Tally) -> Weight:
        """Share of its blocks that are used or promised."""
        share = tally.num_taken(candidate) / max(candidate.num_total_blocks, 1)
        return Weight("taken_share", "share", share)

    def _cheapest(self, candidates: Sequence[Candidate], costs: Sequence[float]) -> Candidate:
        limit = min(costs) * _TIE
        return self._rng.choice([candidate for candidate, cost in zip(candidates, costs, strict=True) if cost <= limit])


# Every rank in turn.


class RoundRobinPolicy(GreedyPolicy):
    """Takes places in the order of their names, each after the one taken last; those without room are left out."""

    def __init__(self, local_prefill_max_tokens: int) -> None:
        super().__init__(local_prefill_max_tokens)
        self._last_prefill: Rank | None = None
        self._last_decode: Rank | None = None

    @property
    def name(self) -> str:
        """What its users know it by."""
        return "round_robin"

    def choose_prefill(self, candidates: Sequence[Candidate], tally: Tally) -> Candidate:
        """The next one."""
        chosen = _after(candidates, self._last_prefill)
        self._last_prefill = chosen.rank
        return chosen

    def choose_decode(self, candidates: Sequence[Candidate], tally: Tally) -> Candidate:
        """The next one."""
        chosen = _after(candidates, self._last_decode)
        self._last_decode = chosen.rank
        return chosen

    def weigh_prefill(self, candidate: Candidate, tally: Tally) -> Weight | None:
        """Nothing."""
        return None

    def weigh_decode(self, candidate: Candidate, tally: Tally) -> Weight | None:
        """Nothing."""
        return None


def _after(candidates: Sequence[Candidate], last: Rank | None) -> Candidate:
    ordered = sorted(candidates, key=lambda candidate: candidate.rank)
    return next((candidate for candidate in ordered if last is None or candidate.rank > last), ordered[0])


# The better of two ranks that are drawn at random.
#
# It does almost as well as the best of all, and several routers that have the same old picture don't all go to the
# same
# place (Mitzenmacher, "The power of two choices in randomized load balancing", 2001).


class PowerOfTwoPolicy(LeastLoadedPolicy):
    """Weighs places as least_loaded does, but each time only two of them."""

    def __init__(self, local_prefill_max_tokens: int, rng: random.Random) -> None:
        """``rng`` draws the two."""
        super().__init__(local_prefill_max_tokens, rng)
        self._draws = rng

    @property
    def name(self) -> str:
        """What its users know it by."""
        return "power_of_two"

    def choose_prefill(self, candidates: Sequence[Candidate], tally: Tally) -> Candidate:
        """Of two, the one with the shorter queue, in tokens."""
        return super().choose_prefill(self._two(candidates), tally)

    def choose_decode(self, candidates: Sequence[Candidate], tally: Tally) -> Candidate:
        """Of two, the one with the smaller share of blocks used or promised."""
        return super().choose_decode(self._two(candidates), tally)

    def _two(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        return candidates if len(candidates) <= 2 else self._draws.sample(candidates, 2)
