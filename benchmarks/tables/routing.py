"""The tables of benchmarks.routing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.routing_cases import OTHERS, OURS
from benchmarks.tables import Report, markdown_table

_NONE = "-"


def routing_tables(report: Report) -> str:
    """Mean and p99 TTFT of every policy on every case, then what is wanted and what came."""
    head = ["", *(f"`{name}`" for name in (OURS, *OTHERS))]
    means = markdown_table(["mean TTFT (ms)", *head[1:]], [_row(row, "ttft_mean", ".1f") for row in report["rows"]])
    tails = markdown_table(["p99 TTFT (ms)", *head[1:]], [_row(row, "ttft_p99", ".0f") for row in report["rows"]])
    bars = markdown_table(["", "ratio", "measured", "wanted"], [_bar(report, bar) for bar in report["bars"]])
    return f"{means}\n{tails}\n{bars}\n{_num_runs(report)}\n"


def _row(row: Mapping[str, Any], name: str, form: str) -> list[object]:
    policies = row["policies"]
    return [row["about"], *(format(policies[key][name], form) if key in policies else _NONE for key in (OURS, *OTHERS))]


def _bar(report: Report, bar: Mapping[str, Any]) -> list[object]:
    [about] = [row["about"] for row in report["rows"] if row["name"] == bar["case"]]
    measured = f"{bar['measured']:.3f}"
    return [
        about,
        bar["what"],
        measured if bar["measured"] <= bar["limit"] else f"**{measured}**",
        f"<= {bar['limit']}",
    ]


def _num_runs(report: Report) -> str:
    """How many runs figures are the mean of."""
    by_count: dict[int, list[str]] = {}
    for row in report["rows"]:
        for policy, values in row["policies"].items():
            by_count.setdefault(values["num_runs"], []).append(f"{policy} on {row['name']}")
    most = max(by_count)
    fewer = [f"{', '.join(by_count[count])}: {count}" for count in sorted(by_count) if count != most]
    revisions = sorted({(run["revision"] or "unknown")[:12] for run in report["runs"]})
    return (
        f"Means of {most} seeds, which decide ties and generated traces; fewer where nothing is drawn or time ran out: "
        f"{'; '.join(fewer) or 'none'}. Replayed at commit {', '.join(revisions)}."
    )
