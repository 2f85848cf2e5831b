"""Tables of benchmarks.profile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.tables import Report, markdown_table

_NUM_FUNCTIONS = 8
# Threads with less of a core are left out.
_MIN_SHARE = 0.005


def profile_tables(report: Report) -> str:
    """For each way and process, the functions with the most time of their own."""
    parts = [
        _describe(way, process, profile)
        for way, profiles in report["profiles"].items()
        for process, profile in profiles.items()
    ]
    return "\n".join([*parts, *(f"- {way} was not recorded: {why}\n" for way, why in report["absent"].items())])


def _describe(way: str, process: str, profile: Mapping[str, Any]) -> str:
    threads = sorted(profile["threads"].items(), key=lambda item: -item[1])
    shares = ", ".join(f"{name} {share:.2f}" for name, share in threads if share >= _MIN_SHARE)
    table = markdown_table(
        [f"{process}, {way}", "own time", "with what it calls"],
        [
            [f"`{item['function']}`", f"{item['self_share']:.1%}", f"{item['total_share']:.1%}"]
            for item in profile["functions"][:_NUM_FUNCTIONS]
        ],
    )
    return f"{table}\nThreads, in cores: {shares}; {profile['num_samples']} samples.\n"
