"""The better of two places that are drawn at random.

It does almost as well as the best of all, and several routers that have the same old picture don't all go to the same
place (Mitzenmacher, "The power of two choices in randomized load balancing", 2001).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policy.base import Candidate
from router.policy.least_loaded import LeastLoadedPolicy
from router.policy.room import Tally


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
