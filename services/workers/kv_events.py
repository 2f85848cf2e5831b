"""A worker's KV events: published as its engine's steps bring them, and snapshots for routers that join later.

On request they are published in vLLM's form, too: ``VllmEvents``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from quartet.engine.base import StepOutput
from quartet.errors import ServingError, WorkerUnavailableError
from quartet.events.kv import KvSnapshot, RankEvents
from quartet.events.vllm import VllmEvent
from quartet.kvcache.vllm_blocks import VllmTranslator

# A step takes far less; an engine without an output for so long is stuck.
_SNAPSHOT_TIMEOUT_S = 10.0


class KvPublisher(Protocol):
    """Publishes to all subscribers (``quartet.events.publisher.EventPublisher``)."""

    @property
    def kv_number(self) -> int:
        """Number of the last batch published; 0: none yet."""
        ...

    def publish_kv(self, changed: RankEvents) -> None:
        """Publish what changed. Never blocks."""
        ...


class SnapshotSource(Protocol):
    """The part of an engine that gives snapshots."""

    def request_kv_snapshot(self) -> None:
        """Have one of the next outputs carry a ``kv_snapshot``."""
        ...


class KvEvents:
    """Publishes what one engine's outputs say of blocks. Lives on the event loop.

    Batches are numbered as they are published, and a snapshot comes in an output, like an event. So the snapshot's
    number is that of the last batch before it, and the engine need not stop for it.
    """

    def __init__(
        self,
        engine: SnapshotSource,
        publisher: KvPublisher,
        also: Callable[[RankEvents], None] | None = None,
    ) -> None:
        """Publish to ``publisher``. The reader of ``engine``'s outputs calls ``take`` with each, in order.

        ``also`` takes the same changes after ``publisher``.
        """
        self._engine = engine
        self._publisher = publisher
        self._also = also
        self._waiting: list[asyncio.Future[KvSnapshot]] = []
        self._is_closed = False

    def take(self, step: StepOutput) -> None:
        """Publish the events of ``step``; if it carries a snapshot, answer the callers that wait for one."""
        for changed in step.kv_events:
            self._publisher.publish_kv(changed)
            if self._also is not None:
                self._also(changed)
        if step.kv_snapshot is None:
            return
        snapshot = KvSnapshot(self._publisher.kv_number, step.kv_snapshot)
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(snapshot)

    async def snapshot(self) -> KvSnapshot:
        """All blocks that can be shared at a moment between now and the answer. Concurrent callers share one snapshot.

        Raises:
            WorkerUnavailableError: the engine is dead or closed, or takes no step in time.
        """
        if self._is_closed:
            raise _gone()
        future: asyncio.Future[KvSnapshot] = asyncio.get_running_loop().create_future()
        if not self._waiting:
            self._engine.request_kv_snapshot()
        self._waiting.append(future)
        try:
            async with asyncio.timeout(_SNAPSHOT_TIMEOUT_S):
                return await future
        except TimeoutError:
            message = f"the engine has taken no step within {_SNAPSHOT_TIMEOUT_S:g} s"
            raise WorkerUnavailableError(message, retry_delay_s=1.0) from None
        finally:
            if future in self._waiting:
                self._waiting.remove(future)

    def close(self) -> None:
        """The outputs have ended: fail waiting and later callers. May be called twice."""
        self._is_closed = True
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_exception(_gone())


class VllmPublishing(Protocol):
    """Publishes in vLLM's form (``quartet.events.vllm_publisher.VllmPublisher``)."""

    def publish(self, events: Sequence[VllmEvent], data_parallel_rank: int) -> None:
        """Publish events of a rank. Never blocks."""
        ...


class VllmEvents:
    """Publishes a worker's changes in vLLM's form, rank by rank."""

    def __init__(self, publisher: VllmPublishing, block_size: int) -> None:
        """Publish to ``publisher`` what becomes of blocks of ``block_size`` tokens."""
        self._publisher = publisher
        self._block_size = block_size
        self._translators: dict[int, VllmTranslator] = {}

    def publish_kv(self, changed: RankEvents) -> None:
        """Publish what changed, as far as it can be told. Never blocks."""
        rank = changed.data_parallel_rank
        translator = self._translators.get(rank)
        if translator is None:
            translator = self._translators[rank] = VllmTranslator(self._block_size)
        events = translator.translate(changed.events)
        if events:
            self._publisher.publish(events, rank)


def _gone() -> ServingError:
    return WorkerUnavailableError("the engine of this worker is dead or closed")
