"""Pictures: the distributions of one load's latencies, or the latencies of a sweep against its throughput."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from cli.bench.compare import Results
from cli.bench.load import Load, LoadKind
from cli.bench.measure import DurationHistogram, Hop
from cli.bench.result import LatencyMs, PointResult
from cli.bench.run import Point

_DPI = 130
_QUANTILES = {0.5: "#2a9d8f", 0.9: "#e9a03b", 0.99: "#d1495b"}
_LINE = "#264653"
_SIDES = {"A": "#264653", "B": "#d1495b"}
_STYLES = {"p50": "o-", "p99": "o--"}
_COLOURS = ("#8ecae6", "#219ebc", "#e9c46a", "#e76f51", "#f4a261", "#9b5de5", "#c8b6ff", "#2a9d8f", "#adb5bd")
_HOP_COLOURS = dict(zip(Hop, _COLOURS, strict=True))
_LATENCIES: dict[str, Callable[[PointResult], LatencyMs]] = {
    "time to first token (TTFT)": lambda result: result.ttft_ms,
    "inter-token latency (ITL)": lambda result: result.itl_ms,
    "whole request (E2E)": lambda result: result.e2e_ms,
}


def plot(points: Sequence[Point], title: str, path: Path) -> None:
    """Draw one load's distributions, or a sweep's latency against throughput, to ``path``. Raises ``OSError``."""
    if len(points) == 1:
        figure = _plot_point(points[0])
        title = f"{title}, {points[0].result.load}"
    else:
        figure = _plot_sweep([point.result for point in points])
    save(figure, title, path)


def plot_comparison(both: Sequence[Results], path: Path) -> None:
    """Draw TTFT, ITL and throughput of two results over their loads, to ``path``. Raises ``OSError``."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    axes = figure.subplots(1, 3)
    for (side, colour), results in zip(_SIDES.items(), both, strict=True):
        loads = sorted(results.points, key=lambda load: load.value)
        for quantile, style in _STYLES.items():
            for axis, name in zip(axes, ("TTFT", "ITL"), strict=False):
                _draw_over_loads(axis, results, loads, f"{name} {quantile} ms", style, f"{side} {quantile}", colour)
        _draw_over_loads(axes[2], results, loads, "output tokens/s", "o-", side, colour)
    for axis, title in zip(axes, ("TTFT, ms", "ITL, ms", "output tokens/s"), strict=True):
        axis.set_title(title, fontsize=10)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.25)
        _label_loads(axis, {load.value for results in both for load in results.points})
        axis.set_xlabel(next(iter(both[0].points)).kind)
    lines, labels = axes[0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=len(labels), fontsize=9)
    save(figure, "\n".join(f"{side}: {results.name}" for side, results in zip(_SIDES, both, strict=True)), path)


def _draw_over_loads(
    axes: Axes, results: Results, loads: Sequence[Load], name: str, style: str, label: str, colour: str
) -> None:
    values = [results.figures(load)[name].value for load in loads]
    known = [np.nan if value is None else value for value in values]
    axes.plot([load.value for load in loads], known, style, color=colour, label=label, markersize=4)


def _label_loads(axes: Axes, values: set[float]) -> None:
    """Each load has its place on a logarithmic axis, and its number below."""
    axes.set_xscale("log")
    axes.set_xticks(sorted(values), [f"{value:g}" for value in sorted(values)])
    axes.xaxis.set_minor_formatter(NullFormatter())


def save(figure: Figure, title: str, path: Path) -> None:
    """Write ``figure`` to ``path``, under ``title``. Raises ``OSError``."""
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI)


def _plot_point(point: Point) -> Figure:
    figure = Figure(figsize=(11, 5.4), layout="constrained")
    grid = figure.add_gridspec(2, 3, height_ratios=(4, 1))
    measured = point.measured
    for column, (name, histogram) in enumerate(
        zip(_LATENCIES, (measured.ttft, measured.itl, measured.e2e), strict=True)
    ):
        axes = figure.add_subplot(grid[0, column])
        _draw_distribution(axes, name, histogram)
    figure.axes[0].set_ylabel("share that took no longer")
    _draw_hops(figure.add_subplot(grid[1, :]), point.result)
    return figure


def _draw_distribution(axes: Axes, name: str, histogram: DurationHistogram) -> None:
    axes.set_title(name, fontsize=10)
    axes.set_xlabel("ms")
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.0%}"))
    axes.grid(alpha=0.25)
    if not histogram.count:
        axes.text(0.5, 0.5, "none", transform=axes.transAxes, ha="center")
        return
    values_s, shares = histogram.distribution()
    axes.step([1e3 * values_s[0], *(1e3 * values_s)], [0.0, *shares], where="post", color=_LINE, linewidth=1.6)
    for quantile, colour in _QUANTILES.items():
        value_ms = 1e3 * histogram.quantile_s(quantile)
        label = f"p{100 * quantile:g}  {_format_ms(value_ms)} ms"
        axes.plot([value_ms], [quantile], "o", color=colour, label=label, markersize=6)
        axes.axvline(value_ms, color=colour, linewidth=0.9, linestyle="--")
    # A few stragglers would squeeze all other values into a corner.
    axes.set_xlim(0, 1.15e3 * min(histogram.max_s, 3 * histogram.quantile_s(0.99)))
    axes.legend(loc="lower right", fontsize=8)


def _draw_hops(axes: Axes, result: PointResult) -> None:
    left = 0.0
    for hop, time in result.hops.items():
        label = f"{hop.replace('_', ' ')} {time.share:.1%}"
        axes.barh([0], [time.share], left=left, color=_HOP_COLOURS[hop], label=label)
        left += time.share
    axes.set_xlim(0, 1)
    axes.set_yticks([])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.0%}"))
    axes.set_title("where a request's time goes", fontsize=10)
    if result.hops:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.35), ncols=4, fontsize=8, frameon=False)


def _plot_sweep(results: Sequence[PointResult]) -> Figure:
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    for axes, (name, latency_of) in zip(figure.subplots(1, len(_LATENCIES)), _LATENCIES.items(), strict=True):
        _draw_against_throughput(axes, [result for result in results if latency_of(result).count], latency_of)
        axes.set_title(name, fontsize=10)
    figure.axes[0].set_ylabel("ms (logarithmic)")
    what = "requests a second" if results[0].load.kind is LoadKind.RATE else "clients"
    lines, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(
        lines, labels, loc="outside lower center", ncols=len(labels), fontsize=9, title=f"numbers at the points: {what}"
    )
    return figure


def _draw_against_throughput(
    axes: Axes, results: Sequence[PointResult], latency_of: Callable[[PointResult], LatencyMs]
) -> None:
    throughput = [result.output_tokens_per_s for result in results]
    for quantile, colour in _QUANTILES.items():
        values = [getattr(latency_of(result), f"p{100 * quantile:g}") for result in results]
        axes.plot(throughput, values, "o-", color=colour, label=f"p{100 * quantile:g}", markersize=4)
    for result, tokens_per_s in zip(results, throughput, strict=True):
        axes.annotate(
            f"{result.load.value:g}",
            (tokens_per_s, latency_of(result).p99 or 0.0),
            xytext=(0, 6),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    # The 99th percentile is often a hundred times the median; a linear axis would show only one of them.
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.margins(y=0.12)
    axes.set_xlim(0, 1.08 * max(throughput, default=1.0) or 1.0)
    axes.set_xlabel("output tokens/s")
    axes.grid(alpha=0.25, which="both")


def _format_ms(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
