"""The thread that loads, calls and reads an LLM, on an event loop of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from quartet.engine.life_cycle import call_on_loop
from quartet.engine.trtllm.errors import trace_of
from quartet.engine.trtllm.loading import LoadedLlm
from quartet.engine.trtllm.session import LlmSession

logger = logging.getLogger(__name__)


class LlmThread:
    """Loads, serves until ``stop``, and closes what it loaded, even if no caller waits for the load any more."""

    def __init__(
        self,
        load: Callable[[], AbstractContextManager[LoadedLlm]],
        make_session: Callable[[LoadedLlm], LlmSession],
        on_lost: Callable[[Exception], None],
    ) -> None:
        """Nothing is loaded before ``start``.

        Args:
            load: loads on entering and closes on leaving, both on the thread.
            make_session: called on the thread's event loop.
            on_lost: called on the thread with the reason why loading or warming up failed.
        """
        self._load = load
        self._make_session = make_session
        self._on_lost = on_lost
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_stop: asyncio.Event | None = None
        self._has_ended = threading.Event()

    def start(self) -> None:
        """Begin to load."""
        # A daemon: a device that hangs must not keep the process from ending.
        threading.Thread(target=self._main, name="quartet-trtllm", daemon=True).start()

    def post(self, call: Callable[[], None]) -> None:
        """Run ``call`` on the thread's event loop, in order; after the loop's end, do nothing. Never blocks."""
        if self._loop is not None:
            call_on_loop(self._loop, call)

    def stop(self) -> None:
        """Make the thread end; if it still loads, it ends after loading. Never blocks."""
        with self._lock:
            self._stop.set()
            if self._loop_stop is not None:
                self.post(self._loop_stop.set)

    def wait_ended(self, timeout_s: float) -> bool:
        """Block until everything is closed; False if that takes longer than ``timeout_s``."""
        return self._has_ended.wait(timeout_s)

    def _main(self) -> None:
        try:
            with self._load() as loaded:
                self._run(loaded)
        except Exception as error:  # the thread's work ends here; the listener fails its requests
            logger.exception("the LLM could not be loaded, or not be closed")
            self._on_lost(error)
        finally:
            self._has_ended.set()

    def _run(self, loaded: LoadedLlm) -> None:
        try:
            asyncio.run(self._serve(loaded))
        except Exception as error:  # noqa: BLE001 - report this before closing the LLM, which may hang
            # Leave the text out of the log: it may quote a request by now. A caller that waits for the start gets it.
            logger.error("the LLM does not work: %s", trace_of(error))
            self._on_lost(error)

    async def _serve(self, loaded: LoadedLlm) -> None:
        stop = asyncio.Event()
        with self._lock:
            self._loop, self._loop_stop = asyncio.get_running_loop(), stop
            if self._stop.is_set():
                return
        await self._make_session(loaded).run(stop)
