"""Pictures of results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def plot_overload(report: Mapping[str, Any], path: Path) -> None:
    """Draw finished tokens/s against concurrency: the sweep, both peaks and the overload."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    sweep = [phase["load"] for phase in report["sweep"]]
    axes.plot([load["concurrency"] for load in sweep], [load["tokens_per_s"] for load in sweep], "o-", label="sweep")
    peak, over = report["peak"], report["overload"]
    peaks = [peak[name]["load"]["tokens_per_s"] for name in ("before", "after")]
    axes.plot([peak["concurrency"]] * len(peaks), peaks, "^", label="peak, before and after the overload")
    seconds = round(over["phase"]["load"]["duration_s"])
    label = f"twice the peak's load, for {seconds} s: {over['ratio']:.2f} of the peak"
    axes.plot([over["concurrency"]], [over["tokens_per_s"]], "s", label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({load["concurrency"] for load in sweep} | {over["concurrency"]}))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("clients in a closed loop")
    axes.set_ylabel("finished tokens/s")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
