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
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.progress import LiveLine
from benchmarks.report import Report, make_parser
from benchmarks.routing_bars import Bar, Row, Run, bars_of, rows_of
from benchmarks.routing_cases import CASES
from cli.replay.policies import POLICIES
from cli.replay.simulation import Simulation
from quartet.config import build
from quartet.telemetry.provenance import read_commit

_STDOUT = "-"


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
    report = Report("routing", packages=("numpy", "xxhash"))
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


if __name__ == "__main__":
    main()
