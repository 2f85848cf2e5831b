"""From a file to what the tower's thread needs of it: worker threads do this, so nothing here keeps state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import torch
from PIL import Image

from quartet.engine.encoder import ItemSize
from quartet.engine.media.rows_file import RowsHeader, read_rows, read_rows_header
from quartet.engine.torch.vision import Pixels
from quartet.errors import InvalidMediaError, MediaTooLargeError
from quartet.media.image_file import decode, read_header
from quartet.media.items import MediaFile, MediaKind

#: A picture that is to be encoded, or rows that are to be written as they are.
Prepared: TypeAlias = Pixels | torch.Tensor


class Vision(Protocol):
    """What the encoder asks of a vision tower; ``quartet.engine.torch.vision`` has the one of checkpoints."""

    dtype: str
    hidden_size: int
    max_item_tokens: int

    def size(self, height: int, width: int) -> ItemSize:
        """What a picture of that size fills. Raises ``MediaTooLargeError``, field ``file``."""
        ...

    def pixels(self, picture: Image.Image) -> Pixels:
        """Preprocess an RGB picture."""
        ...

    def encode(self, pictures: Sequence[Pixels]) -> list[torch.Tensor]:
        """Embeddings of each picture, ``[num_tokens, hidden_size]``. Called on the tower's thread alone."""
        ...


@dataclass(frozen=True, kw_only=True)
class FileReader:
    """Sizes and prepares files for one vision tower.

    Attributes:
        dtype: of the pool, by its PyTorch name.
        block_size: tokens of a block of the pool.
        max_item_tokens: tokens that one item fills at most.
        max_pixels: of a picture.
    """

    vision: Vision
    dtype: str
    block_size: int
    max_item_tokens: int
    max_pixels: int

    def size(self, file: MediaFile) -> ItemSize:
        """What ``file`` fills, from its header alone.

        Raises:
            InvalidMediaError, MediaTooLargeError: field ``file``.
        """
        if file.kind is MediaKind.EMBEDDINGS:
            return ItemSize(self._rows_header(file).num_tokens, None)
        header = read_header(file.data, max_pixels=self.max_pixels)
        size = self._picture_size(header.height, header.width)
        return replace(size, num_pixels=header.width * header.height)

    def prepare(self, file: MediaFile, num_blocks: int) -> Prepared:
        """Decode and preprocess ``file``, which is to lie in ``num_blocks`` blocks.

        Raises:
            InvalidMediaError: field ``file``; it is damaged, or does not fill as many blocks.
            MediaTooLargeError: field ``file``.
        """
        # First, as it costs nothing and a picture of many pixels does.
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
