"""What an Encode worker has: a vision tower, the book of its pool, and the desk between it and the streams."""

from __future__ import annotations

import time

from quartet.engine.settings import Modality
from quartet.errors import ConfigError
from quartet.kvcache.embedding_pool import EmbeddingPool
from quartet.telemetry.encode_metrics import EncodeMetrics
from quartet.transfer.base import PoolMemory
from quartet.transfer.source import TransferSource
from services.encode.encode import EncodeDispatcher, PoolReports
from services.encode.servicer import encode_service
from services.workers.embedding_store import EmbeddingStore
from services.workers.files import FileEncoder
from services.workers.media import MediaBacklog
from services.workers.parts import Abilities, EncoderFactory, Serving, Surroundings


class EncodeParts:
    """The parts of one Encode worker; nothing is opened before ``start``."""

    def __init__(self, surroundings: Surroundings, encoder_factory: EncoderFactory) -> None:
        """Make an encoder with a pool of its own. Raises ``ConfigError``."""
        self._surroundings = surroundings
        if surroundings.config.engine.modality is Modality.TEXT:
            raise ConfigError("engine.modality: an encode worker takes media files; text is for the others")
        self._encoder = encoder_factory(surroundings.config, None)
        self._dispatcher: EncodeDispatcher | None = None
        self._reports: PoolReports | None = None

    async def start(self) -> None:
        """Load the vision tower."""
        began = time.monotonic()
        await self._encoder.start()
        self._surroundings.metrics.set_load_time(time.monotonic() - began)

    @property
    def memory(self) -> PoolMemory:
        """The pool of embeddings."""
        return self._encoder.embeddings.memory

    def serve(self, source: TransferSource) -> Serving:
        """Wire everything."""
        config, metrics = self._surroundings.config, EncodeMetrics(self._surroundings.registry)
        capabilities, layout = self._encoder.capabilities, self._encoder.embeddings.layout
        pool = EmbeddingPool(self.memory.num_blocks, layout.block_size, has_events=True)
        reports = self._reports = PoolReports(self._encoder, pool)
        store = EmbeddingStore(pool, field="items", on_change=reports.changed)
        files = FileEncoder(self._encoder, store, metrics, max_size_bytes=config.max_file_size_bytes)
        dispatcher = self._dispatcher = EncodeDispatcher(
            self._encoder,
            files,
            store,
            source,
            self._surroundings.metrics,
            metrics,
            engine_name=config.engine.kind,
            backlog=MediaBacklog(
                max_items=config.encoder.max_waiting_items, max_pixels=config.encoder.max_waiting_pixels
            ),
        )
        metrics.watch_tower(self._encoder.stats)
        metrics.watch_pool(lambda: pool.counts)
        self._surroundings.metrics.watch_engine(dispatcher.stats)
        return Serving(
            computing=reports,
            snapshots=reports,
            requests=dispatcher,
            service=encode_service(dispatcher, config.streams),
            abilities=Abilities(
                model_fingerprint=capabilities.model_fingerprint,
                num_blocks=self.memory.num_blocks,
                block_size=layout.block_size,
                media=files.takes,
                max_media_tokens=capabilities.max_item_tokens,
            ),
            watches=[files.watch],
        )

    def hand_off_ended(self, holder: int, *, was_taken: bool) -> None:
        """An item's embeddings may go."""
        if self._dispatcher is not None:
            self._dispatcher.release(holder, was_taken=was_taken)

    async def close(self) -> None:
        """Free everything."""
        if self._reports is not None:
            self._reports.close()
        await self._encoder.close()
