"""Logs: one line a record, for people or for machines, and one for each request."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Callable, Iterator

import pytest

from quartet.config import build
from quartet.limited_log import LimitedLog
from quartet.telemetry.logging import FinishedRequest, LogConfig, LogLevel, configure, log_request, name_trace

LOGGER = logging.getLogger("quartet.test")
REQUEST = FinishedRequest(
    request_id="ab" * 16,
    outcome="stop_id",
    model="tiny",
    client_request_id='mine" outcome=faked\nline two',
    num_prompt_tokens=7,
    num_cached_tokens=0,
    first_token_s=0.1234567891,
    total_s=1.5,
)


class Flushed(io.StringIO):
    """Has all that was logged before it is read."""

    def getvalue(self) -> str:
        for handler in logging.getLogger().handlers:
            handler.flush()
        return super().getvalue()


@pytest.fixture
def log_to() -> Iterator[Callable[[LogConfig], io.StringIO]]:
    """Configures logging into a buffer that holds all that was logged; afterwards everything is as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers = []

    def start(config: LogConfig) -> io.StringIO:
        stream = Flushed()
        configure(config, stream)
        return stream

    yield start
    for handler in root.handlers:
        handler.close()
    root.handlers, root.level = handlers, level


def test_a_request_is_one_plain_line_with_its_times(log_to: Callable[[LogConfig], io.StringIO]) -> None:
    stream = log_to(LogConfig())
    log_request(LOGGER, REQUEST)
    [line] = stream.getvalue().splitlines()
    assert "INFO quartet.test: request finished request_id=" + "ab" * 16 + " outcome=stop_id model=tiny" in line
    assert "num_cached_tokens=0" in line and "first_token_s=0.123457" in line and "total_s=1.5" in line
    assert "prefill_s" not in line and "tenant" not in line


def test_a_clients_text_cannot_pass_for_a_field(log_to: Callable[[LogConfig], io.StringIO]) -> None:
    stream = log_to(LogConfig())
    log_request(LOGGER, REQUEST)
    assert r'client_request_id="mine\" outcome=faked\nline two"' in stream.getvalue()


def test_json_is_one_object_a_line(log_to: Callable[[LogConfig], io.StringIO]) -> None:
    stream = log_to(LogConfig(json=True))
    log_request(LOGGER, REQUEST)
    [line] = stream.getvalue().splitlines()
    content = json.loads(line)
    assert content["level"] == "INFO" and content["message"] == "request finished"
    assert content["client_request_id"] == REQUEST.client_request_id
    assert content["total_s"] == 1.5
    assert content["time"].endswith("Z")


@pytest.mark.parametrize("is_json", [False, True])
def test_what_a_client_chose_is_cut_however_long_it_is(
    log_to: Callable[[LogConfig], io.StringIO], is_json: bool
) -> None:
    stream = log_to(LogConfig(json=is_json))
    named = FinishedRequest(request_id="ab" * 16, outcome="invalid_field", tenant="t" * 2**20, model="m" * 256)
    named.client_request_id = "mine" + "\x01" * 2**20 + "end"  # JSON needs six characters for each of these
    log_request(LOGGER, named)
    text = stream.getvalue()
    assert len(text) < 4_096
    assert "mine" in text and "end" in text and "tttt[... 1048320 characters ...]tttt" in text
    assert "m" * 256 in text  # this one is short enough


@pytest.mark.parametrize("is_json", [False, True])
def test_a_long_message_and_a_long_error_are_cut(log_to: Callable[[LogConfig], io.StringIO], is_json: bool) -> None:
    stream = log_to(LogConfig(json=is_json))
    LOGGER.warning("worker %s: %s", "decode-0", "x" * 2**20 + "end")
    assert len(stream.getvalue()) < 9_000
    assert "worker decode-0: xxx" in stream.getvalue() and "xxxend" in stream.getvalue()
    try:
        raise ValueError("y" * 2**20 + "end")
    except ValueError:
        LOGGER.exception("it broke")
    assert len(stream.getvalue()) < 30_000
    assert "Traceback" in stream.getvalue() and "yyyend" in stream.getvalue()


@pytest.mark.parametrize("is_json", [False, True])
def test_a_traceback_is_kept(log_to: Callable[[LogConfig], io.StringIO], is_json: bool) -> None:
    stream = log_to(LogConfig(json=is_json))
    try:
        raise ValueError("the cause")
    except ValueError:
        LOGGER.exception("it broke")
    assert "Traceback" in stream.getvalue() and "the cause" in stream.getvalue()
    assert not is_json or "Traceback" in json.loads(stream.getvalue())["exception"]


def test_records_below_the_level_are_not_written(log_to: Callable[[LogConfig], io.StringIO]) -> None:
    stream = log_to(LogConfig(level=LogLevel.WARNING))
    LOGGER.info("quiet")
    LOGGER.warning("loud")
    assert "quiet" not in stream.getvalue() and "loud" in stream.getvalue()


def test_logging_is_configured_by_name() -> None:
    assert build(LogConfig, {"level": "debug", "json": True}) == LogConfig(level=LogLevel.DEBUG, json=True)


def test_each_line_has_its_own_time(log_to: Callable[[LogConfig], io.StringIO]) -> None:
    stream = log_to(LogConfig())
    for created in (0.0, 0.25, 1.5, 86_399.999):
        record = LOGGER.makeRecord(LOGGER.name, logging.INFO, "", 0, "hello", (), None)
        record.created, record.msecs = created, created * 1000 % 1000
        LOGGER.handle(record)
    times = [line.partition(" ")[0] for line in stream.getvalue().splitlines()]
    assert times == [f"1970-01-01T{time}Z" for time in ("00:00:00.000", "00:00:00.250", "00:00:01.500", "23:59:59.999")]


def test_what_a_peer_can_repeat_is_written_so_often_a_minute_and_then_counted(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    log = LimitedLog(LOGGER, max_per_minute=2, clock=lambda: now[0])
    for second in (0, 1, 2, 59, 60, 61, 62, 120):
        now[0] = float(second)
        log.warning("peer %d", second)
    assert caplog.messages == [
        "peer 0",
        "peer 1",
        "peer 60 (2 more like it were not logged)",
        "peer 61",
        "peer 120 (1 more like it were not logged)",
    ]


def test_a_limited_error_has_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    log = LimitedLog(LOGGER)
    for number in range(2):
        try:
            raise ValueError(number)
        except ValueError:
            log.exception("failed")
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info
    assert str(record.exc_info[1]) == "0"


async def test_json_lines_of_a_task_name_its_trace_until_that_has_ended(
    log_to: Callable[[LogConfig], io.StringIO],
) -> None:
    written = log_to(LogConfig(json=True))
    has_ended, goes_on = asyncio.Event(), asyncio.Event()

    async def shared() -> None:
        LOGGER.info("early")
        has_ended.set()
        await goes_on.wait()
        LOGGER.info("late")

    async def traced() -> asyncio.Task[None]:
        end = name_trace("5e" * 16, "0a" * 8)
        task = asyncio.create_task(shared())
        await has_ended.wait()
        end()
        return task

    task = await asyncio.create_task(traced())
    LOGGER.info("other")
    goes_on.set()
    await task
    lines = {line["message"]: line for line in map(json.loads, written.getvalue().splitlines())}
    assert (lines["early"]["trace_id"], lines["early"]["span_id"]) == ("5e" * 16, "0a" * 8)
    assert "trace_id" not in lines["other"] and "trace_id" not in lines["late"]
