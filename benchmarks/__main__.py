"""Run the short forms of all benchmarks, one after the other, and make the tables of docs/performance.md from them.

    python -m benchmarks

Run the long forms by name, and ``overload``, ``profile``, ``index``, ``routing``, ``tiers_replay``,
``retention_replay``, ``routers``, ``routers_replay``, ``encode``, ``gpu_engine``, ``gpu_short`` and ``gpu_hand_off``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Report
from benchmarks.table import PAGE, RESULTS, fill_page
from quartet.telemetry.provenance import write_report

_TIME_LIMIT_S = 400.0
# So that an interrupted benchmark can end the servers that it started.
_CLEAN_UP_S = 15.0


@dataclass(frozen=True)
class Benchmark:
    """A module of this package, and the arguments that make it run its short form.

    Attributes:
        module: the module to run, if it is not the one named after the benchmark.
    """

    name: str
    options: tuple[str, ...] = ()
    module: str | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """How one benchmark ended.

    Attributes:
        is_done: it ended with exit code 0, within its time.
        is_written: it wrote results. A benchmark that found something wrong writes them too.
    """

    name: str
    duration_s: float
    is_done: bool
    is_written: bool


@dataclass(frozen=True, kw_only=True)
class Total:
    """All benchmarks, in the order in which they ran."""

    runs: Sequence[Run]


BENCHMARKS = (
    Benchmark("relay", ("--short",)),
    Benchmark("many_streams", ("--short",)),
    Benchmark("global_router", ("--short",)),
    Benchmark("transfer"),
    Benchmark("disagg"),
    Benchmark("engine", ("--short",)),
)


def run_all(benchmarks: Sequence[Benchmark], results: Path, page: Path, *, time_limit_s: float = _TIME_LIMIT_S) -> int:
    """Run them and fill ``page``. The exit code is 1 if one failed; the others run all the same.

    The JSON files go to the directory ``results``, with ``total.json``: how long each benchmark took. A benchmark that
    takes longer than ``time_limit_s`` is stopped and counts as failed.
    """
    report, began = Report("total", arguments=[]), time.monotonic()
    runs = [_run(benchmark, results, time_limit_s) for benchmark in benchmarks]
    finished = report.finish(Total(runs=runs)) | {"command": "python -m benchmarks"}
    write_report(finished, str(results / "total.json"))
    fill_page(page, results)
    for run in runs:
        if not run.is_done:
            print(f"failed: {run.name}; {_what_is_shown(run, results)}", file=sys.stderr)
    print(f"== all after {time.monotonic() - began:.0f} s", file=sys.stderr)
    return int(not all(run.is_done for run in runs))


def _run(benchmark: Benchmark, results: Path, time_limit_s: float) -> Run:
    print(f"== {benchmark.name}", file=sys.stderr, flush=True)
    began = time.monotonic()
    written = results / f"{benchmark.name}.json"
    before = _written_at(written)
    module = benchmark.module or f"benchmarks.{benchmark.name}"
    is_done = _execute(
        [sys.executable, "-m", module, "--json", os.path.relpath(written), *benchmark.options], time_limit_s
    )
    took_s = time.monotonic() - began
    print(f"== {benchmark.name} {'done' if is_done else 'failed'} after {took_s:.0f} s", file=sys.stderr, flush=True)
    return Run(
        name=benchmark.name, duration_s=took_s, is_done=is_done, is_written=_written_at(written) not in (None, before)
    )


def _execute(command: Sequence[str], time_limit_s: float) -> bool:
    """Whether the command ends well and in time. If it does not, stop it and every process that it started."""
    process = subprocess.Popen(command, process_group=0)
    try:
        return process.wait(time_limit_s) == 0
    except subprocess.TimeoutExpired:
        print(f"not done within {time_limit_s:g} s", file=sys.stderr)
        return False
    finally:
        if process.poll() is None:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_CLEAN_UP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _written_at(file: Path) -> int | None:
    return file.stat().st_mtime_ns if file.exists() else None


def _what_is_shown(run: Run, results: Path) -> str:
    if run.is_written:
        return "its table shows what it measured"
    if (results / f"{run.name}.json").exists():
        return "its table shows what was measured before"
    return "it has no figures"


if __name__ == "__main__":
    # No arguments: but --help and a misspelt one must not run for minutes and write over results.
    argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    sys.exit(run_all(BENCHMARKS, RESULTS, PAGE))
