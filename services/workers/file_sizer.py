"""Media files on a worker: named, and sized from their headers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quartet.engine.encoder import EncoderCapabilities, MediaSizer
from quartet.errors import InvalidRequestError, MediaTooLargeError, ServingError, UnsupportedFieldError
from quartet.media.items import MediaFile, MediaItem, MediaKind, MediaSize
from quartet.media.media_id import media_id
from quartet.telemetry.encode_metrics import EncodeMetrics


@dataclass(frozen=True)
class SizedItem:
    """A file that was looked at.

    Attributes:
        size: with 0 tokens where the engine alone knows how many.
        num_pixels: that it is decoded to.
        field: its path in the request.
    """

    file: MediaFile
    size: MediaSize
    num_pixels: int
    field: str


class FileSizer:
    """Says of files what a prompt needs to know of them. Lives on the event loop."""

    def __init__(
        self,
        sizer: MediaSizer,
        metrics: EncodeMetrics,
        is_cached: Callable[[bytes], bool] = lambda _name: False,
        *,
        max_size_bytes: int,
    ) -> None:
        """Ask ``sizer``, which is started already; ``is_cached`` says whether an item's embeddings are here.

        Files of more than ``max_size_bytes`` are refused unread.
        """
        self._sizer = sizer
        self._max_size_bytes = max_size_bytes
        self._metrics = metrics
        self._is_cached = is_cached

    @property
    def capabilities(self) -> EncoderCapabilities:
        """What can be done with files."""
        return self._sizer.capabilities

    @property
    def takes(self) -> tuple[str, ...]:
        """The kinds of files, as ``WorkerRecord`` has them."""
        return tuple(kind.value for kind in MediaKind if kind in self.capabilities.kinds)

    async def size(self, items: Sequence[MediaItem], field: str) -> list[SizedItem]:
        """Name and size ``items``, which came in the request's ``field``; nothing is encoded.

        Raises:
            UnsupportedFieldError, InvalidRequestError, InvalidMediaError, MediaTooLargeError: naming the item
                (``items[1].file``), the first one at fault.
        """
        return [await self._size(item, f"{field}[{index}]") for index, item in enumerate(items)]

    async def _size(self, item: MediaItem, field: str) -> SizedItem:
        if item.file.kind not in self.capabilities.kinds:
            raise UnsupportedFieldError(f"this worker takes no files of {item.file.kind}", field=f"{field}.file.kind")
        size_bytes = len(item.file.data)
        if size_bytes > self._max_size_bytes:
            message = f"the file has {size_bytes} bytes, more than the {self._max_size_bytes} that this worker takes"
            raise self._named(MediaTooLargeError(message, field="file"), field)
        # A large file takes as long as many decode steps.
        name = await asyncio.to_thread(media_id, item.file, self.capabilities.preprocessing_fingerprint)
        if item.media_id and item.media_id != name:
            raise InvalidRequestError("the media id is not that of the file", field=f"{field}.media_id")
        try:
            size = await self._sizer.size(item.file)
        except ServingError as error:
            raise self._named(error, field) from None
        named = MediaSize(media_id=name, num_tokens=size.num_tokens, grid=size.grid, is_cached=self._is_cached(name))
        return SizedItem(item.file, named, size.num_pixels, field)

    def _named(self, error: ServingError, field: str) -> ServingError:
        self._metrics.count_item(error.reason.lower())
        if error.field is not None:
            error.field = f"{field}.{error.field}"
        return error
