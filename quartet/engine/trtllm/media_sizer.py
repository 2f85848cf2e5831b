"""Sizes the media files that TensorRT-LLM reads by itself: a ``MediaSizer``, and how an encoder sizes its own."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from quartet.engine.encoder import EncoderCapabilities, ItemSize
from quartet.engine.media.rows_encoder import RowsReader
from quartet.engine.trtllm.media_model import MediaModel, need_media_model
from quartet.errors import MediaTooLargeError
from quartet.media.image_file import read_header
from quartet.media.items import MediaFile, MediaKind

if TYPE_CHECKING:
    from quartet.engine.catalog import EngineSpec


class FileSizes:
    """Of one model's files. May be called on any thread."""

    def __init__(self, model: MediaModel) -> None:
        self._model = model
        self._rows = RowsReader(model.config.hidden_size, model.max_item_tokens)

    def size(self, file: MediaFile) -> ItemSize:
        """What ``file`` fills, from its header; 0 tokens: unknown. Raises as ``MediaSizer.size`` does."""
        if file.kind is MediaKind.EMBEDDINGS:
            return self._rows.size(file)
        header = read_header(file.data, max_pixels=self._model.max_pixels)
        if self._model.sizes is None:
            return ItemSize(0, None, header.height * header.width)
        size = self._model.sizes.size(header.height, header.width)
        if size.num_tokens > self._model.max_item_tokens:
            message = f"the picture fills {size.num_tokens} tokens, one item may fill {self._model.max_item_tokens}"
            raise MediaTooLargeError(message, field="file")
        return replace(size, num_pixels=header.height * header.width)


class TrtllmSizer:
    """See ``MediaSizer``."""

    def __init__(self, model: MediaModel) -> None:
        """Size pictures and embeddings."""
        # Whose worker this is has told the fingerprint already, and another one than its engine's would be wrong.
        self.capabilities: EncoderCapabilities = model.capabilities(frozenset(MediaKind), model_fingerprint="")
        self._sizes = FileSizes(model)

    async def size(self, file: MediaFile) -> ItemSize:
        """See ``MediaSizer``."""
        return await asyncio.to_thread(self._sizes.size, file)


def create_sizer(spec: EngineSpec) -> TrtllmSizer:
    """The sizer of the model of ``spec``.

    Raises:
        ConfigError, ModelFilesError, InvalidRequestError: see ``read_media_model``.
    """
    return TrtllmSizer(need_media_model(spec))
