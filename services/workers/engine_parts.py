"""What a Prefill or Decode worker has: an engine, its puller, and the dispatcher between it and the streams."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine

from quartet.discovery.base import Abilities, Role
from quartet.engine.base import Engine, RequestKind
from quartet.engine.encoder import MediaEncoder, MediaSizer
from quartet.engine.settings import Modality, no_hand_offs
from quartet.errors import ConfigError
from quartet.kvcache.embedding_pool import EmbeddingPool
from quartet.media.items import TAKES_HAND_OFF
from quartet.rpc.server import Service
from quartet.streams.signed_start import SignedStartVerifier
from quartet.telemetry.encode_metrics import EncodeMetrics
from quartet.transfer.base import BlockMemory, EmbeddingMemory
from quartet.transfer.grpc.puller import TransferPuller
from quartet.transfer.source import TransferSource
from services.decode.servicer import decode_service
from services.prefill.servicer import prefill_service
from services.workers.dispatch import DecodeDispatcher, PrefillDispatcher
from services.workers.embedding_store import EmbeddingStore
from services.workers.files import FileEncoder, FileSizer
from services.workers.media import MediaStage, TowerQueue
from services.workers.parts import (
    EncoderFactory,
    EngineFactory,
    Serving,
    SizerFactory,
    Surroundings,
    create_media_sizer,
)


class EngineParts:
    """The ``Parts`` of one Prefill or Decode worker; nothing is opened before ``start``."""

    def __init__(
        self, surroundings: Surroundings, engine_factory: EngineFactory, encoder_factory: EncoderFactory
    ) -> None:
        """Make an engine of the role's kind. Raises ``ConfigError``."""
        self._surroundings = surroundings
        self._config = config = surroundings.config
        # Keys are read first, so that an error in them is reported before a model is loaded.
        self._verifier = SignedStartVerifier(
            surroundings.signing_keys(),
            worker_id=surroundings.worker_id,
            epoch=surroundings.epoch,
            on_outcome=lambda outcome: surroundings.metrics.signed_starts.labels(outcome).inc(),
        )
        kind = RequestKind.PREFILL if surroundings.role is Role.PREFILL else RequestKind.DECODE
        self._puller = surroundings.puller()
        self._engine = engine_factory(config, kind, self._puller)
        self._encoder_factory = encoder_factory
        self._media: MediaParts | None = None

    async def start(self) -> None:
        """Load the model, and its vision tower if the worker needs one.

        Raises:
            ConfigError: a Prefill worker whose engine leaves its blocks to transfers, and none reaches them.
            ServingError: naming what is wrong.
        """
        began = time.monotonic()
        await self._engine.start()
        has_way = bool(self._config.transfer.ways_of(self._engine.memory))
        if self._surroundings.role is Role.PREFILL and not has_way and self._engine.capabilities.layout:
            raise ConfigError(f"engine.device: {no_hand_offs(self._config.engine)}")
        metrics = self._surroundings.metrics
        metrics.load_time.set(time.monotonic() - began)
        metrics.watch_engine(self._engine.stats)
        own_metrics = self._engine.capabilities.metrics
        if own_metrics is not None:
            metrics.watch_collected(own_metrics)
        self._media = MediaParts(self._surroundings, self._engine, self._encoder_factory)
        await self._media.start()

    @property
    def memory(self) -> BlockMemory | None:
        """The engine's pool."""
        return self._engine.memory

    def serve(self, source: TransferSource) -> Serving:
        """Wire all parts."""
        media = self._media
        assert media is not None, "it has started"
        dispatcher = self._dispatcher(source, media.stage)
        capabilities = self._engine.capabilities
        return Serving(
            computing=self._engine,
            snapshots=self._engine,
            requests=dispatcher,
            service=self._service(dispatcher),
            abilities=Abilities(
                model_fingerprint=capabilities.model_fingerprint,
                num_blocks=capabilities.num_blocks,
                block_size=capabilities.block_size,
                data_parallel_size=capabilities.data_parallel_size,
                max_model_len=capabilities.max_model_len,
                sampling_fields=tuple(sorted(capabilities.sampling_fields)),
                media=media.takes,
                max_media_tokens=media.max_item_tokens,
                adapters=capabilities.adapters,
                unannounced_blocks=capabilities.unannounced_blocks,
                reasoning_parser=self._config.reasoning_parser,
                tool_call_parser=self._config.tool_call_parser,
            ),
            watches=media.watches,
        )

    def hand_off_ended(self, holder: int, *, was_taken: bool) -> None:
        """Free the blocks of a prefill."""
        del was_taken  # no worker needs the blocks any more, taken or not
        self._engine.release(holder)

    async def close(self) -> None:
        """Free everything."""
        if self._media is not None:
            await self._media.close()
        await self._engine.close()
        await self._puller.close()

    def _dispatcher(self, source: TransferSource, media: MediaStage | None) -> DecodeDispatcher | PrefillDispatcher:
        metrics, tracer = self._surroundings.metrics, self._surroundings.tracer
        if self._surroundings.role is Role.PREFILL:
            return PrefillDispatcher(self._engine, source, self._config.engine.kind, metrics, media, tracer)
        return DecodeDispatcher(self._engine, metrics, media, tracer)

    def _service(self, dispatcher: DecodeDispatcher | PrefillDispatcher) -> Service:
        limits = self._config.streams.for_model(self._engine.capabilities.max_model_len)
        if isinstance(dispatcher, PrefillDispatcher):
            return prefill_service(dispatcher, limits)
        has_tls = self._config.server.tls is not None
        return decode_service(dispatcher, limits, self._verifier, has_tls=has_tls)


class MediaParts:
    """A worker's pool of embeddings, what fills it, and the stage that prepares requests' media.

    Made once the engine has started; nothing is opened before ``start``.
    """

    def __init__(
        self,
        surroundings: Surroundings,
        engine: Engine,
        encoder_factory: EncoderFactory,
        sizer_factory: SizerFactory = create_media_sizer,
    ) -> None:
        """For the media that ``engine``, which is started, takes. An engine that reads files itself needs no encoder.

        Raises:
            ConfigError: the engine takes no media, and the worker is configured to encode them.
        """
        self._surroundings = surroundings
        self._config = surroundings.config
        self._is_busy = lambda: bool(engine.turns())
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
        """The kinds of media that the worker takes, in the words of ``WorkerRecord``."""
        if self.stage is None:
            return ()
        files = self._files or self._read_files
        return (TAKES_HAND_OFF,) if files is None else (*files.takes, TAKES_HAND_OFF)

    @property
    def max_item_tokens(self) -> int:
        """Most tokens that one file fills; 0: files are refused."""
        files = self._files or self._read_files
        return 0 if files is None else files.capabilities.max_item_tokens

    @property
    def watches(self) -> list[Callable[[], Coroutine[object, object, None]]]:
        """Coroutines that raise once the vision tower is dead."""
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
        puller.attach(embeddings.memory, embeddings.layout, self._is_busy)
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
            tower_queue=TowerQueue(
                max_items=self._config.encoder.max_waiting_items, max_pixels=self._config.encoder.max_waiting_pixels
            ),
        )
