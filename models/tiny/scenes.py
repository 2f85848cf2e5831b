"""Descriptions of pictures of coloured shapes; ``render.py`` draws them."""

from __future__ import annotations

import random
from dataclasses import dataclass

from models.tiny.split import Split

SHAPES = ("circle", "square", "triangle", "star", "cross", "ring", "diamond")
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "black", "white")
GROUNDS = ("grey", "light blue", "light green", "pink", "beige")
PATTERNS = ("plain", "shaded", "striped", "checked", "noisy")
MAX_SHAPES = 6

_ROWS, _COLUMNS = ("top", "", "bottom"), ("left", "", "right")
#: In parts of the picture's side. A shape's middle keeps this far from the lines between the nine fields, so that its
#: field is never in doubt.
_MARGIN = 0.035
_SMALL, _LARGE = (0.07, 0.095), (0.13, 0.165)
_MAX_DRAWS = 40


@dataclass(frozen=True)
class Placed:
    """One shape of a picture.

    Attributes:
        shape: one of ``SHAPES``.
        colour: one of ``COLOURS``.
        is_large: otherwise it is small.
        x: of its middle, 0 to 1 from the left.
        y: of its middle, 0 to 1 from the top.
        radius: of the circle around it, of the picture's side.
        angle: by which it is turned, in radians.
    """

    shape: str
    colour: str
    is_large: bool
    x: float
    y: float
    radius: float
    angle: float

    @property
    def row(self) -> int:
        """0 top, 1 middle, 2 bottom."""
        return int(self.y * 3)

    @property
    def column(self) -> int:
        """0 left, 1 middle, 2 right."""
        return int(self.x * 3)

    @property
    def field(self) -> str:
        """Which of the nine fields of the picture its middle is in: ``top left``, ``bottom``, ``middle``."""
        return f"{_ROWS[self.row]} {_COLUMNS[self.column]}".strip() or "middle"

    @property
    def name(self) -> str:
        """Colour and shape."""
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """A picture's content.

    Attributes:
        shapes: one to six, from top to bottom and left to right; they don't touch and each has a field of its own.
        ground: one of ``GROUNDS``.
        pattern: one of ``PATTERNS``.
        seed: of everything else that varies: exact colours, noise.
    """

    shapes: tuple[Placed, ...]
    ground: str
    pattern: str
    seed: int

    @property
    def key(self) -> str:
        """The key that decides whether it is held out: shapes, colours and fields, not the ground nor exact places."""
        return ";".join(f"{placed.name}@{placed.field}" for placed in self.shapes)


def draw_scene(rng: random.Random, split: Split, max_shapes: int = MAX_SHAPES) -> Scene:
    """Draw a scene of ``split`` with one to ``max_shapes`` shapes; each number is as likely."""
    return split.draw(lambda: _any_scene(rng, rng.randint(1, max_shapes)), lambda scene: scene.key)


def _any_scene(rng: random.Random, num_shapes: int) -> Scene:
    # With few colours or few shapes, counts above one occur, and shapes that differ in one property only.
    colours = rng.sample(COLOURS, k=rng.choice((2, len(COLOURS), len(COLOURS))))
    shapes = rng.sample(SHAPES, k=rng.choice((2, len(SHAPES), len(SHAPES))))
    placed: list[Placed] = []
    while len(placed) < num_shapes:
        placed = _try_to_place(rng, num_shapes, colours, shapes)
    placed.sort(key=lambda one: (one.row, one.column))
    return Scene(tuple(placed), rng.choice(GROUNDS), rng.choice(PATTERNS), rng.getrandbits(32))


def _try_to_place(rng: random.Random, num_shapes: int, colours: list[str], shapes: list[str]) -> list[Placed]:
    """Return ``num_shapes`` shapes, or fewer if the picture is too crowded."""
    placed: list[Placed] = []
    for field in rng.sample(range(9), k=num_shapes):
        for _ in range(_MAX_DRAWS):
            one = _in_field(rng, field, rng.choice(shapes), rng.choice(colours))
            if all(_are_apart(one, other) for other in placed):
                placed.append(one)
                break
    return placed


def _in_field(rng: random.Random, field: int, shape: str, colour: str) -> Placed:
    is_large = rng.random() < 0.5
    radius = rng.uniform(*(_LARGE if is_large else _SMALL))
    x, y = (
        min(max((start + rng.random()) / 3, start / 3 + _MARGIN, radius), (start + 1) / 3 - _MARGIN, 1 - radius)
        for start in (field % 3, field // 3)
    )
    return Placed(shape, colour, is_large, x, y, radius, rng.uniform(-0.15, 0.15))


def _are_apart(one: Placed, other: Placed) -> bool:
    least = one.radius + other.radius + 0.02
    return (one.x - other.x) ** 2 + (one.y - other.y) ** 2 > least**2
