"""Sizes media files for a model, from their headers alone; needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from quartet.engine.encoder import ItemSize
from quartet.engine.media.rows_encoder import RowsReader
from quartet.errors import MediaTooLargeError
from quartet.media.image_file import read_header
from quartet.media.items import MediaFile, MediaKind


@dataclass(frozen=True, kw_only=True)
class FileSizer:
    """Sizes files for one model. May be called on any thread.

    Attributes:
        rows: reads files of embeddings, and knows how many tokens one item may fill.
        picture_size: the size of a picture of this height and width; ``None``: it is not known.
        max_pixels: most pixels of a picture.
    """

    rows: RowsReader
    picture_size: Callable[[int, int], ItemSize] | None
    max_pixels: int

    def size(self, file: MediaFile) -> ItemSize:
        """The size of ``file`` in tokens, from its header; 0 tokens: unknown.

        Raises:
            InvalidMediaError, MediaTooLargeError: field ``file``.
        """
        if file.kind is MediaKind.EMBEDDINGS:
            return self.rows.size(file)
        header = read_header(file.data, max_pixels=self.max_pixels)
        size = ItemSize(0, None) if self.picture_size is None else self.picture_size(header.height, header.width)
        if size.num_tokens > self.rows.max_item_tokens:
            message = f"the picture fills {size.num_tokens} tokens, one item may fill {self.rows.max_item_tokens}"
            raise MediaTooLargeError(message, field="file")
        return replace(size, num_pixels=header.height * header.width)


def check_scaled_size(height: int, width: int, num_scaled_pixels: int, max_pixels: int) -> None:
    """Raise ``MediaTooLargeError``, field ``file``, if preprocessing scales a picture to more than ``max_pixels``."""
    if num_scaled_pixels > max_pixels:
        message = (
            f"a picture of {width} x {height} is scaled to {num_scaled_pixels} pixels, at most {max_pixels} may be"
        )
        raise MediaTooLargeError(message, field="file")
