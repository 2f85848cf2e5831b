"""The vision tower on its thread, with the pool that it writes to, and ``FileReader``, which prepares files for it.

Worker threads call ``FileReader``, so it keeps no state.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeAlias

import torch
from PIL import Image

from quartet.engine.encoder import EncoderCapabilities, ItemSize
from quartet.engine.fingerprint import model_fingerprint
from quartet.engine.media.embeddings import EmbeddingPoolView
from quartet.engine.media.rows_file import RowsHeader, read_rows, read_rows_header
from quartet.engine.torch.encoder_config import TorchEncoderConfig
from quartet.engine.torch.encoder_jobs import Passenger, Prepared, RunTimes
from quartet.engine.torch.vision import Pixels, create_vision
from quartet.errors import EngineError, InvalidMediaError, InvalidRequestError, MediaTooLargeError
from quartet.kvcache.layout import EmbeddingLayout
from quartet.media.image_file import decode, read_header
from quartet.media.items import MediaFile, MediaKind
from quartet.media.media_id import PREPROCESSING_FILES, preprocessing_fingerprint
from quartet.transfer.base import EmbeddingMemory, PoolMemory

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
        """Encode the pictures of ``batch`` at once, and write all items to their blocks.

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
    """Load on the calling thread; reserve a pool if none is given.

    Raises:
        InvalidRequestError: field ``model``, ``device`` or ``num_blocks``: it can't run with this value.
        EngineError: the checkpoint is damaged, or the given pool has another layout.
    """
    vision = load(config)
    layout = EmbeddingLayout(
        model_fingerprint=model_fingerprint(config.model_path, vision.dtype),
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
    memory = embeddings or EmbeddingMemory(layout, PoolMemory(num_blocks, layout.piece_size_bytes))
    return Tower(
        vision=vision,
        reader=FileReader(
            vision=vision,
            dtype=layout.dtype,
            block_size=layout.block_size,
            max_item_tokens=max_item_tokens,
            max_pixels=config.max_pixels,
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
class FileReader:
    """Sizes and prepares files for one vision tower.

    Attributes:
        dtype: of the pool, by its PyTorch name.
        block_size: tokens of a block of the pool.
        max_item_tokens: most tokens of one item.
        max_pixels: most pixels of a picture.
    """

    vision: Vision
    dtype: str
    block_size: int
    max_item_tokens: int
    max_pixels: int

    def size(self, file: MediaFile) -> ItemSize:
        """The tokens that ``file`` fills, from its header only.

        Raises:
            InvalidMediaError, MediaTooLargeError: field ``file``.
        """
        if file.kind is MediaKind.EMBEDDINGS:
            return ItemSize(self._rows_header(file).num_tokens, None)
        header = read_header(file.data, max_pixels=self.max_pixels)
        size = self._picture_size(header.height, header.width)
        return replace(size, num_pixels=header.width * header.height)

    def prepare(self, file: MediaFile, num_blocks: int) -> Prepared:
        """Decode and preprocess ``file`` for ``num_blocks`` blocks.

        Raises:
            InvalidMediaError: field ``file``; it is damaged, or fills another number of blocks.
            MediaTooLargeError: field ``file``.
        """
        # Check the size first: that is cheap, and decoding many pixels is not.
        num_tokens = self.size(file).num_tokens
        if -(-num_tokens // self.block_size) != num_blocks:
            message = f"the file fills {num_tokens} tokens, and {num_blocks} blocks were set aside for it"
            raise InvalidMediaError(message, field="file")
        if file.kind is MediaKind.EMBEDDINGS:
            return read_rows(file.data, self._rows_header(file), self.dtype)
        return self.vision.pixels(decode(file.data, max_pixels=self.max_pixels))

    def _rows_header(self, file: MediaFile) -> RowsHeader:
        return read_rows_header(file.data, hidden_size=self.vision.hidden_size, max_item_tokens=self.max_item_tokens)

    def _picture_size(self, height: int, width: int) -> ItemSize:
        size = self.vision.size(height, width)
        if size.num_tokens > self.max_item_tokens:
            message = f"the picture fills {size.num_tokens} tokens, one item may fill {self.max_item_tokens}"
            raise MediaTooLargeError(message, field="file")
        return size
