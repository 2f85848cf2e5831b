"""Makes the policy that a configuration describes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

from quartet.errors import ConfigError
from router.policy.base import Policy
from router.policy.greedy import LeastLoadedPolicy, PowerOfTwoPolicy, RoundRobinPolicy
from router.policy.kv_aware import KvAwareConfig, KvAwarePolicy
from router.policy.session_affinity import SessionAffinityPolicy
from router.policy.split import SplitPolicy


class PolicyName(StrEnum):
    """Policies by the name that the configuration takes."""

    KV_AWARE = "kv_aware"
    LEAST_LOADED = "least_loaded"
    POWER_OF_TWO = "power_of_two"
    ROUND_ROBIN = "round_robin"


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """How ranks are chosen.

    Attributes:
        name: the policy.
        prefill_name: a different policy for where prompts are computed; ``None``: ``name``.
        decode_name: a different policy for where requests that are prefilled elsewhere are decoded; ``None``: ``name``.
        local_prefill_max_tokens: prompts of up to so many tokens are prefilled where they are decoded (by kv_aware only
            if that costs less); 0: none, while a prefill worker can take them. ``None``: kv_aware goes by cost alone,
            and to the others it is 0.
        transfer_s_per_token: seconds that moving a token's KV to another worker takes; part of kv_aware's cost.
        margin_s: kv_aware sends a rank its next prompts so long before it has computed those that it was given. It must
            be more than the time to reach the worker.
        session_affinity: requests of one ``session_key`` go to the same ranks,
        session_max_load_factor: while these have at most so many times the mean load.
    """

    name: PolicyName = PolicyName.KV_AWARE
    prefill_name: PolicyName | None = None
    decode_name: PolicyName | None = None
    local_prefill_max_tokens: int | None = None
    transfer_s_per_token: float = KvAwareConfig.transfer_s_per_token
    margin_s: float = KvAwareConfig.margin_s
    session_affinity: bool = False
    session_max_load_factor: float = 1.25

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        for name in ("local_prefill_max_tokens", "transfer_s_per_token", "margin_s"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"{name}: must not be negative")
        if self.session_max_load_factor < 1:
            raise ConfigError("session_max_load_factor: must be at least 1, which is the mean")

    @property
    def reads_caches(self) -> bool:
        """Whether what a rank has cached decides where prompts are computed; where they are decoded it never does."""
        return (self.prefill_name or self.name) is PolicyName.KV_AWARE


def create_policy(config: PolicyConfig, rng: random.Random) -> Policy:
    """The policy that ``config`` describes; all of its parts draw from ``rng``."""
    prefill, decode = config.prefill_name or config.name, config.decode_name or config.name
    policy = _create(prefill, config, rng)
    if prefill is not decode:
        policy = SplitPolicy(policy, _create(decode, config, rng))
    if config.session_affinity:
        policy = SessionAffinityPolicy(policy, max_load_factor=config.session_max_load_factor)
    return policy


def _create(name: PolicyName, config: PolicyConfig, rng: random.Random) -> Policy:
    local_max_tokens = config.local_prefill_max_tokens
    match name:
        case PolicyName.KV_AWARE:
            return KvAwarePolicy(
                rng,
                KvAwareConfig(
                    local_prefill_max_tokens=local_max_tokens,
                    transfer_s_per_token=config.transfer_s_per_token,
                    margin_s=config.margin_s,
                ),
            )
        case PolicyName.LEAST_LOADED:
            return LeastLoadedPolicy(local_max_tokens or 0, rng)
        case PolicyName.POWER_OF_TWO:
            return PowerOfTwoPolicy(local_max_tokens or 0, rng)
        case PolicyName.ROUND_ROBIN:
            return RoundRobinPolicy(local_max_tokens or 0)
