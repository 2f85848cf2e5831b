"""A vision tower that takes pictures of any size: pixels, numbers of tokens, and embeddings of a batch.

A picture is a number of tiles, all of one shape: one for LLaVA and VipLLaVA, the whole picture and its parts for
LLaVA-NeXT and LLaVA-OneVision. Tiles of all pictures of a batch go through the tower together, so pictures of all sizes
can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

from quartet.engine.encoder import ItemSize
from quartet.engine.media.file_sizer import check_scaled_size
from quartet.engine.torch.config import TorchEncoderConfig
from quartet.engine.torch.vision_loader import LoadedVision, load_vision
from quartet.errors import InvalidRequestError
from quartet.media.items import MediaGrid

# LLaVA-OneVision leaves a grid as it is until both its edges are this much too long.
_MAX_OVERHANG = 1.1
# Sizes of pictures whose tokens were counted.
_NUM_KNOWN_SIZES = 4096


@dataclass(frozen=True)
class Pixels:
    """A preprocessed picture.

    Attributes:
        tiles: ``[num_tiles, 3, tile height, tile width]``, float32, in host memory.
        height: of the picture itself, in pixels.
        width: of the picture itself, in pixels.
    """

    tiles: torch.Tensor
    height: int
    width: int


class VisionModel:
    """The tower with its projector, and the checkpoint's own image processor. Warmed up on construction.

    Call ``encode`` on one thread only; everything else may be called on any thread.

    Attributes:
        dtype: of the embeddings, by its PyTorch name.
        hidden_size: of the embeddings.
        max_item_tokens: most tokens of a picture.
    """

    def __init__(self, config: TorchEncoderConfig, loaded: LoadedVision) -> None:
        """Encode two pictures to learn the sizes of embeddings.

        Raises:
            InvalidRequestError: field ``model``; its tiles differ in shape, or do not fit the model's grids.
        """
        self.dtype = loaded.dtype
        self.hidden_size = loaded.hidden_size
        self._model: Any = loaded.model  # whose methods are not typed
        self._image_processor: Any = loaded.image_processor
        self._max_pixels = config.max_pixels
        self._device = torch.device(config.device)
        self._vision_config = loaded.model.config.vision_config
        self._pinpoints: list[list[int]] | None = getattr(loaded.model.config, "image_grid_pinpoints", None)
        self._max_grid_tiles = loaded.max_grid_tiles
        self._num_tile_tokens = 0
        self._warm_up()
        # Milliseconds each, and clients' pictures have few sizes.
        self._num_tokens_of = lru_cache(_NUM_KNOWN_SIZES)(self._num_tokens)
        self.max_item_tokens = self._num_tile_tokens + self._max_grid_tokens()

    def size(self, height: int, width: int) -> ItemSize:
        """The tokens that a picture of that size fills.

        Raises:
            MediaTooLargeError: field ``file``; preprocessing would need too much memory.
        """
        check_scaled_size(height, width, self._num_scaled_pixels(height, width), self._max_pixels)
        if self._pinpoints is not None:
            return ItemSize(self._num_tokens_of(height, width), None)
        edge = self._vision_config.image_size // self._vision_config.patch_size
        return ItemSize(self._num_tile_tokens, MediaGrid(edge, edge))

    def pixels(self, picture: Image.Image) -> Pixels:
        """Scale, cut and normalise an RGB picture, as ``AutoProcessor`` without torchvision does."""
        values = self._image_processor(images=picture, return_tensors="np")["pixel_values"]
        tiles = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
        return Pixels(tiles.flatten(0, -4), picture.height, picture.width)

    def encode(self, pictures: Sequence[Pixels]) -> list[torch.Tensor]:
        """Embeddings of each picture, ``[num_tokens, hidden_size]``, on the tower's device."""
        tiles = torch.cat([picture.tiles for picture in pictures]).to(self._device, getattr(torch, self.dtype))
        sizes = {}
        if self._pinpoints is not None:
            sizes["image_sizes"] = [(picture.height, picture.width) for picture in pictures]
        with torch.inference_mode():
            return list(self._model.get_image_features(pixel_values=tiles, **sizes).pooler_output)

    def _warm_up(self) -> None:
        """Run a square and a wide picture: learn the tokens of a tile, and check that all tiles have one shape."""
        grids = getattr(self._image_processor, "image_grid_pinpoints", None)
        if self._pinpoints is not None and sorted(self._pinpoints) != sorted(grids or ()):
            raise InvalidRequestError("the image processor cuts pictures to other grids than the model", field="model")
        edge = int(self._vision_config.image_size)
        self._num_tile_tokens = (edge // self._vision_config.patch_size) ** 2
        pictures = [self.pixels(Image.new("RGB", (width, edge))) for width in (edge, 3 * edge)]
        for picture in pictures:
            if tuple(picture.tiles.shape[1:]) != (3, edge, edge):
                shape = " x ".join(map(str, picture.tiles.shape[1:]))
                message = f"the image processor makes tiles of {shape}, the vision tower takes 3 x {edge} x {edge}"
                raise InvalidRequestError(message, field="model")
        square, wide = (len(rows) for rows in self.encode(pictures))
        if self._pinpoints is None:
            self._num_tile_tokens = square
        expected = [self._num_tokens(picture.height, picture.width) for picture in pictures]
        if [square, wide] != expected:
            message = f"pictures fill {square} and {wide} tokens, not {expected[0]} and {expected[1]}"
            raise InvalidRequestError(message, field="model")

    def _num_tokens(self, height: int, width: int) -> int:
        if self._pinpoints is None:
            return self._num_tile_tokens
        # The model itself packs tensors without memory: only the shape counts.
        num_tiles = image_size_to_num_patches((height, width), self._pinpoints, self._vision_config.image_size)
        features = torch.empty(num_tiles, self._num_tile_tokens, 1, device="meta")
        how = {"vision_feature_select_strategy": self._model.config.vision_feature_select_strategy}
        if self._max_grid_tiles is not None:
            how = {"vision_aspect_ratio": self._model.config.vision_aspect_ratio}
        newline = torch.empty(1, device="meta")
        packed, _ = self._model.pack_image_features([features], [(height, width)], image_newline=newline, **how)
        num_tokens: int = packed[0].shape[0]
        return num_tokens

    def _max_grid_tokens(self) -> int:
        """Most tokens of the parts of a picture, with a newline after each row; 0: pictures are not cut up."""
        edge = self._vision_config.image_size
        tile_edge = edge // self._vision_config.patch_size
        grids = [(height // edge * tile_edge, width // edge * tile_edge) for height, width in self._pinpoints or ()]
        max_cells = max((rows * columns for rows, columns in grids), default=0)
        if self._max_grid_tiles is not None:
            max_cells = min(max_cells, int(_MAX_OVERHANG**2 * self._max_grid_tiles * tile_edge**2))
        return max((min(rows * columns, max_cells) + rows for rows, columns in grids), default=0)

    def _num_scaled_pixels(self, height: int, width: int) -> int:
        """Pixels of the largest intermediate picture: preprocessing scales or pads some pictures up before it cuts."""
        processor = self._image_processor
        if self._pinpoints is not None:
            return height * width  # scaled to one of a few sizes
        if getattr(processor, "pad_to_square", None) is not None and processor.do_pad:
            return max(height, width) ** 2
        shortest_edge = processor.size.shortest_edge if processor.do_resize else None
        if shortest_edge is None or processor.size.longest_edge is not None:
            return height * width
        return max(height * width, int(shortest_edge) ** 2 * max(height, width) // min(height, width))


def create_vision(config: TorchEncoderConfig) -> VisionModel:
    """Load and warm up on the calling thread, which must be the tower's.

    Raises:
        InvalidRequestError: field ``model`` or ``device``; see ``load_vision`` and ``VisionModel``.
        EngineError: the checkpoint is damaged or incomplete.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    # As in matrix products: float32 is no TF32. A picture's embeddings have one name, whichever device computed them.
    torch.backends.cudnn.allow_tf32 = False
    return VisionModel(config, load_vision(config))
