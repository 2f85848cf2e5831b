"""Every place in turn."""

from __future__ import annotations

from collections.abc import Sequence

from quartet.discovery.place import Place
from router.policy.base import Candidate
from router.policy.greedy import GreedyPolicy, Weight
from router.policy.room import Tally


class RoundRobinPolicy(GreedyPolicy):
    """Takes places in the order of their names, each after the one taken last; those without room are left out."""

    def __init__(self, local_prefill_max_tokens: int) -> None:
        super().__init__(local_prefill_max_tokens)
        self._last_prefill: Place | None = None
        self._last_decode: Place | None = None

    @property
    def name(self) -> str:
        """What its users know it by."""
        return "round_robin"

    def choose_prefill(self, candidates: Sequence[Candidate], tally: Tally) -> Candidate:
        """The next one."""
        chosen = _after(candidates, self._last_prefill)
        self._last_prefill = chosen.place
        return chosen

    def choose_decode(self, candidates: Sequence[Candidate], tally: Tally) -> Candidate:
        """The next one."""
        chosen = _after(candidates, self._last_decode)
        self._last_decode = chosen.place
        return chosen

    def weigh_prefill(self, candidate: Candidate, tally: Tally) -> Weight | None:
        """Nothing."""
        return None

    def weigh_decode(self, candidate: Candidate, tally: Tally) -> Weight | None:
        """Nothing."""
        return None


def _after(candidates: Sequence[Candidate], last: Place | None) -> Candidate:
    ordered = sorted(candidates, key=lambda candidate: candidate.place)
    return next((candidate for candidate in ordered if last is None or candidate.place > last), ordered[0])
