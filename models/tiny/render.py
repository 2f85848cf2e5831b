"""Draws scenes as pixels with numpy: shapes with smooth edges on plain, shaded, striped, checked or noisy ground."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.tiny.scenes import Placed, Scene

Floats = NDArray[np.floating[Any]]

IMAGE_SIZE = 96
PATCH_SIZE = 12
NUM_PATCHES = (IMAGE_SIZE // PATCH_SIZE) ** 2

#: Red, green, blue of each of ``scenes.COLOURS``, 0 to 255; each drawn shape is a little off.
COLOUR_VALUES = {
    "red": (215, 35, 35), "orange": (245, 140, 20), "yellow": (245, 225, 40), "green": (35, 150, 55),
    "blue": (35, 75, 215), "purple": (135, 45, 165), "black": (15, 15, 15), "white": (250, 250, 250),
}  # fmt: skip
#: The same of ``scenes.GROUNDS``: pale and of middle brightness, so that every shape stands out.
GROUND_VALUES = {
    "grey": (150, 150, 150), "light blue": (150, 185, 210), "light green": (160, 195, 155), "pink": (220, 175, 185),
    "beige": (205, 190, 155),
}  # fmt: skip
_STRIPE_WIDTH = 9
_JITTER = 14.0
#: A patch shows the shape that covers more than this part of it.
_MIN_COVERAGE = 0.15


def render(scene: Scene, size: int = IMAGE_SIZE) -> NDArray[np.uint8]:
    """Draw ``scene``; the same scene gives the same picture.

    Returns:
        ``[size, size, 3]``, red, green, blue.
    """
    rng = np.random.default_rng(scene.seed)
    picture = _ground(scene, size, rng)
    for placed in scene.shapes:
        rows, columns, mask = _mask(placed, size)
        colour = np.clip(np.array(COLOUR_VALUES[placed.colour]) + rng.uniform(-_JITTER, _JITTER, 3), 0, 255)
        part = picture[rows, columns]
        part += mask[..., None] * (colour.astype(np.float32) - part)
    picture += (rng.random(picture.shape, dtype=np.float32) - np.float32(0.5)) * np.float32(rng.uniform(0, 20))
    return np.clip(picture, 0, 255).astype(np.uint8)


def patch_shapes(scene: Scene) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return what each patch of the picture shows, row by row, for training's auxiliary loss.

    Returns:
        ``[NUM_PATCHES]``, 1 + the index in ``scene.shapes`` of the shape that covers the patch, 0 for none; and
        ``[NUM_PATCHES]``, 1 if a shape's middle is in the patch.
    """
    per_side = IMAGE_SIZE // PATCH_SIZE
    covered = np.full((per_side, per_side), _MIN_COVERAGE, dtype=np.float32)
    shown = np.zeros((per_side, per_side), dtype=np.int64)
    middles = np.zeros((per_side, per_side), dtype=np.int64)
    for index, placed in enumerate(scene.shapes):
        rows, columns, mask = _mask(placed, IMAGE_SIZE)
        whole = np.zeros((IMAGE_SIZE, IMAGE_SIZE), dtype=np.float32)
        whole[rows, columns] = mask
        coverage = whole.reshape(per_side, PATCH_SIZE, per_side, PATCH_SIZE).mean(axis=(1, 3))
        shown[coverage > covered] = index + 1
        covered = np.maximum(covered, coverage)
        middles[int(placed.y * per_side), int(placed.x * per_side)] = 1
    return shown.ravel(), middles.ravel()


def _ground(scene: Scene, size: int, rng: np.random.Generator) -> Floats:
    first = np.array(GROUND_VALUES[scene.ground], dtype=np.float32) + rng.uniform(-10, 10, 3).astype(np.float32)
    second = first + np.float32(rng.choice((-1, 1)) * rng.uniform(12, 28))
    y, x = np.mgrid[0:size, 0:size].astype(np.float32) * np.float32(IMAGE_SIZE / size)
    if scene.pattern == "plain":
        share = np.zeros((size, size), dtype=np.float32)
    elif scene.pattern == "shaded":
        angle = rng.uniform(0, 2 * math.pi)
        share = ((x * math.cos(angle) + y * math.sin(angle)) / (1.5 * IMAGE_SIZE) + 0.5).astype(np.float32)
    elif scene.pattern == "striped":
        share = ((x if rng.random() < 0.5 else y) // _STRIPE_WIDTH % 2).astype(np.float32)
    elif scene.pattern == "checked":
        share = ((x // _STRIPE_WIDTH + y // _STRIPE_WIDTH) % 2).astype(np.float32)
    else:
        share = rng.random((size, size), dtype=np.float32)
    ground: Floats = first + share[..., None] * (second - first)
    return ground


def _mask(placed: Placed, size: int) -> tuple[slice, slice, Floats]:
    """Return the rows and columns around a shape, and how much of each pixel there it covers, 0 to 1."""
    x_middle, y_middle, radius = placed.x * size, placed.y * size, placed.radius * size
    columns = slice(max(0, int(x_middle - radius) - 1), min(size, int(x_middle + radius) + 3))
    rows = slice(max(0, int(y_middle - radius) - 1), min(size, int(y_middle + radius) + 3))
    x = (np.arange(columns.start, columns.stop, dtype=np.float32) + np.float32(0.5 - x_middle))[None, :]
    y = (np.arange(rows.start, rows.stop, dtype=np.float32) + np.float32(0.5 - y_middle))[:, None]
    cos, sin = np.float32(math.cos(placed.angle)), np.float32(math.sin(placed.angle))
    distance = _DISTANCES[placed.shape](x * cos + y * sin, y * cos - x * sin, radius)
    return rows, columns, np.clip(0.5 - distance, 0, 1).astype(np.float32)


def _star(x: Floats, y: Floats, radius: float) -> Floats:
    """Fold the plane into a tenth of the star, in which the star's edge is one line."""
    angle = np.abs((np.arctan2(x, -y) + math.pi / 5) % (2 * math.pi / 5) - math.pi / 5)
    length = np.hypot(x, y)
    inner = 0.42 * radius
    edge = np.array((inner * math.cos(math.pi / 5) - radius, inner * math.sin(math.pi / 5)))
    normal = np.array((edge[1], -edge[0])) / np.hypot(*edge)
    distance: Floats = (length * np.cos(angle) - radius) * normal[0] + length * np.sin(angle) * normal[1]
    return distance


def _triangle(x: Floats, y: Floats, radius: float) -> Floats:
    sides = np.abs(x) * np.float32(math.sqrt(3) / 2) - y * np.float32(0.5) - radius / 2
    distance: Floats = np.maximum(sides, y - radius / 2)
    return distance


def _cross(x: Floats, y: Floats, radius: float) -> Floats:
    x, y = np.abs(x), np.abs(y)
    long, short = 0.95 * radius, 0.3 * radius
    distance: Floats = np.minimum(np.maximum(x - long, y - short), np.maximum(x - short, y - long))
    return distance


#: Of each of ``scenes.SHAPES``: pixels from its edge, less than 0 inside, given the offset from its middle.
_DISTANCES: dict[str, Callable[[Floats, Floats, float], Floats]] = {
    "circle": lambda x, y, radius: np.hypot(x, y) - 0.9 * radius,
    "square": lambda x, y, radius: np.maximum(np.abs(x), np.abs(y)) - 0.72 * radius,
    "triangle": _triangle,
    "star": _star,
    "cross": _cross,
    "ring": lambda x, y, radius: np.abs(np.hypot(x, y) - 0.72 * radius) - 0.24 * radius,
    "diamond": lambda x, y, radius: (np.abs(x) * 1.3 + np.abs(y) - radius) / math.hypot(1.3, 1),
}
