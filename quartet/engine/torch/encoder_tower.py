"""The vision tower on its thread, with the pool that it writes to, and ``FileReader``, which prepares files for it.

Worker threads call ``FileReader``, so it keeps no state.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import torch
from PIL import Image

from quartet.engine.encoder import EncoderCapabilities, ItemSize
from quartet.engine.fingerprint import model_fingerprint
from quartet.engine.media.embeddings import EmbeddingPoolView
from quartet.engine.media.file_sizer import FileSizer
from quartet.engine.media.rows_encoder import RowsReader, check_blocks
from quartet.engine.torch.config import TorchEncoderConfig
from quartet.engine.torch.encoder_jobs import Passenger, Prepared, RunTimes
from quartet.engine.torch.pool import reserve_embeddings
from quartet.engine.torch.vision import Pixels, create_vision
from quartet.errors import EngineError, InvalidRequestError
from quartet.kvcache.layout import EmbeddingLayout
from quartet.media.image_file import decode
from quartet.media.items import MediaFile, MediaKind
from quartet.media.media_id import PREPROCESSING_FILES, preprocessing_fingerprint
from quartet.transfer.base import EmbeddingMemory

_LOG = logging.getLogger(__name__)


class Vision(Protocol):
    """A vision tower, as the encoder needs it; ``quartet.engine.torch.vision`` makes one from a checkpoint."""

    dtype: str
    hidden_size: int
    max_item_tokens: int

    def size(self, height: int, width: int) -> ItemSize:
        """The tokens that a picture of that size fills. Raises ``MediaTooLargeError``, field ``file``."""
        ...

    def pixels(self, picture: Image.Image) -> Pixels:
        """Preprocess an RGB picture."""
        ...

    def encode(self, pictures: Sequence[Pixels]) -> list[torch.Tensor]:
        """Embeddings of each picture, ``[num_tokens, hidden_size]``. Called on the tower's thread only."""
        ...


#: Loads and warms up a vision tower, on the calling thread.
LoadVision: TypeAlias = Callable[[TorchEncoderConfig], Vision]


@dataclass(frozen=True, kw_only=True)
class Tower:
    """A vision tower, loaded and warm, and its pool.

    Attributes:
        memory: of ``pool``.
    """

    vision: Vision
    reader: FileReader
    memory: EmbeddingMemory
    pool: EmbeddingPoolView
    capabilities: EncoderCapabilities

    def run(self, batch: Sequence[Passenger]) -> RunTimes:
        """Encode the pictures of ``batch`` at once, and write all items to their blocks: they are there at the end.

        If the device has no room for that, items are run one by one; ``RunTimes.unfit`` names those that do not fit
        even alone, which are not written.
        """
        began_at = time.monotonic()
        unfit: list[int] = []
        if not self._has_run(batch):
            unfit = [index for index, item in enumerate(batch) if not self._has_run([item])]
        return RunTimes(began_at, time.monotonic() - began_at, frozenset(unfit))

    def _has_run(self, batch: Sequence[Passenger]) -> bool:
        """Run ``batch``; false: the device had no room for it."""
        try:
            self._encode(batch)
        except torch.OutOfMemoryError as error:
            _LOG.warning("no room on the device to encode %d items: %s", len(batch), error)
        else:
            return True
        # Not in the handler: there the exception's frames still hold the tensors of the run.
        torch.cuda.empty_cache()  # does nothing without CUDA
        return False

    def _encode(self, batch: Sequence[Passenger]) -> None:
        pictures = [item.prepared for item in batch if isinstance(item.prepared, Pixels)]
        encoded = iter(self.vision.encode(pictures) if pictures else ())
        for item in batch:
            rows = item.prepared if isinstance(item.prepared, torch.Tensor) else next(encoded)
            self.pool.write(item.block_ids, rows)


def load_tower(
    config: TorchEncoderConfig, embeddings: EmbeddingMemory | None, load: LoadVision = create_vision
) -> Tower:
    """Load on the calling thread; reserve a pool on the tower's device if none is given.

    Raises:
        InvalidRequestError: field ``model``, ``device`` or ``num_blocks``: it can't run with this value.
        EngineError: the checkpoint is damaged, or the given pool has another layout.
    """
    vision = load(config)
    layout = EmbeddingLayout(
        model_fingerprint=model_fingerprint(config.model_path, vision.dtype, config.random_seed),
        dtype=vision.dtype,
        hidden_size=vision.hidden_size,
        block_size=config.block_size,
    )
    if embeddings is not None and embeddings.layout != layout:
        raise EngineError(f"the encoder writes {layout}, and the pool is for {embeddings.layout}")
    max_item_tokens = config.max_item_tokens or vision.max_item_tokens
    num_blocks = config.num_blocks if embeddings is None else embeddings.memory.num_blocks
    if max_item_tokens > num_blocks * config.block_size:
        message = (
            f"{num_blocks} blocks hold {num_blocks * config.block_size} tokens, one item may fill {max_item_tokens}"
        )
        raise InvalidRequestError(message, field="num_blocks")
    memory = embeddings or reserve_embeddings(layout, num_blocks, torch.device(config.device))
    return Tower(
        vision=vision,
        reader=FileReader(
            rows=RowsReader(layout.hidden_size, max_item_tokens),
            picture_size=vision.size,
            max_pixels=config.max_pixels,
            vision=vision,
            layout=layout,
        ),
        memory=memory,
        pool=EmbeddingPoolView(memory),
        capabilities=EncoderCapabilities(
            kinds=frozenset(config.kinds),
            model_fingerprint=layout.model_fingerprint,
            preprocessing_fingerprint=_preprocessing_fingerprint(Path(config.model_path)),
            max_item_tokens=max_item_tokens,
        ),
    )


def _preprocessing_fingerprint(directory: Path) -> bytes:
    paths = [directory / name for name in PREPROCESSING_FILES]
    return preprocessing_fingerprint({path.name: path.read_bytes() for path in paths if path.is_file()})


@dataclass(frozen=True, kw_only=True)
class FileReader(FileSizer):
    """Sizes and prepares files for one vision tower.

    Attributes:
        layout: of the pool.
    """

    vision: Vision
    layout: EmbeddingLayout

    def prepare(self, file: MediaFile, num_blocks: int) -> Prepared:
        """Decode and preprocess ``file`` for ``num_blocks`` blocks.

        Raises:
            InvalidMediaError: field ``file``; it is damaged, or fills another number of blocks.
            MediaTooLargeError: field ``file``.
        """
        # Check the size first: that is cheap, and decoding many pixels is not.
        check_blocks(self.size(file).num_tokens, self.layout.block_size, num_blocks)
        if file.kind is MediaKind.EMBEDDINGS:
            return self.rows.read(file, self.layout.dtype)
        return self.vision.pixels(decode(file.data, max_pixels=self.max_pixels))
