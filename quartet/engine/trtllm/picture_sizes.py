"""How many tokens pictures fill, by arithmetic alone, for the model types whose pictures are one run of placeholders.

As transformers' ``processing_llava_next`` counts, which TensorRT-LLM asks too: nothing of a library's is needed, so a
router may be told before anything is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quartet.engine.encoder import ItemSize
from quartet.errors import InvalidRequestError, MediaTooLargeError
from quartet.media.items import MediaGrid

#: Model types whose pictures' sizes are known here.
SIZED_MODEL_TYPES = ("llava", "llava_next")

# Towers with a row for the whole picture before those of the patches.
_TOWERS_WITH_CLASS_ROW = ("clip_vision_model", "chinese_clip_vision_model")
_TOWERS = (*_TOWERS_WITH_CLASS_ROW, "siglip_vision_model")
_MAX_EDGE = 1 << 16


@dataclass(frozen=True, kw_only=True)
class PictureSizes:
    """Of one model's pictures.

    Attributes:
        edge: pixels of a tile, which is square.
        tile_edge: patches of a tile.
        num_tile_tokens: that the whole picture fills, scaled to one tile.
        grids: heights and widths, in pixels, that a picture may be cut up to besides; empty: it never is.
        shortest_edge: pixels that a picture's shorter edge is scaled to before it is cropped to a tile; ``None``: it
            is scaled to the tile as a whole.
        max_pixels: of a picture, also of one that was scaled.
    """

    edge: int
    tile_edge: int
    num_tile_tokens: int
    grids: tuple[tuple[int, int], ...]
    shortest_edge: int | None
    max_pixels: int

    def size(self, height: int, width: int) -> ItemSize:
        """What a picture of that size fills. Raises ``MediaTooLargeError``, field ``file``."""
        num_pixels = self._num_scaled_pixels(height, width)
        if num_pixels > self.max_pixels:
            message = (
                f"a picture of {width} x {height} is scaled to {num_pixels} pixels, at most {self.max_pixels} may be"
            )
            raise MediaTooLargeError(message, field="file")
        if not self.grids:
            return ItemSize(self.num_tile_tokens, MediaGrid(self.tile_edge, self.tile_edge), height * width)
        return ItemSize(self.num_tile_tokens + self._num_grid_tokens(height, width), None, height * width)

    @property
    def max_item_tokens(self) -> int:
        """What no picture exceeds."""
        grids = (
            (height // self.edge * self.tile_edge, width // self.edge * self.tile_edge) for height, width in self.grids
        )
        return self.num_tile_tokens + max((rows * columns + rows for rows, columns in grids), default=0)

    def _num_scaled_pixels(self, height: int, width: int) -> int:
        if self.grids or self.shortest_edge is None:
            return height * width
        return max(height * width, self.shortest_edge**2 * max(height, width) // min(height, width))

    def _num_grid_tokens(self, height: int, width: int) -> int:
        """Of the parts, without those that only pad them, and with a newline after each row."""
        grid_height, grid_width = self._best_grid(height, width)
        rows, columns = grid_height // self.edge * self.tile_edge, grid_width // self.edge * self.tile_edge
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        return rows * columns + rows

    def _best_grid(self, height: int, width: int) -> tuple[int, int]:
        """Where most of the picture is left, and of those the one with the least padding."""

        def merit(grid: tuple[int, int]) -> tuple[int, int]:
            scale = min(grid[1] / width, grid[0] / height)
            num_pixels = min(int(width * scale) * int(height * scale), width * height)
            return num_pixels, num_pixels - grid[0] * grid[1]

        return max(self.grids, key=merit)


def read_picture_sizes(config: Mapping[str, Any], preprocessor: Mapping[str, Any], *, max_pixels: int) -> PictureSizes:
    """Of a checkpoint's ``config.json`` and ``preprocessor_config.json``.

    Raises:
        InvalidRequestError: field ``model``: what they say is not what is counted here.
    """
    model_type = config.get("model_type")
    if model_type not in SIZED_MODEL_TYPES:
        raise _refusal(f"model type {model_type!r}, only {' and '.join(SIZED_MODEL_TYPES)}")
    tower = config.get("vision_config")
    tower = tower if isinstance(tower, Mapping) else {}
    tower_type = tower.get("model_type", "clip_vision_model")
    if tower_type not in _TOWERS:
        raise _refusal(f"vision tower {tower_type!r}, only {', '.join(_TOWERS)}")
    edge, patch_size = (
        _edge(tower.get("image_size", 336), "image_size"),
        _edge(tower.get("patch_size", 14), "patch_size"),
    )
    tile_edge = edge // patch_size
    strategy = config.get("vision_feature_select_strategy", "default")
    has_class_row = tower_type in _TOWERS_WITH_CLASS_ROW
    num_tokens = tile_edge**2
    if strategy == "full":
        num_tokens += has_class_row
    elif strategy != "default" or not has_class_row:
        raise _refusal(f"vision_feature_select_strategy {strategy!r} with the tower {tower_type!r}")
    grids = _grids(config, preprocessor, edge) if model_type == "llava_next" else ()
    if grids and num_tokens != tile_edge**2:
        raise _refusal("parts of pictures with a row for the whole of each")
    return PictureSizes(
        edge=edge,
        tile_edge=tile_edge,
        num_tile_tokens=num_tokens,
        grids=grids,
        shortest_edge=_shortest_edge(preprocessor, edge),
        max_pixels=max_pixels,
    )


def _grids(config: Mapping[str, Any], preprocessor: Mapping[str, Any], edge: int) -> tuple[tuple[int, int], ...]:
    named = config.get("image_grid_pinpoints")
    pairs = named if isinstance(named, list) else []
    grids = tuple((pair[0], pair[1]) for pair in pairs if isinstance(pair, list) and [*map(type, pair)] == [int, int])
    if not grids or len(grids) != len(pairs) or any(size % edge or size < edge for grid in grids for size in grid):
        raise _refusal(f"image_grid_pinpoints that are not of whole tiles of {edge} pixels")
    if sorted(preprocessor.get("image_grid_pinpoints", ())) != sorted(pairs):
        raise _refusal("an image processor that cuts pictures to other grids than the model")
    return grids


def _shortest_edge(preprocessor: Mapping[str, Any], edge: int) -> int | None:
    """Checks on the way that what comes of a picture is a tile, as these processors have it."""
    size = preprocessor.get("size", {})
    size = {"shortest_edge": size} if isinstance(size, int) else size
    shortest_edge = size.get("shortest_edge") if preprocessor.get("do_resize", True) else None
    is_cropped = preprocessor.get("do_center_crop", shortest_edge is not None)
    made = preprocessor.get("crop_size", size) if is_cropped else size
    made = {"height": made, "width": made} if isinstance(made, int) else made
    if made.get("height") != edge or made.get("width") != edge:
        raise _refusal(f"an image processor whose tiles are not of {edge} x {edge} pixels")
    return None if shortest_edge is None else _edge(shortest_edge, "size.shortest_edge")


def _edge(value: Any, name: str) -> int:
    if type(value) is not int or not 0 < value <= _MAX_EDGE:
        raise _refusal(f"{name} {value!r}")
    return value


def _refusal(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"how many tokens pictures fill is not known for {what}", field="model")
