"""The table of ``python -m benchmarks``: how long each benchmark's short form took."""

from __future__ import annotations

from benchmarks.tables import Report, markdown_table


def total_tables(report: Report) -> str:
    """A row for each benchmark, and their sum with all that is between them."""
    rows = [[run["name"], f"{run['duration_s']:.0f}", _outcome(run["is_done"])] for run in report["runs"]]
    rows.append(["all", f"{report['duration_s']:.0f}", ""])
    return markdown_table(["benchmark", "seconds", ""], rows)


def _outcome(is_done: bool) -> str:
    return "" if is_done else "failed"
