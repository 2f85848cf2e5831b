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
    means = markdown_table(
        ["mean TTFT (ms)", *head[1:], "runs"],
        [[*_row(row, "ttft_mean", ".1f"), _num_runs(row)] for row in report["rows"]],
    )
    tails = markdown_table(["p99 TTFT (ms)", *head[1:]], [_row(row, "ttft_p99", ".0f") for row in report["rows"]])
    bars = markdown_table(["", "ratio", "measured", "wanted"], [_bar(report, bar) for bar in report["bars"]])
    return f"{means}\n{tails}\n{bars}\n{_notes(report)}\n"


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


def _num_runs(row: Mapping[str, Any]) -> str:
    """How many runs its figures are the means of, in the order of the columns."""
    counts = [row["policies"][name]["num_runs"] for name in (OURS, *OTHERS) if name in row["policies"]]
    return str(counts[0]) if len(set(counts)) == 1 else ", ".join(map(str, counts))


def _notes(report: Report) -> str:
    revisions = sorted({(run["revision"] or "unknown")[:12] for run in report["runs"]})
    return (
        "Each run has a seed of its own, which decides ties and generated traces; *runs* says how many figures are the "
        f"means of, where they differ in the order of the columns. Replayed at commit {', '.join(revisions)}."
    )
