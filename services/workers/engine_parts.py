"""What a Prefill or Decode worker has: an engine, its puller, and the dispatcher between it and the streams."""

from __future__ import annotations

import time

from quartet.discovery.base import Role
from quartet.engine.base import RequestKind
from quartet.rpc.seal import SealOpener
from quartet.rpc.seal_keys import SealKeys
from quartet.rpc.server import Service
from quartet.transfer.base import PoolMemory
from quartet.transfer.source import TransferSource
from services.decode.servicer import decode_service
from services.prefill.servicer import prefill_service
from services.workers.dispatcher import DecodeDispatcher, PrefillDispatcher
from services.workers.engines import EncoderFactory, EngineFactory
from services.workers.media import MediaStage
from services.workers.media_parts import MediaParts
from services.workers.parts import Abilities, Serving, Surroundings


class EngineParts:
    """The parts of one Prefill or Decode worker; nothing is opened before ``start``."""

    def __init__(
        self, surroundings: Surroundings, engine_factory: EngineFactory, encoder_factory: EncoderFactory
    ) -> None:
        """Make an engine of the role's kind. Raises ``ConfigError``."""
        self._surroundings = surroundings
        self._config = config = surroundings.config
        # What is wrong with the keys is told before a model is loaded.
        self._seals = SealOpener(
            None if config.seal_keys_file is None else SealKeys(config.seal_keys_file),
            worker_id=surroundings.worker_id,
            epoch=surroundings.epoch,
            on_outcome=surroundings.metrics.count_sealed_start,
        )
        kind = RequestKind.PREFILL if surroundings.role is Role.PREFILL else RequestKind.DECODE
        self._puller = surroundings.puller()
        self._engine = engine_factory(config, kind, self._puller)
        self._encoder_factory = encoder_factory
        self._media: MediaParts | None = None

    async def start(self) -> None:
        """Load the model, and its vision tower if the worker is to have it."""
        began = time.monotonic()
        await self._engine.start()
        metrics = self._surroundings.metrics
        metrics.set_load_time(time.monotonic() - began)
        metrics.watch_engine(self._engine.stats)
        own_metrics = self._engine.capabilities.metrics
        if own_metrics is not None:
            metrics.watch_collected(own_metrics)
        self._media = MediaParts(self._surroundings, self._engine, self._encoder_factory)
        await self._media.start()

    @property
    def memory(self) -> PoolMemory | None:
        """The engine's pool."""
        return self._engine.memory

    def serve(self, source: TransferSource) -> Serving:
        """Wire everything."""
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
            ),
            watches=media.watches,
        )

    def hand_off_ended(self, holder: int, *, was_taken: bool) -> None:
        """The blocks of a prefill may go."""
        del was_taken  # they are nobody's any more, either way
        self._engine.release(holder)

    async def close(self) -> None:
        """Free everything."""
        if self._media is not None:
            await self._media.close()
        await self._engine.close()
        await self._puller.close()

    def _dispatcher(self, source: TransferSource, media: MediaStage | None) -> DecodeDispatcher | PrefillDispatcher:
        metrics = self._surroundings.metrics
        if self._surroundings.role is Role.PREFILL:
            return PrefillDispatcher(self._engine, source, self._config.engine.kind, metrics, media)
        return DecodeDispatcher(self._engine, metrics, media)

    def _service(self, dispatcher: DecodeDispatcher | PrefillDispatcher) -> Service:
        if isinstance(dispatcher, PrefillDispatcher):
            return prefill_service(dispatcher, self._config.streams)
        has_tls = self._config.server.tls is not None
        return decode_service(dispatcher, self._config.streams, self._seals, has_tls=has_tls)
