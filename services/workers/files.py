"""Media files on a worker: named, sized from their headers, then encoded into the pool or kept by the encoder."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from quartet.engine.encoder import EncodedState, EncoderCapabilities, EncodeTimes, MediaEncoder, MediaSizer
from quartet.errors import EngineError, InvalidRequestError, ServingError, UnsupportedFieldError
from quartet.media import file_size
from quartet.media.items import MediaFile, MediaItem, MediaKind, MediaSize
from quartet.media.media_id import in_trust_domain, media_id
from quartet.telemetry.encode_metrics import EncodeMetrics
from services.workers.embedding_store import EmbeddingStore, Want

_POLL_INTERVAL_S = 1.0


@dataclass(frozen=True)
class SizedItem:
    """A file whose header was read.

    Attributes:
        size: with 0 tokens if only the engine knows how many.
        num_pixels: of the decoded picture.
        field: its path in the request.
    """

    file: MediaFile
    size: MediaSize
    num_pixels: int
    field: str


class FileSizer:
    """Names and sizes files, as a prompt needs it. Lives on the event loop."""

    def __init__(
        self,
        sizer: MediaSizer,
        metrics: EncodeMetrics,
        is_cached: Callable[[bytes], bool] = lambda _name: False,
        *,
        max_size_bytes: int,
    ) -> None:
        """Size with ``sizer``, which is started; ``is_cached`` says whether an item's embeddings are in the pool.

        Files of more than ``max_size_bytes`` are refused unread.
        """
        self._sizer = sizer
        self._max_size_bytes = max_size_bytes
        self._metrics = metrics
        self._is_cached = is_cached

    @property
    def capabilities(self) -> EncoderCapabilities:
        """The kinds of files, the largest item, and the fingerprints."""
        return self._sizer.capabilities

    @property
    def takes(self) -> tuple[str, ...]:
        """The kinds of files, in the words of ``WorkerRecord``."""
        return tuple(kind.value for kind in MediaKind if kind in self.capabilities.kinds)

    async def size(self, items: Sequence[MediaItem], field: str, *, trust_domain: str) -> list[SizedItem]:
        """Name and size ``items``, which came in the request's ``field``; nothing is encoded.

        ``trust_domain`` is the id of the domain whose names they get; empty: none.

        Raises:
            UnsupportedFieldError, InvalidRequestError, InvalidMediaError, MediaTooLargeError: naming the item
                (``items[1].file``), the first one at fault.
        """
        fingerprint = in_trust_domain(self.capabilities.preprocessing_fingerprint, trust_domain)
        return [await self._size(item, f"{field}[{index}]", fingerprint) for index, item in enumerate(items)]

    async def _size(self, item: MediaItem, field: str, fingerprint: bytes) -> SizedItem:
        if item.file.kind not in self.capabilities.kinds:
            raise UnsupportedFieldError(f"this worker takes no files of {item.file.kind}", field=f"{field}.file.kind")
        size_bytes = len(item.file.data)
        if size_bytes > self._max_size_bytes:
            error = file_size.too_large(self._max_size_bytes, size_bytes)
            error.field = "file"
            raise self._named(error, field)
        # In a thread: hashing a large file takes as long as many decode steps.
        name = await asyncio.to_thread(media_id, item.file, fingerprint)
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


class FileEncoder(FileSizer):
    """Also encodes files. Lives on the event loop."""

    def __init__(
        self, encoder: MediaEncoder, store: EmbeddingStore, metrics: EncodeMetrics, *, max_size_bytes: int
    ) -> None:
        """Encode with ``encoder``, which is started, into its pool, which ``store`` manages.

        Files of more than ``max_size_bytes`` are refused.
        """
        super().__init__(encoder, metrics, store.has, max_size_bytes=max_size_bytes)
        self._encoder = encoder

    @property
    def num_steps(self) -> int:
        """Batches encoded, ever."""
        return self._encoder.stats().num_steps

    def has_state(self, file: MediaFile) -> bool:
        """Whether the encoder keeps the result for ``file`` itself: then use ``encode_state``, else ``want``."""
        states = self._encoder.states
        return states is not None and file.kind in states.kinds

    def want(
        self, item: SizedItem, arrived_at: float, on_encoded: Callable[[EncodeTimes], None] = lambda _times: None
    ) -> Want:
        """A ``Want`` that encodes ``item``, which arrived at ``arrived_at`` (monotonic), into the pool.

        ``on_encoded`` is called with the times, counted from the arrival, if the vision tower had to run.
        """
        return Want(item.size.media_id, item.size.num_tokens, partial(self._encode, item, arrived_at, on_encoded))

    async def encode_state(self, item: SizedItem, arrived_at: float, holder: int) -> EncodedState:
        """Have the encoder keep ``item``, which arrived at ``arrived_at`` (monotonic), for ``holder``.

        If this raises or is cancelled, nothing is kept.

        Raises:
            ServingError: as ``StateEncoder.encode`` does, naming the item.
        """
        states = self._encoder.states
        assert states is not None, "has_state says so"
        waited_s = time.monotonic() - arrived_at
        try:
            encoded = await states.encode(holder, item.file)
        except ServingError as error:
            raise self._named(error, item.field) from None
        return replace(encoded, times=self._note(encoded.times, waited_s))

    async def watch(self) -> None:
        """Runs until cancelled. Raises ``EngineError`` once the encoder is dead."""
        while self._encoder.is_alive:  # noqa: ASYNC110 - encoders do not notify of their death
            await asyncio.sleep(_POLL_INTERVAL_S)
        raise EngineError("the vision tower of this worker is dead")

    async def _encode(
        self,
        item: SizedItem,
        arrived_at: float,
        on_encoded: Callable[[EncodeTimes], None],
        block_ids: tuple[int, ...],
    ) -> None:
        waited_s = time.monotonic() - arrived_at
        try:
            times = await self._encoder.encode(item.file, block_ids)
        except ServingError as error:
            raise self._named(error, item.field) from None
        on_encoded(self._note(times, waited_s))

    def _note(self, times: EncodeTimes, waited_s: float) -> EncodeTimes:
        self._metrics.count_item("encoded")
        times = replace(times, queue_s=waited_s + times.queue_s)
        self._metrics.observe_encoded(times.queue_s, times.compute_s)
        return times
