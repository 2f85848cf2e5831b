"""What a vision tower's worker tells of its pool, in the words of an engine: steps that carry events."""

from __future__ import annotations

from collections.abc import AsyncIterator

from quartet.engine.base import StepOutput
from quartet.engine.encoder import MediaEncoder
from quartet.engine.output_queue import OutputQueue
from quartet.events.kv import RankEvents, StoredBlocks
from quartet.kvcache.embedding_pool import EmbeddingPool


class PoolReports:
    """The outputs of an encoder, which has none: each item that can be found is a first block of rank 0."""

    def __init__(self, encoder: MediaEncoder, pool: EmbeddingPool) -> None:
        """Report on ``pool``, which takes note of events."""
        self._encoder = encoder
        self._pool = pool
        self._outputs = OutputQueue()

    @property
    def is_alive(self) -> bool:
        """Whether the encoder lives."""
        return self._encoder.is_alive

    def changed(self) -> None:
        """The pool has changed: report what came and went. Also where nothing did, since the load is another one."""
        events = self._pool.take_events()
        self._outputs.put(StepOutput(kv_events=(RankEvents(0, events),) if events else ()))

    def request_kv_snapshot(self) -> None:
        """Have the next output carry a ``kv_snapshot``."""
        self.changed()
        self._outputs.put(StepOutput(kv_snapshot=(StoredBlocks(0, self._pool.stored_items()),)))

    def outputs(self) -> AsyncIterator[StepOutput]:
        """The reports, in order, for one consumer, until ``close``."""
        return self._outputs.read()

    def close(self) -> None:
        """End the outputs."""
        self._outputs.end()
