"""The cases on which policies are compared: one trace and one fleet; each case changes one thing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby
from pathlib import Path

from cli.replay.simulation import FleetSettings
from cli.traces.format import TraceRequest, read_trace
from cli.traces.generate import ArrivalKind, Arrivals, SessionConfig, TraceConfig, generate

#: What the others are measured against, and against what.
OURS = "kv_aware"
OTHERS = ("round_robin", "least_loaded", "dynamo_1", "dynamo_16")
#: Policies that give the same result for every seed, because they draw nothing at random.
_DETERMINISTIC = ("round_robin",)

_SPEED, _NUM_WORKERS, _LOAD_AGE_S, _BOOKINGS_AGE_S = 1.5, 8, 0.05, 0.002
_NUM_GENERATED = 4000


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table.

    Attributes:
        name: its name on the command line.
        about: the thing that it changes.
        speed: requests of a recorded trace come this many times as fast.
        spread_s: requests with one timestamp are spread evenly at random over this time; ``None``: they stay as they
            are.
        generated: makes a trace for each seed, instead of the recorded one.
        policies: policies to replay.
    """

    name: str
    about: str
    speed: float = _SPEED
    spread_s: float | None = None
    generated: TraceConfig | None = None
    fleet: FleetSettings = field(default_factory=lambda: FleetSettings(num_workers=_NUM_WORKERS))
    policies: Sequence[str] = (OURS, *OTHERS)

    def seeds(self, policy: str, num_seeds: int) -> range:
        """The seeds for ``policy``: only one if all runs would be the same."""
        return range(1 if policy in _DETERMINISTIC and self.generated is None else num_seeds)

    def requests(self, trace: Path | None, seed: int) -> list[TraceRequest]:
        """The requests to replay with ``seed``: those of ``trace``, or generated ones. Raises ``TraceError``."""
        if self.generated is not None:
            return list(generate(replace(self.generated, seed=seed)))
        assert trace is not None, "the recorded trace is needed"
        requests = [replace(item, arrival_s=item.arrival_s / self.speed) for item in _recorded(trace)]
        return requests if self.spread_s is None else _spread(requests, self.spread_s)


@cache
def _recorded(trace: Path) -> list[TraceRequest]:
    return read_trace(trace)


def _spread(requests: Sequence[TraceRequest], spread_s: float) -> list[TraceRequest]:
    rng = random.Random(0)
    times_s: list[float] = []
    for arrival_s, burst in groupby(requests, key=lambda request: request.arrival_s):
        times_s += [arrival_s + rng.uniform(0.0, spread_s) for _ in burst]
    spread = [replace(request, arrival_s=time_s) for request, time_s in zip(requests, times_s, strict=True)]
    return sorted(spread, key=lambda request: request.arrival_s)


def _fleet(
    num_workers: int = _NUM_WORKERS,
    num_routers: int = 1,
    load_age_s: float = 0.0,
    bookings_age_s: float | None = None,
) -> FleetSettings:
    return FleetSettings(
        num_workers=num_workers, num_routers=num_routers, load_age_s=load_age_s, bookings_age_s=bookings_age_s
    )


def _generated(arrivals: Arrivals, sessions: SessionConfig) -> TraceConfig:
    return TraceConfig(arrivals=arrivals, sessions=sessions, max_requests=_NUM_GENERATED)


def _of_routers(num_routers: int) -> Case:
    about = f"{num_routers} routers, load reports 50 ms old"
    fleet = _fleet(_NUM_WORKERS, num_routers, _LOAD_AGE_S)
    return Case(name=f"routers_{num_routers}", about=about, fleet=fleet, policies=(OURS,))


def _of_telling_routers(num_routers: int) -> Case:
    about = f"{num_routers} routers that tell each other, load reports 50 ms old"
    fleet = _fleet(_NUM_WORKERS, num_routers, _LOAD_AGE_S, _BOOKINGS_AGE_S)
    return Case(name=f"telling_{num_routers}", about=about, fleet=fleet, policies=(OURS,))


_LONG_CHATS = SessionConfig(num_turns=4.0, message_tokens=2500.0, output_tokens=300.0, num_system_prompts=64)
_ONE_PREFIX_OF_MANY = SessionConfig(
    num_turns=1.0, message_tokens=1000.0, output_tokens=300.0, system_tokens=8000.0, num_system_prompts=64, zipf=0.7
)
_POISSON = Arrivals(kind=ArrivalKind.POISSON, rate=8.0)
_BURSTS = Arrivals(kind=ArrivalKind.BURSTS, rate=8.0, burst_size=24, burst_spread_s=0.1)
_FAST_POISSON = Arrivals(kind=ArrivalKind.POISSON, rate=20.0)

_SETTINGS: Sequence[Case] = (
    Case(name="base", about="1.5x, 8 workers"),
    Case(name="speed_1", about="1x", speed=1.0),
    Case(name="speed_2", about="2x", speed=2.0),
    Case(name="workers_4", about="4 workers", fleet=_fleet(4)),
    Case(name="workers_16", about="16 workers", fleet=_fleet(16)),
    Case(name="poisson", about="generated: Poisson", generated=_generated(_POISSON, _LONG_CHATS)),
    Case(name="bursty", about="generated: bursts", generated=_generated(_BURSTS, _LONG_CHATS)),
    Case(name="shared", about="generated: shared prefixes", generated=_generated(_FAST_POISSON, _ONE_PREFIX_OF_MANY)),
    Case(name="spread_1ms", about="bursts spread over 1 ms", spread_s=0.001),
    Case(name="spread_50ms", about="bursts spread over 50 ms", spread_s=0.05),
    Case(name="spread_2s", about="bursts spread over 2 s", spread_s=2.0),
    Case(name="old_load", about="load reports 50 ms old", fleet=_fleet(load_age_s=_LOAD_AGE_S)),
    _of_routers(2),
    _of_routers(4),
    _of_routers(16),
    *map(_of_telling_routers, (2, 4, 8, 16)),
)

#: By name, in the order of the table.
CASES = {case.name: case for case in _SETTINGS}
