"""A policy that sets an event when it keeps a request waiting."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Sequence

from router.policy.base import Decision, Pending, Snapshot
from router.policy.greedy import LeastLoadedPolicy


class NotingPolicy(LeastLoadedPolicy):
    """``kept_waiting`` is set once a request was kept in the queue."""

    def __init__(self, local_prefill_max_tokens: int, rng: random.Random) -> None:
        super().__init__(local_prefill_max_tokens, rng)
        self.kept_waiting = asyncio.Event()

    def __deepcopy__(self, memo: dict[int, object]) -> NotingPolicy:
        # What a copy decides is noted nowhere.
        return NotingPolicy(self._local_prefill_max_tokens, copy.deepcopy(self._rng, memo))

    def assign(self, queued: Sequence[Pending], snapshot: Snapshot) -> Decision:
        decision = super().assign(queued, snapshot)
        if None in decision.placements:
            self.kept_waiting.set()
        return decision
