"""Renders the tables of docs/performance.md and docs/routing.md from benchmarks/results: nobody types figures by hand.

    python -m benchmarks.table [--check]

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->`` and is made of ``benchmarks/results/NAME.json``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.tables import Report
from benchmarks.tables.disagg import disagg_tables
from benchmarks.tables.encode import encode_tables
from benchmarks.tables.engine import engine_tables
from benchmarks.tables.index import index_tables
from benchmarks.tables.many_streams import many_streams_tables
from benchmarks.tables.overload import overload_tables
from benchmarks.tables.prefixes import prefixes_tables
from benchmarks.tables.profile import profile_tables
from benchmarks.tables.relay import relay_tables
from benchmarks.tables.routing import routing_tables
from benchmarks.tables.routing_cost import routing_cost_tables
from benchmarks.tables.total import total_tables
from benchmarks.tables.transfer import transfer_tables

_REPOSITORY = Path(__file__).resolve().parent.parent
PAGE = _REPOSITORY / "docs" / "performance.md"
PAGES = (PAGE, _REPOSITORY / "docs" / "routing.md")
RESULTS = _REPOSITORY / "benchmarks" / "results"
_TABLE = re.compile(r"(?P<begin><!-- table: (?P<name>\w+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)


def main() -> int:
    """Run the command line; the exit code is 1 where ``--check`` finds a page to differ."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing, but fail where a page is not up to date")
    arguments = parser.parse_args()
    if not arguments.check:
        for page in PAGES:
            fill_page(page, RESULTS)
        return 0
    stale = [page for page in PAGES if render_page(text := page.read_text(encoding="utf-8"), RESULTS) != text]
    for page in stale:
        print(f"{page} does not show what {RESULTS} holds: run `python -m benchmarks.table`", file=sys.stderr)
    return int(bool(stale))


def fill_page(page: Path, results: Path) -> None:
    """Make every table of the file ``page`` anew, as ``render_page`` does."""
    page.write_text(render_page(page.read_text(encoding="utf-8"), results), encoding="utf-8")


def render_page(page: str, results: Path) -> str:
    """``page`` with every table made anew from the JSON files in ``results``; where there is none, it says so.

    Raises:
        KeyError: a table that nobody knows how to make.
    """

    def render(found: re.Match[str]) -> str:
        make, source = _TABLES[found["name"]], results / f"{found['name']}.json"
        if not source.exists():
            return f"{found['begin']}\nnot measured yet\n\n{found['end']}"
        report = json.loads(source.read_text(encoding="utf-8"))
        return f"{found['begin']}\n{make(report)}\n{_describe(report)}\n{found['end']}"

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


_TABLES: Mapping[str, Callable[[Report], str]] = {
    "overload": overload_tables,
    "relay": relay_tables,
    "many_streams": many_streams_tables,
    "profile": profile_tables,
    "index": index_tables,
    "transfer": transfer_tables,
    "disagg": disagg_tables,
    "encode": encode_tables,
    "engine": engine_tables,
    "routing": routing_tables,
    "prefixes": prefixes_tables,
    "routing_cost": routing_cost_tables,
    "total": total_tables,
}


if __name__ == "__main__":
    sys.exit(main())
