"""Background tasks with an owner that notices their end, and the watch over an event loop that may be blocked.

A router or worker runs several tasks for as long as it lives: discovery, registration, load reports and more. Without
one of them it would look well and do nothing. ``Supervisor`` starts them. When one ends, by an exception or not, the
supervisor logs why, and the process drains and ends with an exit code, so that it is started again. The same happens
where a ``vital`` callback of the event loop fails: one that plans its own next call, and that others wait for.

``LoopWatch`` tells probes, which run on other threads, whether the event loop still runs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from functools import wraps
from types import TracebackType
from typing import Any, ParamSpec, Self

logger = logging.getLogger(__name__)

# Tasks that were cancelled clean up after themselves; their owner does not wait longer for them than this.
_CANCEL_TIMEOUT_S = 5.0

ParamT = ParamSpec("ParamT")


class TaskEndedError(Exception):
    """A task that should have run until it was cancelled has ended; the message names it."""


class CallbackFailedError(Exception):
    """A ``vital`` callback has failed; the message names it, and the cause is its error."""


def vital(callback: Callable[ParamT, None]) -> Callable[ParamT, None]:
    """A callback of the event loop whose error ends the process, as that of a supervised task does.

    It is for callbacks that keep something going for all requests. An error of another one is logged by the event loop.
    """

    @wraps(callback)
    def call(*args: ParamT.args, **kwargs: ParamT.kwargs) -> None:
        try:
            callback(*args, **kwargs)
        except Exception as error:
            raise CallbackFailedError(f"the callback {callback.__qualname__}") from error

    return call


class Supervisor:
    """The background tasks of one process, from ``async with`` to its end.

    The block calls ``run_until`` and then drains, which the tasks still serve. At the end of the block they are
    cancelled. If one had ended before, the block ends with a ``TaskEndedError``, or with the task's own error if that
    is an expected one.
    """

    def __init__(
        self, on_failure: Callable[[], None] = lambda: None, *, expected: tuple[type[Exception], ...] = ()
    ) -> None:
        """Call ``on_failure`` as soon as the first task has ended: say that this process is not ready any more.

        Errors of ``expected`` types say all in their message: they are logged without a traceback.
        """
        self._on_failure = on_failure
        self._expected = expected
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failure: Exception | None = None
        self._has_failed = asyncio.Event()
        self._is_closing = False

    @property
    def has_failed(self) -> bool:
        """Whether a task has ended."""
        return self._failure is not None

    def start(self, name: str, work: Coroutine[Any, Any, object]) -> None:
        """Run ``work`` until the end of the block."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._take_end)

    async def run_until(self, stop: asyncio.Event) -> None:
        """Return when ``stop`` is set or a task has ended, whichever comes first."""
        waiting = [asyncio.create_task(event.wait()) for event in (stop, self._has_failed)]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()

    async def __aenter__(self) -> Self:
        asyncio.get_running_loop().set_exception_handler(self._take_error)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closing = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            _, left = await asyncio.wait(tuple(self._tasks), timeout=_CANCEL_TIMEOUT_S)
            for task in left:
                logger.error("the task %s has not ended %g s after its cancel", task.get_name(), _CANCEL_TIMEOUT_S)
        if error is None and self._failure is not None:
            raise self._failure

    def _take_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if self._is_closing:
            report_failure(task)
        else:
            self._fail(f"the task {task.get_name()}", error)

    def _take_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What the event loop does with an error that nobody caught."""
        error = context.get("exception")
        if isinstance(error, CallbackFailedError) and not self._is_closing:
            self._fail(str(error), error.__cause__)
        else:
            loop.default_exception_handler(context)

    def _fail(self, what: str, error: BaseException | None) -> None:
        trace = None if isinstance(error, self._expected) else error
        why = "" if error is None else f": {error!r}"
        logger.error("%s has ended, and so must this process%s", what, why, exc_info=trace)
        if self._failure is None:
            self._failure = self._public(what, error)
            self._has_failed.set()
            self._on_failure()

    def _public(self, what: str, error: BaseException | None) -> Exception:
        if isinstance(error, self._expected):
            return error
        ended = TaskEndedError(f"{what} has ended: {error!r}")
        ended.__cause__ = error
        return ended


def report_failure(task: asyncio.Task[Any]) -> None:
    """Log the unexpected error of a task whose owner goes on without it; for ``add_done_callback``."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        logger.error("the task %s failed", task.get_name(), exc_info=error)


def end_process_within(limit_s: float, code: int = 1) -> None:
    """End this process with ``code`` in ``limit_s`` seconds unless it ends before, whatever hangs in it."""

    def end() -> None:
        logger.error("the process has not ended within %g s, and ends now", limit_s)
        logging.shutdown()
        os._exit(code)

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()


class LoopWatch:
    """Knows on any thread whether the event loop runs. A thread of its own watches for its beats.

    Only seconds in which this process ran count: a process that was stopped, or got no CPU, is not called blocked when
    it goes on. When the loop is blocked, the watch logs once where.
    """

    def __init__(self, *, blocked_after_s: float = 5.0, dead_after_s: float = 30.0, tick_s: float = 0.5) -> None:
        """The loop is blocked, or dead, after so many seconds without a beat, measured in ticks of ``tick_s``."""
        self._max_ticks = round(blocked_after_s / tick_s)
        self._dead_ticks = round(dead_after_s / tick_s)
        self._tick_s = tick_s
        self._num_missed = 0
        self._loop_thread: int | None = None
        self._has_ended = threading.Event()

    @property
    def is_blocked(self) -> bool:
        """Whether the event loop has not run for too long. Any thread may ask."""
        return self._num_missed >= self._max_ticks

    @property
    def is_dead(self) -> bool:
        """Whether the event loop was blocked for so long that only a restart helps. Any thread may ask."""
        return self._num_missed >= self._dead_ticks

    async def run(self) -> None:
        """Beat until cancelled. Call it as a task of the event loop to be watched."""
        self._loop_thread = threading.get_ident()
        threading.Thread(target=self._watch, name="loop-watch", daemon=True).start()
        try:
            while True:
                self._num_missed = 0
                await asyncio.sleep(self._tick_s)
        finally:
            self._has_ended.set()
            self._num_missed = 0

    def _watch(self) -> None:
        while not self._has_ended.wait(self._tick_s):
            self._num_missed += 1
            if self._num_missed == self._max_ticks:
                logger.error("the event loop is blocked at\n%s", self._where())

    def _where(self) -> str:
        frame = sys._current_frames().get(self._loop_thread or 0)
        return "".join(traceback.format_stack(frame)).rstrip()


class AwakeClock:
    """Seconds in which this process ran, as far as someone asks once in a while.

    A process that was stopped for a minute goes on a second later by this clock. What did not move meanwhile could not.
    """

    def __init__(self, max_gap_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Between two calls at most ``max_gap_s`` seconds count."""
        self._max_gap_s = max_gap_s
        self._clock = clock
        self._last = clock()
        self._awake_s = 0.0

    def now(self) -> float:
        """Seconds awake since the clock was made."""
        now = self._clock()
        self._awake_s += min(now - self._last, self._max_gap_s)
        self._last = now
        return self._awake_s
