"""An engine's thread: rounds of work, and the ways that a test can hold, disturb and end it."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from tensorrt_llm._stand_in.control import Faults, Gate
from tensorrt_llm._stand_in.request import Request, RequestState
from tensorrt_llm._stand_in.switches import SWITCHES
from tensorrt_llm.executor.result import Step

_logger = logging.getLogger(__name__)
#: How often the thread checks whether other processes pulled what waits here.
_HELD_POLL_S = 0.01


class EngineLoop:
    """The part of an engine that knows no model.

    Attributes:
        steps, transfers, faults: see `EngineControl`.
    """

    def __init__(self, name: str) -> None:
        self.steps, self.transfers, self.faults = Gate(), Gate(), Faults()
        self.num_steps = 0
        self._condition = threading.Condition()
        self._incoming: deque[Request] = deque()
        self._requests: list[Request] = []
        self._is_closing = self._is_shut_down = self._has_news = False
        self.transfers.listen(self.wake)
        self._error_queue: queue.Queue[BaseException] = queue.Queue()
        if SWITCHES.fatal_error:
            self._fatal_error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def num_running(self) -> int:
        """Requests that haven't ended."""
        return len(self._requests) + len(self._incoming)

    @property
    def num_held(self) -> int:
        """What waits to be pulled."""
        raise NotImplementedError

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def is_shutdown(self) -> bool:
        """Say whether the engine is gone, closed or dead."""
        return self._is_shut_down

    def submit(self, request: Request) -> None:
        """Take a request over.

        Raises:
            RuntimeError: the engine is gone.
        """
        with self._condition:
            if self._is_closing or self._is_shut_down:
                raise RuntimeError("LLM is shutting down")
            self._incoming.append(request)
            self._has_news = True
            self._condition.notify_all()

    def abort(self, request: Request) -> None:
        """End a request at the next round; one that ended stays as it is."""
        request.is_aborted = True
        self.wake()

    def note_death_of_rank(self, error: BaseException) -> None:
        """Note what the end of a rank's process says, as a thread of the executor does; no request gets it."""
        if SWITCHES.fatal_error:
            self._fatal_error = error
        else:
            self._error_queue.put(error)

    def inject(self, **faults: Any) -> None:
        """Set faults, and wake the thread for them."""
        with self._condition:
            for name, value in faults.items():
                setattr(self.faults, name, value)
        self.wake()

    def wake(self) -> None:
        """Wake the thread."""
        with self._condition:
            self._has_news = True
            self._condition.notify_all()

    def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Return once ``condition`` holds."""
        with self._condition:
            if not self._condition.wait_for(condition, timeout_s):
                raise TimeoutError("it never came true")

    def close(self) -> None:
        """End the thread: it finishes its step first, and hangs with it."""
        with self._condition:
            self._is_closing = True
        self.wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        error: BaseException = RuntimeError("LLM is shutting down")
        try:
            while self._wait_for_work():
                self._round()
                with self._condition:
                    self._condition.notify_all()
        except BaseException as death:  # noqa: BLE001 - the thread ends here: its waiting callers get the error
            _logger.info("the engine died: %s", type(death).__name__)
            error = death
        finally:
            with self._condition:
                self._is_shut_down = True
                left = [*self._requests, *self._incoming]
                self._requests, self._incoming = [], deque()
            self._free_all()
            for request in left:
                request.state = RequestState.ENDED
                request.output.put(Step(is_last=True, error=error))
            with self._condition:
                self._condition.notify_all()

    def _wait_for_work(self) -> bool:
        """Wait until there is something to do; return whether the thread goes on."""
        with self._condition:
            timeout_s = _HELD_POLL_S if self.num_held else None
            self._condition.wait_for(lambda: self._has_news or self._is_closing or self._can_step(), timeout_s)
            self._has_news = False
            self._take_incoming()
            return not self._is_closing

    def _round(self) -> None:
        if self.faults.death is not None:
            raise self.faults.death
        self._handle_aborts_and_faults()
        if not self._can_step():
            return
        self.steps.pass_through()
        if self.faults.death is not None:
            raise self.faults.death
        with self._condition:
            self._take_incoming()
        self._handle_aborts_and_faults()
        self._step()
        self.num_steps += 1

    def _take_incoming(self) -> None:
        self._requests += self._incoming
        self._incoming.clear()

    def _can_step(self) -> bool:
        """Say whether a step would do anything."""
        raise NotImplementedError

    def _handle_aborts_and_faults(self) -> None:
        """Do what takes no step: aborts, faults, releases."""
        raise NotImplementedError

    def _step(self) -> None:
        """Run one step of the model."""
        raise NotImplementedError

    def _free_all(self) -> None:
        """Free what others might still want."""
        raise NotImplementedError
