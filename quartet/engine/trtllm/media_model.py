"""What the adapter knows of the media of a checkpoint before TensorRT-LLM has loaded anything.

``PictureSizes`` counts the tokens of pictures by arithmetic, for model types whose pictures are one run of
placeholders: as transformers' ``processing_llava_next`` counts, which TensorRT-LLM uses too. It needs no library, so a
router knows sizes before anything is computed. ``TrtllmSizer`` sizes the files that TensorRT-LLM reads by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from PIL import Image

from quartet.engine.encoder import EncoderCapabilities, ItemSize
from quartet.engine.media.file_sizer import FileSizer, check_scaled_size
from quartet.engine.media.rows_encoder import RowsReader
from quartet.engine.media_config import (
    MediaConfig,
    make_embedding_memory,
    read_media_config,
    shared_item_tokens,
)
from quartet.engine.trtllm.arguments import merge_layers
from quartet.errors import ConfigError, InvalidRequestError
from quartet.kvcache.layout import DTYPE_SIZE_BYTES, EmbeddingLayout
from quartet.media.items import MediaFile, MediaGrid, MediaKind
from quartet.text import model_files
from quartet.text.tokenizer import Tokenizer
from quartet.transfer.base import EmbeddingMemory

if TYPE_CHECKING:
    from quartet.engine.settings import EngineSettings, EngineSpec

_PREPROCESSOR, _PROCESSOR = "preprocessor_config.json", "processor_config.json"

# TensorRT-LLM's own default, if a checkpoint says nothing.
_DEFAULT_DTYPE = "bfloat16"

#: Model types whose pictures' sizes are known here.
SIZED_MODEL_TYPES = ("llava", "llava_next")

# Model types whose input processors are known to leave ``mm_processor_kwargs`` unread.
_WITHOUT_PROCESSOR_KWARGS = ("llava_next", "llama4")

# Model types whose embeddings TensorRT-LLM wants with the places of special tokens among them, which no file tells.
_WITHOUT_EMBEDDINGS = ("llama4",)

# Towers with a row for the whole picture before those of the patches.
_TOWERS_WITH_CLASS_ROW = ("clip_vision_model", "chinese_clip_vision_model")

_TOWERS = (*_TOWERS_WITH_CLASS_ROW, "siglip_vision_model")

_MAX_EDGE = 1 << 16


@dataclass(frozen=True, kw_only=True)
class MediaModel:
    """A model that takes pictures.

    Attributes:
        placeholder: the text of its placeholder.
        tokenizer: the tokenizer of prompts.
        dtype: the dtype of embeddings, by its PyTorch name.
        sizes: the sizes of pictures; ``None``: they are not known for models of this type.
        max_item_tokens: tokens that one item may fill.
        max_pixels: pixels that one picture may have.
        processor_kwargs: what TensorRT-LLM's picture processor is given beside pictures.
    """

    config: MediaConfig
    settings: EngineSettings
    placeholder: str
    tokenizer: Tokenizer
    dtype: str
    sizes: PictureSizes | None
    max_item_tokens: int
    max_pixels: int
    processor_kwargs: Mapping[str, object] = field(default_factory=dict)

    @property
    def kinds(self) -> frozenset[MediaKind]:
        """The kinds of files that TensorRT-LLM can be given."""
        kinds = {MediaKind.IMAGE}
        if self.config.model_type not in _WITHOUT_EMBEDDINGS:
            kinds.add(MediaKind.EMBEDDINGS)
        return frozenset(kinds)

    def picture_inputs(self, pictures: Sequence[Image.Image]) -> dict[str, object]:
        """``pictures`` as ``generate_async`` takes them beside a prompt."""
        options = {"mm_processor_kwargs": dict(self.processor_kwargs)} if self.processor_kwargs else {}
        return {"multi_modal_data": {"image": list(pictures)}, **options}

    def make_memory(self, model_fingerprint: str) -> EmbeddingMemory:
        """A pool of embeddings, as the settings say."""
        layout = EmbeddingLayout(
            model_fingerprint=model_fingerprint,
            dtype=self.dtype,
            hidden_size=self.config.hidden_size,
            block_size=self.settings.block_size,
        )
        return make_embedding_memory(layout, self.settings.num_embedding_blocks)

    def capabilities(self, kinds: frozenset[MediaKind], model_fingerprint: str) -> EncoderCapabilities:
        """The capabilities of an encoder, or sizer, of files of ``kinds``."""
        return EncoderCapabilities(
            kinds=kinds,
            model_fingerprint=model_fingerprint,
            preprocessing_fingerprint=self.config.preprocessing_fingerprint,
            max_item_tokens=self.max_item_tokens,
        )

    def sizer(self) -> FileSizer:
        """Sizes the model's files."""
        return FileSizer(
            rows=RowsReader(self.config.hidden_size, self.max_item_tokens),
            picture_size=None if self.sizes is None else self.sizes.size,
            max_pixels=self.max_pixels,
        )

    def need_embeddings(self, field: str) -> None:
        """Raise ``ConfigError``, which names the setting ``field``, if TensorRT-LLM can be given no embeddings."""
        if MediaKind.EMBEDDINGS not in self.kinds:
            message = f"embeddings for models of type {self.config.model_type} are not supported"
            raise ConfigError(f"{field}: {message}")

    def need_sizes(self, field: str) -> PictureSizes:
        """The sizes of pictures. Raises ``ConfigError``, which names the setting ``field``: they are not known."""
        if self.sizes is None:
            known = " and ".join(SIZED_MODEL_TYPES)
            message = f"pictures of models of type {self.config.model_type} are not supported, only those of {known}"
            raise ConfigError(f"{field}: {message}")
        return self.sizes


def read_media_model(spec: EngineSpec) -> MediaModel | None:
    """Read the media model of ``spec``; ``None``: the model takes text only.

    Raises:
        ConfigError: ``engine.num_embedding_blocks``: the largest picture has no room; ``engine.mm_processor_kwargs``:
            TensorRT-LLM does not read them for this model.
        ModelFilesError: a file is missing or malformed.
        InvalidRequestError: field ``model``: the checkpoint lacks something needed, or contradicts itself.
    """
    config = read_media_config(spec.model_path)
    if config is None:
        return None
    if spec.engine.mm_processor_kwargs and config.model_type in _WITHOUT_PROCESSOR_KWARGS:
        message = f"TensorRT-LLM does not read them for models of type {config.model_type}"
        raise ConfigError(f"engine.mm_processor_kwargs: {message}")
    tokenizer = Tokenizer.from_files(config.files)
    placeholder = tokenizer.token_text(config.placeholder_id)
    if placeholder is None:
        raise InvalidRequestError("the tokenizer lacks the placeholder of pictures", field="model")
    sizes = None
    if config.model_type in SIZED_MODEL_TYPES:
        processor = {**_preprocessor(config), **spec.engine.mm_processor_kwargs}
        sizes = read_picture_sizes(config.config, processor, max_pixels=spec.encoder.max_pixels)
    asked = spec.engine.dtype
    return MediaModel(
        config=config,
        settings=spec.engine,
        placeholder=placeholder,
        tokenizer=tokenizer,
        dtype=asked if asked in DTYPE_SIZE_BYTES else config.dtype or _DEFAULT_DTYPE,
        sizes=sizes,
        max_item_tokens=_max_item_tokens(spec.engine, sizes),
        max_pixels=spec.encoder.max_pixels,
        processor_kwargs=spec.engine.mm_processor_kwargs,
    )


def need_media_model(spec: EngineSpec) -> MediaModel:
    """As ``read_media_model``, but raises ``InvalidRequestError`` if the model takes text only."""
    model = read_media_model(spec)
    if model is None:
        raise InvalidRequestError("config.json names no vision tower: the model takes text only", field="model")
    return model


def kv_dtype(settings: EngineSettings) -> str:
    """The KV cache's dtype, as ``LlmArguments.kv_dtype``; an encode worker uses it only in its fingerprint."""
    arguments, _ = merge_layers(settings)
    return arguments.kv_dtype


@dataclass(frozen=True, kw_only=True)
class PictureSizes:
    """The sizes of one model's pictures.

    Attributes:
        edge: pixels along the edge of a tile, which is square.
        tile_edge: patches along the edge of a tile.
        num_tile_tokens: tokens that the whole picture fills, scaled to one tile.
        grids: heights and widths, in pixels, to which a picture may also be cut up; empty: it is never cut up.
        shortest_edge: pixels to which a picture's shorter edge is scaled before the picture is cropped to a tile;
            ``None``: the picture as a whole is scaled to the tile.
        max_pixels: pixels that a picture may have, also after it is scaled.
    """

    edge: int
    tile_edge: int
    num_tile_tokens: int
    grids: tuple[tuple[int, int], ...]
    shortest_edge: int | None
    max_pixels: int

    def size(self, height: int, width: int) -> ItemSize:
        """The size in tokens of a picture of these pixels. Raises ``MediaTooLargeError``, field ``file``."""
        check_scaled_size(height, width, self._num_scaled_pixels(height, width), self.max_pixels)
        if not self.grids:
            return ItemSize(self.num_tile_tokens, MediaGrid(self.tile_edge, self.tile_edge), height * width)
        return ItemSize(self.num_tile_tokens + self._num_grid_tokens(height, width), None, height * width)

    @property
    def max_item_tokens(self) -> int:
        """The number of tokens that no picture exceeds."""
        grids = (
            (height // self.edge * self.tile_edge, width // self.edge * self.tile_edge) for height, width in self.grids
        )
        return self.num_tile_tokens + max((rows * columns + rows for rows, columns in grids), default=0)

    def _num_scaled_pixels(self, height: int, width: int) -> int:
        if self.grids or self.shortest_edge is None:
            return height * width
        return max(height * width, self.shortest_edge**2 * max(height, width) // min(height, width))

    def _num_grid_tokens(self, height: int, width: int) -> int:
        """Tokens of the parts, without those that are only padding, and with a newline after each row."""
        grid_height, grid_width = self._best_grid(height, width)
        rows, columns = grid_height // self.edge * self.tile_edge, grid_width // self.edge * self.tile_edge
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        return rows * columns + rows

    def _best_grid(self, height: int, width: int) -> tuple[int, int]:
        """The grid that keeps most of the picture; among equal ones, the grid with the least padding."""

        def merit(grid: tuple[int, int]) -> tuple[int, int]:
            scale = min(grid[1] / width, grid[0] / height)
            num_pixels = min(int(width * scale) * int(height * scale), width * height)
            return num_pixels, num_pixels - grid[0] * grid[1]

        return max(self.grids, key=merit)


def read_picture_sizes(config: Mapping[str, Any], preprocessor: Mapping[str, Any], *, max_pixels: int) -> PictureSizes:
    """Read the sizes from a checkpoint's ``config.json`` and ``preprocessor_config.json``.

    Raises:
        InvalidRequestError: field ``model``: ``PictureSizes`` can't count pictures of this model.
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


class TrtllmSizer:
    """See ``MediaSizer``."""

    def __init__(self, model: MediaModel) -> None:
        """Size pictures and embeddings."""
        # The worker has reported its engine's fingerprint already, and any other one would be wrong.
        self.capabilities: EncoderCapabilities = model.capabilities(model.kinds, model_fingerprint="")
        self._sizer = model.sizer()

    async def size(self, file: MediaFile) -> ItemSize:
        """See ``MediaSizer``."""
        return await asyncio.to_thread(self._sizer.size, file)


def create_sizer(spec: EngineSpec) -> TrtllmSizer:
    """The sizer of the model of ``spec``.

    Raises:
        ConfigError, ModelFilesError, InvalidRequestError: see ``read_media_model``.
    """
    return TrtllmSizer(need_media_model(spec))


def _preprocessor(config: MediaConfig) -> Mapping[str, Any]:
    """The image processor's settings; newer releases of transformers write them into the processor's file."""
    found = model_files.parse_json_file(config.files, _PREPROCESSOR)
    within = model_files.parse_json_file(config.files, _PROCESSOR).get("image_processor")
    return within if not found and isinstance(within, Mapping) else found


def _max_item_tokens(settings: EngineSettings, sizes: PictureSizes | None) -> int:
    num_blocks, block_size = settings.num_embedding_blocks, settings.block_size
    if sizes is None:
        return shared_item_tokens(num_blocks=num_blocks, block_size=block_size)
    if sizes.max_item_tokens > num_blocks * block_size:
        message = f"{num_blocks} hold {num_blocks * block_size} tokens, one item may fill {sizes.max_item_tokens}"
        raise ConfigError(f"engine.num_embedding_blocks: {message}")
    return sizes.max_item_tokens


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
    """Read the shortest edge; also check that the processor makes one tile of a picture, as these processors do."""
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
