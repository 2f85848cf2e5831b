"""Bounds of attempts, and what they are made with."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from quartet.errors import ConfigError
from quartet.telemetry.metrics import RouterMetrics
from router.admission import Admission
from router.hops import Hops


@dataclass(frozen=True, kw_only=True)
class AttemptConfig:
    """Bounds of one choice's attempts.

    Attributes:
        max_attempts: attempts in all; the last one's error is the choice's.
        reserve_tokens: a decode place must have room for the prompt, what was generated, and so many tokens more
            (or what is left to generate, if less).
        encode_timeout_s: longest encode of a request's media at one worker, that one's queue included.
        prefill_timeout_s: longest prefill hop, the worker's queue included.
        decode_start_timeout_s: longest wait for a decode worker's first word, its queue and the transfer included.
        decode_stall_timeout_s: longest silence of a decode worker after that.
    """

    max_attempts: int = 5
    reserve_tokens: int = 512
    encode_timeout_s: float = 60.0
    prefill_timeout_s: float = 120.0
    decode_start_timeout_s: float = 120.0
    decode_stall_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        for name in ("max_attempts", "reserve_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1")
        for name in ("encode_timeout_s", "prefill_timeout_s", "decode_start_timeout_s", "decode_stall_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: must be above 0")


@dataclass(frozen=True, kw_only=True)
class AttemptTools:
    """What attempts are made with; the same for all requests of a router.

    Attributes:
        sleep: pauses between attempts, in seconds.
    """

    router_id: str
    admission: Admission
    hops: Hops
    config: AttemptConfig
    metrics: RouterMetrics
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
