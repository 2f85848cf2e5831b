"""When requests come: endless times, from 0 on and in order."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from quartet.errors import ConfigError


class ArrivalKind(StrEnum):
    """How requests follow each other."""

    POISSON = "poisson"  # each for itself
    BURSTS = "bursts"  # many at about the same time, then a pause


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """A process that requests come by.

    Attributes:
        rate: requests a second, on average.
        burst_size: requests of one burst; bursts themselves come by a Poisson process.
        burst_spread_s: time within which a burst's requests come, each moment as likely.
    """

    kind: ArrivalKind = ArrivalKind.POISSON
    rate: float = 1.0
    burst_size: int = 16
    burst_spread_s: float = 0.5

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        if not 0 < self.rate < float("inf"):
            raise ConfigError(f"rate: must be above 0, not {self.rate:g}")
        if self.burst_size < 1:
            raise ConfigError(f"burst_size: must be at least 1, not {self.burst_size}")
        if not 0 <= self.burst_spread_s < float("inf"):
            raise ConfigError(f"burst_spread_s: must not be negative, not {self.burst_spread_s:g}")

    def times_s(self, rng: np.random.Generator) -> Iterator[float]:
        """Draw them one by one; the first one is at 0."""
        times = self._poisson(rng) if self.kind is ArrivalKind.POISSON else self._bursts(rng)
        first = next(times)
        yield 0.0
        for time in times:
            yield time - first

    def _poisson(self, rng: np.random.Generator) -> Iterator[float]:
        now = 0.0
        while True:
            now += rng.exponential(1 / self.rate)
            yield now

    def _bursts(self, rng: np.random.Generator) -> Iterator[float]:
        begins_at = 0.0
        waiting: list[float] = []
        while True:
            begins_at += rng.exponential(self.burst_size / self.rate)
            while waiting and waiting[0] <= begins_at:
                yield heapq.heappop(waiting)
            for offset_s in rng.uniform(0, self.burst_spread_s, self.burst_size):
                heapq.heappush(waiting, begins_at + float(offset_s))
