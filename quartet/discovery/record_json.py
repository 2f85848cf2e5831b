"""The JSON form of records, and how a registry reads what others have stored in it.

In the registry a record is a JSON object. Readers ignore keys that they do not know, so that newer processes may add
keys. The epoch is a decimal string: JavaScript and jq read numbers as doubles, which cannot hold 64 bits.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, fields
from typing import TypeVar, get_type_hints

from quartet.discovery.base import AnyRecord, HostIdentity, Role, RouterRecord, WorkerKey, WorkerRecord
from quartet.discovery.checks import check_name
from quartet.errors import DiscoveryError
from quartet.limited_log import LimitedLog

logger = logging.getLogger(__name__)

#: A longer record is refused before it is parsed: etcd takes no more in one request.
MAX_RECORD_BYTES = 3 << 19

_MAX_REMEMBERED = 1024
_MAX_LOGGED_PER_MINUTE = 100

FieldsT = TypeVar("FieldsT")


def to_json(record: AnyRecord) -> bytes:
    """The record as one UTF-8 JSON object."""
    return json.dumps({**asdict(record), "epoch": str(record.epoch)}, separators=(",", ":")).encode()


def from_json(data: bytes) -> WorkerRecord:
    """The worker's record that ``data`` holds; unknown keys are ignored.

    Raises:
        DiscoveryError: too long, not a JSON object, or a key is missing or impossible. The message names the key.
    """
    return _from_json(WorkerRecord, data)


def router_from_json(data: bytes) -> RouterRecord:
    """The router's record that ``data`` holds, as ``from_json``."""
    return _from_json(RouterRecord, data)


def _from_json(cls: type[FieldsT], data: bytes) -> FieldsT:
    if len(data) > MAX_RECORD_BYTES:
        raise DiscoveryError(f"the record has more than {MAX_RECORD_BYTES} bytes")
    try:
        return _parse_fields(cls, _parse_object(data))
    except ValueError as error:
        raise DiscoveryError(f"the record is impossible: {error}") from error


def read_epoch(data: bytes) -> int | None:
    """The epoch that ``data`` names, readable otherwise or not; ``None``: it is no process's record."""
    try:
        return _epoch("epoch", _parse_object(data).get("epoch"))
    except (DiscoveryError, ValueError):
        return None


class RecordReader:
    """Reads stored records. One that can't be used is no process; each is logged once, until its value changes.

    Of many such records at most 100 are logged in a minute.
    """

    def __init__(self) -> None:
        """Nothing has been refused yet."""
        self._refused: dict[str, int] = {}  # by name, the value's hash; oldest first
        self._log = LimitedLog(logger, max_per_minute=_MAX_LOGGED_PER_MINUTE)

    def key(self, role: str, worker_id: str) -> WorkerKey | None:
        """The key with these parts; ``None`` for a role that only newer versions know, or an impossible id."""
        try:
            check_name("worker_id", worker_id)
            return WorkerKey(role=Role(role), worker_id=worker_id)
        except ValueError as error:
            self._refuse(f"{role[:20]!r}/{worker_id[:200]!r}", b"", error)
            return None

    def record(self, key: WorkerKey, data: bytes) -> AnyRecord | None:
        """The record stored under ``key``; ``None`` where it can't be read or is another process's."""
        name = f"{key.role}/{key.worker_id}"
        try:
            record: AnyRecord = router_from_json(data) if key.role is Role.ROUTER else from_json(data)
            if record.key != key:
                raise DiscoveryError(f"it names {'/'.join(record.key)}")
        except DiscoveryError as error:
            self._refuse(name, data, error)
            return None
        self._refused.pop(name, None)
        return record

    def unreadable(self, role: str, worker_id: str, error: OSError) -> None:
        """What is stored under the key with these parts can't be read."""
        key = self.key(role, worker_id)
        if key is not None:
            self._refuse(f"{key.role}/{key.worker_id}", str(error).encode(errors="replace"), error)

    def _refuse(self, name: str, data: bytes, error: Exception) -> None:
        value_hash = hash(data)
        if self._refused.get(name) == value_hash:
            return
        self._log.warning("ignored the record under %s: %s", name, error)
        self._refused[name] = value_hash
        if len(self._refused) > _MAX_REMEMBERED:
            del self._refused[next(iter(self._refused))]


def _parse_object(data: bytes) -> Mapping[str, object]:
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:  # the latter for thousands of open brackets
        raise DiscoveryError(f"the record is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise DiscoveryError("the record is not a JSON object")
    return values


def _impossible(key: str, wanted: str) -> DiscoveryError:
    return DiscoveryError(f"{key} of the record must be {wanted}", field=key)


def _text(key: str, value: object) -> str:
    if not isinstance(value, str):
        raise _impossible(key, "a string")
    return value


def _number(key: str, value: object) -> int:
    # bool is an int to Python, but ``true`` is no number.
    if not isinstance(value, int) or isinstance(value, bool):
        raise _impossible(key, "a whole number")
    return value


def _texts(key: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _impossible(key, "a list of strings")
    return tuple(value)


def _role(key: str, value: object) -> Role:
    try:
        return Role(_text(key, value))
    except ValueError as error:
        raise _impossible(key, f"one of {', '.join(Role)}") from error


def _host(key: str, value: object) -> HostIdentity:
    if not isinstance(value, dict):
        raise _impossible(key, "an object")
    return _parse_fields(HostIdentity, value)


def _epoch(key: str, value: object) -> int:
    text = _text(key, value)
    if not (text.isascii() and text.isdigit()):
        raise _impossible(key, "a decimal string")
    return int(text)


_PARSERS: Mapping[object, Callable[[str, object], object]] = {
    str: _text,
    int: _number,
    tuple[str, ...]: _texts,
    Role: _role,
    HostIdentity: _host,
}
_TYPES: Mapping[type, Mapping[str, object]] = {
    cls: get_type_hints(cls) for cls in (WorkerRecord, RouterRecord, HostIdentity)
}


def _parse_fields(cls: type[FieldsT], values: Mapping[str, object]) -> FieldsT:
    """The dataclass ``cls`` of these values by name; those of fields with a default may be missing."""
    parsed = {}
    for field in fields(cls):  # type: ignore[arg-type]
        name = field.name
        if name in values:
            parse = _epoch if name == "epoch" else _PARSERS[_TYPES[cls][name]]
            parsed[name] = parse(name, values[name])
        elif field.default is MISSING:
            raise DiscoveryError(f"the record has no {name}", field=name)
    return cls(**parsed)
