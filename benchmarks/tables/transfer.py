"""The tables of benchmarks.transfer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.tables import Report, markdown_table

_MIB, _KIB = 1 << 20, 1 << 10


def transfer_tables(report: Report) -> str:
    """The bars, then a row for each size and temperature."""
    warm = report["warm"]
    bars = markdown_table(
        ["warm, 64 MiB", "measured", "wanted"],
        [
            ["shm over memcpy of the same round", f"{warm['share_of_memcpy']['shm']:.2f}", ">= 0.6"],
            ["grpc, GB/s", f"{warm['gb_per_s']['grpc']:.2f}", ">= 0.7"],
        ],
    )
    return f"{bars}\n{speeds_table([report, *report['others']])}"


def speeds_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """A row for each of ``runs`` and temperature."""
    return markdown_table(
        [
            "blocks",
            "piece",
            "",
            "shm GB/s",
            "grpc GB/s",
            "memcpy GB/s",
            "shm over memcpy",
            "CPU s per GB, shm: puller, source",
            "grpc: puller, source",
        ],
        [_row(run, temperature) for run in runs for temperature in ("warm", "cold")],
    )


def _row(run: Mapping[str, Any], temperature: str) -> list[object]:
    figures = run[temperature]
    speed = figures["gb_per_s"]
    return [
        f"{run['size_bytes'] / _MIB:g} MiB",
        f"{run['piece_size_bytes'] // _KIB} KiB",
        temperature,
        f"{speed['shm']:.1f}",
        f"{speed['grpc']:.2f}",
        f"{speed['memcpy']:.1f}",
        f"{figures['share_of_memcpy']['shm']:.2f}",
        *(_cpu(figures["cpu_s_per_gb"][way]) for way in ("shm", "grpc")),
    ]


def _cpu(cpu_s_per_gb: Mapping[str, float]) -> str:
    return f"{cpu_s_per_gb['puller']:.2f}, {cpu_s_per_gb['source']:.2f}"
