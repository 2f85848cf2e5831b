"""The tables of benchmarks.index."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.tables import Report, markdown_table


def index_tables(report: Report) -> str:
    """The bars, then a row for each size."""
    rebuild, hash_us = report["rebuild"], report["hash_us"]
    [bar] = [case for case in report["cases"] if _size(case) == "1 M" and case["num_workers"] == 1000]
    bars = markdown_table(
        ["", "measured", "wanted"],
        [
            ["lookup, 1 M blocks, 1000 workers, p50 (us)", f"{bar['lookup_us']['p50']:.1f}", "<= 10"],
            ["blocks inserted a second, same size", f"{bar['inserts_per_s'] / 1e6:.1f} M", ">= 2 M"],
            [
                f"rebuild of {rebuild['num_blocks'] / 1e6:.1f} M blocks from {rebuild['num_workers']} workers (s)",
                f"{report['rebuild_s']:.2f}",
                "< 3",
            ],
            ["hashing a prompt of 8192 tokens, p50 (us): list, array", _both(hash_us), ""],
        ],
    )
    sizes = markdown_table(
        [
            "blocks",
            "workers",
            "lookup p50, p99 (us)",
            "with predictions",
            "predict (us)",
            "inserts/s",
            "removes/s",
            "longest store (ms)",
            "bytes a block",
        ],
        [_row(case) for case in report["cases"]],
    )
    return f"{bars}\n{sizes}"


def _row(case: Mapping[str, Any]) -> list[object]:
    return [
        _size(case),
        case["num_workers"],
        *(f"{case[name]['p50']:.1f}, {case[name]['p99']:.1f}" for name in ("lookup_us", "predicted_lookup_us")),
        f"{case['predict_us']:.0f}",
        *(f"{case[name] / 1e6:.1f} M" for name in ("inserts_per_s", "removes_per_s")),
        f"{case['longest_store_ms']:.0f}",
        f"{case['bytes_per_block']:.0f}",
    ]


def _size(case: Mapping[str, Any]) -> str:
    return f"{case['num_blocks'] / 1e6:.0f} M"


def _both(hash_us: Mapping[str, Any]) -> str:
    return ", ".join(f"{hash_us[kind]['p50']:.0f}" for kind in ("list", "array"))
