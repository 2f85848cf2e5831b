"""A watch that a task feeds: the same for every registry."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import TypeAlias

from quartet.discovery.base import WorkerEvent, WorkerKey, WorkerRecord
from quartet.discovery.worker_set import WorkerSet
from quartet.errors import DiscoveryError

#: Tells the watch it is given about workers until it is cancelled.
Feed: TypeAlias = Callable[["LiveWatch"], Coroutine[object, object, None]]


class LiveWatch:
    """The ``Watch`` of every registry: ``feed`` tells it what the registry holds, a reader iterates it."""

    def __init__(self, feed: Feed, *, on_close: Callable[[LiveWatch], None]) -> None:
        self._on_close = on_close
        self._workers = WorkerSet()
        self._wake = asyncio.Event()
        self._is_closed = False
        self._task = asyncio.create_task(feed(self), name="discovery-watch")
        self._task.add_done_callback(lambda _: self._wake.set())

    def replace(self, records: Iterable[WorkerRecord]) -> None:
        """For the feed: a complete list."""
        self._workers.replace(records)
        self._wake.set()

    def put(self, record: WorkerRecord) -> None:
        """For the feed: one worker has come or changed."""
        self._workers.put(record)
        self._wake.set()

    def remove(self, key: WorkerKey) -> None:
        """For the feed: one worker has gone."""
        self._workers.remove(key)
        self._wake.set()

    def __aiter__(self) -> LiveWatch:
        return self

    async def __anext__(self) -> WorkerEvent:
        while not self._is_closed:
            if (event := self._workers.next_event()) is not None:
                return event
            self._raise_if_feed_ended()
            self._wake.clear()
            await self._wake.wait()
        raise StopAsyncIteration

    async def close(self) -> None:
        """End the iteration and the feed; closing again does nothing."""
        self._is_closed = True
        self._wake.set()
        self._task.cancel()
        await asyncio.wait({self._task})
        self._on_close(self)

    def _raise_if_feed_ended(self) -> None:
        # A feed runs until it is closed; should it ever end by a bug, the reader must not wait for ever.
        if self._task.done():
            cause = None if self._task.cancelled() else self._task.exception()
            raise DiscoveryError(f"the watch broke: {cause!r}") from cause
