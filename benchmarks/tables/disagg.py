"""The tables of benchmarks.disagg."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.tables import Report, markdown_table

_PARTS = ("route", "prefill", "transfer", "join", "first_message", "edge")
_WANTED_MS = 3


def disagg_tables(report: Report) -> str:
    """What it costs, then where the second token's time goes. Reports from before the bare chain have none."""
    has_chain = "bare" in report
    overhead = markdown_table(
        [
            "stub engine, prompt",
            "agg: 1st, 2nd token (ms)",
            "disagg",
            "moved",
            "copying alone (ms)",
            "own cost",
            "wanted",
            *(("bare chain", "own cost over it") if has_chain else ("in round trips",)),
        ],
        [
            [*_overhead_row(length, figures), *_beside(report, figures, has_chain=has_chain)]
            for length, figures in report["stub"].items()
        ],
    )
    parts = markdown_table(
        ["disaggregated, prompt", *(part.replace("_", " ") for part in _PARTS), "second token (ms)", "aggregated"],
        [
            [f"{engine}, {length}", *_parts(figures)]
            for engine in ("stub", "tiny")
            for length, figures in report[engine].items()
        ],
    )
    return f"{overhead}\n{_bare(report['bare'] if has_chain else report)}\n{parts}"


def _overhead_row(length: str, figures: Mapping[str, Any]) -> list[object]:
    return [
        length,
        *(f"{figures['ttft_ms'][side]:.1f}, {figures['second_token_ms'][side]:.1f}" for side in ("agg", "disagg")),
        f"{figures['transfer_bytes'] / (1 << 20):.0f} MiB",
        f"{figures['copy_ms']:.1f}",
        f"{figures['overhead_ms']:.1f}",
        f"<= {_WANTED_MS}",
    ]


def _beside(report: Report, figures: Mapping[str, Any], *, has_chain: bool) -> list[str]:
    if not has_chain:
        return [f"{figures['overhead_ms'] / report['round_trip_ms']:.1f}"]
    chain_ms = figures["bare_chain_ms"]
    return [f"{chain_ms:.1f}", f"{figures['overhead_ms'] / chain_ms:.1f}"]


def _bare(bare: Mapping[str, float]) -> str:
    round_trip = f"A round trip by nothing but gRPC, after a pause: {bare['round_trip_ms']:.2f} ms."
    if "bare_chain_ms" not in bare:
        return f"{round_trip}\n"
    return (
        f"The bare chain over all rounds: {bare['bare_chain_ms']:.2f} ms, a tenth of them at or below "
        f"{bare['bare_chain_ms_p10']:.2f} ms. From an event loop to a thread and back: {bare['thread_change_ms']:.2f} "
        f"ms. {round_trip}\n"
    )


def _parts(figures: Mapping[str, Any]) -> list[str]:
    disagg, second = figures["parts_ms"]["disagg"], figures["second_token_ms"]
    return [*(f"{disagg[part]:.1f}" for part in _PARTS), f"{second['disagg']:.1f}", f"{second['agg']:.1f}"]
