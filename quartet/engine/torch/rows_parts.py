"""The pool of an encode worker whose vision tower is not loaded, as it takes embeddings alone."""

from __future__ import annotations

from quartet.engine.encoder import EncoderCapabilities
from quartet.engine.fingerprint import model_fingerprint
from quartet.engine.media.rows_encoder import RowsParts
from quartet.engine.media_config import make_embedding_memory, read_media_config, shared_item_tokens
from quartet.engine.torch.encoder_config import TorchEncoderConfig
from quartet.errors import InvalidRequestError
from quartet.kvcache.layout import EmbeddingLayout
from quartet.media.items import MediaKind


def make_rows_parts(config: TorchEncoderConfig) -> RowsParts:
    """Of a checkpoint whose tower is not loaded: a pool as ``config`` says.

    Raises:
        ModelFilesError: a file is missing or malformed.
        InvalidRequestError: field ``model``: it takes text only; ``dtype``: nothing says it.
    """
    media = read_media_config(config.model_path)
    if media is None:
        raise InvalidRequestError("config.json names no vision tower: the model takes text only", field="model")
    dtype = media.dtype if config.dtype == "auto" else config.dtype
    if dtype is None:
        raise InvalidRequestError("config.json does not say the dtype of embeddings", field="dtype")
    layout = EmbeddingLayout(
        model_fingerprint=model_fingerprint(config.model_path, dtype),
        dtype=dtype,
        hidden_size=media.hidden_size,
        block_size=config.block_size,
    )
    capabilities = EncoderCapabilities(
        kinds=frozenset({MediaKind.EMBEDDINGS}),
        model_fingerprint=layout.model_fingerprint,
        preprocessing_fingerprint=media.preprocessing_fingerprint,
        max_item_tokens=config.max_item_tokens
        or shared_item_tokens(num_blocks=config.num_blocks, block_size=config.block_size),
    )
    return RowsParts(capabilities, make_embedding_memory(layout, config.num_blocks))
