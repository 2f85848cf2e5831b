"""Logs: one line a record, plain or JSON, and one INFO line for each request that ended. Never a prompt or a secret.

Clients and other processes choose much of what is logged: names, ids, the messages of their errors. However long it is,
only so much of each is written. The bounds stand here, where lines are made, and not where records are.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType
from typing import TextIO, TypeAlias

from quartet.telemetry.log_writer import QueuedHandler

_FIELDS_KEY = "quartet_fields"
_SEPARATORS = frozenset(' "=')

#: Characters of one field that are written at most.
MAX_FIELD_LENGTH = 256

# Of a message and of a traceback.
_MAX_MESSAGE_LENGTH, _MAX_TRACE_LENGTH = 8_192, 16_384

FieldValue: TypeAlias = str | int | float

# Of the task that logs; a handler formats lines where they are logged.
_trace_ids: ContextVar[Mapping[str, str]] = ContextVar("trace ids", default=MappingProxyType({}))


class LogLevel(StrEnum):
    """From which severity on records are written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """How a process logs.

    Attributes:
        level: records below it are not written.
        json: one JSON object a line, for collectors, instead of text for people.
    """

    level: LogLevel = LogLevel.INFO
    json: bool = False


@dataclass(kw_only=True)
class FinishedRequest:
    """What the one line about a request says. ``None`` and empty texts are left out.

    Not frozen: it has many fields and is read once, and freezing doubles its price.

    Attributes:
        request_id: its name in every message, log line and span.
        outcome: its finish reasons, or its error's reason, in lower case.
        model: the pool that served it.
        trace_id, span_id: of its W3C trace context, if it has one.
        path: at routers: how its client gets the tokens; ``generate``: by the call itself, also by HTTP.
        client_request_id: the client's own name for it.
        encode_worker: the worker that encoded its media; left out where the worker that computed the prompt did.
        prefill_worker: the worker that computed the prompt last; left out where that was the decode worker.
        decode_worker: the worker that decoded last.
        num_held_tokens: the most prompt tokens that one rank of the model had cached, as the router knew it.
        num_matched_tokens: of these, those of the rank that computed the prompt.
        num_evicted_tokens: of these, those that were evicted before it did.
        num_cached_tokens: prompt tokens whose KV was cached.
        num_attempts: of the choice that took most.
        tokenize_s: template and tokenizer.
        media_s: fetching its media, and encoding them at an encode worker, before ``router_queue_s``.
        router_queue_s: in the router's queue, until there was room.
        prefill_s: the prefill hop, the worker's queue included.
        prefill_queue_s: of that, in the worker's queue.
        decode_queue_s: in the decode worker's queue, less ``transfer_s`` and ``onboard_s``.
        transfer_s: moving blocks to the decode worker.
        onboard_s: loading cached blocks from the memory or the disk of a worker's host.
        first_token_s: from arrival to the first token.
        total_s: from arrival to the end.
    """

    request_id: str
    outcome: str
    trace_id: str = ""
    span_id: str = ""
    model: str = ""
    path: str = ""
    tenant: str = ""
    client_request_id: str = ""
    encode_worker: str = ""
    prefill_worker: str = ""
    decode_worker: str = ""
    num_choices: int = 1
    num_prompt_tokens: int | None = None
    num_held_tokens: int | None = None
    num_matched_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_evicted_tokens: int | None = None
    num_output_tokens: int | None = None
    num_attempts: int | None = None
    tokenize_s: float | None = None
    media_s: float | None = None
    router_queue_s: float | None = None
    prefill_s: float | None = None
    prefill_queue_s: float | None = None
    decode_queue_s: float | None = None
    transfer_s: float | None = None
    onboard_s: float | None = None
    first_token_s: float | None = None
    total_s: float | None = None


def configure(config: LogConfig, stream: TextIO | None = None) -> None:
    """Make all loggers of the process write to ``stream`` (standard error) as ``config`` says; replaces what was.

    A thread writes, which does not survive a fork. ``logging.shutdown`` waits for it, for a second: call it before
    ``os._exit``.
    """
    handler = QueuedHandler(stream or sys.stderr)
    handler.setFormatter(_JsonFormatter() if config.json else _PlainFormatter())
    logging.basicConfig(level=config.level.upper(), handlers=[handler], force=True)
    # No line of ours names the thread, process or task, and finding them costs time for each record.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False


def log_request(logger: logging.Logger, request: FinishedRequest) -> None:
    """Write the one INFO line about a request that ended; long texts in it are cut."""
    if not logger.isEnabledFor(logging.INFO):
        return
    shown: dict[str, FieldValue] = {}
    for name, value in vars(request).items():
        if value is None or value == "":
            continue
        kind = type(value)
        if kind is float:
            value = round(value, 6)
        elif kind is str and len(value) > MAX_FIELD_LENGTH:
            value = cut(value, MAX_FIELD_LENGTH)
        shown[name] = value
    # `info` would look up the caller, which is not shown and costs as much as the rest.
    logger.handle(
        logger.makeRecord(logger.name, logging.INFO, "", 0, "request finished", (), None, extra={_FIELDS_KEY: shown})
    )


def name_trace(trace_id: str, span_id: str) -> Callable[[], None]:
    """Let JSON lines that the current task logs, and tasks that it starts, have these ids.

    Returns:
        What ends that. A task may be started for one request and go on for others.
    """
    ids = {"trace_id": trace_id, "span_id": span_id}
    _trace_ids.set(ids)
    return ids.clear


def cut(text: str, max_length: int) -> str:
    """``text``; of one with more characters, its beginning and its end, and between them how many are left out."""
    if len(text) <= max_length:
        return text
    num_last = max_length // 4
    num_left_out = len(text) - max_length
    return f"{text[: max_length - num_last]}[... {num_left_out} characters ...]{text[-num_last:]}"


class _PlainFormatter(logging.Formatter):
    """``2025-01-31T12:00:00.000Z INFO quartet.x: message key=value``."""

    def format(self, record: logging.LogRecord) -> str:
        fields = [
            f" {name}={_quoted(value) if isinstance(value, str) else value}"
            for name, value in _fields_of(record).items()
        ]
        line = f"{_timestamp(record)} {record.levelname} {record.name}: {_message(record)}{''.join(fields)}"
        trace = _trace(self, record)
        return f"{line}\n{trace}" if trace else line


class _JsonFormatter(logging.Formatter):
    """One JSON object a record."""

    def format(self, record: logging.LogRecord) -> str:
        content: dict[str, FieldValue] = {
            "time": _timestamp(record),
            "level": record.levelname,
            "logger": record.name,
            "message": _message(record),
            **_trace_ids.get(),
            **_fields_of(record),
        }
        trace = _trace(self, record)
        if trace:
            content["exception"] = trace
        return json.dumps(content, ensure_ascii=False)


def _fields_of(record: logging.LogRecord) -> Mapping[str, FieldValue]:
    found: Mapping[str, FieldValue] = getattr(record, _FIELDS_KEY, {})
    return found


def _timestamp(record: logging.LogRecord) -> str:
    return f"{_second(int(record.created))}.{int(record.msecs):03d}Z"


@lru_cache(maxsize=1)
def _second(unix_s: int) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _message(record: logging.LogRecord) -> str:
    return cut(record.getMessage(), _MAX_MESSAGE_LENGTH)


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    # It ends with the error's message.
    return cut(formatter.formatException(record.exc_info), _MAX_TRACE_LENGTH) if record.exc_info else ""


def _quoted(text: str) -> str:
    # A client's text must not look like further fields, or begin a line of its own.
    return text if text.isprintable() and _SEPARATORS.isdisjoint(text) else json.dumps(text)
