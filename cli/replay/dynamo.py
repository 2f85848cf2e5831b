"""The cost function of ai-dynamo/dynamo's KV router, to compare with: a replay is worth what it agrees with.

See ``lib/kv-router/src/scheduling/selector.rs`` there, release 1.6.1, at temperature 0.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policy.base import Candidate, Decision, Option, Pending, Placement, Snapshot


class DynamoPolicy:
    """One request after the other, each to the place where ``scale * prefill + decode`` is least, in blocks.

    *prefill*: tokens of requests there that have no first token yet and of this prompt, less what is cached of it; a
    request is charged in full until its first token. *decode*: blocks of the prompts there, this one's included.
    """

    def __init__(self, scale: float, rng: random.Random) -> None:
        """``scale`` is what its users know as the overlap score weight; ``rng`` breaks ties."""
        self._scale = scale
        self._rng = rng

    @property
    def name(self) -> str:
        """What replays know it by."""
        return f"dynamo_{self._scale:g}"

    def assign(self, waiting: Sequence[Pending], snapshot: Snapshot) -> Decision:
        """Place all of ``waiting``, each as if the ones before it had been sent already."""
        placements, sent = list[Placement](), dict[Candidate, list[Pending]]()
        for pending in waiting:
            costs = [sum(self._terms(pending, rank, sent.get(rank, ())).values()) for rank in snapshot.decode]
            least = min(costs)
            chosen = self._rng.choice(
                [rank for rank, cost in zip(snapshot.decode, costs, strict=True) if cost == least]
            )
            num_cached_tokens = _num_cached_tokens(pending, chosen, sent.get(chosen, ()))
            sent.setdefault(chosen, []).append(pending)
            placements.append(Placement(None, chosen.rank, num_cached_tokens, least))
        return Decision(placements)

    def explain(self, pending: Pending, snapshot: Snapshot) -> Sequence[Option]:
        """What ``pending`` would cost at each rank, were it all that waits."""
        idle = [
            Option(rank=candidate.rank, is_decode=False, obstacle="only ranks that decode are used")
            for candidate in snapshot.prefill
        ]
        return idle + [
            Option(
                rank=candidate.rank,
                is_decode=True,
                num_cached_tokens=pending.num_cached_tokens.get(candidate.rank, 0),
                cost=sum((terms := self._terms(pending, candidate, ())).values()),
                cost_unit="blocks",
                terms=terms,
            )
            for candidate in snapshot.decode
        ]

    def _terms(self, pending: Pending, candidate: Candidate, sent: Sequence[Pending]) -> dict[str, float]:
        """What the cost is the sum of."""
        size = candidate.block_size
        num_tokens = candidate.num_unanswered_tokens + pending.num_tokens
        num_tokens += sum(
            other.num_tokens - _num_cached_tokens(other, candidate, sent[:index]) for index, other in enumerate(sent)
        )
        num_cached_blocks = _num_cached_tokens(pending, candidate, sent) // size
        num_prompt_blocks = candidate.num_prompt_blocks + sum(
            candidate.num_blocks(item.num_tokens) for item in (*sent, pending)
        )
        prefill = self._scale * max(num_tokens / size - num_cached_blocks, 0.0)
        return {"prefill_blocks": prefill, "decode_blocks": float(num_prompt_blocks)}


def _num_cached_tokens(pending: Pending, candidate: Candidate, sent: Sequence[Pending]) -> int:
    shared = [pending.num_shared_tokens(other, candidate.block_size) for other in sent]
    return max(pending.num_cached_tokens.get(candidate.rank, 0), *shared, 0)
