"""Is kv_aware better than the others on more than the trace it was tuned on? Each case changes one thing.

The recorded trace is the public Mooncake conversation trace, which is not in this repository. Without it, only those
cases run that generate their own. Time is virtual, so the machine changes only how long the benchmark takes. Each
replay writes FILE anew; ``--resume`` skips the replays that FILE already has.

    python -m benchmarks.routing --json FILE [--trace FILE] [--processes 2] [--seeds 5] [--only CASE,CASE] [--resume]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean

from benchmarks.progress import LiveLine
from benchmarks.report import Report, make_parser
from benchmarks.routing_cases import CASES, OTHERS, OURS
from cli.replay.policies import POLICIES
from cli.replay.results import PolicyResult
from cli.replay.simulation import Simulation
from quartet.config import build
from quartet.telemetry.provenance import read_commit

_STDOUT = "-"
_MOST_TTFT, _MOST_P99 = 1.02, 1.05
_BASE, _OLD_LOAD = "base", "old_load"
# With at least two workers a router, and with fewer.
_MOST_OF_ONE_ROUTER, _MOST_WITH_MANY_ROUTERS = 1.15, 1.3
_SEVERAL_ROUTERS = {
    "routers_2": _MOST_OF_ONE_ROUTER,
    "routers_4": _MOST_OF_ONE_ROUTER,
    "telling_2": _MOST_OF_ONE_ROUTER,
    "telling_4": _MOST_OF_ONE_ROUTER,
    "telling_8": _MOST_WITH_MANY_ROUTERS,
    "telling_16": _MOST_WITH_MANY_ROUTERS,
}

#: Results of Dynamo 1.6.1's own offline replay of the conversation trace, and how near replays must come to them.
CALIBRATION_TRACE = "mooncake_conversation"
_ROUND_ROBIN_1X = {"ttft_mean": 321.1, "ttft_p50": 184.1, "ttft_p99": 2048.0, "itl_mean": 7.59, "reuse_ratio": 0.082}
_ROUND_ROBIN = {"ttft_mean": 332.7, "ttft_p50": 194.1, "ttft_p99": 2069.0, "itl_mean": 8.76, "reuse_ratio": 0.082}
_CALIBRATION: Sequence[tuple[str, str, Mapping[str, float], float]] = (
    ("speed_1", "round_robin", _ROUND_ROBIN_1X, 0.01),
    (_BASE, "round_robin", _ROUND_ROBIN, 0.01),
    (_BASE, "dynamo_1", {"ttft_mean": 307.0, "reuse_ratio": 0.189}, 0.03),
    (_BASE, "dynamo_16", {"ttft_mean": 254.0, "reuse_ratio": 0.241}, 0.03),
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One replay.

    Attributes:
        revision: the commit that was replayed; ``None``: unknown.
    """

    case: str
    policy: str
    seed: int
    revision: str | None
    result: PolicyResult


@dataclass(frozen=True, kw_only=True)
class Mean:
    """Means over the runs of one policy on one case; latencies are in milliseconds.

    Attributes:
        requests_refused: in all runs together.
    """

    num_runs: int
    ttft_mean: float
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    itl_mean: float
    reuse_ratio: float
    requests_refused: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """The figures of one case, by policy."""

    name: str
    about: str
    policies: Mapping[str, Mean]


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A requirement: ``measured`` is at most ``limit``."""

    case: str
    what: str
    measured: float
    limit: float


@dataclass(frozen=True, kw_only=True)
class Results:
    """All that was measured.

    Attributes:
        trace: name of the recorded trace; empty: there was none.
        rows: means over the runs, by case.
        bars: the limits that the rows should meet.
    """

    trace: str
    rows: Sequence[Row]
    bars: Sequence[Bar]
    runs: Sequence[Run]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A replay that is still to run."""

    case: str
    policy: str
    seed: int


def main() -> None:
    """Run the command line."""
    arguments = _parse()
    report = Report("routing", packages=("numpy", "xxhash"), revision=arguments.commit)
    runs = read_runs(Path(arguments.json)) if arguments.resume else []
    trace: Path | None = arguments.trace
    jobs = find_jobs(arguments.only or list(CASES), arguments.seeds, runs, has_trace=trace is not None)
    save = partial(_save, report, "" if trace is None else trace.name, runs, arguments.json)
    replay_all(jobs, trace, runs, arguments.processes, save if arguments.json != _STDOUT else lambda: None)
    save()


def find_jobs(names: Sequence[str], num_seeds: int, runs: Sequence[Run], *, has_trace: bool) -> list[Job]:
    """The replays of the cases ``names`` that ``runs`` do not have yet."""
    cases = [CASES[name] for name in names]
    done = {(run.case, run.policy, run.seed) for run in runs}
    return [
        Job(case=case.name, policy=policy, seed=seed)
        for seed in range(num_seeds)  # outermost, so that an interrupted run has some results of every case
        for case in cases
        if has_trace or case.generated is not None
        for policy in case.policies
        if seed in case.seeds(policy, num_seeds) and (case.name, policy, seed) not in done
    ]


def replay_all(
    jobs: Sequence[Job], trace: Path | None, runs: list[Run], num_processes: int, save: Callable[[], None]
) -> None:
    """Run ``jobs``, add the result of each to ``runs``, and then call ``save``. Raises ``TraceError``."""
    revision, began = read_commit().revision, time.monotonic()
    spawn = multiprocessing.get_context("spawn")
    with LiveLine() as line, ProcessPoolExecutor(num_processes, spawn) as pool:
        futures = [pool.submit(replay, job, trace, revision) for job in jobs]
        try:
            for number, future in enumerate(as_completed(futures), 1):
                run = future.result()
                runs.append(run)
                save()
                left_s = (time.monotonic() - began) / number * (len(jobs) - number)
                line.say(f"{number} of {len(jobs)}: {_describe(run)}; some {left_s / 60:.0f} min left")
        finally:
            pool.shutdown(cancel_futures=True)


def replay(job: Job, trace: Path | None, revision: str | None) -> Run:
    """Run one replay. Raises ``TraceError``."""
    case = CASES[job.case]
    result = Simulation(case.requests(trace, job.seed), POLICIES[job.policy], case.fleet, job.seed).run()
    return Run(case=job.case, policy=job.policy, seed=job.seed, revision=revision, result=result)


def read_runs(file: Path) -> list[Run]:
    """The runs of an earlier report of this benchmark; none if there is no such file.

    Raises:
        ConfigError: the report is another benchmark's.
    """
    if not file.exists():
        return []
    return [build(Run, run) for run in json.loads(file.read_text(encoding="utf-8")).get("runs", ())]


def rows_of(runs: Sequence[Run]) -> list[Row]:
    """A row for each case that ran, in the order of the cases."""
    rows = []
    for case in CASES.values():
        of_case = [run for run in runs if run.case == case.name]
        policies = {name: [run.result for run in of_case if run.policy == name] for name in case.policies}
        if of_case:
            means = {name: _mean(results) for name, results in policies.items() if results}
            rows.append(Row(name=case.name, about=case.about, policies=means))
    return rows


def bars_of(rows: Sequence[Row], trace: str = "") -> list[Bar]:
    """The requirements on ``rows`` that have all the policies needed; ``trace`` names the recorded one."""
    by_name = {row.name: row.policies for row in rows}
    bars: list[Bar] = _calibration(by_name) if trace.startswith(CALIBRATION_TRACE) else []
    for name, policies in by_name.items():
        if OURS in policies and all(other in policies for other in OTHERS):
            bars += _against_others(name, policies)
    for name, limit in _SEVERAL_ROUTERS.items():
        one, several = by_name.get(_OLD_LOAD, {}).get(OURS), by_name.get(name, {}).get(OURS)
        if one is not None and several is not None:
            ratio = several.ttft_mean / one.ttft_mean
            bars.append(Bar(case=name, what="mean TTFT of one router's", measured=ratio, limit=limit))
    return bars


def _save(report: Report, trace: str, runs: Sequence[Run], destination: str) -> None:
    rows = rows_of(runs)
    report.write(Results(trace=trace, rows=rows, bars=bars_of(rows, trace), runs=runs), destination)


def _describe(run: Run) -> str:
    ttft = run.result.ttft_ms
    return f"{run.case}, {run.policy}, seed {run.seed}: TTFT mean {ttft.mean:.1f} ms, p99 {ttft.p99:.0f}"


def _cases(names: str) -> list[str]:
    found = names.split(",")
    for name in found:
        if name not in CASES:
            raise argparse.ArgumentTypeError(f"there is no case {name!r}; there are {', '.join(CASES)}")
    return found


def _parse() -> argparse.Namespace:
    parser = make_parser("routing", __doc__)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="the recorded trace")
    parser.add_argument("--processes", type=int, default=2, help="replays at a time")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each policy that draws, on each case")
    parser.add_argument("--only", type=_cases, metavar="CASE,CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--resume", action="store_true", help="spare the replays that FILE has")
    return parser.parse_args()


def _calibration(by_name: Mapping[str, Mapping[str, Mean]]) -> list[Bar]:
    return [
        Bar(
            case=case,
            what=f"{name} of `{policy}`, distance from Dynamo's own replay",
            measured=abs(getattr(by_name[case][policy], name) / value - 1.0),
            limit=limit,
        )
        for case, policy, figures, limit in _CALIBRATION
        if policy in by_name.get(case, {})
        for name, value in figures.items()
    ]


def _against_others(name: str, policies: Mapping[str, Mean]) -> list[Bar]:
    ours, others = policies[OURS], [policies[other] for other in OTHERS]
    best_mean, best_p99 = min(other.ttft_mean for other in others), min(other.ttft_p99 for other in others)
    bars = [
        Bar(case=name, what="mean TTFT of the best other's", measured=ours.ttft_mean / best_mean, limit=_MOST_TTFT),
        Bar(case=name, what="p99 TTFT of the best other's", measured=ours.ttft_p99 / best_p99, limit=_MOST_P99),
    ]
    if name != _BASE:
        return bars
    blind, tuned = policies["round_robin"], policies["dynamo_16"]
    return [
        *bars,
        Bar(case=name, what="mean TTFT of round_robin's", measured=ours.ttft_mean / blind.ttft_mean, limit=0.66),
        Bar(case=name, what="mean TTFT of dynamo_16's", measured=ours.ttft_mean / tuned.ttft_mean, limit=0.87),
        Bar(case=name, what="p99 TTFT of round_robin's", measured=ours.ttft_p99 / blind.ttft_p99, limit=0.81),
        Bar(case=name, what="mean ITL of round_robin's", measured=ours.itl_mean / blind.itl_mean, limit=1.0),
        Bar(case=name, what="requests refused", measured=ours.requests_refused, limit=0),
    ]


def _mean(results: Sequence[PolicyResult]) -> Mean:
    return Mean(
        num_runs=len(results),
        ttft_mean=mean(result.ttft_ms.mean for result in results),
        ttft_p50=mean(result.ttft_ms.p50 for result in results),
        ttft_p90=mean(result.ttft_ms.p90 for result in results),
        ttft_p99=mean(result.ttft_ms.p99 for result in results),
        itl_mean=mean(result.itl_ms.mean for result in results),
        reuse_ratio=mean(result.reuse_ratio for result in results),
        requests_refused=sum(result.requests_refused for result in results),
    )


if __name__ == "__main__":
    main()
