"""The JSON form of records."""

from __future__ import annotations

import json
import logging
from typing import Any

import hypothesis.strategies as st
import pytest
import zmq
from hypothesis import given

from quartet.discovery import record_json
from quartet.discovery.base import Role, WorkerKey, WorkerRecord
from quartet.discovery.record_json import MAX_RECORD_BYTES, RecordReader, from_json, read_epoch, to_json
from quartet.errors import DiscoveryError
from quartet.streams.convert.workers import from_worker_record, to_worker_record
from tests.discovery.records import make_record
from tests.discovery.strategies import worker_records

_REQUIRED = sorted(
    set(json.loads(to_json(make_record())))
    - {"data_parallel_size", "media", "adapters", "http_address", "max_media_tokens", "unannounced_blocks"}
    - {"reasoning_parser", "tool_call_parser"}
)


@given(worker_records())
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
        ("num_blocks", 2**31),
        ("block_size", 2**31),
        ("max_model_len", -1),
        ("max_media_tokens", -1),
        ("max_media_tokens", 2**40),
        ("data_parallel_size", 0),
        ("data_parallel_size", 1025),
        ("data_parallel_size", 10**4000),
        ("grpc_address", ""),
        ("grpc_address", "\ud800:1"),
        ("grpc_address", "host"),
        ("grpc_address", "host:0"),
        ("grpc_address", "host:65536"),
        ("grpc_address", "host:٣"),
        ("grpc_address", "a\0b:1"),
        ("grpc_address", "::1:50051"),
        ("grpc_address", "unix:/tmp/socket:1"),
        ("events_address", "127.0.0.1:5"),
        ("events_address", "tcp://*:5"),
        ("events_address", "ipc://host:5"),
        ("events_address", "tcp://\udfff:5"),
        ("http_address", "host:99999"),
        ("model_name", "\ud800"),
        ("model_name", "two\nlines"),
        ("model_name", "m" * 257),
        ("model_fingerprint", "\x1b[2J"),
        ("contract_version", "\ud800"),
        ("sampling_fields", ["\ud800"]),
        ("media", ["image"] * 1025),
        ("adapters", ["\0"]),
        ("transfer_ways", "grpc"),
        ("transfer_ways", [1]),
        ("host", "here"),
        ("host", {"boot_id": "boot"}),
        ("host", {"boot_id": "boot", "ipc_namespace": "\ud800"}),
    ],
)
def test_an_impossible_value_is_an_error_naming_its_key(key: str, value: object) -> None:
    with pytest.raises(DiscoveryError) as raised:
        from_json(json.dumps(_fields() | {key: value}).encode())
    assert key in raised.value.message or raised.value.field == "ipc_namespace"


@pytest.mark.parametrize("address", ["10.0.0.1:1", "worker_7.pods.example:65535", "[::1]:50051", "[fe80::1%eth0]:5"])
def test_an_address_that_can_be_dialled_is_taken(address: str) -> None:
    fields = {"grpc_address": address, "http_address": address, "events_address": f"tcp://{address}"}
    assert from_json(json.dumps(_fields() | fields).encode()) == make_record(**fields)


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    with pytest.raises(DiscoveryError):
        from_json(data)


_JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(
    st.dictionaries(
        st.sampled_from(sorted(json.loads(to_json(make_record())))),
        _JSON_VALUES | st.sampled_from(["\ud800", "tcp://:1", "[::]:0", 2**32, -1, ""]),
        min_size=1,
        max_size=3,
    )
)
def test_a_record_with_any_values_is_refused_or_can_be_sent_shown_and_dialled(changes: dict[str, object]) -> None:
    try:
        record = from_json(json.dumps(_fields() | changes).encode())
    except DiscoveryError:
        return
    assert from_json(to_json(record)) == record
    from_worker_record(to_worker_record(record).FromString(to_worker_record(record).SerializeToString()))
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        if record.events_address:
            socket.connect(record.events_address)


def test_deeply_nested_json_is_an_error_like_any_other() -> None:
    with pytest.raises(DiscoveryError):
        from_json(b"[" * 100_000)


@pytest.mark.parametrize(
    ("data", "epoch"),
    [
        (to_json(make_record(epoch=2**64 - 1)), 2**64 - 1),
        (b'{"epoch":"9","of":"a newer version"}', 9),
        (b"", None),
        (b"[" * 100_000, None),
        (b"[]", None),
        (b"{}", None),
        (b'{"epoch":7}', None),
        (b'{"epoch":"-7"}', None),
        (b'{"epoch":"' + b"9" * 5000 + b'"}', None),
    ],
)
def test_the_epoch_is_read_also_from_a_record_that_is_not_readable_otherwise(data: bytes, epoch: int | None) -> None:
    assert read_epoch(data) == epoch


def test_a_record_that_is_too_long_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(DiscoveryError, match="more than 1572864 bytes"):
        from_json(to_json(make_record()) + b" " * MAX_RECORD_BYTES)


def test_a_skipped_record_is_logged_once_with_its_name_until_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    key, reader = WorkerKey(role=Role.DECODE, worker_id="w7"), RecordReader()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert reader.record(key, b"{}") is None
        for _ in range(3):
            assert reader.record(key, to_json(make_record("w8"))) is None
            assert reader.key("waiter", "w9") is None
            assert reader.key("decode", "two\nlines") is None
        assert reader.record(key, to_json(make_record("w7"))) == make_record("w7")
        assert reader.record(key, b"{}") is None
    said = [("decode/w7", "record has no"), ("decode/w7", "it names decode/w8"), ("w9", "waiter"), ("two\\nlines", "")]
    assert len(caplog.messages) == len(said) + 1
    for message, parts in zip(caplog.messages, said, strict=False):
        assert all(part in message for part in parts)


def test_a_record_under_the_key_of_another_role_is_no_worker(caplog: pytest.LogCaptureFixture) -> None:
    record = make_record("w7")
    assert record.role is Role.DECODE
    assert RecordReader().record(WorkerKey(role=Role.PREFILL, worker_id="w7"), to_json(record)) is None
    assert "prefill/w7: it names decode/w7" in caplog.text


def test_more_bad_records_than_are_remembered_are_not_logged_at_each_list(caplog: pytest.LogCaptureFixture) -> None:
    reader = RecordReader()
    for _ in range(3):
        for number in range(2000):
            assert reader.record(WorkerKey(Role.DECODE, f"w{number}"), b"") is None
    assert len(caplog.messages) == 100


def test_what_was_logged_takes_bounded_memory(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_json, "_MAX_LOGGED_PER_MINUTE", 10_000)
    reader = RecordReader()
    with caplog.at_level(logging.WARNING):
        for number in [*range(2000), 1999, 0]:
            assert reader.record(WorkerKey(Role.DECODE, f"w{number}"), b"") is None
    assert len(caplog.messages) == 2001, "the last is remembered, the first forgotten"


def _fields() -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(to_json(make_record()))
    return fields
