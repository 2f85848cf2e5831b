"""The engine's own thread: loads the model, steps while there is work, sleeps while there is none."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from quartet.engine.base import EngineStats
from quartet.engine.runner import ModelRunner
from quartet.engine.scheduler import SchedulerConfig
from quartet.engine.step_loop import Message, Snapshot, StepLoop, StepReport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ThreadListener:
    """What hears of the thread, on the event loop and in order: ready, reports, lost, end.

    Attributes:
        on_ready: the model is loaded; what the runner says of itself may be read.
        on_report: a step had something to say, as it began or ended.
        on_lost: loading or a step failed; nothing is computed any more.
        on_end: the model is closed and the thread about to end.
    """

    on_ready: Callable[[ModelRunner], None]
    on_report: Callable[[StepReport], None]
    on_lost: Callable[[Exception], None]
    on_end: Callable[[], None]


class EngineThread:
    """Drives a ``StepLoop`` until ``stop``. A model whose step failed stays open until then: transfers may use it."""

    def __init__(
        self, runner_factory: Callable[[], ModelRunner], config: SchedulerConfig, listener: ThreadListener
    ) -> None:
        self._runner_factory = runner_factory
        self._config = config
        self._listener = listener
        self._inbox: deque[Message] = deque()
        self._wake_up = threading.Event()
        self._is_stopping = False
        self._steps: StepLoop | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def snapshot(self) -> Snapshot:
        """The latest statistics; any thread may ask."""
        return Snapshot(EngineStats()) if self._steps is None else self._steps.snapshot

    def start(self) -> None:
        """Begin to load; the running event loop hears of it."""
        self._loop = asyncio.get_running_loop()
        # A daemon: a device that hangs in a step must not keep the process from ending.
        self._thread = threading.Thread(target=self._main, name="quartet-engine", daemon=True)
        self._thread.start()

    def post(self, message: Message) -> None:
        """Hand over a message for the next step. Never blocks."""
        self._inbox.append(message)
        self._wake_up.set()

    def stop(self) -> None:
        """Make the thread end after the step it is in; ``on_end`` follows."""
        self._is_stopping = True
        self._wake_up.set()

    def join(self) -> None:
        """Wait for the thread's last instructions; for after ``on_end``."""
        if self._thread is not None:
            self._thread.join()

    def _main(self) -> None:
        runner: ModelRunner | None = None
        try:
            runner = self._runner_factory()
            steps = self._steps = StepLoop(runner, self._config, on_begin=self._tell_report)
            self._tell(self._listener.on_ready, runner)
            self._step_until_stopped(steps)
        except Exception as error:  # the thread's work ends here; the listener fails what it knows
            logger.exception("the engine is lost")
            self._tell(self._listener.on_lost, error)
            self._wait_until_stopped()
        finally:
            _close(runner)
            self._tell(self._listener.on_end)

    def _step_until_stopped(self, steps: StepLoop) -> None:
        while not self._is_stopping:
            if steps.is_idle and not self._inbox:
                self._wake_up.wait()
            self._wake_up.clear()  # before reading: what is posted from here on wakes up again
            report = steps.step([self._inbox.popleft() for _ in range(len(self._inbox))])
            if report:
                self._tell_report(report)

    def _wait_until_stopped(self) -> None:
        while not self._is_stopping:
            self._wake_up.wait()
            self._wake_up.clear()

    def _tell_report(self, report: StepReport) -> None:
        self._tell(self._listener.on_report, report)

    def _tell(self, hear: Callable[..., None], *args: object) -> None:
        assert self._loop is not None, "started"
        # RuntimeError: the loop is closed, so nobody listens any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(hear, *args)


def _close(runner: ModelRunner | None) -> None:
    try:
        if runner is not None:
            runner.close()
    except Exception:  # the thread ends here
        logger.exception("the model could not be closed")
