"""Renders the tables of docs/performance.md from benchmarks/results, so that nobody types figures by hand.

    python -m benchmarks.table [--check]

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->`` and is made of ``benchmarks/results/NAME.json``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_REPOSITORY = Path(__file__).resolve().parent.parent
_PAGE = _REPOSITORY / "docs" / "performance.md"
_RESULTS = _REPOSITORY / "benchmarks" / "results"
_TABLE = re.compile(r"(?P<begin><!-- table: (?P<name>\w+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)

Report = Mapping[str, Any]


def main() -> int:
    """Run the command line; the exit code is 1 where ``--check`` finds the page to differ."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="change nothing, but fail where the page is not up to date"
    )
    arguments = parser.parse_args()
    page = _PAGE.read_text(encoding="utf-8")
    rendered = render_page(page, _RESULTS)
    if arguments.check and rendered != page:
        print(f"{_PAGE} does not show what {_RESULTS} holds: run `python -m benchmarks.table`", file=sys.stderr)
        return 1
    if not arguments.check:
        _PAGE.write_text(rendered, encoding="utf-8")
    return 0


def render_page(page: str, results: Path) -> str:
    """``page`` with every table made anew from the JSON files in ``results``.

    Raises:
        KeyError: a table that nobody knows how to make.
        OSError: there are no results for it.
    """

    def render(found: re.Match[str]) -> str:
        report = json.loads((results / f"{found['name']}.json").read_text(encoding="utf-8"))
        return f"{found['begin']}\n{_TABLES[found['name']](report)}\n{_describe(report)}\n{found['end']}"

    return _TABLE.sub(render, page)


def _describe(report: Report) -> str:
    """What was run, of which code, when and where."""
    machine, commit = report["machine"], report["commit"]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    revision = (commit["revision"] or "unknown")[:12] + (" with changes" if commit["is_dirty"] else "")
    load = report["load_average"]
    return (
        f"`{report['command']}` on {report['started_at'][:10]}, commit {revision}; {machine['cpu_model']}, "
        f"{machine['num_cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB; {versions}. Load average "
        f"{load['before']:.1f} before, {load['after']:.1f} after.\n"
    )


def _overload(report: Report) -> str:
    peak, over, setting = report["peak"], report["overload"], report["setting"]
    rows = [("sweep", phase) for phase in report["sweep"]]
    rows += [("peak, before", peak["before"]), ("**overload**", over["phase"]), ("peak, after", peak["after"])]
    phases = _markdown(
        [
            "phase",
            "clients",
            "tok/s",
            "tok per CPU s",
            "TTFT p50, p99 (ms)",
            "waited",
            "queued",
            "blocks",
            "failed",
            "CPU",
        ],
        [_phase_row(name, phase, setting) for name, phase in rows],
    )
    best = max(peak[name]["load"]["tokens_per_s"] for name in ("before", "after"))
    verdict = _markdown(
        ["at twice the peak's load", "measured", "wanted"],
        [
            ["finished tok/s over the mean of the two peaks", f"{over['ratio']:.2f}", ">= 0.9"],
            ["over the better of the two", f"{over['tokens_per_s'] / best:.2f}", ""],
            ["over the sweep's best window", f"{over['ratio_to_sweep']:.2f}", ""],
            ["hand-offs expired", over["hand_offs_expired"], "0"],
            ["requests preempted", over["preemptions"], "0"],
            ["prompts prefilled twice", over["prompts_prefilled_twice"], "0"],
            ["tokens computed again", over["phase"]["evidence"]["tokens_computed_again"], "0"],
            ["requests finished, failed, refused", _requests(over), ""],
        ],
    )
    return f"{verdict}\n{phases}"


def _requests(over: Mapping[str, Any]) -> str:
    return f"{over['requests_finished']}, {over['requests_failed']}, {over['requests_refused']}"


def _phase_row(name: str, phase: Mapping[str, Any], setting: Mapping[str, Any]) -> list[object]:
    load, cpu = phase["load"], phase["cpu"]
    shares = ", ".join(f"{process} {share:.2f}" for process, share in cpu["share"].items())
    num_tokens = load["requests_finished"] * setting["workload"]["num_output_tokens"]
    server_cpu_s = sum(used_s for process, used_s in cpu["cpu_s"].items() if process != "client")
    return [
        name,
        load["concurrency"],
        f"{load['tokens_per_s']:.0f}",
        f"{num_tokens / server_cpu_s:.0f}",
        f"{load['ttft_ms_p50']:.0f}, {load['ttft_ms_p99']:.0f}",
        f"{phase['evidence']['requests_waited']} of {load['requests_finished']}",
        phase["extremes"]["queued_requests"],
        f"{phase['extremes']['decode_blocks']} of {setting['num_decode_blocks']}",
        load["requests_failed"] + load["requests_refused"],
        f"{shares}; others {cpu['others_share']:.2f}",
    ]


def _markdown(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [list(head), ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


_TABLES: Mapping[str, Callable[[Report], str]] = {"overload": _overload}


if __name__ == "__main__":
    sys.exit(main())
