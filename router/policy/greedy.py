"""The simple policies: one request after the other, each to the best rank that has room.

``GreedyPolicy`` is what they share: which ranks would do, backfill reservations, explanations. ``LeastLoadedPolicy``,
``PowerOfTwoPolicy`` and ``RoundRobinPolicy`` choose among the ranks that would do.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quartet.discovery.base import Rank
from router.policy.base import Candidate, Decision, Option, Pending, Placement, Snapshot
from router.policy.room import (
    JUST_FAILED,
    Backfill,
    Tally,
    can_prefill,
    decode_choices,
    decode_obstacle,
    not_avoided,
    prefill_obstacle,
)

# Costs this close count as equal. The choice among equals is random, so that several routers with the same
# picture don't all send to the same rank.
_TIE = 1.05


@dataclass(frozen=True)
class Weight:
    """By what a simple policy compares ranks; less is better. ``name`` ends with the unit."""

    name: str
    unit: str
    value: float


class GreedyPolicy(ABC):
    """Places requests in order; its subclasses choose among the ranks that would do.

    Small requests may overtake a large one that has no room (see ``router.policy.room.Backfill``).
    """

    def __init__(self, local_prefill_max_tokens: int) -> None:
        """Requests of up to ``local_prefill_max_tokens`` tokens are prefilled where they are decoded."""
        self._local_prefill_max_tokens = local_prefill_max_tokens

    @property
    @abstractmethod
    def name(self) -> str:
        """The name that users know."""

    @abstractmethod
    def choose_prefill(self, candidates: Sequence[Candidate], tally: Tally) -> Candidate:
        """One of ``candidates``; there is at least one."""

    @abstractmethod
    def choose_decode(self, candidates: Sequence[Candidate], tally: Tally) -> Candidate:
        """One of ``candidates``; there is at least one, and all have room."""

    def weigh_prefill(self, candidate: Candidate, tally: Tally) -> Weight | None:
        """What ``choose_prefill`` compares; ``None``: nothing that a rank has."""
        return None

    def weigh_decode(self, candidate: Candidate, tally: Tally) -> Weight | None:
        """What ``choose_decode`` compares; ``None``: nothing that a rank has."""
        return None

    def assign(self, queued: Sequence[Pending], snapshot: Snapshot) -> Decision:
        """Choose ranks for ``queued``; ``None`` keeps a request in the router's queue."""
        tally, backfill = Tally(), Backfill()
        placements: list[Placement | None] = []
        for pending in queued:
            if len(backfill.reserved) == len(snapshot.decode):
                break
            placements.append(self._assign(pending, snapshot, tally, backfill))
        return Decision(placements + [None] * (len(queued) - len(placements)))

    def explain(self, pending: Pending, snapshot: Snapshot) -> Sequence[Option]:
        """How each rank suits ``pending``, if nothing else waits."""
        tally, options = Tally(), list[Option]()
        chosen = {candidate.rank for candidate in self._prefill_choices(pending, snapshot)}
        for candidate in snapshot.prefill:
            if candidate.rank in chosen and tally.can_run(candidate):
                options.append(_option(candidate, pending, self.weigh_prefill(candidate, tally)))
            else:
                options.append(_option(candidate, pending, obstacle=self._why_not_prefill(candidate, pending)))
        chosen = {candidate.rank for candidate in decode_choices(snapshot.decode, pending, tally)}
        for candidate in snapshot.decode:
            if candidate.rank in chosen:
                options.append(_option(candidate, pending, self.weigh_decode(candidate, tally), is_decode=True))
            else:
                obstacle = decode_obstacle(candidate, pending, tally) or JUST_FAILED
                options.append(_option(candidate, pending, is_decode=True, obstacle=obstacle))
        return options

    def _assign(self, pending: Pending, snapshot: Snapshot, tally: Tally, backfill: Backfill) -> Placement | None:
        unreserved = backfill.unreserved(snapshot.decode)
        choices = decode_choices(unreserved, pending, tally)
        if not choices:
            backfill.reserve(pending, unreserved, tally)
            return None
        able = self._prefill_choices(pending, snapshot)
        free = [candidate for candidate in able if tally.can_run(candidate)]
        if able and not free:
            return None
        decode = self.choose_decode(choices, tally)
        prefill = self.choose_prefill(free, tally) if free else None
        weight = self.weigh_decode(decode, tally) if prefill is None else self.weigh_prefill(prefill, tally)
        tally.add(pending, prefill, decode)
        return Placement(
            None if prefill is None else prefill.rank,
            decode.rank,
            pending.num_cached_tokens.get((prefill or decode).rank, 0),
            None if weight is None else weight.value,
        )

    def _prefill_choices(self, pending: Pending, snapshot: Snapshot) -> Sequence[Candidate]:
        """The ranks that may prefill it; none: its decode rank does."""
        if self._is_short(pending):
            return ()
        able = [candidate for candidate in snapshot.prefill if can_prefill(candidate, pending)]
        if pending.prefer_prefill is not None:
            preferred = [candidate for candidate in able if candidate.rank == pending.prefer_prefill]
            if preferred:
                return preferred
        return not_avoided(able, pending)

    def _why_not_prefill(self, candidate: Candidate, pending: Pending) -> str:
        if self._is_short(pending):
            return f"prompts of up to {self._local_prefill_max_tokens} tokens are prefilled where they are decoded"
        if obstacle := prefill_obstacle(candidate, pending):
            return obstacle
        has_failed = candidate.rank.worker_id in pending.avoid
        return JUST_FAILED if has_failed else f"its blocks are at {pending.prefer_prefill}"

    def _is_short(self, pending: Pending) -> bool:
        # The decode rank is chosen later, and may not take the media.
        return pending.num_tokens <= self._local_prefill_max_tokens and not pending.needs_media


class LeastLoadedPolicy(GreedyPolicy):
    """Prefills where the fewest tokens wait, decodes where the smallest share of the blocks is taken."""

    def __init__(self, local_prefill_max_tokens: int, rng: random.Random) -> None:
        """``rng`` breaks ties."""
        super().__init__(local_prefill_max_tokens)
        self._rng = rng

    @property
    def name(self) -> str:
        """The name that users know."""
        return "least_loaded"

    def choose_prefill(self, candidates: Sequence[Candidate], tally: Tally) -> Candidate:
        """The one with the shortest queue, in tokens."""
        return self._cheapest(candidates, tally.num_queued_tokens)

    def choose_decode(self, candidates: Sequence[Candidate], tally: Tally) -> Candidate:
        """The one with the smallest share of blocks used or promised."""
        return self._cheapest(candidates, tally.taken_share)

    def weigh_prefill(self, candidate: Candidate, tally: Tally) -> Weight:
        """Prompt tokens that wait there."""
        return Weight("queued_tokens", "tokens", float(tally.num_queued_tokens(candidate)))

    def weigh_decode(self, candidate: Candidate, tally: Tally) -> Weight:
        """Share of its blocks that are used or promised."""
        return Weight("taken_share", "share", tally.taken_share(candidate))

    def _cheapest(self, candidates: Sequence[Candidate], cost_of: Callable[[Candidate], float]) -> Candidate:
        costs = [cost_of(candidate) for candidate in candidates]
        limit = min(costs) * _TIE
        return self._rng.choice([candidate for candidate, cost in zip(candidates, costs, strict=True) if cost <= limit])


class PowerOfTwoPolicy(LeastLoadedPolicy):
    """Takes the better of two ranks that are drawn at random, compared as least_loaded does.

    It does almost as well as the best of all ranks, and several routers that have the same old picture don't all go to
    the same rank (Mitzenmacher, "The power of two choices in randomized load balancing", 2001).
    """

    @property
    def name(self) -> str:
        """The name that users know."""
        return "power_of_two"

    def _cheapest(self, candidates: Sequence[Candidate], cost_of: Callable[[Candidate], float]) -> Candidate:
        two = candidates if len(candidates) <= 2 else self._rng.sample(candidates, 2)
        return super()._cheapest(two, cost_of)


class RoundRobinPolicy(GreedyPolicy):
    """Takes ranks in the order of their names, each after the one taken last; ranks without room are skipped."""

    def __init__(self, local_prefill_max_tokens: int) -> None:
        super().__init__(local_prefill_max_tokens)
        self._last_prefill: Rank | None = None
        self._last_decode: Rank | None = None

    @property
    def name(self) -> str:
        """The name that users know."""
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


def _option(
    candidate: Candidate,
    pending: Pending,
    weight: Weight | None = None,
    *,
    is_decode: bool = False,
    obstacle: str = "",
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


def _after(candidates: Sequence[Candidate], last: Rank | None) -> Candidate:
    ordered = sorted(candidates, key=lambda candidate: candidate.rank)
    return next((candidate for candidate in ordered if last is None or candidate.rank > last), ordered[0])
