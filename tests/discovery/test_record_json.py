"""The JSON form of records."""

from __future__ import annotations

import json
import logging
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from quartet.discovery.base import (
    HostIdentity,
    Role,
    WorkerKey,
    WorkerRecord,
    from_json,
    parse_key,
    parse_record,
    to_json,
)
from quartet.errors import DiscoveryError
from tests.discovery.records import make_record

_texts = st.lists(st.text(max_size=8), max_size=3).map(tuple)
_counts = st.integers(0, 2**40)
_records = st.builds(
    WorkerRecord,
    worker_id=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True),
    role=st.sampled_from(Role),
    epoch=st.integers(0, 2**64 - 1),
    grpc_address=st.text(max_size=20),
    events_address=st.text(max_size=20),
    model_name=st.text(max_size=20),
    model_fingerprint=st.text(max_size=20),
    host=st.builds(HostIdentity, boot_id=st.text(max_size=8), ipc_namespace=st.text(max_size=8)),
    data_parallel_size=st.integers(1, 64),
    num_blocks=_counts,
    block_size=_counts,
    max_model_len=_counts,
    transfer_ways=_texts,
    sampling_fields=_texts,
    media=_texts,
    adapters=_texts,
    contract_version=st.text(max_size=8),
    http_address=st.text(max_size=20),
    max_media_tokens=st.integers(0, 2**31),
    unannounced_blocks=_texts,
)

_REQUIRED = sorted(
    set(json.loads(to_json(make_record())))
    - {"data_parallel_size", "media", "adapters", "http_address", "max_media_tokens", "unannounced_blocks"}
)


@given(_records)
def test_a_record_survives_its_json_form(record: WorkerRecord) -> None:
    assert from_json(to_json(record)) == record


def test_the_epoch_is_a_decimal_string_because_doubles_hold_53_bits() -> None:
    assert json.loads(to_json(make_record(epoch=2**64 - 1)))["epoch"] == "18446744073709551615"


def test_a_field_with_a_default_may_be_missing() -> None:
    fields = {key: value for key, value in _fields().items() if key in _REQUIRED}
    assert from_json(json.dumps(fields).encode()) == make_record()


@pytest.mark.parametrize("key", _REQUIRED)
def test_a_missing_key_is_named(key: str) -> None:
    fields = _fields()
    del fields[key]
    with pytest.raises(DiscoveryError, match=rf"no {key}$") as raised:
        from_json(json.dumps(fields).encode())
    assert raised.value.field == key


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("role", "waiter"),
        ("role", 1),
        ("worker_id", None),
        ("worker_id", "a/b"),
        ("worker_id", ""),
        ("epoch", 7),
        ("epoch", "-1"),
        ("epoch", "٣"),
        ("epoch", str(2**64)),
        ("num_blocks", "64"),
        ("num_blocks", True),
        ("num_blocks", -1),
        ("data_parallel_size", 0),
        ("transfer_ways", "grpc"),
        ("transfer_ways", [1]),
        ("host", "here"),
        ("host", {"boot_id": "boot"}),
    ],
)
def test_an_impossible_value_is_an_error_naming_its_key(key: str, value: object) -> None:
    with pytest.raises(DiscoveryError) as raised:
        from_json(json.dumps(_fields() | {key: value}).encode())
    assert key in raised.value.message or raised.value.field == "ipc_namespace"


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    with pytest.raises(DiscoveryError):
        from_json(data)


def test_deeply_nested_json_is_an_error_like_any_other() -> None:
    with pytest.raises(DiscoveryError):
        from_json(b"[" * 100_000)


def test_a_skipped_record_is_logged_with_its_name(caplog: pytest.LogCaptureFixture) -> None:
    key = WorkerKey(role=Role.DECODE, worker_id="w7")
    with caplog.at_level(logging.WARNING):
        assert parse_record(key, b"{}") is None
        assert parse_record(key, to_json(make_record("w8"))) is None
        assert parse_key("waiter", "w9") is None
    assert [name in line for name, line in zip(("w7", "w8", "w9"), caplog.messages, strict=True)] == [True] * 3


def _fields() -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(to_json(make_record()))
    return fields
