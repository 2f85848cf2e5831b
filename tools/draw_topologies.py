"""Draws topologies: docs/images/topologies/NAME.svg from each configs/trtllm/NAME.yaml.

python tools/draw_topologies.py [--check]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from quartet.discovery.base import Role
from services.topology.topology import Topology, WorkerGroup, load_topology

CONFIGS, PICTURES = Path("configs/trtllm"), Path("docs/images/topologies")

_FILLS = {Role.ENCODE: "#e4dfec", Role.PREFILL: "#fdeada", Role.DECODE: "#e6f0d8"}
_INK, _MOVES = "#44546a", "#c0504d"
_BOX_WIDTH, _BOX_HEIGHT, _GAP, _MARGIN = 222, 74, 18, 20
_FIRST_COLUMN, _COLUMN = 392, 318
_ROUTER_LEFT, _ROUTER_WIDTH = 170, 150
# All of them side by side as wide as a page.
_SCALE = 0.72


@dataclass(frozen=True)
class Box:
    """One worker in the picture.

    Attributes:
        left, top: of its upper left corner.
        lines: its text, the first line in bold.
    """

    role: Role
    left: float
    top: float
    lines: Sequence[str]

    @property
    def middle(self) -> float:
        """Its vertical middle."""
        return self.top + _BOX_HEIGHT / 2


def draw(topology: Topology) -> str:
    """The picture of ``topology`` as SVG."""
    columns = [role for role in _FILLS if any(group.role is role for group in topology.workers)]
    rows = max(sum(group.replicas for group in topology.workers if group.role is role) for role in columns)
    height = rows * (_BOX_HEIGHT + _GAP) - _GAP + 2 * _MARGIN + 26
    width = _FIRST_COLUMN + (len(columns) - 1) * _COLUMN + _BOX_WIDTH + _MARGIN
    boxes = [box for number, role in enumerate(columns) for box in _column(topology, role, number, height)]
    parts = [*_edge(topology, height), *_arrows(boxes, height), *map(_worker, boxes)]
    return _document(width, height, parts)


def _column(topology: Topology, role: Role, number: int, height: float) -> list[Box]:
    workers = [(group, index) for group in topology.workers if group.role is role for index in range(group.replicas)]
    used = len(workers) * (_BOX_HEIGHT + _GAP) - _GAP
    left, top = _FIRST_COLUMN + number * _COLUMN, (height - used) / 2
    return [
        Box(role, left, top + row * (_BOX_HEIGHT + _GAP), _lines(topology, group, index))
        for row, (group, index) in enumerate(workers)
    ]


def _lines(topology: Topology, group: WorkerGroup, index: int) -> list[str]:
    settings = {"modality": topology.engine.modality, **_mapping(group.overrides.get("engine"))}
    gpus = group.gpus[index] if group.gpus else ()
    lines = [f"{group.process_name}-{index}", _gpu_text(gpus)]
    file = settings.get("extra_engine_args")
    if file is not None:
        lines.append(str(Path(str(file)).relative_to("configs/engines")))
    if settings.get("modality") == "multimodal":
        lines[1] += ", with vision tower"
    elif group.role is Role.ENCODE and "kinds" in _mapping(group.overrides.get("encoder")):
        lines[1] += ", no vision tower"
    return lines


def _gpu_text(gpus: Sequence[int]) -> str:
    if not gpus:
        return "no GPU"
    return f"GPU {gpus[0]}" if len(gpus) == 1 else f"GPUs {gpus[0]} to {gpus[-1]}"


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _edge(topology: Topology, height: float) -> list[str]:
    """The client and the router, at half the height."""
    middle = height / 2
    policy = _mapping(topology.router.overrides.get("policy")).get("name", "kv_aware")
    return [
        _rectangle(_MARGIN, middle - 26, 92, 52, "#f4f6fa"),
        _text(_MARGIN + 46, middle + 5, "client", is_bold=True),
        _arrow(_MARGIN + 92, middle, _ROUTER_LEFT, middle, _INK),
        _rectangle(_ROUTER_LEFT, middle - 36, _ROUTER_WIDTH, 72, "#dce6f2"),
        _text(_ROUTER_LEFT + _ROUTER_WIDTH / 2, middle - 3, "Router", is_bold=True),
        _text(_ROUTER_LEFT + _ROUTER_WIDTH / 2, middle + 18, str(policy), size=12),
    ]


def _arrows(boxes: Sequence[Box], height: float) -> list[str]:
    parts = []
    right = _ROUTER_LEFT + _ROUTER_WIDTH
    first = min(box.left for box in boxes)
    for box in boxes:
        if box.left == first:
            parts.append(_arrow(right, height / 2, box.left, box.middle, _INK))
    computes_prompts = Role.PREFILL if any(box.role is Role.PREFILL for box in boxes) else Role.DECODE
    for role, nearest, label in ((Role.ENCODE, computes_prompts, "embeddings"), (Role.PREFILL, Role.DECODE, "KV")):
        sources = [box for box in boxes if box.role is role]
        targets = [box for box in boxes if box.role is nearest]
        for source in sources:
            for target in targets:
                start = source.left + _BOX_WIDTH
                parts.append(_arrow(start, source.middle, target.left, target.middle, _MOVES))
        if sources and targets:
            middle = (sources[0].left + _BOX_WIDTH + targets[0].left) / 2
            parts.append(_text(middle, min(box.middle for box in (*sources, *targets)) - 9, label, size=12))
    if any(box.left != first for box in boxes):
        text = "The Router streams with every worker; red: straight from worker to worker"
        parts.append(_text(right, height - 8, text, size=12, anchor="start"))
    return parts


def _worker(box: Box) -> str:
    head, *rest = box.lines
    centre, top = box.left + _BOX_WIDTH / 2, box.top + _BOX_HEIGHT / 2 - 8 * len(rest) + 5
    return "\n".join(
        [
            _rectangle(box.left, box.top, _BOX_WIDTH, _BOX_HEIGHT, _FILLS[box.role]),
            _text(centre, top, head, is_bold=True),
            *(_text(centre, top + 2 + 17 * number, line, size=12) for number, line in enumerate(rest, 1)),
        ]
    )


def _rectangle(left: float, top: float, width: float, height: float, fill: str) -> str:
    place = f'x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}" rx="8"'
    return f'<rect {place} fill="{fill}" stroke="{_INK}" stroke-width="1.5"/>'


def _text(x: float, y: float, text: str, *, size: int = 15, is_bold: bool = False, anchor: str = "middle") -> str:
    weight = ' font-weight="bold"' if is_bold else ""
    style = f'font-size="{size}" text-anchor="{anchor}" fill="#1f2a3a"{weight}'
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(text)}</text>'


def _arrow(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    marker = "k" if colour == _MOVES else "a"
    ends = f'x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"'
    return f'<line {ends} stroke="{colour}" stroke-width="1.5" marker-end="url(#{marker})"/>'


def _document(width: float, height: float, parts: Sequence[str]) -> str:
    markers = "".join(
        f'<marker id="{name}" markerUnits="userSpaceOnUse" markerWidth="12" markerHeight="12" viewBox="0 0 9 9"'
        f' refX="8" refY="4.5" orient="auto"><path d="M0,0 L9,4.5 L0,9 z" fill="{colour}"/></marker>'
        for name, colour in (("a", _INK), ("k", _MOVES))
    )
    size = f'width="{_SCALE * width:.0f}" height="{_SCALE * height:.0f}"'
    view = f'{size} viewBox="0 0 {width:g} {height:g}" font-family="Helvetica, Arial, sans-serif"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {view}>'
    background = f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>'
    return "\n".join([head, f"<defs>{markers}</defs>", background, *parts, "</svg>", ""])


def main() -> int:
    """Write every picture, or with ``--check`` say which are out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a picture is out of date")
    arguments = parser.parse_args()
    is_current = True
    for file in sorted(CONFIGS.glob("*.yaml")):
        picture, drawn = PICTURES / f"{file.stem}.svg", draw(load_topology(file))
        if picture.is_file() and picture.read_text(encoding="utf-8") == drawn:
            continue
        if arguments.check:
            print(f"{picture} does not show {file}: run python tools/draw_topologies.py", file=sys.stderr)
            is_current = False
        else:
            PICTURES.mkdir(parents=True, exist_ok=True)
            picture.write_text(drawn, encoding="utf-8")
            print(picture)
    return 0 if is_current else 1


if __name__ == "__main__":
    sys.exit(main())
