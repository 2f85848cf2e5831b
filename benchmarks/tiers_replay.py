"""What do tiers below the workers' pools save? Replays in virtual time: without tiers, with a host, with a disk too.

Two traces: the public Mooncake conversation trace at 1.5x, which is not in this repository, on the fleet of
``benchmarks.routing``; and agents, as docs/mock.md makes them, on small pools. Without ``--trace`` only the agents run.
Time is virtual, so the machine changes only how long the benchmark takes. FILE is written anew after each replay.

    python -m benchmarks.tiers_replay --json FILE [--trace FILE] [--processes 2]
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.progress import LiveLine
from benchmarks.report import Report, make_parser
from cli.replay.policies import POLICIES
from cli.replay.results import PolicyResult
from cli.replay.simulation import FleetSettings, Simulation
from cli.replay.tiers import TierSettings
from cli.replay.worker import EngineSettings
from cli.traces.format import TraceRequest, read_trace
from cli.traces.generate import Arrivals, SessionConfig, TraceConfig, generate
from quartet.kvcache.tiers import TierPlan

#: What the others are measured against.
DEVICE = "device"
_STDOUT = "-"
_POLICY = "kv_aware"
_SPEED = 1.5
_NUM_HOST, _NUM_DISK = 4, 16  # times the device's blocks
_AGENTS = TraceConfig(
    arrivals=Arrivals(rate=6.0),
    sessions=SessionConfig(
        num_turns=12.0,
        think_time_s=15.0,
        think_time_sigma=1.5,
        message_tokens=700.0,
        output_tokens=150.0,
        system_tokens=6000.0,
        num_system_prompts=4,
    ),
    max_requests=4000,
)


@dataclass(frozen=True, kw_only=True)
class Load:
    """A trace, and the fleet without tiers.

    Attributes:
        is_recorded: it is the conversation trace.
    """

    about: str
    num_workers: int
    num_blocks: int
    is_recorded: bool


LOADS: Mapping[str, Load] = {
    "conversation": Load(about="conversations at 1.5x", num_workers=8, num_blocks=16_384, is_recorded=True),
    "agents": Load(about="agents", num_workers=4, num_blocks=2_048, is_recorded=False),
}
#: Names of what is below the pools, and what the table calls it.
BELOW: Mapping[str, str] = {
    DEVICE: "nothing",
    "host": "host",
    "disk": "host and disk",
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One replay; ``ratio``: its mean TTFT over that without tiers, ``None`` until that has run."""

    load: str
    below: str
    fleet: FleetSettings
    result: PolicyResult
    ratio: float | None = None


@dataclass(frozen=True, kw_only=True)
class Results:
    """All that was measured; ``trace`` names the recorded one, if there was any."""

    trace: str
    policy: str
    runs: Sequence[Run]


def main() -> None:
    """Run the command line."""
    parser = make_parser("tiers_replay", __doc__)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="the recorded trace")
    parser.add_argument("--processes", type=int, default=2, help="replays at a time")
    arguments = parser.parse_args()
    report = Report("tiers_replay", packages=("numpy", "xxhash"), revision=arguments.commit)
    trace: Path | None = arguments.trace
    jobs = [
        (name, below) for name, load in LOADS.items() if trace is not None or not load.is_recorded for below in BELOW
    ]
    runs: list[Run] = []
    spawn = multiprocessing.get_context("spawn")
    with LiveLine() as line, ProcessPoolExecutor(arguments.processes, spawn) as pool:
        futures = [pool.submit(replay, *job, trace) for job in jobs]
        for future in as_completed(futures):
            runs.append(run := future.result())
            line.say(f"{len(runs)} of {len(jobs)}: {run.load}, {run.below}: TTFT {run.result.ttft_ms.mean:.1f} ms")
            if arguments.json != _STDOUT or len(runs) == len(jobs):
                name = "" if trace is None else trace.name
                report.write(Results(trace=name, policy=_POLICY, runs=compared(runs)), arguments.json)


def replay(name: str, below: str, trace: Path | None) -> Run:
    """Run one replay. Raises ``TraceError``."""
    load = LOADS[name]
    engine = EngineSettings(num_blocks=load.num_blocks, tiers=tiers_of(below, load.num_blocks))
    fleet = FleetSettings(num_workers=load.num_workers, engine=engine)
    result = Simulation(_requests(load, trace), POLICIES[_POLICY], fleet).run()
    return Run(load=name, below=below, fleet=fleet, result=result)


def tiers_of(below: str, num_blocks: int) -> TierSettings | None:
    """The tiers called ``below``, of a pool of so many blocks; transfers go by engines' defaults."""
    host = TierPlan(num_blocks=_NUM_HOST * num_blocks)
    if below == "host":
        return TierSettings(host=host)
    if below == "disk":
        return TierSettings(host=host, disk=TierPlan(num_blocks=_NUM_DISK * num_blocks))
    return None


def compared(runs: Sequence[Run]) -> list[Run]:
    """``runs`` in the order of the table, each with its ratio."""
    by_name = {(run.load, run.below): run for run in runs}
    ordered = [by_name[load, below] for load in LOADS for below in BELOW if (load, below) in by_name]
    return [replace(run, ratio=_ratio(run, by_name.get((run.load, DEVICE)))) for run in ordered]


def _ratio(run: Run, base: Run | None) -> float | None:
    return None if base is None else run.result.ttft_ms.mean / base.result.ttft_ms.mean


def _requests(load: Load, trace: Path | None) -> list[TraceRequest]:
    if not load.is_recorded:
        return list(generate(_AGENTS))
    assert trace is not None, "the recorded trace is needed"
    return [replace(request, arrival_s=request.arrival_s / _SPEED) for request in read_trace(trace)]


if __name__ == "__main__":
    main()
