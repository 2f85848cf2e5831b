"""Usage records: a JSON line for each request, in a file, for whoever accounts for what tenants use.

A thread writes them, so a slow disk stops no token. What waits is bounded; what is lost is counted. Each record goes to
whatever file lies at the path then: one that was moved away, as ``logrotate`` does, is followed by a new one.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from queue import Empty, SimpleQueue

from quartet.errors import ConfigError

logger = logging.getLogger(__name__)

# Some 30 MB of memory; a disk that stands still for ten seconds loses nothing of 5,000 requests a second.
_MAX_QUEUED = 50_000

_MAX_WRITTEN_AT_ONCE = 256

#: At the end of the process what waits has this long to be written. Who kills the process must leave it the time.
CLOSE_TIMEOUT_S = 5.0


@dataclass(kw_only=True, slots=True)
class UsageRecord:
    """What one request used. Not frozen: freezing doubles its price.

    Attributes:
        time: when it ended, in Unix seconds; the file has it in RFC 3339.
        request_id: names it in the logs.
        client_request_id: the client's own name for it; empty: none.
        tenant: whose it was; empty: nobody's.
        key_id: the id of the API key that was shown; empty: none was.
        model: that served it; empty: it was refused before that was known.
        path: ``generate``, or ``place``: then the answer's tokens after the first are not known here.
        num_prompt_tokens, num_cached_tokens, num_output_tokens: of all its choices, as in its log line.
        num_resumed_tokens: of the output tokens those that its client brought (``resume``): an earlier call gave them.
        resumed_choice: the number of the choice that goes on after them; ``None``: a new request, all of its choices.
        duration_s: from its arrival to its end.
        outcome: as in its log line.
    """

    time: float
    request_id: str
    client_request_id: str
    tenant: str
    key_id: str
    model: str
    path: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_resumed_tokens: int
    resumed_choice: int | None
    duration_s: float
    outcome: str


class UsageLog:
    """Writes usage records to one file."""

    def __init__(self, path: Path, *, max_queued: int = _MAX_QUEUED) -> None:
        """Open ``path``, or make it, readable by the owner and the group. At most ``max_queued`` records wait.

        Raises:
            ConfigError: it can't be written.
        """
        self._path = path
        self._max_queued = max_queued
        self._queue: SimpleQueue[UsageRecord | None] = SimpleQueue()
        # Each of these has one side that changes it: who puts records, or the thread.
        self._num_refused = self._num_failed = 0
        self._is_torn = self._is_failing = self._is_refusing = False
        try:
            self._descriptor = self._open()
        except OSError as error:
            raise ConfigError(f"usage_log: cannot write {path}: {error.strerror}") from error
        self._thread = threading.Thread(target=self._run, name="usage-log", daemon=True)
        self._thread.start()

    @property
    def num_lost(self) -> int:
        """Records that were not written: too many waited, or writing failed."""
        return self._num_refused + self._num_failed

    def put(self, record: UsageRecord) -> None:
        """Have ``record`` written. Never blocks."""
        if self._queue.qsize() >= self._max_queued:
            if not self._is_refusing:
                logger.error("usage records are lost: %d wait to be written to %s", self._max_queued, self._path)
            self._is_refusing = True
            self._num_refused += 1
            return
        self._is_refusing = False
        self._queue.put(record)

    def close(self) -> None:
        """Write what waits, for at most five seconds, and end."""
        self._queue.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("usage records are lost: %s took none for %g s", self._path, CLOSE_TIMEOUT_S)

    def _open(self) -> int:
        """Open the file at the path, or make it; ``_is_torn`` says whether its last line has no end."""
        flags = os.O_APPEND | os.O_CREAT
        try:
            # Also for reading, so a pipe that nobody reads yet does not stop the start of the process.
            descriptor = os.open(self._path, os.O_RDWR | flags, 0o640)
        except PermissionError:  # it may be written, but not read
            descriptor = os.open(self._path, os.O_WRONLY | flags, 0o640)
        self._is_torn = _is_torn(descriptor)
        return descriptor

    def _run(self) -> None:
        is_open = True
        while is_open:
            records: list[UsageRecord] = []
            for item in self._gathered():
                if item is None:
                    is_open = False
                else:
                    records.append(item)
            if records:
                self._write(records)
        os.close(self._descriptor)

    def _gathered(self) -> Iterator[UsageRecord | None]:
        """Some of what waits, at least one."""
        yield self._queue.get()
        with suppress(Empty):
            for _ in range(_MAX_WRITTEN_AT_ONCE - 1):
                yield self._queue.get_nowait()

    def _write(self, records: list[UsageRecord]) -> None:
        lines, num_written = b"".join(map(_to_line, records)), 0
        try:
            self._follow()
            # What is left of a line that was written in part gets an end, so the next one stays readable.
            content = b"\n" + lines if self._is_torn else lines
            while num_written < len(content):
                num_written += os.write(self._descriptor, content[num_written:])
        except OSError as error:  # a full disk, a directory that is gone: the next ones may be written
            if not self._is_failing:
                logger.error("usage records are lost: cannot write %s: %s", self._path, error.strerror)
            self._is_failing = True
            self._is_torn |= num_written > 0
            self._num_failed += len(records)  # some may be there: a count of lost ones is rather too high
        else:
            self._is_torn = self._is_failing = False

    def _follow(self) -> None:
        """Go on in the file at the path, if that is another one by now."""
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            is_same = False
        else:
            own = os.fstat(self._descriptor)
            is_same = (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)
        if not is_same:
            before, self._descriptor = self._descriptor, self._open()
            os.close(before)


def _is_torn(descriptor: int) -> bool:
    """Whether the file's last line has no end, as that of a process that was killed. Of what can't be read: no."""
    try:
        size_bytes = os.fstat(descriptor).st_size
        return size_bytes > 0 and os.pread(descriptor, 1, size_bytes - 1) != b"\n"
    except OSError:
        return False


def _to_line(record: UsageRecord) -> bytes:
    shown = {**asdict(record), "time": datetime.fromtimestamp(record.time, UTC).isoformat(timespec="milliseconds")}
    shown["duration_s"] = round(record.duration_s, 6)
    return f"{json.dumps(shown)}\n".encode()
