"""Notices that an LLM's executor has failed for good, such as by the death of a rank, though nothing else says so.

Requests of such an executor may never hear of it, and a call may block on a rank that is gone, and with it the event
loop of the LLM's thread. So a thread of its own looks. TensorRT-LLM notifies nobody; what it notes is read without a
call into it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


def fatal_error_of(llm: Any) -> BaseException | None:
    """The error by which the executor of ``llm`` has failed for good; ``None``: none is noted. Any thread may ask."""
    executor = getattr(llm, "_executor", None)
    noted = getattr(executor, "_fatal_error", None)
    if isinstance(noted, BaseException):
        return noted
    # Releases without that field queue what ended one of their threads or ranks. The next call would raise it and shut
    # the executor down, but without a call it lies there.
    try:
        queued = executor._error_queue.queue[0]  # type: ignore[union-attr]
    except (AttributeError, IndexError):
        return None
    return queued if isinstance(queued, BaseException) else None


def shut_down(llm: Any) -> None:
    """Shut ``llm`` down unless its executor has failed: to do so would send to dead ranks, and wait for them."""
    error = fatal_error_of(llm)
    if error is None:
        llm.shutdown()
    else:
        logger.error("the LLM is not shut down, as its executor has failed: %s", type(error).__name__)


class Watchdog:
    """Watches one LLM from ``start`` to ``stop``."""

    def __init__(self, llm: Any, on_fatal: Callable[[Exception], None], interval_s: float) -> None:
        """Look every ``interval_s``; call ``on_fatal`` on the watching thread, once, with the executor's error."""
        self._llm = llm
        self._on_fatal = on_fatal
        self._interval_s = interval_s
        self._has_stopped = threading.Event()

    def start(self) -> None:
        """Begin to watch."""
        threading.Thread(target=self._watch, name="quartet-trtllm-watchdog", daemon=True).start()

    def stop(self) -> None:
        """Watch no more. Never waits."""
        self._has_stopped.set()

    def _watch(self) -> None:
        while not self._has_stopped.wait(self._interval_s):
            error = fatal_error_of(self._llm)
            if error is not None:
                self._on_fatal(error if isinstance(error, Exception) else RuntimeError(repr(error)))
                return
