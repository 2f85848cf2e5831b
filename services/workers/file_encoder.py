"""Media files on a worker with a vision tower: encoded into the worker's pool, or kept by the encoder itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from quartet.engine.encoder import EncodedState, EncodeTimes, MediaEncoder
from quartet.errors import EngineError, ServingError
from quartet.media.items import MediaFile
from quartet.telemetry.encode_metrics import EncodeMetrics
from services.workers.embedding_store import EmbeddingStore, Want
from services.workers.file_sizer import FileSizer, SizedItem

_LOOK_INTERVAL_S = 1.0


class FileEncoder(FileSizer):
    """Does with files what a request needs of them. Lives on the event loop."""

    def __init__(
        self, encoder: MediaEncoder, store: EmbeddingStore, metrics: EncodeMetrics, *, max_size_bytes: int
    ) -> None:
        """Encode with ``encoder``, which is started already, into the pool of ``store``, which is its own.

        Files of more than ``max_size_bytes`` are refused.
        """
        super().__init__(encoder, metrics, store.has, max_size_bytes=max_size_bytes)
        self._encoder = encoder

    @property
    def num_steps(self) -> int:
        """Batches encoded, ever."""
        return self._encoder.stats().num_steps

    def has_state(self, file: MediaFile) -> bool:
        """Whether the encoder keeps what becomes of ``file``: ``encode_state`` is for it then, and else ``want``."""
        states = self._encoder.states
        return states is not None and file.kind in states.kinds

    def want(
        self, item: SizedItem, arrived_at: float, on_encoded: Callable[[EncodeTimes], None] = lambda _times: None
    ) -> Want:
        """How ``item``, which came at ``arrived_at`` (monotonic), gets into the pool.

        ``on_encoded`` is told, if that took the vision tower, how long since then.
        """
        return Want(item.size.media_id, item.size.num_tokens, partial(self._encode, item, arrived_at, on_encoded))

    async def encode_state(self, item: SizedItem, arrived_at: float, holder: int) -> EncodedState:
        """Have the encoder keep ``item``, which came at ``arrived_at`` (monotonic), for ``holder``.

        Where this raises, by being cancelled too, nothing is kept.

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
        while self._encoder.is_alive:  # noqa: ASYNC110 - it tells nobody of its death but who asks
            await asyncio.sleep(_LOOK_INTERVAL_S)
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
