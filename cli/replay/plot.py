"""A picture of policies side by side."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cli.bench.plot import save
from cli.replay.results import PolicyResult, Spread

_QUANTILES = {"mean": "#264653", "p50": "#2a9d8f", "p90": "#e9a03b", "p99": "#d1495b"}


def plot(results: Mapping[str, PolicyResult], title: str, path: Path) -> None:
    """Draw latencies and reuse of each policy to ``path``. Raises ``OSError``."""
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    ttft, itl, reuse = figure.subplots(1, 3, width_ratios=(3, 3, 2))
    _draw_spreads(ttft, "time to first token (ms)", {name: result.ttft_ms for name, result in results.items()})
    _draw_spreads(itl, "inter-token latency (ms)", {name: result.itl_ms for name, result in results.items()})
    names = list(results)
    bars = reuse.barh(names, [results[name].reuse_ratio for name in names], color="#219ebc")
    reuse.bar_label(bars, fmt="%.3f", padding=3, fontsize=8)
    reuse.set_title("prompt tokens found in a cache", fontsize=10)
    reuse.margins(x=0.2)
    reuse.invert_yaxis()
    handles, labels = ttft.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8)
    save(figure, title, path)


def _draw_spreads(axes: Axes, title: str, spreads: Mapping[str, Spread]) -> None:
    names = list(spreads)
    height = 0.8 / len(_QUANTILES)
    for number, (quantile, colour) in enumerate(_QUANTILES.items()):
        positions = [row + (number - 1.5) * height for row in range(len(names))]
        values = [getattr(spreads[name], quantile) for name in names]
        bars = axes.barh(positions, values, height, color=colour, label=quantile)
        axes.bar_label(bars, fmt="%.4g", padding=3, fontsize=7)
    axes.set_yticks(range(len(names)), names)
    axes.set_title(title, fontsize=10)
    axes.margins(x=0.15)
    axes.invert_yaxis()
