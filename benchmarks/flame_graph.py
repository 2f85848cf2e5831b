"""Flame graphs from collapsed stacks, after Brendan Gregg's: a still SVG without script, as a page can show it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from zlib import crc32

_WIDTH, _ROW_HEIGHT, _HEAD_HEIGHT, _MARGIN = 1200, 17, 40, 10
_FONT = 'font-family="Verdana, sans-serif" font-size="11"'
_CHARACTER_WIDTH = 6.6
# Narrower frames would be mere lines; their time is in the frame below.
_MIN_SHARE = 0.003


@dataclass(frozen=True)
class FunctionTime:
    """One function's share of all samples.

    Attributes:
        self_share: share of the samples with it on top of the stack.
        total_share: share of the samples with it anywhere in the stack.
    """

    function: str
    self_share: float
    total_share: float


@dataclass
class _Frame:
    count: int = 0
    callees: dict[str, _Frame] = field(default_factory=dict)


def parse_stacks(text: str) -> Mapping[Sequence[str], int]:
    """Samples by stack, outermost function first, from lines ``outer;inner 12``.

    Raises:
        ValueError: a line has another form.
    """
    stacks: Counter[Sequence[str]] = Counter()
    for line in filter(None, text.splitlines()):
        frames, _, count = line.rpartition(" ")
        stacks[tuple(frames.split(";"))] += int(count)
    return stacks


def rank_functions(stacks: Mapping[Sequence[str], int]) -> list[FunctionTime]:
    """All functions, the one with the most time of its own first. Recursion counts once."""
    num_samples = sum(stacks.values())
    own: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for stack, count in stacks.items():
        own[stack[-1]] += count
        for function in set(stack):
            total[function] += count
    functions = [FunctionTime(name, own[name] / num_samples, total[name] / num_samples) for name in total]
    return sorted(functions, key=lambda item: (-item.self_share, item.function))


def render_flame_graph(stacks: Mapping[Sequence[str], int], title: str) -> str:
    """An SVG: each function stands on its caller, as wide as its share of the samples."""
    root = _Frame()
    for stack, count in sorted(stacks.items()):
        _add(root, stack, count)
    height = _HEAD_HEIGHT + _ROW_HEIGHT * _depth(root, root.count) + _MARGIN
    bars = "".join(_draw(root, root.count, 0.0, 0, height))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" {_FONT}>\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n'
        f'<text x="{_WIDTH / 2:.0f}" y="24" text-anchor="middle" font-size="15">{escape(title)}</text>\n'
        f"{bars}</svg>\n"
    )


def _add(root: _Frame, stack: Sequence[str], count: int) -> None:
    frame = root
    frame.count += count
    for function in stack:
        frame = frame.callees.setdefault(function, _Frame())
        frame.count += count


def _depth(frame: _Frame, num_samples: int) -> int:
    return max((1 + _depth(callee, num_samples) for callee in _wide(frame, num_samples).values()), default=0)


def _wide(frame: _Frame, num_samples: int) -> dict[str, _Frame]:
    return {name: callee for name, callee in frame.callees.items() if callee.count >= _MIN_SHARE * num_samples}


def _draw(frame: _Frame, num_samples: int, x: float, level: int, height: int) -> Iterable[str]:
    scale = (_WIDTH - 2 * _MARGIN) / num_samples
    y = height - _MARGIN - _ROW_HEIGHT * (level + 1)
    for name, callee in _wide(frame, num_samples).items():
        width = callee.count * scale
        label = name[: int((width - 6) / _CHARACTER_WIDTH)] if width > 6 + 3 * _CHARACTER_WIDTH else ""
        tip = f"{name}: {callee.count / num_samples:.1%}"
        yield (
            f'<g><title>{escape(tip)}</title><rect x="{_MARGIN + x:.1f}" y="{y}" width="{width:.1f}" '
            f'height="{_ROW_HEIGHT - 1}" fill="{_colour(name)}"/>'
            f'<text x="{_MARGIN + x + 3:.1f}" y="{y + 12}">{escape(label)}</text></g>\n'
        )
        yield from _draw(callee, num_samples, x, level + 1, height)
        x += width


def _colour(name: str) -> str:
    """A warm colour, the same for a function in every picture."""
    number = crc32(name.encode())
    return f"rgb({205 + number % 50},{80 + number // 50 % 130},{number // 6500 % 55})"
