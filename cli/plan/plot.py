"""A picture of the fleets that were tried: which of them meet the targets, and how near the best come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from cli.bench.plot import save
from cli.plan.search import Plan, Target, Tried

_MEETS, _MISSES, _GIVEN_UP, _CHOSEN = "#b7e4c7", "#f4acb7", "#dee2e6", "#264653"
_COLOURS = ("#264653", "#2a9d8f", "#e9a03b")
# Fleets beyond it are drawn as far.
_MOST_STRAIN = 3.0


def plot(plan: Plan, targets: Sequence[Target], title: str, path: Path) -> None:
    """Draw ``plan`` to ``path``. Raises ``OSError``."""
    figure = Figure(figsize=(13, 5.2), layout="constrained")
    fleets, strains = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_fleets(fleets, plan, targets)
    _draw_strains(strains, _compared(plan), targets)
    save(figure, title, path)


def _draw_fleets(axes: Axes, plan: Plan, targets: Sequence[Target]) -> None:
    """A cell for each fleet, with its value of each target."""
    for tried in plan.tried:
        x, y = tried.shape.num_decode, tried.shape.num_prefill
        colour = _GIVEN_UP if tried.result is None else _MEETS if tried.meets else _MISSES
        axes.add_patch(Rectangle((x - 0.48, y - 0.48), 0.96, 0.96, facecolor=colour))
        text = "too late"
        if tried.result is not None:
            text = "\n".join(f"{target.value_ms(tried.result):.4g}" for target in targets)
        axes.text(x, y, text, ha="center", va="center", fontsize=8)
    if plan.chosen is not None:
        x, y = plan.chosen.shape.num_decode, plan.chosen.shape.num_prefill
        axes.add_patch(Rectangle((x - 0.48, y - 0.48), 0.96, 0.96, fill=False, edgecolor=_CHOSEN, linewidth=2.5))
    axes.set_xlim(0.4, max(tried.shape.num_decode for tried in plan.tried) + 0.6)
    axes.set_ylim(-0.6, max(tried.shape.num_prefill for tried in plan.tried) + 0.6)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("Decode workers")
    axes.set_ylabel("Prefill workers; 0: all do both")
    lines = ", ".join(map(str, targets))
    axes.set_title(f"{lines} (ms); green: meets the targets, framed: what to start", fontsize=10)


def _draw_strains(axes: Axes, compared: Mapping[str, Tried], targets: Sequence[Target]) -> None:
    """Each latency over its limit, of the fleets that are compared."""
    height = 0.8 / max(len(compared), 1)
    for number, (name, tried) in enumerate(compared.items()):
        assert tried.result is not None, "only those are compared that were replayed to their end"
        values = [target.value_ms(tried.result) / target.limit_ms for target in targets]
        positions = [row + (number - (len(compared) - 1) / 2) * height for row in range(len(targets))]
        bars = axes.barh(
            positions, [min(value, _MOST_STRAIN) for value in values], height, color=_COLOURS[number], label=name
        )
        axes.bar_label(bars, [f"{value:.0%}" for value in values], padding=3, fontsize=8)
    axes.axvline(1.0, color="#d1495b", linewidth=1.2)
    axes.set_yticks(range(len(targets)), [f"{target}\n<= {target.limit_ms:g} ms" for target in targets])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axes.set_title("latencies as shares of their targets", fontsize=10)
    axes.margins(x=0.15)
    axes.invert_yaxis()
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), fontsize=8, frameon=False)


def _compared(plan: Plan) -> Mapping[str, Tried]:
    """What to start, or what comes nearest, with the others that are worth a look."""
    candidates: Sequence[Tried | None]
    if plan.chosen is None:
        candidates = (plan.nearest, plan.nearest_other)
    else:
        candidates = (plan.chosen, plan.beside, plan.disaggregated)
    return {str(tried.shape): tried for tried in candidates if tried is not None and tried.result is not None}
