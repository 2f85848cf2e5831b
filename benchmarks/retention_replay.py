"""What does it bring to retain conversations? Replays in virtual time: by last use alone, and with times to live.

Traces are made as ``quartet trace`` makes them: agents, as docs/mock.md has them, alone and beside requests without a
session. Some are unkind to retention. Time is virtual, so the machine changes only how long the benchmark takes. FILE
is written anew after each replay.

    python -m benchmarks.retention_replay --json FILE [--processes 2]
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace

from benchmarks.progress import LiveLine
from benchmarks.report import Report, make_parser
from cli.replay.policies import POLICIES
from cli.replay.results import PolicyResult
from cli.replay.simulation import FleetSettings, Simulation
from cli.replay.worker import EngineSettings
from cli.traces.format import TraceRequest
from cli.traces.generate import Arrivals, SessionConfig, TraceConfig, generate
from quartet.kvcache.retention import RetentionPlan

#: Times to live, in seconds; 0: nothing is retained, what the others are measured against.
TTLS_S = (0.0, 15.0, 60.0, 240.0)
_STDOUT = "-"
_POLICY = "kv_aware"
_NUM_WORKERS, _NUM_BLOCKS = 4, 2_048
_AGENTS = SessionConfig(
    num_turns=12.0,
    think_time_s=15.0,
    think_time_sigma=1.5,
    message_tokens=700.0,
    output_tokens=150.0,
    system_tokens=6000.0,
    num_system_prompts=4,
)
_DOCUMENTS = SessionConfig(
    num_turns=1.0, message_tokens=8000.0, output_tokens=150.0, system_tokens=0.0, length_sigma=0.7
)
_CHATS = SessionConfig(num_turns=4.0, message_tokens=1500.0)


@dataclass(frozen=True, kw_only=True)
class Load:
    """Sessions, and what comes beside them without a session.

    Attributes:
        rate, other_rate: requests a second.
        num_requests: of the sessions.
    """

    about: str
    rate: float
    num_requests: int
    sessions: SessionConfig = _AGENTS
    others: SessionConfig | None = None
    other_rate: float = 0.0


LOADS: Mapping[str, Load] = {
    "agents": Load(about="agents", rate=6.0, num_requests=2_500),
    "documents": Load(about="agents beside documents", rate=1.0, num_requests=700, others=_DOCUMENTS, other_rate=4.0),
    "pauses": Load(
        about="the same with pauses of 120 s",
        rate=1.0,
        num_requests=700,
        sessions=replace(_AGENTS, think_time_s=120.0),
        others=_DOCUMENTS,
        other_rate=4.0,
    ),
    "chats": Load(about="agents beside chats without keys", rate=1.0, num_requests=500, others=_CHATS, other_rate=6.0),
    "ended": Load(
        about="sessions of one request beside such chats",
        rate=2.0,
        num_requests=1_000,
        sessions=replace(_AGENTS, num_turns=1.0),
        others=_CHATS,
        other_rate=4.0,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One replay; ``ratio``: its mean TTFT over that without retention, ``None`` until that has run."""

    load: str
    ttl_s: float
    fleet: FleetSettings
    result: PolicyResult
    ratio: float | None = None


@dataclass(frozen=True, kw_only=True)
class Results:
    """All that was measured."""

    policy: str
    runs: Sequence[Run]


def main() -> None:
    """Run the command line."""
    parser = make_parser("retention_replay", __doc__)
    parser.add_argument("--processes", type=int, default=2, help="replays at a time")
    arguments = parser.parse_args()
    report = Report("retention_replay", packages=("numpy", "xxhash"), revision=arguments.commit)
    jobs = [(name, ttl_s) for name in LOADS for ttl_s in TTLS_S]
    runs: list[Run] = []
    spawn = multiprocessing.get_context("spawn")
    with LiveLine() as line, ProcessPoolExecutor(arguments.processes, spawn) as pool:
        futures = [pool.submit(replay, *job) for job in jobs]
        for future in as_completed(futures):
            runs.append(run := future.result())
            line.say(f"{len(runs)} of {len(jobs)}: {run.load}, {run.ttl_s:g} s: TTFT {run.result.ttft_ms.mean:.1f} ms")
            if arguments.json != _STDOUT or len(runs) == len(jobs):
                report.write(Results(policy=_POLICY, runs=compared(runs)), arguments.json)


def replay(name: str, ttl_s: float) -> Run:
    """Run one replay."""
    retention = RetentionPlan(ttl_s=ttl_s) if ttl_s else None
    engine = EngineSettings(num_blocks=_NUM_BLOCKS, retention=retention)
    fleet = FleetSettings(num_workers=_NUM_WORKERS, engine=engine)
    result = Simulation(requests_of(LOADS[name]), POLICIES[_POLICY], fleet).run()
    return Run(load=name, ttl_s=ttl_s, fleet=fleet, result=result)


def requests_of(load: Load) -> list[TraceRequest]:
    """The trace: what the sessions ask, and what comes beside them until their last request; no block is in both."""
    arrivals = Arrivals(rate=load.rate)
    asked = list(generate(TraceConfig(arrivals=arrivals, sessions=load.sessions, max_requests=load.num_requests)))
    if load.others is None:
        return asked
    beside = TraceConfig(
        arrivals=Arrivals(rate=load.other_rate), sessions=load.others, duration_s=asked[-1].arrival_s, seed=1
    )
    first_id = 1 + max(hash_id for request in asked for hash_id in request.hash_ids)
    others = [
        replace(request, session="", hash_ids=tuple(first_id + hash_id for hash_id in request.hash_ids))
        for request in generate(beside)
    ]
    return sorted(asked + others, key=lambda request: request.arrival_s)


def compared(runs: Sequence[Run]) -> list[Run]:
    """``runs`` in the order of the table, each with its ratio."""
    by_name = {(run.load, run.ttl_s): run for run in runs}
    ordered = [by_name[load, ttl_s] for load in LOADS for ttl_s in TTLS_S if (load, ttl_s) in by_name]
    return [replace(run, ratio=_ratio(run, by_name.get((run.load, TTLS_S[0])))) for run in ordered]


def _ratio(run: Run, base: Run | None) -> float | None:
    return None if base is None else run.result.ttft_ms.mean / base.result.ttft_ms.mean


if __name__ == "__main__":
    main()
