"""Policies to replay: the router's own, and the cost function of ai-dynamo/dynamo's KV router to compare with."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from quartet.discovery.base import Rank
from quartet.errors import InvalidRequestError
from router.policy.base import Candidate, Decision, Option, Pending, Placement, Policy, Snapshot
from router.policy.greedy import LeastLoadedPolicy, PowerOfTwoPolicy, RoundRobinPolicy
from router.policy.kv_aware import KvAwarePolicy

#: Makes a policy for one router.
MakePolicy: TypeAlias = Callable[[random.Random], Policy]


@dataclass(kw_only=True, slots=True)
class ReplayCandidate(Candidate):
    """What a replay's router knows of one rank, with the fields that only ``DynamoPolicy`` reads.

    Attributes:
        num_unanswered_tokens: missing tokens of the router's requests there that have no first token yet.
        num_prompt_blocks: blocks of the prompts of the router's requests there, shared ones counted for each.
    """

    num_unanswered_tokens: int = 0
    num_prompt_blocks: int = 0


class DynamoPolicy:
    """Assigns each request in turn to the rank where ``scale * prefill + decode`` is least, in blocks.

    *prefill*: tokens of this prompt that are not cached there, and of the requests there that have no first token yet;
    each request counts in full until then. *decode*: blocks of the prompts there, with this one's.

    Replays are worth what they agree with, and this is the cost function of ai-dynamo/dynamo's KV router: see
    ``lib/kv-router/src/scheduling/selector.rs`` there, release 1.6.1, at temperature 0.
    """

    def __init__(self, scale: float, rng: random.Random) -> None:
        """``scale``: Dynamo's "overlap score weight"; ``rng`` breaks ties."""
        self._scale = scale
        self._rng = rng

    @property
    def name(self) -> str:
        """Its name in replays."""
        return f"dynamo_{self._scale:g}"

    def assign(self, queued: Sequence[Pending], snapshot: Snapshot) -> Decision:
        """Assign all of ``queued``, each as if the earlier ones had been sent already."""
        placements, sent = list[Placement](), dict[Rank, list[Pending]]()
        for pending in queued:
            costs = [sum(self._terms(pending, one, sent.get(one.rank, ())).values()) for one in snapshot.decode]
            least = min(costs)
            chosen = self._rng.choice([one for one, cost in zip(snapshot.decode, costs, strict=True) if cost == least])
            num_cached_tokens = _num_cached_tokens(pending, chosen, sent.get(chosen.rank, ()))
            sent.setdefault(chosen.rank, []).append(pending)
            placements.append(Placement(None, chosen.rank, num_cached_tokens, least))
        return Decision(placements)

    def explain(self, pending: Pending, snapshot: Snapshot) -> Sequence[Option]:
        """What ``pending`` would cost at each rank if nothing else waited."""
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
        """The terms whose sum is the cost."""
        known, size = _known(candidate), candidate.block_size
        num_tokens = known.num_unanswered_tokens + pending.num_tokens
        num_tokens += sum(
            other.num_tokens - _num_cached_tokens(other, candidate, sent[:index]) for index, other in enumerate(sent)
        )
        num_cached_blocks = _num_cached_tokens(pending, candidate, sent) // size
        num_prompt_blocks = known.num_prompt_blocks + sum(
            candidate.num_blocks(item.num_tokens) for item in (*sent, pending)
        )
        prefill = self._scale * max(num_tokens / size - num_cached_blocks, 0.0)
        return {"prefill_blocks": prefill, "decode_blocks": float(num_prompt_blocks)}


#: By the name that ``--policy`` takes.
POLICIES: Mapping[str, MakePolicy] = {
    "kv_aware": KvAwarePolicy,
    "least_loaded": lambda rng: LeastLoadedPolicy(0, rng),
    "power_of_two": lambda rng: PowerOfTwoPolicy(0, rng),
    "round_robin": lambda _rng: RoundRobinPolicy(0),
    "dynamo_1": lambda rng: DynamoPolicy(1.0, rng),
    "dynamo_16": lambda rng: DynamoPolicy(16.0, rng),
}


def find_policies(names: str) -> dict[str, MakePolicy]:
    """The policies that ``names`` lists, separated by commas. Raises ``InvalidRequestError``."""
    found: dict[str, MakePolicy] = {}
    for name in names.split(","):
        if name not in POLICIES:
            known = ", ".join(POLICIES)
            raise InvalidRequestError(f"there is no policy {name!r}; there are {known}", field="policy")
        found[name] = POLICIES[name]
    return found


def _num_cached_tokens(pending: Pending, candidate: Candidate, sent: Sequence[Pending]) -> int:
    shared = [pending.num_shared_tokens(other, candidate.block_size) for other in sent]
    return max(pending.num_cached_tokens.get(candidate.rank, 0), *shared, 0)


def _known(candidate: Candidate) -> ReplayCandidate:
    assert isinstance(candidate, ReplayCandidate), "only replays have this policy"
    return candidate
