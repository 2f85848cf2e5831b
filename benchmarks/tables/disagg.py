"""The tables of benchmarks.disagg."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.tables import Report, markdown_table

_PARTS = ("route", "prefill", "transfer", "join", "first_message", "edge")
_WANTED_MS = 3


def disagg_tables(report: Report) -> str:
    """What it costs, then where the second token's time goes."""
    overhead = markdown_table(
        [
            "stub engine, prompt",
            "agg: 1st, 2nd token (ms)",
            "disagg",
            "moved",
            "copying alone (ms)",
            "own cost",
            "wanted",
            "in round trips",
        ],
        [_overhead_row(length, figures, report["round_trip_ms"]) for length, figures in report["stub"].items()],
    )
    bare = f"A round trip by nothing but gRPC, after a pause: {report['round_trip_ms']:.2f} ms.\n"
    parts = markdown_table(
        ["disaggregated, prompt", *(part.replace("_", " ") for part in _PARTS), "second token (ms)", "aggregated"],
        [
            [f"{engine}, {length}", *_parts(figures)]
            for engine in ("stub", "tiny")
            for length, figures in report[engine].items()
        ],
    )
    return f"{overhead}\n{bare}\n{parts}"


def _overhead_row(length: str, figures: Mapping[str, Any], round_trip_ms: float) -> list[object]:
    return [
        length,
        *(f"{figures['ttft_ms'][side]:.1f}, {figures['second_token_ms'][side]:.1f}" for side in ("agg", "disagg")),
        f"{figures['transfer_bytes'] / (1 << 20):.0f} MiB",
        f"{figures['copy_ms']:.1f}",
        f"{figures['overhead_ms']:.1f}",
        f"<= {_WANTED_MS}",
        f"{figures['overhead_ms'] / round_trip_ms:.1f}",
    ]


def _parts(figures: Mapping[str, Any]) -> list[str]:
    disagg, second = figures["parts_ms"]["disagg"], figures["second_token_ms"]
    return [*(f"{disagg[part]:.1f}" for part in _PARTS), f"{second['disagg']:.1f}", f"{second['agg']:.1f}"]
