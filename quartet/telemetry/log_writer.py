"""Writes log lines on a thread, so that the process goes on when its log is not read.

A terminal that is stopped, a collector that hangs and a full pipe block a write for as long as they like. A thread that
logs only formats its line and puts it into a bounded queue. When that is full, lines are dropped and counted.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TextIO

# Of all lines that wait: some ten thousand of requests.
_MAX_QUEUED_CHARACTERS = 4 << 20

# At the end of the process, what waits has this long to be written.
_FLUSH_TIMEOUT_S = 1.0

# Between two writes lines gather: each time the thread wakes up the event loop's thread may have to wait for it.
_GATHER_S = 0.02

# Writes of so many bytes to a pipe are not mixed with those of other processes and libraries (``PIPE_BUF``).
_MAX_WRITE_BYTES = 4096


class QueuedHandler(logging.Handler):
    """A handler whose lines a thread of its own writes. Make it after a fork: threads do not survive one."""

    def __init__(self, stream: TextIO, *, max_queued_characters: int = _MAX_QUEUED_CHARACTERS) -> None:
        """Write to ``stream``, past its buffer if it has a file descriptor."""
        super().__init__()
        self._write = _writer(stream)
        self._max_queued = max_queued_characters
        # A number asks for all lines before it: once they are written, ``flush`` with that number is done.
        self._queue: SimpleQueue[str | int | None] = SimpleQueue()
        # Each of these has one side that changes it: those that log, which hold the handler's lock, or the thread.
        self._num_put_characters = self._num_refused = self._num_flushes = 0
        self._num_taken_characters = self._num_lost = self._num_told = 0
        self._flushed = threading.Condition()
        self._num_flushed = 0
        # There is no sense in waiting for the thread.
        self._is_stuck = False
        threading.Thread(target=self._run, name="log-writer", daemon=True).start()

    @property
    def num_dropped(self) -> int:
        """Lines that were not written because too many waited, or writing failed."""
        return self._num_refused + self._num_lost

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the record's line, or drop it. Never blocks."""
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001 - it must not break what logs it, and `handleError` writes to stderr: may block
            line = f"a line of {record.name} can't be formatted: {record.msg!r:.200}"
        if self._num_put_characters - self._num_taken_characters + len(line) > self._max_queued:
            self._num_refused += 1
            return
        self._num_put_characters += len(line)
        self._queue.put(line)

    def flush(self) -> None:
        """Wait until what was logged is written, at most a second, and not again after that was not enough."""
        if self._is_stuck:
            return
        with self._flushed:
            self._num_flushes += 1
            number = self._num_flushes
            self._queue.put(number)
            self._is_stuck = not self._flushed.wait_for(lambda: self._num_flushed >= number, _FLUSH_TIMEOUT_S)

    def close(self) -> None:
        """End the thread once it has written what waits. Does not wait for that."""
        self._is_stuck = True
        self._queue.put(None)
        super().close()

    def _run(self) -> None:
        is_open = True
        while is_open:
            lines: list[str] = []
            flush = 0
            for item in self._gathered():
                if isinstance(item, str):
                    lines.append(item)
                elif item is None:
                    is_open = False
                else:
                    flush = item
            self._write_lines(lines)
            if flush:
                with self._flushed:
                    self._num_flushed = flush
                    self._flushed.notify_all()
            else:
                time.sleep(_GATHER_S)

    def _gathered(self) -> Iterator[str | int | None]:
        """All that waits, at least one thing."""
        yield self._queue.get()
        with suppress(Empty):
            while True:
                yield self._queue.get_nowait()

    def _write_lines(self, lines: list[str]) -> None:
        for part in _parts(lines):
            text = "".join(f"{line}\n" for line in part)
            if not self._is_written(text):
                self._num_lost += len(part)
            elif (num_untold := self.num_dropped - self._num_told) and self._is_written(self._report(num_untold)):
                self._num_told += num_untold
            # Until here they are in memory.
            self._num_taken_characters += sum(map(len, part))

    def _is_written(self, text: str) -> bool:
        try:
            self._write(text)
        except (OSError, ValueError):  # a full disk, a reader that is gone, a closed stream: the next may be written
            return False
        return True

    def _report(self, num_untold: int) -> str:
        message = "log lines dropped: %d; they came faster than they were taken"
        record = logging.LogRecord(__name__, logging.WARNING, "", 0, message, (num_untold,), exc_info=None)
        return f"{self.format(record)}\n"


def num_dropped_lines() -> int:
    """Lines that the root logger's handlers have dropped since they were made."""
    return sum(handler.num_dropped for handler in logging.getLogger().handlers if isinstance(handler, QueuedHandler))


def _parts(lines: list[str]) -> Iterator[list[str]]:
    """``lines`` in parts that are written at once; a longer line is a part of its own."""
    part: list[str] = []
    num_bytes = 0
    for line in lines:
        if part and num_bytes + len(line) >= _MAX_WRITE_BYTES:
            yield part
            part, num_bytes = [], 0
        part.append(line)
        num_bytes += len(line) + 1
    if part:
        yield part


def _writer(stream: TextIO) -> Callable[[str], None]:
    try:
        descriptor = stream.fileno()
        stream.flush()
    except (OSError, ValueError):  # in memory, or closed
        return lambda text: _write_stream(stream, text)
    return lambda text: _write_all(descriptor, text.encode("utf-8", "backslashreplace"))


def _write_stream(stream: TextIO, text: str) -> None:
    stream.write(text)
    stream.flush()


def _write_all(descriptor: int, content: bytes) -> None:
    """Past the stream's buffer: its lock, held by a write that is stuck, would keep the interpreter from ending."""
    while content:
        try:
            content = content[os.write(descriptor, content) :]
        except BlockingIOError:  # another process has made the pipe, which it shares, non-blocking
            select.select([], [descriptor], [])
