"""What the adapter knows of the media of a checkpoint, before TensorRT-LLM has loaded anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quartet.engine.encoder import EncoderCapabilities
from quartet.engine.media_config import (
    MediaConfig,
    make_embedding_memory,
    read_media_config,
    shared_item_tokens,
)
from quartet.engine.trtllm.layers import merge_layers
from quartet.engine.trtllm.picture_sizes import SIZED_MODEL_TYPES, PictureSizes, read_picture_sizes
from quartet.errors import ConfigError, InvalidRequestError
from quartet.kvcache.layout import DTYPE_SIZE_BYTES, EmbeddingLayout
from quartet.media.items import MediaKind
from quartet.text import model_files
from quartet.text.tokenizer import Tokenizer
from quartet.transfer.base import EmbeddingMemory

if TYPE_CHECKING:
    from quartet.engine.catalog import EngineSpec
    from quartet.engine.settings import EngineSettings

_PREPROCESSOR, _PROCESSOR = "preprocessor_config.json", "processor_config.json"
# TensorRT-LLM's own, where a checkpoint says nothing.
_DEFAULT_DTYPE = "bfloat16"


@dataclass(frozen=True, kw_only=True)
class MediaModel:
    """A model that sees.

    Attributes:
        placeholder: the text of its placeholder.
        tokenizer: that of prompts.
        dtype: of embeddings, by its PyTorch name.
        sizes: of pictures; ``None``: they are not known for models of this type.
        max_item_tokens: tokens that one item may fill.
        max_pixels: of one picture.
    """

    config: MediaConfig
    settings: EngineSettings
    placeholder: str
    tokenizer: Tokenizer
    dtype: str
    sizes: PictureSizes | None
    max_item_tokens: int
    max_pixels: int

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
        """Of what encodes, or sizes, files of ``kinds``."""
        return EncoderCapabilities(
            kinds=kinds,
            model_fingerprint=model_fingerprint,
            preprocessing_fingerprint=self.config.preprocessing_fingerprint,
            max_item_tokens=self.max_item_tokens,
        )

    def need_sizes(self, field: str) -> PictureSizes:
        """Of pictures. Raises ``ConfigError`` naming the setting that takes them: they are not known."""
        if self.sizes is None:
            known = " and ".join(SIZED_MODEL_TYPES)
            message = f"pictures of models of type {self.config.model_type} are not supported, only those of {known}"
            raise ConfigError(f"{field}: {message}")
        return self.sizes


def read_media_model(spec: EngineSpec) -> MediaModel | None:
    """That of ``spec``; ``None``: it takes text only.

    Raises:
        ConfigError: ``engine.num_embedding_blocks``: the largest picture has no room.
        ModelFilesError: a file is missing or malformed.
        InvalidRequestError: field ``model``: the checkpoint leaves out what is needed, or contradicts itself.
    """
    config = read_media_config(spec.model_path)
    if config is None:
        return None
    tokenizer = Tokenizer.from_files(config.files)
    placeholder = tokenizer.token_text(config.placeholder_id)
    if placeholder is None:
        raise InvalidRequestError("the tokenizer lacks the placeholder of pictures", field="model")
    sizes = None
    if config.model_type in SIZED_MODEL_TYPES:
        sizes = read_picture_sizes(config.config, _preprocessor(config), max_pixels=spec.encoder.max_pixels)
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
    )


def need_media_model(spec: EngineSpec) -> MediaModel:
    """That of ``spec``. Raises as ``read_media_model`` does; ``InvalidRequestError`` also where it takes text only."""
    model = read_media_model(spec)
    if model is None:
        raise InvalidRequestError("config.json names no vision tower: the model takes text only", field="model")
    return model


def kv_dtype(settings: EngineSettings) -> str:
    """Of the KV cache, as ``LlmArguments.kv_dtype``, which an encode worker has in its name and nowhere else."""
    arguments, _ = merge_layers(settings)
    return arguments.kv_dtype


def _preprocessor(config: MediaConfig) -> Mapping[str, Any]:
    """What makes pictures into pixels; newer releases of transformers write it into the processor's file."""
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
