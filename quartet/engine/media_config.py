"""The media of a model, as its checkpoint's small files describe them; needs no model library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quartet.errors import InvalidRequestError
from quartet.kvcache.layout import DTYPE_SIZE_BYTES, EmbeddingLayout
from quartet.media.media_id import preprocessing_fingerprint
from quartet.text import model_files
from quartet.text.tokenizer import Tokenizer
from quartet.transfer.base import EmbeddingMemory, PoolMemory

# One item may fill this part of a pool, so that several requests' items fit at once.
_ITEM_SHARE = 4


@dataclass(frozen=True, kw_only=True)
class MediaConfig:
    """The configuration of a model that takes media.

    Attributes:
        model_type: as ``config.json`` has it.
        placeholder_id: the token that stands for media.
        hidden_size: of embeddings.
        dtype: of the checkpoint, by its PyTorch name; ``None``: no file says it.
        preprocessing_fingerprint: as ``quartet.media.media_id`` makes it.
        files: the small files, by name.
    """

    model_type: str
    placeholder_id: int
    hidden_size: int
    dtype: str | None
    preprocessing_fingerprint: bytes
    files: Mapping[str, bytes]

    @property
    def config(self) -> Mapping[str, Any]:
        """The content of ``config.json``."""
        return model_files.parse_json_file(self.files, model_files.CONFIG)


def read_media_config(model_path: str) -> MediaConfig | None:
    """The media configuration of a checkpoint; ``None``: it takes text only.

    Raises:
        ModelFilesError: a file is missing or malformed.
        InvalidRequestError: field ``model``; ``config.json`` lacks a needed entry.
    """
    files = model_files.read_text_files(Path(model_path))
    config = model_files.parse_json_file(files, model_files.CONFIG)
    placeholder_id = model_files.placeholder(config, lambda text: Tokenizer.from_files(files).token_to_id(text))
    if placeholder_id is None:
        return None
    text_config = config.get("text_config")
    configs = [text_config, config] if isinstance(text_config, Mapping) else [config]
    hidden_size = next((one["hidden_size"] for one in configs if "hidden_size" in one), None)
    if type(placeholder_id) is not int or type(hidden_size) is not int or hidden_size < 1:
        raise InvalidRequestError("config.json has no image_token_index with a hidden_size", field="model")
    dtypes = [one.get(name) for one in configs for name in ("dtype", "torch_dtype")]
    return MediaConfig(
        model_type=str(config.get("model_type")),
        placeholder_id=placeholder_id,
        hidden_size=hidden_size,
        dtype=next((name for name in dtypes if isinstance(name, str) and name in DTYPE_SIZE_BYTES), None),
        preprocessing_fingerprint=preprocessing_fingerprint(files),
        files=files,
    )


def make_embedding_memory(layout: EmbeddingLayout, num_blocks: int) -> EmbeddingMemory:
    """A pool of ``num_blocks`` blocks of embeddings."""
    return EmbeddingMemory(layout, PoolMemory(num_blocks, layout.piece_size_bytes))


def shared_item_tokens(*, num_blocks: int, block_size: int) -> int:
    """Tokens that one item may fill in a pool, for a model whose largest item is unknown."""
    return max(num_blocks * block_size // _ITEM_SHARE, 1)
