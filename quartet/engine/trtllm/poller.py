"""A thread that fetches one of an LLM's feeds, in whichever of upstream's two ways it comes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from quartet.engine.trtllm.errors import trace_of

logger = logging.getLogger(__name__)

# How long a fetch may wait for something. Short: it may block, and what it waits for may not wake it.
_FETCH_S = 0.2
# An iterator that waited so long for an item had been told of everything before.
_WAITED_S = 0.02
# Without items and without requests for so long a feed is idle, and looked at but now and then.
_IDLE_AFTER_S, _IDLE_FETCH_EVERY_S = 5.0, 1.0
_CLOSE_S = 5.0
# After the first failure, doubled with each until it is the other.
_RETRY_S, _MAX_RETRY_S = 0.5, 30.0
_MAX_DOUBLINGS = 10


@dataclass(frozen=True, kw_only=True)
class PollListener:
    """What hears of a feed, on the poller's thread.

    Attributes:
        on_items: items, in order.
        on_told: all that the engine had to say before this moment, in monotonic seconds, was in items by now.
        on_break: it could not be fetched; what it told of meanwhile may be missing. Once until ``on_mended``.
        on_mended: it was fetched again.
    """

    on_items: Callable[[Sequence[object]], None]
    on_told: Callable[[float], None]
    on_break: Callable[[Exception], None]
    on_mended: Callable[[], None]


class Poller:
    """Fetches from the first ``begin`` until ``close``.

    A queue's iterator fails before the first request, and once it ended stays so until another one is submitted: then
    ``begin`` has it asked again at once. Over RPC each call fetches, and blocks: nobody else's thread but this one's.
    An iterator may yield items, or lists of them. Whatever else a fetch raises, it is tried again, ever less often.
    """

    def __init__(self, name: str, fetch: Callable[[float], AsyncIterator[object]], listener: PollListener) -> None:
        """``fetch`` is ``get_..._async``: it takes the seconds to wait."""
        self._fetch = fetch
        self._listener = listener
        self._wake_up = threading.Event()
        self._closing = threading.Event()
        self._num_failures = 0
        self._began_at = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        # A daemon: a call that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._start_lock = threading.Lock()

    def begin(self) -> None:
        """A request was submitted. Never blocks; any thread may call."""
        self._began_at = time.monotonic()
        with self._start_lock:
            if self._thread.ident is None and not self._closing.is_set():
                self._thread.start()
        self._wake_up.set()

    def stop(self) -> None:
        """Fetch no more. Never blocks; may be called twice."""
        with self._start_lock:
            self._closing.set()
        self._wake_up.set()
        loop, task = self._loop, self._task
        if loop is not None and task is not None:
            with contextlib.suppress(RuntimeError):  # the loop ended meanwhile
                loop.call_soon_threadsafe(task.cancel)

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Stop, and return once the thread ended, or ``timeout_s`` later. May be called twice."""
        self.stop()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _main(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._poll_until_closed())

    async def _poll_until_closed(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        last_item_at = time.monotonic()
        while not self._closing.is_set():
            self._wake_up.clear()  # before fetching: a request from here on has it fetch again at once
            began_at = time.monotonic()
            try:
                has_items = await self._poll()
            except Exception as error:  # noqa: BLE001 - one fetch ends here, and `_break` logs
                self._break(error)
                continue
            self._mend()
            if has_items:
                last_item_at = time.monotonic()
                continue
            now = time.monotonic()
            is_idle = now - max(last_item_at, self._began_at) > _IDLE_AFTER_S
            pause_s = _IDLE_FETCH_EVERY_S if is_idle else _FETCH_S - (now - began_at)
            if pause_s > 0:
                # This loop has nothing else to do.
                self._wake_up.wait(pause_s)

    def _break(self, error: Exception) -> None:
        """Tell of it and wait; this loop has nothing else to do, and requests are no reason to ask earlier."""
        if self._closing.is_set():
            return
        if not self._num_failures:
            logger.warning("%s could not be fetched, which is tried again: %s", self._thread.name, trace_of(error))
            self._listener.on_break(error)
        self._num_failures += 1
        self._closing.wait(min(_RETRY_S * 2 ** (min(self._num_failures, _MAX_DOUBLINGS) - 1), _MAX_RETRY_S))

    def _mend(self) -> None:
        if self._num_failures:
            self._num_failures = 0
            logger.info("%s is fetched again", self._thread.name)
            self._listener.on_mended()

    async def _poll(self) -> bool:
        """Fetch once; whether anything came."""
        began_at = time.monotonic()
        try:
            iterator = self._fetch(_FETCH_S)
        except (AssertionError, TimeoutError):
            return False  # there was no request yet, or nothing in time
        has_items = False
        while not self._closing.is_set():
            asked_at = time.monotonic()
            try:
                item = await anext(iterator)
            except (StopAsyncIteration, TimeoutError):
                break
            if time.monotonic() - asked_at > _WAITED_S:
                self._listener.on_told(asked_at)
            has_items = True
            self._listener.on_items(item if isinstance(item, list) else [item])
        # An end at once, with nothing: an iterator that had ended before, behind which items may wait.
        if has_items or time.monotonic() - began_at > _FETCH_S * 0.8:
            self._listener.on_told(began_at)
        return has_items
