"""Bounds of the router's queue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quartet.errors import ConfigError
from router.fair_share import check_weights


@dataclass(frozen=True, kw_only=True)
class AdmissionConfig:
    """Bounds of the queue.

    Attributes:
        max_queue_length: choices that wait at most; more are refused at once. A router's own retries always get in.
        queue_timeout_s: longest wait for room.
        unavailable_timeout_s: longest wait while no decode worker is ready at all.
        retry_delay_s: what refused clients are told to wait.
        tenant_weights: by tenant, its share of the work while others wait too; a tenant left out weighs 1.
        prediction_life_s: blocks of a prompt count as cached where it was sent for so long, unless KV events tell.
    """

    max_queue_length: int = 4096
    queue_timeout_s: float = 60.0
    unavailable_timeout_s: float = 10.0
    retry_delay_s: float = 1.0
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    prediction_life_s: float = 30.0

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        if self.max_queue_length < 1:
            raise ConfigError("max_queue_length: must be at least 1")
        for name in ("queue_timeout_s", "unavailable_timeout_s", "retry_delay_s", "prediction_life_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: must be above 0")
        check_weights(self.tenant_weights)
