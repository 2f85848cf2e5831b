"""Draws the loss and accuracy of a training run by skill.

python -m models.tiny.curves LOG.json CURVES.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

_WINDOW = 4


def draw_curves(log: Path, picture: Path) -> None:
    """Draw ``log`` as ``picture``: each skill's loss per token, and the share of its tokens predicted right."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    entries = json.loads(log.read_text(encoding="utf-8"))["entries"]
    figure, axes = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained")
    colours = [pyplot.get_cmap("tab20")(number) for number in range(20)]
    skills = sorted({skill for entry in entries for skill in entry["skills"]})
    for skill, colour in zip(skills, colours, strict=False):
        for axis, measure in zip(axes, ("loss", "accuracy"), strict=True):
            points = [(e["step"], e["skills"][skill][measure]) for e in entries if skill in e["skills"]]
            axis.plot([step for step, _ in points], _smooth([value for _, value in points]), color=colour, label=skill)
    patches = [entry["patch_loss"] for entry in entries]
    axes[0].plot([e["step"] for e in entries], _smooth(patches), "k:", label="patches (auxiliary)")
    axes[0].set(xlabel="step", ylabel="loss per answer token", yscale="log", ylim=(1e-4, 10))
    axes[1].set(xlabel="step", ylabel="answer tokens foreseen", ylim=(0.8, 1.005))
    axes[0].legend(ncols=2, fontsize="small")
    figure.savefig(picture, dpi=110)


def _smooth(values: list[float]) -> list[float]:
    """Return means over a few values."""
    windows = [values[max(0, end - _WINDOW) : end] for end in range(1, len(values) + 1)]
    return [sum(window) / len(window) for window in windows]


if __name__ == "__main__":
    draw_curves(Path(sys.argv[1]), Path(sys.argv[2]))
