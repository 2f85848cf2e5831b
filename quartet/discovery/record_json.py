"""The JSON form of worker records: what lies in the registry.

Readers ignore keys that they do not know, so that newer workers may say more. The epoch is a decimal string:
JavaScript and jq read numbers as doubles, which cannot hold 64 bits.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import TypeAlias

from quartet.discovery.base import HostIdentity, Role, WorkerKey, WorkerRecord
from quartet.errors import DiscoveryError

logger = logging.getLogger(__name__)

_Fields: TypeAlias = Mapping[str, object]


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


_REQUIRED = object()


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
