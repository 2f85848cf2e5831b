"""The threads that call CUDA for copies: a stream and an event each, and no copy outlives the work that issued it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from quartet.errors import TransferError
from quartet.transfer.cuda.driver import CudaError, Driver
from quartet.transfer.cuda.memory import DeviceMemory
from quartet.transfer.cuda.pinned import HostWindow
from quartet.transfer.runs import run_to_end

logger = logging.getLogger(__name__)

#: A thread sleeps while its copies are under way; another one begins the next transfer's meanwhile.
_NUM_THREADS = 2

#: How long ``close`` waits for copies. They take milliseconds; a GPU that hangs must not keep the process.
CLOSE_TIMEOUT_S = 10.0

#: How many copies a thread starts, one by one at 4 us each, before it looks again whether to stop.
COPIES_A_LOOK = 64

#: How many it starts in one call, which takes a microsecond each, before it looks.
COPIES_A_CALL = 512

#: How many it starts in its first call, and four times as many in each further one up to that: the GPU has something to
#: do while the next ones are started.
COPIES_A_FIRST_CALL = 64


@dataclass(eq=False)
class Lane:
    """What one thread copies by.

    Attributes:
        stream: beside the engine's and the other lanes'.
        event: one on it.
        windows: pinned memory that the lane's user keeps from work to work.
        tables: addresses of memory on the GPU that it keeps so.
    """

    stream: int
    event: int
    windows: list[HostWindow] = field(default_factory=list)
    tables: list[int] = field(default_factory=list)


#: Issues copies on a lane; it looks at ``stop`` now and then, and ends soon once that is set.
CopyWork: TypeAlias = Callable[[Lane, threading.Event], None]


class CopyThreads:
    """Threads bound to one pool's GPU."""

    def __init__(self, memory: DeviceMemory, name: str) -> None:
        """Start none yet; ``name`` is theirs in a stack dump."""
        self._memory = memory
        self._name = name
        self.driver: Driver = memory.driver
        self._executor = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix=name)
        self._lanes: dict[int, Lane] = {}  # by thread
        self._is_closed = False

    async def call(self, work: Callable[[], None]) -> None:
        """Run ``work`` with the GPU's context; returns, raises or is cancelled only once it has ended.

        Raises:
            TransferError: the threads are closed.
        """
        self._check_open()
        await run_to_end(self._executor, partial(self._bound, work), lambda: None)

    async def copy(self, work: CopyWork, what: str) -> None:
        """Run ``work`` and wait until all that it issued is done, also when it failed or is cancelled.

        Raises:
            TransferError: the threads are closed, or a call failed; that message begins with ``what``.
        """
        self._check_open()
        stop = threading.Event()
        try:
            await run_to_end(self._executor, partial(self._copy, work, stop), stop.set)
        except CudaError as error:
            raise TransferError(f"{what} failed: {error}") from error

    def submit(self, work: Callable[[], None]) -> None:
        """Run ``work`` with the GPU's context, some time; a failure is logged."""
        self._executor.submit(self._bound, work).add_done_callback(_log_failure)

    async def close(self, last: Callable[[], None] = lambda: None) -> None:
        """End the threads, once they have done what they were given; then run ``last``. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await asyncio.to_thread(self._end, last)
        except TimeoutError:
            logger.error("the threads %s of GPU %s do not end", self._name, self._memory.device)
        except CudaError as error:
            logger.error("a GPU's resources were not given back: %s", error)

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransferError("the worker is closing")

    def _end(self, last: Callable[[], None]) -> None:
        self._executor.shutdown()
        self.driver.bind(self._memory.device)
        self._destroy_lanes()
        last()

    def _bound(self, work: Callable[[], None]) -> None:
        self.driver.bind(self._memory.device)
        work()

    def _copy(self, work: CopyWork, stop: threading.Event) -> None:
        lane = self._lane()
        try:
            work(lane, stop)
        finally:
            self._wait(lane)  # also when cancelled or failed: the copies that began write until then

    def _wait(self, lane: Lane) -> None:
        try:
            self.driver.record(lane.event, lane.stream)
            self.driver.wait(lane.event)
        except CudaError:
            self.driver.synchronize(lane.stream)  # fails only where the context is lost, and then nothing writes
            raise

    def _lane(self) -> Lane:
        self.driver.bind(self._memory.device)
        lane = self._lanes.get(threading.get_ident())
        if lane is None:
            event = self.driver.create_event()
            try:
                lane = Lane(self.driver.create_stream(), event)
            except CudaError:
                self.driver.destroy_event(event)
                raise
            self._lanes[threading.get_ident()] = lane
        return lane

    def _destroy_lanes(self) -> None:
        while self._lanes:
            _, lane = self._lanes.popitem()
            for window in lane.windows:
                window.free(self.driver)
            for address in lane.tables:
                self.driver.free(address)
            self.driver.destroy_event(lane.event)
            self.driver.destroy_stream(lane.stream)


def _log_failure(done: Future[None]) -> None:
    error = done.exception()
    if error is not None:
        logger.error("a GPU's resources were not given back: %r", error)
