"""Differences between what a watch knows and what its reader has received."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from quartet.discovery.base import (
    Role,
    Synchronised,
    WorkerAdded,
    WorkerChanged,
    WorkerEvent,
    WorkerKey,
    WorkerRecord,
    WorkerRemoved,
    WorkerSet,
)
from tests.discovery.records import make_record

_A, _B = make_record("a"), make_record("b")


def test_the_watch_is_not_synchronised_before_the_first_list() -> None:
    workers = WorkerSet()
    workers.put(_A)
    assert _drain(workers) == [WorkerAdded(_A)]
    workers.replace([_A])
    assert _drain(workers) == [Synchronised()]


def test_a_list_yields_only_differences_and_synchronises_once() -> None:
    workers = WorkerSet()
    workers.replace([_B, _A])
    assert _drain(workers) == [WorkerAdded(_A), WorkerAdded(_B), Synchronised()]
    changed = make_record("b", epoch=3)
    workers.replace([changed])
    assert _drain(workers) == [WorkerRemoved("a", Role.DECODE), WorkerChanged(changed)]
    workers.replace([changed])
    assert _drain(workers) == []


def test_changes_merge_while_the_reader_is_away() -> None:
    workers = WorkerSet()
    workers.put(_A)
    workers.remove(_A.key)
    workers.put(_B)
    workers.put(make_record("b", epoch=2))
    assert _drain(workers) == [WorkerAdded(make_record("b", epoch=2))]


def test_a_worker_that_goes_and_comes_back_as_it_was_is_no_event() -> None:
    workers = WorkerSet()
    workers.put(_A)
    _drain(workers)
    workers.remove(_A.key)
    workers.put(_A)
    assert _drain(workers) == []


def test_an_id_of_two_roles_is_given_to_the_reader_once(caplog: pytest.LogCaptureFixture) -> None:
    decode, prefill = make_record("both"), make_record("both", role=Role.PREFILL, epoch=2)
    workers = WorkerSet()
    workers.replace([decode, prefill])
    assert _drain(workers) == [WorkerAdded(decode), Synchronised()]
    workers.put(make_record("both", role=Role.PREFILL, epoch=3))
    assert _drain(workers) == []
    assert [message for message in caplog.messages if "a decode worker has this id" in message] == caplog.messages
    assert len(caplog.messages) == 1
    workers.remove(decode.key)
    workers.put(prefill)
    assert _drain(workers) == [WorkerRemoved("both", Role.DECODE), WorkerAdded(prefill)]
    workers.put(decode)
    workers.remove(decode.key)
    workers.remove(prefill.key)
    assert _drain(workers) == [WorkerRemoved("both", Role.PREFILL)]


def test_the_reader_gets_the_other_role_of_an_id_once_the_first_is_gone() -> None:
    decode, prefill = make_record("both"), make_record("both", role=Role.PREFILL, epoch=2)
    workers = WorkerSet()
    workers.replace([decode, prefill])
    _drain(workers)
    workers.remove(decode.key)
    assert _drain(workers) == [WorkerRemoved("both", Role.DECODE), WorkerAdded(prefill)]


_steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from("abcAB"), st.integers(0, 2)),
        st.tuples(st.just("remove"), st.sampled_from("abcAB"), st.just(0)),
        st.tuples(st.just("replace"), st.sets(st.sampled_from("abcAB")).map("".join), st.integers(0, 2)),
        st.tuples(st.just("read"), st.just(""), st.just(0)),
    ),
    max_size=30,
)


@given(_steps)
def test_after_any_changes_the_reader_knows_each_registered_worker_under_one_role(
    steps: list[tuple[str, str, int]],
) -> None:
    workers, truth, received = WorkerSet(), dict[WorkerKey, WorkerRecord](), dict[WorkerKey, WorkerRecord]()
    for step, names, epoch in steps:
        records = [_record(name, epoch) for name in names]
        match step:
            case "put":
                workers.put(records[0])
                truth[records[0].key] = records[0]
            case "remove":
                workers.remove(records[0].key)
                truth.pop(records[0].key, None)
            case "replace":
                workers.replace(records)
                truth = {record.key: record for record in records}
            case "read":
                _receive(received, workers.next_event())
    for event in _drain(workers):
        _receive(received, event)
    assert received.items() <= truth.items()
    assert {key.worker_id for key in received} == {key.worker_id for key in truth}


def _record(name: str, epoch: int) -> WorkerRecord:
    """A capital letter is the same id in another role."""
    return make_record(name.lower(), role=Role.PREFILL if name.isupper() else Role.DECODE, epoch=epoch)


def _receive(received: dict[WorkerKey, WorkerRecord], event: WorkerEvent | None) -> None:
    match event:
        case WorkerAdded(record):
            assert all(key.worker_id != record.worker_id for key in received)
            received[record.key] = record
        case WorkerChanged(record):
            assert received[record.key] != record
            received[record.key] = record
        case WorkerRemoved(worker_id, role):
            del received[WorkerKey(role=role, worker_id=worker_id)]


def _drain(workers: WorkerSet) -> list[WorkerEvent]:
    events = []
    while (event := workers.next_event()) is not None:
        events.append(event)
    return events
