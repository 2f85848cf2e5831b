"""Policies to replay, by the name that ``--policy`` takes."""

from __future__ import annotations

from collections.abc import Mapping

from cli.replay.dynamo import DynamoPolicy
from cli.replay.simulation import MakePolicy
from quartet.errors import InvalidRequestError
from router.policy.greedy import LeastLoadedPolicy, PowerOfTwoPolicy, RoundRobinPolicy
from router.policy.kv_aware import KvAwarePolicy

#: Each makes a policy of its own for one router.
POLICIES: Mapping[str, MakePolicy] = {
    "kv_aware": KvAwarePolicy,
    "least_loaded": lambda rng: LeastLoadedPolicy(0, rng),
    "power_of_two": lambda rng: PowerOfTwoPolicy(0, rng),
    "round_robin": lambda _rng: RoundRobinPolicy(0),
    "dynamo_1": lambda rng: DynamoPolicy(1.0, rng),
    "dynamo_16": lambda rng: DynamoPolicy(16.0, rng),
}


def find_policies(names: str) -> dict[str, MakePolicy]:
    """The policies that ``names``, parted by commas, are of. Raises ``InvalidRequestError``."""
    found: dict[str, MakePolicy] = {}
    for name in names.split(","):
        if name not in POLICIES:
            known = ", ".join(POLICIES)
            raise InvalidRequestError(f"there is no policy {name!r}; there are {known}", field="policy")
        found[name] = POLICIES[name]
    return found
