"""A session in domain terms: many requests on one stream, by slot, and the bounds that it keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from quartet.errors import ConfigError, ServingError
from quartet.rpc.edge import GenerateStart, Resume


@dataclass(frozen=True, kw_only=True)
class SessionStart:
    """A request of a session.

    Attributes:
        slot: chosen by the client; free again after the request's end.
        resume: goes on after an attempt that broke; ``None``: a new request.
        traceparent: W3C trace context of this request, not checked; empty: that of the stream.
    """

    slot: int
    start: GenerateStart
    resume: Resume | None = None
    traceparent: str = ""


class SessionRun(Protocol):
    """One request that runs; its sink hears the end once it holds nothing any more."""

    def cancel(self) -> None:
        """End it early: each choice that has not ended gets its end."""
        ...

    def abort(self, error: ServingError) -> None:
        """End it with ``error``."""
        ...


@dataclass(frozen=True, kw_only=True)
class SessionLimits:
    """Bounds of each session.

    Attributes:
        tick_s: time between two messages to the client; the first after a pause goes at once.
        max_requests: requests at most, those included whose end the client has not taken; more are refused.
        max_pending_tokens: of one request for a client that reads too slowly; a request of which more gathers is
            ended. It is looked at whenever so many deltas have come, at most 4,096, so that much may come on top.
        max_pending_bytes: the same of its tokens, text and log probabilities together.

    Raises:
        ConfigError: naming the field.
    """

    tick_s: float = 0.002
    max_requests: int = 4096
    max_pending_tokens: int = 4096
    max_pending_bytes: int = 256 << 10

    def __post_init__(self) -> None:
        if self.tick_s < 0:
            raise ConfigError("tick_s: must not be negative")
        for name in ("max_requests", "max_pending_tokens", "max_pending_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1")
