"""The life of an engine that computes on a thread of its own: loading, live requests, outputs in order, one end.

``ThreadedEngine`` is the part on the event loop; its thread reaches it by ``call_on_loop``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Generic, Protocol, TypeVar

from quartet.engine.base import EngineCapabilities, EngineRequest, Failed, StepOutput, Turn
from quartet.errors import ServingError, WorkerUnavailableError

logger = logging.getLogger(__name__)

#: What the thread has loaded.
LoadedT = TypeVar("LoadedT")


class Transfers(Protocol):
    """The hand-offs that an engine is taking over."""

    def stop_all(self) -> None:
        """End all of them."""
        ...

    async def close(self, timeout_s: float) -> None:
        """End all of them and wait until nothing writes to the engine's blocks, ``timeout_s`` at most."""
        ...


class ThreadedEngine(ABC, Generic[LoadedT]):
    """The event loop's half of an engine; a subclass starts and stops the thread and brings requests to it.

    The thread calls ``_take_*`` on the event loop. After the end, a loss or ``close``, every live request has failed
    and later outputs are dropped.
    """

    def __init__(self, transfers: Transfers | None, close_timeout_s: float) -> None:
        """Nothing is loaded before ``start``.

        Args:
            transfers: stopped at the end; ``None``: the engine takes no hand-offs.
            close_timeout_s: bounds the wait for ``transfers`` in ``close``, and then the wait for the thread.
        """
        self._transfers = transfers
        self._close_timeout_s = close_timeout_s
        self._outputs = OutputQueue()
        self._live: set[int] = set()
        self._capabilities: EngineCapabilities | None = None
        self._ready: asyncio.Future[LoadedT] | None = None
        self._end_error: ServingError | None = None
        self._closing: asyncio.Task[None] | None = None

    @property
    def capabilities(self) -> EngineCapabilities:
        """What it can do; valid after ``start``."""
        assert self._capabilities is not None, "the engine was not started"
        return self._capabilities

    @property
    def is_alive(self) -> bool:
        """Whether it was started and has not ended."""
        return self._capabilities is not None and self._end_error is None

    def submit(self, request: EngineRequest) -> None:
        """Queue ``request``; every outcome, refusal included, arrives in ``outputs``.

        Raises:
            EngineError, WorkerUnavailableError: the engine died or was closed; there are no more outputs.
        """
        assert self._capabilities is not None, "the engine was not started"
        assert request.id not in self._live, "an id is used once"
        self._check_alive()
        try:
            self._accept(request)
        except ServingError as error:
            self._outputs.put(StepOutput(failed=(Failed(request.id, error),)))
        else:
            self._live.add(request.id)

    def outputs(self) -> AsyncIterator[StepOutput]:
        """The steps' outputs, in order, for one consumer. Ends after ``close``; raises ``EngineError`` when it died."""
        return self._outputs.read()

    def turns(self) -> Sequence[Turn]:
        """None: what the thread does, others compute."""
        return ()

    async def close(self) -> None:
        """Fail running requests, stop transfers and the thread, free everything. Bounded in time; may be called twice.

        Loading can't be interrupted and is not waited for: the thread closes what it has loaded once that is complete.
        """
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    @abstractmethod
    def _accept(self, request: EngineRequest) -> None:
        """Post ``request`` to the thread. Raises ``ServingError`` to refuse it; nothing was posted then."""

    @abstractmethod
    def _start_thread(self) -> None:
        """Start loading; ``_take_ready`` or ``_take_loss`` follows."""

    @abstractmethod
    def _stop_thread(self) -> None:
        """Make the thread end after its step, or after loading. Does not wait."""

    @abstractmethod
    async def _wait_thread(self, timeout_s: float) -> bool:
        """Wait until the thread has closed what it loaded; false if that takes longer than ``timeout_s``."""

    async def _load(self) -> LoadedT:
        """Start the thread and wait for what it loads. Raises the error of loading, or of a ``close`` meanwhile."""
        self._check_alive()
        self._ready = asyncio.get_running_loop().create_future()
        self._start_thread()
        loaded = await self._ready
        self._check_alive()
        return loaded

    def _take_ready(self, loaded: LoadedT) -> None:
        assert self._ready is not None, "start waits"
        if not self._ready.done():
            self._ready.set_result(loaded)

    def _take_output(self, output: StepOutput) -> None:
        if self._end_error is not None:
            return
        for ended in (output.finished, output.prefilled, output.failed):
            for item in ended:
                self._live.discard(item.id)
        self._outputs.put(output)

    def _take_loss(self, start_error: Exception, loss: ServingError) -> None:
        """Loading or a step failed: a pending ``start`` raises ``start_error``, live requests fail with ``loss``."""
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(start_error)
        self._end(loss)
        self._outputs.end(loss)

    def _check_alive(self) -> None:
        if self._end_error is not None:
            raise type(self._end_error)(self._end_error.message)

    def _end(self, error: ServingError) -> None:
        """Fail all live requests and drop later outputs. Only the first call counts."""
        if self._end_error is not None:
            return
        self._end_error = error
        if self._live:
            self._outputs.put(StepOutput(failed=tuple(Failed(id, error) for id in sorted(self._live))))
        self._live.clear()
        if self._transfers is not None:
            self._transfers.stop_all()

    async def _close(self) -> None:
        self._end(closed := WorkerUnavailableError("the engine was closed"))
        self._outputs.end()
        if self._transfers is not None:
            await self._transfers.close(self._close_timeout_s)
        if self._ready is None:
            return
        self._stop_thread()  # the thread closes the pool: only now does nothing write to it
        if not self._ready.done():
            self._ready.set_exception(closed)
            self._ready.exception()  # ``start`` may have been given up
            return
        if self._ready.cancelled():
            return  # ``start`` was given up; the model may still be loading
        if not await self._wait_thread(self._close_timeout_s):
            logger.error("the engine's thread has not ended within %s s", self._close_timeout_s)


class OutputQueue:
    """Hands steps' outputs to one consumer. Not bounded: the engine never waits for its consumer."""

    def __init__(self) -> None:
        self._outputs: deque[StepOutput] = deque()
        self._changed = asyncio.Event()
        self._has_ended = False
        self._error: ServingError | None = None

    def put(self, output: StepOutput) -> None:
        """Queue ``output``. Never waits."""
        self._outputs.append(output)
        self._changed.set()

    def end(self, error: ServingError | None = None) -> None:
        """Let the consumer end, with ``error`` if given, after what is queued. Only the first call counts."""
        if not self._has_ended:
            self._has_ended, self._error = True, error
            self._changed.set()

    async def read(self) -> AsyncIterator[StepOutput]:
        """The outputs, in order, until ``end``; then raises its error, if there is one."""
        while True:
            while self._outputs:
                yield self._outputs.popleft()
            if self._has_ended:
                break
            self._changed.clear()
            await self._changed.wait()
        if self._error is not None:
            raise self._error


def call_on_loop(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: object) -> None:
    """Run ``callback`` on the event loop. May be called on any thread; does nothing once the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, *args)
