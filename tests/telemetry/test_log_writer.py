"""Who stops reading the log stops nothing else; what is dropped is counted, and what waits at the end is written."""

from __future__ import annotations

import errno
import fcntl
import io
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from prometheus_client import CollectorRegistry

from quartet.telemetry.log_writer import QueuedHandler
from quartet.telemetry.metrics import ProcessMetrics

_TIMEOUT_S = 30.0
_ROOM = 1000


class Gated(io.StringIO):
    """Takes no line while its gate is closed, and fails each write with ``error`` while it has one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.is_writing = threading.Event(), threading.Event()
        self.error: Exception | None = None

    def write(self, text: str) -> int:
        self.is_writing.set()
        assert self.gate.wait(_TIMEOUT_S)
        if self.error is not None:
            raise self.error
        return super().write(text)

    def lines(self) -> list[str]:
        return self.getvalue().splitlines()


@contextmanager
def log_to(stream: Gated) -> Iterator[tuple[logging.Logger, QueuedHandler]]:
    logger = logging.Logger("quartet.test")
    handler = QueuedHandler(stream, max_queued_characters=_ROOM)
    logger.addHandler(handler)
    try:
        yield logger, handler
    finally:
        stream.gate.set()
        handler.close()


def fill(logger: logging.Logger, stream: Gated) -> None:
    """Keep the thread in a write, and fill the queue with lines of a hundred characters."""
    for _ in range(_ROOM // 100):
        logger.info("%0100d", 0)
    assert stream.is_writing.wait(_TIMEOUT_S)


def test_lines_come_whole_and_in_order_from_all_threads() -> None:
    stream = Gated()
    stream.gate.set()
    with log_to(stream) as (logger, handler):
        for number in range(200):
            logger.info("%d", number)
            if number % 10 == 9:
                handler.flush()
        assert stream.lines() == [str(number) for number in range(200)]
        assert handler.num_dropped == 0


def test_what_finds_no_room_is_dropped_counted_and_told_once_lines_are_taken_again() -> None:
    stream = Gated()
    with log_to(stream) as (logger, handler):
        fill(logger, stream)
        for _ in range(7):
            logger.info("dropped")
        assert handler.num_dropped == 7
        stream.gate.set()
        handler.flush()
        told = "log lines dropped: 7; they came faster than they were taken"
        assert stream.lines() == [f"{0:0100d}"] * 10 + [told]
        logger.info("taken again")
        handler.flush()
        assert stream.lines()[11:] == ["taken again"]


def test_a_line_that_is_itself_longer_than_the_queue_is_dropped() -> None:
    stream = Gated()
    stream.gate.set()
    with log_to(stream) as (logger, handler):
        logger.info("x" * (_ROOM + 1))
        logger.info("short")
        handler.flush()
        assert handler.num_dropped == 1
        assert stream.lines()[0] == "short"


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "the disk is full"), ValueError("closed")])
def test_lines_that_could_not_be_written_are_counted_and_the_next_ones_are_tried(error: Exception) -> None:
    stream = Gated()
    stream.gate.set()
    stream.error = error
    with log_to(stream) as (logger, handler):
        logger.info("lost")
        handler.flush()
        stream.error = None
        logger.info("written")
        handler.flush()
        assert stream.lines() == ["written", "log lines dropped: 1; they came faster than they were taken"]


def test_a_flush_ends_though_nothing_takes_the_lines_and_the_next_one_waits_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quartet.telemetry.log_writer._FLUSH_TIMEOUT_S", 0.01)
    stream = Gated()
    with log_to(stream) as (logger, handler):
        fill(logger, stream)
        handler.flush()
        monkeypatch.setattr("quartet.telemetry.log_writer._FLUSH_TIMEOUT_S", 3600.0)
        handler.flush()
    handler.flush()


def test_a_line_that_cannot_be_formatted_breaks_nothing() -> None:
    stream = Gated()
    stream.gate.set()
    with log_to(stream) as (logger, handler):
        logger.info("%d", "no number")
        handler.flush()
        assert stream.lines() == ["a line of quartet.test can't be formatted: '%d'"]


def test_dropped_lines_are_a_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    registry, stream = CollectorRegistry(), Gated()
    ProcessMetrics(registry)
    with log_to(stream) as (logger, handler):
        monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
        fill(logger, stream)
        assert registry.get_sample_value("quartet_process_dropped_log_lines_total") == 0
        logger.info("dropped")
        assert registry.get_sample_value("quartet_process_dropped_log_lines_total") == 1


_PROCESS = """
import logging, os, sys
from quartet.telemetry.logging import LogConfig, configure

configure(LogConfig())
for number in range(int(sys.argv[1])):
    logging.info("%0100d", number)
print("answered", flush=True)
sys.stdin.readline()
logging.error("the last error")
END
"""


@pytest.mark.parametrize("end", ["sys.exit(3)", "logging.shutdown(); os._exit(3)", "raise SystemExit(3)"])
@pytest.mark.parametrize("is_read", [False, True])
def test_a_process_whose_log_nobody_reads_goes_on_and_ends_and_else_its_last_error_is_written(
    end: str, is_read: bool
) -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    command = [sys.executable, "-c", _PROCESS.replace("END", end), "1" if is_read else "1000"]
    with open(reader, encoding="utf-8") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=writer, text=True)
        os.close(writer)
        assert process.stdout is not None and process.stdout.readline() == "answered\n"
        process.communicate("\n", timeout=_TIMEOUT_S)
        assert process.returncode == 3
        assert log.readlines()[-1].endswith("ERROR root: the last error\n") is is_read
