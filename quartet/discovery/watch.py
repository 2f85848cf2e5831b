"""What every registry has: registrations that a task keeps alive, and a watch that tells its reader the differences."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable
from typing import TypeAlias

from quartet.discovery.base import (
    Synchronised,
    WorkerAdded,
    WorkerChanged,
    WorkerEvent,
    WorkerKey,
    WorkerRecord,
    WorkerRemoved,
)
from quartet.errors import DiscoveryError

#: Brings the watch it is given what the registry holds, until it is cancelled.
Feed: TypeAlias = Callable[["LiveWatch"], Coroutine[object, object, None]]


class LiveRegistry(ABC):
    """A ``Registry`` that closes what it made; use it within one event loop."""

    def __init__(self) -> None:
        self._open: set[LiveRegistration | LiveWatch] = set()

    def watch(self) -> LiveWatch:
        """Begin to watch."""
        watch = LiveWatch(self._feed, on_close=self._open.discard)
        self._open.add(watch)
        return watch

    async def close(self) -> None:
        """Close every registration and watch made here."""
        await asyncio.gather(*(part.close() for part in self._open))

    @abstractmethod
    async def _feed(self, watch: LiveWatch) -> None:
        """Bring ``watch`` what the registry holds, until cancelled."""


class LiveRegistration(ABC):
    """A ``Registration`` that a task keeps alive.

    Attributes:
        record: as it was registered.
    """

    def __init__(self, record: WorkerRecord, *, on_close: Callable[[LiveRegistration], None]) -> None:
        self.record = record
        self._on_close = on_close
        self._task: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Remove the record, unless a later registration has replaced it; ends in bounded time."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        await self._remove()
        self._on_close(self)

    def _keep(self, work: Coroutine[object, object, None]) -> None:
        self._task = asyncio.create_task(work, name=f"discovery-register-{self.record.worker_id}")

    @abstractmethod
    async def _remove(self) -> None:
        """Remove the record; log why if that can't be done."""


class LiveWatch:
    """The ``Watch`` of every registry: ``feed`` brings it what the registry holds, a reader iterates it."""

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


class WorkerSet:
    """The workers as known, and which of them the reader has not been told about; pure.

    Differences are worked out when the reader asks for the next one. So nothing queues up behind a slow reader, and
    after a broken connection a fresh list turns into exactly the events that the reader missed.
    """

    def __init__(self) -> None:
        self._known: dict[WorkerKey, WorkerRecord] = {}
        self._told: dict[WorkerKey, WorkerRecord] = {}
        # An ordered set: the reader gets workers in the order in which they first changed.
        self._to_tell: dict[WorkerKey, None] = {}
        self._is_listed = False
        self._is_synchronised = False

    def replace(self, records: Iterable[WorkerRecord]) -> None:
        """Take ``records`` for the whole truth: a complete list."""
        listed = {record.key: record for record in records}
        changed = [key for key in self._known.keys() | listed.keys() if self._known.get(key) != listed.get(key)]
        self._known = listed
        self._to_tell.update(dict.fromkeys(sorted(changed)))
        self._is_listed = True

    def put(self, record: WorkerRecord) -> None:
        """One worker has come or changed."""
        self._known[record.key] = record
        self._to_tell[record.key] = None

    def remove(self, key: WorkerKey) -> None:
        """One worker has gone; an unknown one is ignored."""
        if self._known.pop(key, None) is not None:
            self._to_tell[key] = None

    def next_event(self) -> WorkerEvent | None:
        """The reader's next event, which counts as delivered; ``None`` when the reader is up to date."""
        while self._to_tell:
            key = next(iter(self._to_tell))
            del self._to_tell[key]
            if (event := self._tell(key)) is not None:
                return event
        if self._is_listed and not self._is_synchronised:
            self._is_synchronised = True
            return Synchronised()
        return None

    def _tell(self, key: WorkerKey) -> WorkerEvent | None:
        told = self._told.pop(key, None)
        record = self._known.get(key)
        if record is None:
            return None if told is None else WorkerRemoved(worker_id=key.worker_id, role=key.role)
        self._told[key] = record
        if told is None:
            return WorkerAdded(record)
        return None if told == record else WorkerChanged(record)
