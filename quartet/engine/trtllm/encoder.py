"""A ``MediaEncoder`` on TensorRT-LLM: its ``MultimodalEncoder`` keeps pictures, a pool of ours keeps embeddings.

The model's pictures become states (``StateEncoder``): they stay in the GPU's memory, for one prefill worker of the
same host. Embeddings that clients computed need no GPU: they are blocks, cached, and pulled across hosts. If the sizes
of a model's pictures are unknown, this encoder takes embeddings only, and does not load TensorRT-LLM.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from quartet.engine.encoder import EncoderCapabilities, EncoderStats, EncodeTimes, ItemSize, StateEncoder
from quartet.engine.media.file_sizer import FileSizer
from quartet.engine.media.rows_encoder import RowsEncoder, RowsParts
from quartet.engine.trtllm.arguments import Use, build_objects, llm_arguments
from quartet.engine.trtllm.media_model import MediaModel, kv_dtype, need_media_model
from quartet.engine.trtllm.model_facts import pool_fingerprint
from quartet.engine.trtllm.package import check_installed
from quartet.engine.trtllm.pictures import PictureStates, check_hands_over
from quartet.engine.trtllm.times import TrtllmTimes
from quartet.media.items import MediaFile, MediaKind
from quartet.transfer.base import EmbeddingMemory

if TYPE_CHECKING:
    from quartet.engine.settings import EngineSpec

_LOG = logging.getLogger(__name__)


class TrtllmEncoder:
    """See ``MediaEncoder``. Loads nothing before ``start``."""

    def __init__(self, spec: EngineSpec, times: TrtllmTimes | None = None) -> None:
        """Encode the kinds of files that ``spec`` says; ``times`` bounds the waits.

        Raises:
            ConfigError: names the setting that is not possible.
        """
        self._spec = spec
        self._times = times
        self._arguments = llm_arguments(spec, Use.ENCODE)
        self._states: PictureStates | None = None
        self._rows: RowsEncoder | None = None
        self._sizer: FileSizer | None = None
        self._capabilities: EncoderCapabilities | None = None

    @property
    def capabilities(self) -> EncoderCapabilities:
        """See ``MediaEncoder``."""
        assert self._capabilities is not None, "it has started"
        return self._capabilities

    @property
    def states(self) -> StateEncoder | None:
        """See ``MediaEncoder``."""
        return self._states

    @property
    def embeddings(self) -> EmbeddingMemory:
        """See ``MediaEncoder``."""
        assert self._rows is not None, "it has started"
        return self._rows.embeddings

    @property
    def is_alive(self) -> bool:
        """See ``MediaEncoder``."""
        return self._states is None or self._states.is_alive

    async def start(self) -> None:
        """Load TensorRT-LLM if this encoder takes pictures.

        Raises:
            ConfigError: ``encoder.kinds`` or ``engine.num_embedding_blocks`` does not suit the model.
            ServingError: something else is wrong.
        """
        for warning in self._arguments.warnings:
            _LOG.warning("%s", warning)
        model = await asyncio.to_thread(need_media_model, self._spec)
        kinds = self._kinds(model)
        fingerprint = await asyncio.to_thread(pool_fingerprint, self._spec.model_path, kv_dtype(self._spec.engine))
        self._capabilities = model.capabilities(kinds, fingerprint)
        rows = model.capabilities(frozenset({MediaKind.EMBEDDINGS}), fingerprint)
        self._rows = RowsEncoder(lambda: RowsParts(rows, model.make_memory(fingerprint)))
        self._sizer = model.sizer()
        await self._rows.start()
        if MediaKind.IMAGE in kinds:
            check_installed()
            batch_size = self._arguments.max_batch_size or self._spec.encoder.max_batch_size
            self._states = PictureStates(model, self._load, batch_size, self._times)
            await self._states.start()

    async def size(self, file: MediaFile) -> ItemSize:
        """See ``MediaEncoder``."""
        assert self._sizer is not None, "it has started"
        return await asyncio.to_thread(self._sizer.size, file)

    async def encode(self, file: MediaFile, block_ids: Sequence[int]) -> EncodeTimes:
        """See ``MediaEncoder``."""
        assert self._rows is not None, "it has started"
        return await self._rows.encode(file, block_ids)

    def stats(self) -> EncoderStats:
        """See ``MediaEncoder``."""
        rows = EncoderStats() if self._rows is None else self._rows.stats()
        return rows if self._states is None else rows.plus(**asdict(self._states.stats))

    async def close(self) -> None:
        """See ``MediaEncoder``."""
        if self._states is not None:
            await self._states.close()
        if self._rows is not None:
            await self._rows.close()

    def _kinds(self, model: MediaModel) -> frozenset[MediaKind]:
        asked = self._spec.encoder.kinds
        kinds = frozenset(asked or ({MediaKind.EMBEDDINGS} if model.sizes is None else MediaKind))
        if MediaKind.IMAGE in kinds:
            model.need_sizes("encoder.kinds")
        if MediaKind.EMBEDDINGS in kinds:
            model.need_embeddings("encoder.kinds")
        return kinds

    def _load(self) -> Any:
        from tensorrt_llm import MultimodalEncoder

        encoder = MultimodalEncoder(**build_objects(self._arguments))
        check_hands_over(encoder)
        return encoder
