"""Usage records: what they say, where they go when the file is moved, and what is lost when it can't be written."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from quartet.api.request import Resume
from quartet.errors import ConfigError, ModelNotFoundError
from quartet.telemetry.metrics import RouterMetrics
from router import usage_log as module
from router.http.config import HttpConfig
from router.usage_log import UsageLog, UsageRecord
from tests.router.fakes import Collected, Fleet, collect, expected_tokens
from tests.router.http.face import open_face
from tests.router.http.test_server import ACME, CHAT, write_keys
from tests.router.system import running_system
from tests.router.test_generate import make_start as make_domain_start
from tests.router.test_place import place

RECORD = UsageRecord(
    time=1_700_000_000.25,
    request_id="r",
    client_request_id="",
    tenant="acme",
    key_id="k",
    model="tiny",
    path="generate",
    num_prompt_tokens=20,
    num_cached_tokens=16,
    num_output_tokens=3,
    num_resumed_tokens=0,
    resumed_choice=None,
    duration_s=0.5,
    outcome="length",
)


def records_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def open_below(folder: Path) -> list[str]:
    """The files in ``folder`` that this process has open."""
    found = list[str]()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the listing itself
            found.append(str(descriptor.readlink()))
    return [name for name in found if name.startswith(f"{folder}/")]


class Gate:
    """Holds the writing thread before each write, and tells that it is there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.came, self.goes = threading.Semaphore(0), threading.Semaphore(0)
        self.failure: OSError | None = None
        self.max_bytes: int | None = None
        self._write: Callable[[int, bytes], int] = os.write
        monkeypatch.setattr(module.os, "write", self.write)

    def write(self, descriptor: int, content: bytes) -> int:
        self.came.release()
        assert self.goes.acquire(timeout=30)
        if self.failure is not None and self.max_bytes is None:
            raise self.failure
        max_bytes, self.max_bytes = self.max_bytes, None
        return self._write(descriptor, content[:max_bytes])

    def wait(self) -> None:
        assert self.came.acquire(timeout=30)


def test_a_line_says_who_used_what_and_when(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    log = UsageLog(path)
    log.put(RECORD)
    log.close()
    [record] = records_in(path)
    assert record.pop("time") == "2023-11-14T22:13:20.250+00:00"
    assert record == {name: getattr(RECORD, name) for name in record} and len(record) == 13
    assert log.num_lost == 0


def test_the_owner_and_the_group_may_read_it_and_no_other_program_inherits_it(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        log = UsageLog(tmp_path / "usage.jsonl")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "usage.jsonl").stat().st_mode) == 0o640
    assert not os.get_inheritable(log._descriptor)
    log.close()


def test_a_file_that_is_moved_away_is_followed_by_a_new_one_and_loses_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, gate = tmp_path / "usage.jsonl", Gate(monkeypatch)
    log = UsageLog(path)
    log.put(RECORD)
    gate.wait()
    path.rename(tmp_path / "usage.jsonl.1")
    log.put(replace(RECORD, request_id="second"))
    gate.goes.release()
    gate.wait()  # the second write, in the new file
    assert open_below(tmp_path) == [str(path)], "the old file is closed"
    gate.goes.release()
    log.close()
    assert open_below(tmp_path) == []
    assert [record["request_id"] for record in records_in(tmp_path / "usage.jsonl.1")] == ["r"]
    assert [record["request_id"] for record in records_in(path)] == ["second"]


def test_what_does_not_fit_while_the_disk_stands_still_is_lost_counted_and_blocks_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, gate = tmp_path / "usage.jsonl", Gate(monkeypatch)
    log, registry = UsageLog(path, max_queued=2), CollectorRegistry()
    RouterMetrics(registry).watch_usage(lambda: log.num_lost)
    log.put(RECORD)
    gate.wait()
    for _ in range(5):
        log.put(RECORD)
    assert registry.get_sample_value("quartet_router_lost_usage_records_total") == log.num_lost == 3
    assert caplog.text.count("2 wait to be written") == 1
    gate.goes.release()
    gate.wait()  # both that waited are being written, so there is room again
    for _ in range(5):
        log.put(RECORD)
    assert log.num_lost == 6 and caplog.text.count("2 wait to be written") == 2, "once each time"
    gate.goes.release(10)
    log.close()
    assert len(records_in(path)) == 5


def test_so_many_records_are_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, gate = tmp_path / "usage.jsonl", Gate(monkeypatch)
    monkeypatch.setattr(module, "_MAX_WRITTEN_AT_ONCE", 2)
    log = UsageLog(path)
    log.put(RECORD)
    gate.wait()
    for _ in range(5):
        log.put(RECORD)
    for num_written in (1, 3, 5):
        gate.goes.release()
        gate.wait()
        assert len(records_in(path)) == num_written
    gate.goes.release()
    log.close()
    assert len(records_in(path)) == 6


def test_after_a_disk_that_was_full_lines_are_whole_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, gate = tmp_path / "usage.jsonl", Gate(monkeypatch)
    log = UsageLog(path)
    gate.failure, gate.max_bytes = OSError(28, "No space left on device"), 10
    log.put(RECORD)
    gate.goes.release(2)
    gate.wait()
    gate.wait()
    log.put(RECORD)  # which is lost like the first
    gate.wait()
    gate.goes.release()
    log.put(RECORD)
    gate.wait()
    gate.failure = None
    gate.goes.release()
    assert caplog.text.count("No space left") == 1
    log.put(RECORD)
    gate.wait()
    gate.failure = OSError(28, "No space left on device")
    gate.goes.release(10)
    log.close()
    torn, *whole = path.read_text().splitlines()
    assert len(torn) == 10 and [json.loads(line)["request_id"] for line in whole] == ["r"]
    assert log.num_lost == 3 and caplog.text.count("No space left") == 2, "once each time"


def test_a_line_that_a_killed_process_left_in_half_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    for left, num_lines in (('{"time": "20', 2), ("", 3)):
        path.write_text((path.read_text() if path.exists() else "") + left)
        log = UsageLog(path)
        log.put(RECORD)
        log.close()
        torn, *whole = path.read_text().splitlines()
        assert torn == '{"time": "20' and len(whole) == num_lines - 1
        assert {json.loads(line)["request_id"] for line in whole} == {"r"}


def test_a_file_that_may_be_written_and_not_read_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really_open = os.open

    def open_unreadable(path: Path, flags: int, mode: int) -> int:
        if flags & os.O_RDWR:
            raise PermissionError(13, "Permission denied")
        return really_open(path, flags, mode)

    monkeypatch.setattr(module.os, "open", open_unreadable)
    log = UsageLog(tmp_path / "usage.jsonl")
    for _ in range(2):
        log.put(RECORD)
    log.close()
    assert len(records_in(tmp_path / "usage.jsonl")) == 2


def test_a_pipe_that_nobody_reads_yet_stops_no_start(tmp_path: Path) -> None:
    path = tmp_path / "usage.pipe"
    os.mkfifo(path)
    log = UsageLog(path)
    reader = os.open(path, os.O_RDONLY)
    log.put(RECORD)
    line = b""
    while not line.endswith(b"\n"):
        line += os.read(reader, 4096)
    assert json.loads(line)["request_id"] == "r"
    log.close()
    os.close(reader)


def test_an_end_that_leaves_records_unwritten_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate(monkeypatch)
    monkeypatch.setattr(module, "CLOSE_TIMEOUT_S", 0.05)
    log = UsageLog(tmp_path / "usage.jsonl")
    log.put(RECORD)
    gate.wait()
    log.close()
    assert "took none for 0.05 s" in caplog.text
    gate.goes.release(10)
    log._thread.join(30)


def test_a_file_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    for path in (tmp_path / "none" / "usage.jsonl", tmp_path):
        with pytest.raises(ConfigError, match="usage_log"):
            UsageLog(path)


async def test_each_request_by_http_has_a_record_with_the_id_of_its_key(tmp_path: Path) -> None:
    keys, path = write_keys(tmp_path / "keys", f"acme {ACME} id=first"), tmp_path / "usage.jsonl"
    log = UsageLog(path)
    async with open_face(config=HttpConfig(keys_file=keys), usage=log) as face:
        headers = {"Authorization": f"Bearer {ACME}", "X-Request-Id": "mine"}
        _, answer = await face.post("/v1/chat/completions", CHAT, **headers)
        await face.post("/v1/chat/completions", {**CHAT, "model": "none"}, **headers)
    log.close()
    first, second = records_in(path)
    assert (first["tenant"], first["key_id"], first["client_request_id"]) == ("acme", "first", "mine")
    assert (first["model"], first["path"], first["outcome"]) == ("tiny", "generate", "length")
    assert answer["id"].endswith(first["request_id"])
    used = answer["usage"]
    assert (first["num_prompt_tokens"], first["num_output_tokens"]) == (
        used["prompt_tokens"],
        used["completion_tokens"],
    )
    assert first["duration_s"] > 0 and ACME not in path.read_text()
    assert (second["model"], second["outcome"], second["num_output_tokens"]) == ("", "model_not_found", 0)


async def test_what_each_call_of_a_resumed_answer_had_generated_can_be_summed(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    log = UsageLog(path)
    fleet = Fleet("prefill-0", "decode-0", usage=log)
    start, resume = make_domain_start(num_choices=2), Resume(request_id="ab" * 16, attempt=1, seed=5, choice=1)
    given = tuple(expected_tokens(5, 1, 20, 4))
    shown_before = Collected()
    shown_before.token_ids[1] = [*given]
    await collect(fleet.generate(start))
    await collect(fleet.generate(start, resume=replace(resume, generated_token_ids=given)), shown_before)
    await fleet.pipeline.place(start, resume=replace(resume, generated_token_ids=given))
    with pytest.raises(ModelNotFoundError):  # before the tokens are looked at
        await collect(fleet.generate(replace(start, model="none"), resume=replace(resume, generated_token_ids=given)))
    log.close()
    shown = [
        (record["num_output_tokens"], record["num_resumed_tokens"], record["resumed_choice"])
        for record in records_in(path)
    ]
    assert shown == [(2 * 12, 0, None), (12, 4, 1), (5, 4, 1), (0, 0, 1)]


async def test_a_router_writes_what_waits_before_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "usage.jsonl"
    async with running_system(tmp_path, monkeypatch, "prefill-0", "decode-0", usage_log=path) as (_system, stub):
        await place(stub)
    assert "usage-log" not in [thread.name for thread in threading.enumerate()]
    [record] = records_in(path)
    assert (record["path"], record["outcome"], record["num_prompt_tokens"]) == ("place", "placed", 20)
