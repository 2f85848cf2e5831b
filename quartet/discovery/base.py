"""The discovery seam: what workers and routers announce, and what every registry promises and has.

A registry keeps one record per process alive for as long as that keeps its registration. It notifies watchers of
workers, or of routers, that come, change and go. Every implementation (``etcd``, ``file``) passes the same conformance
suite.

A worker id names one process of a namespace at a time. A new start takes the id over from its former life, and a former
life never takes it back: see ``Registration``.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from quartet.discovery.checks import (
    MAX_RANKS,
    check_address,
    check_count,
    check_events_address,
    check_name,
    check_text,
    check_texts,
)
from quartet.errors import DiscoveryError

logger = logging.getLogger(__name__)

#: Version of the contracts in ``protos/`` that this code speaks, as workers announce it: the package of the stubs.
CONTRACT_VERSION = "quartet.v1"
#: Versions of workers that this code can drive. While a fleet is upgraded to another one, routers have both.
SPOKEN_VERSIONS = frozenset({CONTRACT_VERSION})

#: Of ``Abilities.unannounced_blocks``: blocks of requests with a cache salt.
SALTED_BLOCKS = "salted"


class Role(StrEnum):
    """What a process does in the topology."""

    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"
    ROUTER = "router"


@dataclass(frozen=True, kw_only=True)
class HostIdentity:
    """Which kernel, and which IPC namespace of it, a process runs in.

    Two workers can share memory (``shm``, ``cuda_ipc``) only where both are equal.

    Attributes:
        boot_id: the kernel's random id of this boot.
        ipc_namespace: the kernel's name of the IPC namespace (``ipc:[4026531839]``).
    """

    boot_id: str
    ipc_namespace: str


class WorkerKey(NamedTuple):
    """A worker's name within a namespace; ordered by role, then id."""

    role: Role
    worker_id: str


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """What a worker announces about its model and pool.

    Attributes:
        model_fingerprint: hex SHA-256; pools are (name, fingerprint) and never mixed.
        data_parallel_size: number of data-parallel ranks, each routed to by itself.
        num_blocks: KV blocks per rank; 0 where the worker holds none.
        block_size: tokens per KV block; 0 where the worker holds none.
        max_model_len: most tokens of one sequence, prompt and output together.
        sampling_fields: names of the sampling fields that the worker honours.
        media: what the worker takes of media: ``image``, ``embeddings`` (files of each, which it encodes or checks
            itself), ``hand_off`` (embeddings that an encode worker holds).
        max_media_tokens: tokens that one media item fills at most; 0: it takes none.
        adapters: names of the LoRA adapters that the worker serves.
        unannounced_blocks: cached blocks that its KV events leave out: ``salted``, ``adapter``, ``media``.
        reasoning_parser, tool_call_parser: how the model's output is parsed; ``none``: not; empty: as its chat template
            says.
    """

    model_fingerprint: str
    data_parallel_size: int = 1
    num_blocks: int
    block_size: int
    max_model_len: int
    sampling_fields: tuple[str, ...]
    media: tuple[str, ...] = ()
    max_media_tokens: int = 0
    adapters: tuple[str, ...] = ()
    unannounced_blocks: tuple[str, ...] = ()
    reasoning_parser: str = ""
    tool_call_parser: str = ""


@dataclass(frozen=True, kw_only=True)
class WorkerRecord(Abilities):
    """What one worker announces about itself; equal only if every field is.

    Attributes:
        worker_id: 1 to 128 letters, digits, ``.``, ``_`` or ``-``, beginning with a letter or digit.
        role: what the worker does.
        epoch: random unsigned 64-bit number of this start of the worker: another epoch means that it has started again.
        grpc_address: ``host:port`` that peers dial.
        events_address: ``tcp://host:port`` of the ZMQ PUB socket; empty when the worker has none.
        model_name: what requests ask for.
        host: where the process runs, for the ways that need shared memory.
        transfer_ways: the ways by which its blocks can be pulled, best first; empty: no worker can pull them.
        contract_version: the version of the protos that the worker was built with.
        http_address: ``host:port`` of metrics and health; loopback: of the worker's own host; empty: it has none.
    """

    worker_id: str
    role: Role
    epoch: int
    grpc_address: str
    events_address: str
    model_name: str
    host: HostIdentity
    transfer_ways: tuple[str, ...]
    contract_version: str
    http_address: str = ""

    def __post_init__(self) -> None:
        """Check every value. Raises ``ValueError`` naming the field."""
        check_name("worker_id", self.worker_id)
        if self.role is Role.ROUTER:
            raise ValueError("role must be a worker's")
        if not 0 <= self.epoch < 2**64:
            raise ValueError("epoch must be an unsigned 64-bit number")
        check_address("grpc_address", self.grpc_address)
        if self.events_address:
            check_events_address("events_address", self.events_address)
        if self.http_address:
            check_address("http_address", self.http_address)
        for name in ("model_name", "model_fingerprint", "contract_version"):
            check_text(name, getattr(self, name))
        check_text("host", self.host.boot_id)
        check_text("host", self.host.ipc_namespace)
        for name in ("transfer_ways", "sampling_fields", "media", "adapters", "unannounced_blocks"):
            check_texts(name, getattr(self, name))
        for name in ("reasoning_parser", "tool_call_parser"):
            if getattr(self, name):
                check_name(name, getattr(self, name))
        check_count("data_parallel_size", self.data_parallel_size, least=1, most=MAX_RANKS)
        for name in ("num_blocks", "block_size", "max_model_len", "max_media_tokens"):
            check_count(name, getattr(self, name))

    @property
    def key(self) -> WorkerKey:
        """This worker's name within its namespace."""
        return WorkerKey(role=self.role, worker_id=self.worker_id)


@dataclass(frozen=True, kw_only=True)
class RouterRecord:
    """What one router announces about itself, for clients and for other routers; equal only if every field is.

    Attributes:
        router_id: a name as ``WorkerRecord.worker_id``, of which no worker may have the same.
        epoch: random unsigned 64-bit number of this start of the router.
        grpc_address: ``host:port`` that clients dial.
        contract_version: the version of the protos that the router was built with.
        http_address: ``host:port`` of OpenAI's API; empty when the router has none.
        metrics_address: ``host:port`` of metrics and health; loopback: of the router's own host; empty: it has none.
        events_address: ``tcp://host:port`` of the ZMQ PUB socket that tells what it books; empty when it has none.
        max_generates: calls of Generate that it takes at a time; 0: it does not say.
    """

    router_id: str
    epoch: int
    grpc_address: str
    contract_version: str
    http_address: str = ""
    metrics_address: str = ""
    events_address: str = ""
    max_generates: int = 0

    def __post_init__(self) -> None:
        """Check every value. Raises ``ValueError`` naming the field."""
        check_name("router_id", self.router_id)
        if not 0 <= self.epoch < 2**64:
            raise ValueError("epoch must be an unsigned 64-bit number")
        check_address("grpc_address", self.grpc_address)
        for name in ("http_address", "metrics_address"):
            if getattr(self, name):
                check_address(name, getattr(self, name))
        if self.events_address:
            check_events_address("events_address", self.events_address)
        check_text("contract_version", self.contract_version)
        check_count("max_generates", self.max_generates)

    @property
    def key(self) -> WorkerKey:
        """This router's name within its namespace."""
        return WorkerKey(role=Role.ROUTER, worker_id=self.router_id)


#: What a registry holds.
AnyRecord: TypeAlias = WorkerRecord | RouterRecord


class Rank(NamedTuple):
    """One data-parallel rank of one worker: what requests are routed to, everywhere.

    A tuple: routers look it up hundreds of times a request, and a dataclass takes four times as long.
    """

    worker_id: str
    data_parallel_rank: int = 0

    def __str__(self) -> str:
        return f"{self.worker_id}/{self.data_parallel_rank}"


@dataclass(frozen=True)
class WorkerAdded:
    """A worker that the reader of the watch did not know."""

    record: WorkerRecord


@dataclass(frozen=True)
class WorkerChanged:
    """A known worker's new record; with another epoch, the worker has started anew."""

    record: WorkerRecord


@dataclass(frozen=True)
class WorkerRemoved:
    """A known worker's record is gone: it left, or its lease ended. Absent does not mean dead."""

    worker_id: str
    role: Role


@dataclass(frozen=True)
class Synchronised:
    """The watch has given every worker of its first list; comes once per watch."""


WorkerEvent: TypeAlias = WorkerAdded | WorkerChanged | WorkerRemoved | Synchronised


class Registry(ABC):
    """Where the workers and routers of one namespace are announced; use it within one event loop."""

    def __init__(self) -> None:
        self._open: set[Registration | Watch | RouterWatch] = set()

    @abstractmethod
    async def register(self, record: AnyRecord) -> Registration:
        """Announce ``record``, replacing what an earlier start of the worker left, and keep it alive.

        The record survives lost leases, restarts and wipes of the registry: it is registered again, unless another
        process has the worker id by then.

        Raises:
            DiscoveryError: the registry could not be reached in bounded time, or a worker of another role had the id
                all that time; nothing is kept.
            WorkerReplacedError: a later start took the id meanwhile; nothing is kept.
        """

    async def workers(self) -> list[WorkerRecord]:
        """The workers' readable records of this moment, ordered by role and id.

        Raises:
            DiscoveryError: the registry could not be reached in bounded time.
        """
        return [record for record in await self.records() if isinstance(record, WorkerRecord)]

    async def routers(self) -> list[RouterRecord]:
        """The routers' readable records of this moment, ordered by id. Raises as ``workers`` does."""
        return [record for record in await self.records() if isinstance(record, RouterRecord)]

    @abstractmethod
    async def records(self) -> list[AnyRecord]:
        """All readable records of this moment, ordered by role and id. Raises as ``workers`` does."""

    def watch(self) -> Watch:
        """Begin to watch workers; needs a running event loop. Never fails: it tries until it is closed."""
        watch = Watch(self._feed, on_close=self._open.discard)
        self._open.add(watch)
        return watch

    def watch_routers(self) -> RouterWatch:
        """Begin to watch routers, as ``watch`` does workers."""
        watch = RouterWatch(self._feed, on_close=self._open.discard)
        self._open.add(watch)
        return watch

    def certificate_end(self) -> float | None:
        """Unix time at which the first of the certificates ends that its connections have; ``None``: they have none.

        Any thread may ask.
        """
        return None

    async def close(self) -> None:
        """Close every registration and watch made here, and the connection; ends in bounded time."""
        await asyncio.gather(*(part.close() for part in self._open))

    @abstractmethod
    async def _feed(self, known: RecordSet) -> None:
        """Keep ``known`` equal to what the registry holds, until cancelled."""


class Registration(ABC):
    """A worker's or router's record in the registry, kept there by a task until closed.

    Attributes:
        record: as it was registered.
    """

    def __init__(self, record: AnyRecord, *, on_close: Callable[[Registration], None]) -> None:
        self.record = record
        self._on_close = on_close
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def id_field(self) -> str:
        """The name of the record's field that names the process."""
        return "router_id" if isinstance(self.record, RouterRecord) else "worker_id"

    async def ended(self) -> None:
        """Wait until the record is no longer kept although it was not closed, and raise why. It never returns.

        Raises:
            WorkerReplacedError: another process has this worker id: another epoch, or another role.
                This worker is to finish its present work and end.
            Exception: a bug in the task that keeps the record.
        """
        if self._task is not None:
            await asyncio.wait({self._task})
            if not self._is_closed:
                self._task.result()
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Remove the record, unless a later registration has replaced it.

        Never raises for an unreachable registry and ends in bounded time: the record then goes with its lease.
        """
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
            # Its error is for ``ended``; here it would only be in the way.
            await asyncio.gather(self._task, return_exceptions=True)
        await self._remove()
        self._on_close(self)

    def _keep(self, work: Coroutine[object, object, None]) -> None:
        self._task = asyncio.create_task(work, name=f"discovery-register-{self.record.key.worker_id}")

    @abstractmethod
    async def _remove(self) -> None:
        """Remove the record; log why if that can't be done."""


class Watch:
    """One reader's view of the workers: iterate it with ``async for``, from one task.

    Begins with a ``WorkerAdded`` per worker, then ``Synchronised``, then differences only, also across broken
    connections; meanwhile the last known workers stay. A slow reader gets fewer events (changes of
    one worker merge), never a wrong end state. The iteration ends when the watch or its registry is closed.
    """

    def __init__(self, feed: Feed, *, on_close: Callable[[Watch], None]) -> None:
        """``feed`` keeps a set of records equal to what the registry holds, until it is cancelled."""
        self._on_close = on_close
        self._wake = asyncio.Event()
        self._workers = WorkerSet(self._wake.set)
        self._feeding = _Feeding(feed(self._workers), self._wake)

    def __aiter__(self) -> Watch:
        return self

    async def __anext__(self) -> WorkerEvent:
        while not self._feeding.is_closed:
            if (event := self._workers.next_event()) is not None:
                return event
            await self._feeding.wait()
        raise StopAsyncIteration

    async def close(self) -> None:
        """End the iteration and the feed, and free what the watch holds; closing again does nothing."""
        await self._feeding.close()
        self._on_close(self)


class RouterWatch:
    """One reader's view of the routers: iterate it with ``async for``, from one task.

    Gives all routers, ordered by id, once they are listed, and after each change. It ends as a ``Watch`` does.
    """

    def __init__(self, feed: Feed, *, on_close: Callable[[RouterWatch], None]) -> None:
        """``feed`` is as for ``Watch``."""
        self._on_close = on_close
        self._wake = asyncio.Event()
        self._routers = RouterSet(self._wake.set)
        self._feeding = _Feeding(feed(self._routers), self._wake)

    def __aiter__(self) -> RouterWatch:
        return self

    async def __anext__(self) -> Sequence[RouterRecord]:
        while not self._feeding.is_closed:
            if (routers := self._routers.next_list()) is not None:
                return routers
            await self._feeding.wait()
        raise StopAsyncIteration

    async def close(self) -> None:
        """End the iteration and the feed; closing again does nothing."""
        await self._feeding.close()
        self._on_close(self)


class _Feeding:
    """The task that feeds a watch; ``wake`` is set when there is something new, or when it ends."""

    def __init__(self, feed: Coroutine[object, object, None], wake: asyncio.Event) -> None:
        self.is_closed = False
        self._wake = wake
        self._task = asyncio.create_task(feed, name="discovery-watch")
        self._task.add_done_callback(lambda _: wake.set())

    async def wait(self) -> None:
        """Until there is something new. Raises ``DiscoveryError`` if the feed has ended."""
        # A feed runs until it is closed; should it ever end by a bug, the reader must not wait for ever.
        if self._task.done():
            cause = None if self._task.cancelled() else self._task.exception()
            raise DiscoveryError(f"the watch broke: {cause!r}") from cause
        self._wake.clear()
        await self._wake.wait()

    async def close(self) -> None:
        self.is_closed = True
        self._wake.set()
        self._task.cancel()
        await asyncio.wait({self._task})


class RecordSet(ABC):
    """What a feed keeps equal to what its registry holds; pure."""

    @abstractmethod
    def replace(self, records: Iterable[AnyRecord]) -> None:
        """Take ``records`` as the complete list."""

    @abstractmethod
    def put(self, record: AnyRecord) -> None:
        """One process has come or changed."""

    @abstractmethod
    def remove(self, key: WorkerKey) -> None:
        """One process has gone; an unknown one is ignored."""


#: Keeps a set equal to what a registry holds, until it is cancelled.
Feed: TypeAlias = Callable[[RecordSet], Coroutine[object, object, None]]


class RouterSet(RecordSet):
    """The known routers, and whether the reader has them; pure."""

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        """Start without routers; ``on_change`` is called after each change."""
        self._on_change = on_change
        self._known: dict[WorkerKey, RouterRecord] = {}
        self._is_listed = False
        self._read: Sequence[RouterRecord] | None = None

    def replace(self, records: Iterable[AnyRecord]) -> None:
        """Take the routers of ``records`` as the complete list of routers."""
        self._known = {record.key: record for record in records if isinstance(record, RouterRecord)}
        self._is_listed = True
        self._on_change()

    def put(self, record: AnyRecord) -> None:
        """One router has come or changed; a worker is ignored."""
        if isinstance(record, RouterRecord):
            self._known[record.key] = record
            self._on_change()

    def remove(self, key: WorkerKey) -> None:
        """One router has gone; an unknown one is ignored."""
        if self._known.pop(key, None) is not None:
            self._on_change()

    def next_list(self) -> Sequence[RouterRecord] | None:
        """All routers by id, which count as delivered; ``None``: the reader has them, or they were never listed."""
        routers = [self._known[key] for key in sorted(self._known)]
        if not self._is_listed or routers == self._read:
            return None
        self._read = routers
        return routers


class WorkerSet(RecordSet):
    """The known workers, and the changes that the reader has not received yet; pure.

    Differences are worked out when the reader asks for the next one. So nothing queues up behind a slow reader, and
    after a broken connection a fresh list turns into exactly the events that the reader missed.

    Readers know a worker by its id. Should records of several roles have one id, which no registration of ours lets
    happen, the reader gets the first that it was told of, and another only once that one is gone.
    """

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        """Start without workers; ``on_change`` is called after each change."""
        self._on_change = on_change
        self._known: dict[WorkerKey, WorkerRecord] = {}
        self._reported: dict[WorkerKey, WorkerRecord] = {}
        # An ordered set: the reader gets workers in the order in which they first changed.
        self._to_report: dict[WorkerKey, None] = {}
        self._shadowed: set[WorkerKey] = set()
        self._is_listed = False
        self._is_synchronised = False

    def replace(self, records: Iterable[AnyRecord]) -> None:
        """Take the workers of ``records`` as the complete list of workers."""
        listed = {record.key: record for record in records if isinstance(record, WorkerRecord)}
        changed = [key for key in self._known.keys() | listed.keys() if self._known.get(key) != listed.get(key)]
        self._known = listed
        self._to_report.update(dict.fromkeys(sorted(changed)))
        self._is_listed = True
        self._on_change()

    def put(self, record: AnyRecord) -> None:
        """One worker has come or changed; a router is ignored."""
        if isinstance(record, WorkerRecord):
            self._known[record.key] = record
            self._to_report[record.key] = None
            self._on_change()

    def remove(self, key: WorkerKey) -> None:
        """One worker has gone; an unknown one is ignored."""
        if self._known.pop(key, None) is not None:
            self._to_report[key] = None
            self._on_change()

    def next_event(self) -> WorkerEvent | None:
        """The reader's next event, which counts as delivered; ``None`` when the reader is up to date."""
        while self._to_report:
            key = next(iter(self._to_report))
            del self._to_report[key]
            if (event := self._report(key)) is not None:
                return event
        if self._is_listed and not self._is_synchronised:
            self._is_synchronised = True
            return Synchronised()
        return None

    def _report(self, key: WorkerKey) -> WorkerEvent | None:
        record = self._known.get(key)
        if record is None:
            return self._report_removed(key)
        if self._is_shadowed(key):
            return None
        reported = self._reported.pop(key, None)
        self._reported[key] = record
        if reported is None:
            return WorkerAdded(record)
        return None if reported == record else WorkerChanged(record)

    def _report_removed(self, key: WorkerKey) -> WorkerEvent | None:
        self._shadowed.discard(key)
        if self._reported.pop(key, None) is None:
            return None
        freed = [other for other in self._shadowed if other.worker_id == key.worker_id]
        self._to_report.update(dict.fromkeys(sorted(freed)))
        return WorkerRemoved(worker_id=key.worker_id, role=key.role)

    def _is_shadowed(self, key: WorkerKey) -> bool:
        """Whether the reader knows a worker of another role by the id of ``key``; logged once."""
        others = [WorkerKey(role, key.worker_id) for role in Role if role is not key.role]
        holder = next((other for other in others if other in self._reported), None)
        if holder is None:
            self._shadowed.discard(key)
        elif key not in self._shadowed:
            self._shadowed.add(key)
            logger.warning("ignored the %s worker %s: a %s worker has this id", key.role, key.worker_id, holder.role)
        return holder is not None
