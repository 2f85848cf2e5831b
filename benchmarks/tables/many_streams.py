"""The table of benchmarks.many_streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.tables import Report, markdown_table

_KIB = 1024


def many_streams_tables(report: Report) -> str:
    """A row for each way of opening them."""
    table = markdown_table(
        [
            "way",
            "opened at once",
            "refused or lost",
            "open together",
            "all accepted (s)",
            "all with a token (s)",
            "Router KiB a stream",
            "Decode KiB a stream",
        ],
        [_row(way, burst) for way, burst in report["bursts"].items()],
    )
    absent = "".join(f"- {way} was not measured: {why}\n" for way, why in report["absent"].items())
    return f"{table}\n{absent}" if absent else table


def _row(way: str, burst: Mapping[str, Any]) -> list[object]:
    outcome = burst["outcome"]
    return [
        way,
        burst["num_streams"],
        burst["num_refused_or_lost"],
        outcome["max_open"],
        f"{outcome['accepted_s']:.1f}",
        f"{outcome['first_token_s']:.1f}",
        f"{burst['router']['per_stream'] / _KIB:.1f}",
        f"{burst['decode']['per_stream'] / _KIB:.1f}",
    ]
