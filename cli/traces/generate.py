"""Makes traces: who comes when (``arrivals``) and asks for what (``sessions``), in the terms of the format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from cli.traces.arrivals import Arrivals
from cli.traces.format import TraceRequest
from cli.traces.sessions import BlockKey, SessionConfig, Sessions
from quartet.errors import ConfigError

_MS_PER_S = 1000
# They are all in memory at once; the public traces have some 20,000.
_MAX_NUM_REQUESTS = 10_000_000


@dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """One trace: the same for the same configuration.

    Attributes:
        arrivals: when requests come.
        sessions: what they ask for.
        max_requests: it ends after so many; ``None``: not by their number.
        duration_s: it ends after so long; ``None``: not by time.
        seed: of everything that is drawn, not negative.
    """

    arrivals: Arrivals = field(default_factory=Arrivals)
    sessions: SessionConfig = field(default_factory=SessionConfig)
    max_requests: int | None = None
    duration_s: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        if self.max_requests is None and self.duration_s is None:
            raise ConfigError("max_requests: it or duration_s must say where the trace ends")
        if self.max_requests is not None and not 1 <= self.max_requests <= _MAX_NUM_REQUESTS:
            raise ConfigError(f"max_requests: must be in [1, {_MAX_NUM_REQUESTS}], not {self.max_requests}")
        if self.duration_s is not None and not 0 < self.duration_s < float("inf"):
            raise ConfigError(f"duration_s: must be above 0, not {self.duration_s:g}")
        if self.max_requests is None and self.duration_s is not None:
            num_requests = self.duration_s * self.arrivals.rate
            if num_requests > _MAX_NUM_REQUESTS:
                raise ConfigError(f"duration_s: makes {num_requests:g} requests, more than {_MAX_NUM_REQUESTS}")
        if self.seed < 0:
            raise ConfigError(f"seed: must not be negative, not {self.seed}")


def generate(config: TraceConfig) -> Iterator[TraceRequest]:
    """The requests in the order of their arrivals, which are whole milliseconds; at least one.

    Hash ids count from 0 in the order in which blocks come up first.
    """
    # Streams of their own: another rate leaves the sessions' contents as they are, as far as their order does.
    arrival_rng, session_rng = (np.random.default_rng(seed) for seed in np.random.SeedSequence(config.seed).spawn(2))
    sessions = Sessions(config.sessions, session_rng)
    ids: dict[BlockKey, int] = {}
    for number, time_s in enumerate(config.arrivals.times_s(arrival_rng)):
        if config.max_requests is not None and number >= config.max_requests:
            return
        if config.duration_s is not None and time_s >= config.duration_s:
            return
        turn = sessions.next(time_s)
        yield TraceRequest(
            arrival_s=int(time_s * _MS_PER_S) / _MS_PER_S,
            num_input_tokens=turn.num_input_tokens,
            num_output_tokens=turn.num_output_tokens,
            hash_ids=tuple(ids.setdefault(key, len(ids)) for key in turn.block_keys()),
        )
