"""A ``Registry`` within one process; it passes the conformance suite of discovery."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from quartet.discovery.base import AnyRecord, RecordSet, Registration, Registry, Role, WorkerKey
from quartet.discovery.checks import check_name
from quartet.discovery.record_json import RecordReader, read_epoch, to_json
from quartet.errors import DiscoveryError, WorkerReplacedError


@dataclass(eq=False)
class MemoryStore:
    """What the registries of one process share: records in their JSON form, by namespace and key."""

    _values: defaultdict[str, dict[WorkerKey, bytes]] = field(default_factory=lambda: defaultdict(dict))
    _watchers: set[asyncio.Event] = field(default_factory=set)
    _reader: RecordReader = field(default_factory=RecordReader)

    def put(self, namespace: str, key: WorkerKey, value: bytes) -> None:
        """Store ``value``, replacing what was there."""
        self._values[namespace][key] = value
        self._wake_watchers()

    def delete(self, namespace: str, key: WorkerKey) -> None:
        """Remove the value, if there is one: what the end of a lease would do."""
        self._values[namespace].pop(key, None)
        self._wake_watchers()

    def get(self, namespace: str, key: WorkerKey) -> bytes | None:
        """The value under ``key``."""
        return self._values[namespace].get(key)

    def records(self, namespace: str) -> list[AnyRecord]:
        """The readable records, ordered by role and id."""
        parsed = (self._reader.record(key, value) for key, value in self._values[namespace].items())
        return sorted((record for record in parsed if record), key=lambda record: record.key)

    async def feed(self, namespace: str, known: RecordSet) -> None:
        """Keep ``known`` up to date until cancelled."""
        async for _ in self.changes():
            known.replace(self.records(namespace))

    async def changes(self) -> AsyncIterator[None]:
        """Yield now, and after each change."""
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            while True:
                yield
                await changed.wait()
                changed.clear()
        finally:
            self._watchers.discard(changed)

    def _wake_watchers(self) -> None:
        for changed in self._watchers:
            changed.set()


class MemoryRegistration(Registration):
    """A record in a ``MemoryStore``."""

    def __init__(
        self,
        store: MemoryStore,
        namespace: str,
        record: AnyRecord,
        *,
        on_close: Callable[[Registration], None],
    ) -> None:
        super().__init__(record, on_close=on_close)
        self._store = store
        self._namespace = namespace
        self._value = to_json(record)
        if (taken := self._find_other_role()) is not None:
            raise DiscoveryError(f"{self.id_field} {record.key.worker_id} is taken by {taken.role}/{taken.worker_id}")
        store.put(namespace, record.key, self._value)
        self._keep(self._keep_registered())

    async def _keep_registered(self) -> None:
        async for _ in self._store.changes():
            stored = self._store.get(self._namespace, self.record.key)
            if stored is not None and read_epoch(stored) is None:
                self._store.put(self._namespace, self.record.key, self._value)
            elif stored not in (None, self._value) or self._find_other_role() is not None:
                raise WorkerReplacedError(f"another process has registered as {' '.join(self.record.key)}")

    def _find_other_role(self) -> WorkerKey | None:
        own, id = self.record.key
        keys = [WorkerKey(role, id) for role in Role if role is not own]
        return next((key for key in keys if self._store.get(self._namespace, key) is not None), None)

    async def _remove(self) -> None:
        if self._store.get(self._namespace, self.record.key) == self._value:
            self._store.delete(self._namespace, self.record.key)


class MemoryRegistry(Registry):
    """A ``Registry`` whose records live and die with this process; use it from one event loop."""

    def __init__(self, store: MemoryStore | None = None, *, namespace: str = "default") -> None:
        super().__init__()
        check_name("namespace", namespace)
        self._store = store or MemoryStore()
        self._namespace = namespace

    async def register(self, record: AnyRecord) -> MemoryRegistration:
        """Announce ``record`` until the registration is closed."""
        registration = MemoryRegistration(self._store, self._namespace, record, on_close=self._open.discard)
        self._open.add(registration)
        return registration

    async def records(self) -> list[AnyRecord]:
        """All readable records of this moment, ordered by role and id."""
        return self._store.records(self._namespace)

    async def _feed(self, known: RecordSet) -> None:
        await self._store.feed(self._namespace, known)
