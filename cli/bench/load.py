"""How hard to press: a number of clients, a rate of arrivals, or a trace's own times."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class LoadKind(StrEnum):
    """What a load's value means."""

    CONCURRENCY = "concurrency"  # clients, each of which sends its next request when its last one has ended
    RATE = "rate"  # requests a second on average, at the times of a Poisson process, whatever becomes of them
    REPLAY = "replay"  # the trace's times, this many times as fast


@dataclass(frozen=True)
class Load:
    """One load; the value of ``CONCURRENCY`` is a whole number."""

    kind: LoadKind
    value: float

    def __str__(self) -> str:
        match self.kind:
            case LoadKind.CONCURRENCY:
                return f"concurrency {self.value:g}"
            case LoadKind.RATE:
                return f"rate {self.value:g}/s"
            case LoadKind.REPLAY:
                return f"replay at {self.value:g}x"
