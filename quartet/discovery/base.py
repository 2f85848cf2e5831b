"""The discovery seam: what a worker announces, what a registry promises, and the JSON form of a worker's record.

A registry keeps one record per worker alive for as long as the worker keeps its registration, and tells
watchers what comes, changes and goes. Every implementation (``etcd``, ``file``) passes the same conformance suite.

In the registry a record is a JSON object. Readers ignore keys that they do not know, so that newer workers may say
more. The epoch is a decimal string: JavaScript and jq read numbers as doubles, which cannot hold 64 bits.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol, TypeAlias

from quartet.errors import DiscoveryError

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_REQUIRED = object()
_Fields: TypeAlias = Mapping[str, object]


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
    """What names a worker within a namespace; ordered by role, then id."""

    role: Role
    worker_id: str


@dataclass(frozen=True, kw_only=True)
class WorkerRecord:
    """What one worker announces about itself; equal only if every field is.

    Attributes:
        worker_id: 1 to 128 letters, digits, ``.``, ``_`` or ``-``, beginning with a letter or digit.
        role: what the worker does.
        epoch: random unsigned 64-bit number of this start of the worker: another epoch means that it has started again.
        grpc_address: ``host:port`` that peers dial.
        events_address: ``tcp://host:port`` of the ZMQ PUB socket; empty when the worker has none.
        model_name: what requests ask for.
        model_fingerprint: hex SHA-256; pools are (name, fingerprint) and never mixed.
        host: where the process runs, for the ways that need shared memory.
        data_parallel_size: number of data-parallel ranks, each routed to by itself.
        num_blocks: KV blocks per rank; 0 where the worker holds none.
        block_size: tokens per KV block; 0 where the worker holds none.
        max_model_len: most tokens of one sequence, prompt and output together.
        transfer_ways: the ways to move blocks that the worker speaks, best first.
        sampling_fields: names of the sampling fields that the worker honours.
        media: what the worker takes of media: ``image``, ``embeddings`` (files of each, which it encodes or checks
            itself), ``hand_off`` (embeddings that an encode worker holds).
        max_media_tokens: tokens that one media item fills at most; 0: it takes none.
        adapters: names of the LoRA adapters that the worker serves.
        contract_version: the version of the protos that the worker was built with.
        http_address: ``host:port`` of metrics and health; empty when the worker has none.
    """

    worker_id: str
    role: Role
    epoch: int
    grpc_address: str
    events_address: str
    model_name: str
    model_fingerprint: str
    host: HostIdentity
    data_parallel_size: int = 1
    num_blocks: int
    block_size: int
    max_model_len: int
    transfer_ways: tuple[str, ...]
    sampling_fields: tuple[str, ...]
    media: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    contract_version: str
    http_address: str = ""
    max_media_tokens: int = 0

    def __post_init__(self) -> None:
        check_name("worker_id", self.worker_id)
        if not 0 <= self.epoch < 2**64:
            raise ValueError("epoch must be an unsigned 64-bit number")
        if self.data_parallel_size < 1:
            raise ValueError("data_parallel_size must be at least 1")
        if min(self.num_blocks, self.block_size, self.max_model_len) < 0:
            raise ValueError("num_blocks, block_size and max_model_len must not be negative")

    @property
    def key(self) -> WorkerKey:
        """What names this worker within its namespace."""
        return WorkerKey(role=self.role, worker_id=self.worker_id)


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


class Registration(Protocol):
    """A worker's record in the registry, kept there until closed."""

    @property
    def record(self) -> WorkerRecord:
        """The record as it was registered."""
        ...

    async def close(self) -> None:
        """Remove the record, unless a later registration has replaced it.

        Never raises for an unreachable registry and ends in bounded time: the record then goes with its lease.
        """
        ...


class Watch(Protocol):
    """One reader's view of the workers: iterate it with ``async for``, from one task.

    Begins with a ``WorkerAdded`` per worker, then ``Synchronised``, then differences only, also across broken
    connections, while which the last known workers simply stay. A slow reader gets fewer events (changes of
    one worker merge), never a wrong end state. The iteration ends when the watch or its registry is closed.
    """

    def __aiter__(self) -> AsyncIterator[WorkerEvent]:
        """The watch itself."""
        ...

    async def close(self) -> None:
        """End the iteration and free what the watch holds."""
        ...


class Registry(Protocol):
    """Where the workers of one namespace are announced."""

    async def register(self, record: WorkerRecord) -> Registration:
        """Announce ``record``, replacing what the same role and id had, and keep it alive.

        The record survives lost leases, restarts and wipes of the registry: it is registered again.

        Raises:
            DiscoveryError: the registry could not be reached in bounded time; nothing is kept.
        """
        ...

    async def workers(self) -> list[WorkerRecord]:
        """The readable records of this moment, ordered by role and id.

        Raises:
            DiscoveryError: the registry could not be reached in bounded time.
        """
        ...

    def watch(self) -> Watch:
        """Begin to watch; needs a running event loop. Never fails: it tries until it is closed."""
        ...

    async def close(self) -> None:
        """Close every registration and watch made here, and the connection; ends in bounded time."""
        ...


def check_name(field: str, name: str) -> None:
    """Raise ``ValueError`` naming ``field`` unless ``name`` can be part of a key and of a file name."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{field} must be 1 to 128 letters, digits, '.', '_' or '-', not {name!r}")


def to_json(record: WorkerRecord) -> bytes:
    """The record as one UTF-8 JSON object."""
    return json.dumps({**asdict(record), "epoch": str(record.epoch)}, separators=(",", ":")).encode()


def from_json(data: bytes) -> WorkerRecord:
    """The record that ``data`` holds; unknown keys are ignored.

    Raises:
        DiscoveryError: not a JSON object, or a key is missing or impossible; ``field`` names the key.
    """
    fields = _parse_object(data)
    host = _object(fields, "host")
    try:
        return WorkerRecord(
            worker_id=_text(fields, "worker_id"),
            role=_role(fields, "role"),
            epoch=_epoch(fields, "epoch"),
            grpc_address=_text(fields, "grpc_address"),
            events_address=_text(fields, "events_address"),
            model_name=_text(fields, "model_name"),
            model_fingerprint=_text(fields, "model_fingerprint"),
            host=HostIdentity(boot_id=_text(host, "boot_id"), ipc_namespace=_text(host, "ipc_namespace")),
            data_parallel_size=_number(fields, "data_parallel_size", default=1),
            num_blocks=_number(fields, "num_blocks"),
            block_size=_number(fields, "block_size"),
            max_model_len=_number(fields, "max_model_len"),
            transfer_ways=_texts(fields, "transfer_ways"),
            sampling_fields=_texts(fields, "sampling_fields"),
            media=_texts(fields, "media", default=()),
            adapters=_texts(fields, "adapters", default=()),
            contract_version=_text(fields, "contract_version"),
            http_address=_text(fields, "http_address", default=""),
            max_media_tokens=_number(fields, "max_media_tokens", default=0),
        )
    except ValueError as error:
        raise DiscoveryError(f"the worker record is impossible: {error}") from error


def parse_key(role: str, worker_id: str) -> WorkerKey | None:
    """The key with these parts, or ``None`` (logged) where a newer version wrote a role unknown here."""
    try:
        return WorkerKey(role=Role(role), worker_id=worker_id)
    except ValueError:
        logger.warning("ignored the record of worker %r: unknown role %r", worker_id, role)
        return None


def parse_record(key: WorkerKey, data: bytes) -> WorkerRecord | None:
    """The record stored under ``key``, or ``None`` (logged) where it cannot be read or is another worker's."""
    try:
        record = from_json(data)
    except DiscoveryError as error:
        logger.warning("ignored the record of %s worker %s: %s", key.role, key.worker_id, error)
        return None
    if record.key != key:
        logger.warning("ignored the record under %s/%s: it names %s", key.role, key.worker_id, record.key)
        return None
    return record


def _parse_object(data: bytes) -> _Fields:
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:  # the latter for thousands of open brackets
        raise DiscoveryError(f"the worker record is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise DiscoveryError("the worker record is not a JSON object")
    return fields


def _value(fields: _Fields, key: str, default: object) -> object:
    value = fields.get(key, default)
    if value is _REQUIRED:
        raise DiscoveryError(f"the worker record has no {key}", field=key)
    return value


def _impossible(key: str, wanted: str) -> DiscoveryError:
    return DiscoveryError(f"{key} of the worker record must be {wanted}", field=key)


def _text(fields: _Fields, key: str, default: object = _REQUIRED) -> str:
    value = _value(fields, key, default)
    if not isinstance(value, str):
        raise _impossible(key, "a string")
    return value


def _number(fields: _Fields, key: str, default: object = _REQUIRED) -> int:
    value = _value(fields, key, default)
    # bool is an int to Python, but ``true`` is no number.
    if not isinstance(value, int) or isinstance(value, bool):
        raise _impossible(key, "a whole number")
    return value


def _texts(fields: _Fields, key: str, default: object = _REQUIRED) -> tuple[str, ...]:
    value = _value(fields, key, default)
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise _impossible(key, "a list of strings")
    return tuple(value)


def _object(fields: _Fields, key: str) -> _Fields:
    value = _value(fields, key, _REQUIRED)
    if not isinstance(value, dict):
        raise _impossible(key, "an object")
    return value


def _role(fields: _Fields, key: str) -> Role:
    value = _text(fields, key)
    try:
        return Role(value)
    except ValueError as error:
        raise _impossible(key, f"one of {', '.join(Role)}") from error


def _epoch(fields: _Fields, key: str) -> int:
    value = _text(fields, key)
    if not (value.isascii() and value.isdigit()):
        raise _impossible(key, "a decimal string")
    return int(value)
