"""The media of a Prefill or Decode worker: its pool of embeddings, what fills it, and the stage of starts there."""

from __future__ import annotations

from collections.abc import Callable, Coroutine

from quartet.engine.base import Engine
from quartet.engine.encoder import MediaEncoder, MediaSizer
from quartet.engine.settings import Modality
from quartet.errors import ConfigError
from quartet.kvcache.embedding_pool import EmbeddingPool
from quartet.media.items import TAKES_HAND_OFF
from quartet.telemetry.encode_metrics import EncodeMetrics
from quartet.transfer.base import EmbeddingMemory
from quartet.transfer.grpc.puller import TransferPuller
from services.workers.embedding_store import EmbeddingStore
from services.workers.engines import EncoderFactory, SizerFactory, create_media_sizer
from services.workers.file_encoder import FileEncoder
from services.workers.file_sizer import FileSizer
from services.workers.media import MediaStage
from services.workers.media_backlog import MediaBacklog
from services.workers.parts import Surroundings


class MediaParts:
    """Made once the engine has started; nothing is opened before ``start``."""

    def __init__(
        self,
        surroundings: Surroundings,
        engine: Engine,
        encoder_factory: EncoderFactory,
        sizer_factory: SizerFactory = create_media_sizer,
    ) -> None:
        """For the media that ``engine``, which is started, takes. One that reads files by itself needs no encoder.

        Raises:
            ConfigError: it takes none, and the worker is to encode media.
        """
        self._surroundings = surroundings
        self._config = surroundings.config
        self._placeholder_id = engine.capabilities.placeholder_id
        self._embeddings = None if self._config.engine.modality is Modality.TEXT else engine.embeddings
        self._reads_media = engine.capabilities.reads_media
        self._puller: TransferPuller | None = None
        self._encoder: MediaEncoder | None = None
        self._sizer: MediaSizer | None = None
        if self._config.engine.encodes_media:
            if self._embeddings is None or self._placeholder_id is None:
                raise ConfigError("engine.modality: the model takes text only")
            if self._reads_media:
                self._sizer = sizer_factory(self._config)
            else:
                self._encoder = encoder_factory(self._config, self._embeddings)
        self._files: FileEncoder | None = None
        self._read_files: FileSizer | None = None
        self.stage: MediaStage | None = None

    async def start(self) -> None:
        """Load the vision tower, if there is one. Raises ``ServingError`` naming what is wrong."""
        if self._encoder is not None:
            await self._encoder.start()
        if self._embeddings is not None and self._placeholder_id is not None:
            self.stage = self._make_stage(self._embeddings, self._placeholder_id)

    @property
    def takes(self) -> tuple[str, ...]:
        """What the worker takes of media, as ``WorkerRecord`` has it."""
        if self.stage is None:
            return ()
        files = self._files or self._read_files
        return (TAKES_HAND_OFF,) if files is None else (*files.takes, TAKES_HAND_OFF)

    @property
    def max_item_tokens(self) -> int:
        """Tokens that a file fills at most; 0: none is taken."""
        files = self._files or self._read_files
        return 0 if files is None else files.capabilities.max_item_tokens

    @property
    def watches(self) -> list[Callable[[], Coroutine[object, object, None]]]:
        """Raise once the vision tower is dead."""
        return [] if self._files is None else [self._files.watch]

    async def close(self) -> None:
        """Free everything. May be called twice."""
        if self.stage is not None:
            await self.stage.close()
        if self._puller is not None:
            await self._puller.close()
        if self._encoder is not None:
            await self._encoder.close()

    def _make_stage(self, embeddings: EmbeddingMemory, placeholder_id: int) -> MediaStage:
        puller = self._puller = self._surroundings.puller()
        puller.attach(embeddings.memory, embeddings.layout)
        pool = EmbeddingPool(embeddings.memory.num_blocks, embeddings.layout.block_size)
        store = EmbeddingStore(pool, field="media")
        metrics = EncodeMetrics(self._surroundings.registry)
        metrics.watch_pool(lambda: pool.counts)
        if self._encoder is not None:
            self._files = FileEncoder(self._encoder, store, metrics, max_size_bytes=self._config.max_file_size_bytes)
            metrics.watch_tower(self._encoder.stats)
        if self._sizer is not None:
            self._read_files = FileSizer(self._sizer, metrics, max_size_bytes=self._config.max_file_size_bytes)
        return MediaStage(
            store,
            puller,
            metrics,
            files=self._files,
            read_files=self._read_files,
            read_states=self._config.engine.kind if self._reads_media else None,
            placeholder_id=placeholder_id,
            backlog=MediaBacklog(
                max_items=self._config.encoder.max_waiting_items, max_pixels=self._config.encoder.max_waiting_pixels
            ),
        )
