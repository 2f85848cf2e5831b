"""The place with the least to do."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policy.base import Candidate
from router.policy.greedy import GreedyPolicy, Weight
from router.policy.room import Tally

# Costs this close count as equal. The choice among equals is random, so that several routers with the same
# picture don't all send to the same place.
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
