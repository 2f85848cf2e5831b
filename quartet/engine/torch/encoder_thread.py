"""The tower's own thread: loads it, runs batches, sleeps while there is nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quartet.engine.torch.encoder_jobs import Passenger, RunTimes

if TYPE_CHECKING:  # it imports torch, which takes seconds: only the tower's thread may
    from quartet.engine.torch.encoder_tower import Tower

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TowerListener:
    """What hears of the thread, on the event loop and in order: ready, runs, lost, end.

    Attributes:
        on_ready: the tower is loaded and warm.
        on_run: the oldest batch that was posted lies in its blocks, but for what did not fit into the device.
        on_lost: loading or a run failed; nothing is written any more.
        on_end: the thread is about to end.
    """

    on_ready: Callable[[Tower], None]
    on_run: Callable[[RunTimes], None]
    on_lost: Callable[[Exception], None]
    on_end: Callable[[], None]


class TowerThread:
    """Runs batches in the order in which they were posted, until ``stop`` or the first exception."""

    def __init__(self, load: Callable[[], Tower], listener: TowerListener) -> None:
        """Begin to load; the running event loop hears of it."""
        self._load = load
        self._listener = listener
        self._inbox: queue.SimpleQueue[Sequence[Passenger] | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        # A daemon: a device that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._main, name="quartet-encoder", daemon=True)
        self._thread.start()

    def post(self, batch: Sequence[Passenger]) -> None:
        """Hand over a batch. Never blocks."""
        self._inbox.put(batch)

    def stop(self) -> None:
        """Make the thread end after the batches that were posted; ``on_end`` follows."""
        self._inbox.put(None)

    def join(self) -> None:
        """Wait for the thread's last instructions; for after ``on_end``."""
        self._thread.join()

    def _main(self) -> None:
        try:
            tower = self._load()
            self._tell(self._listener.on_ready, tower)
            while (batch := self._inbox.get()) is not None:
                self._tell(self._listener.on_run, tower.run(batch))
        except Exception as error:  # the thread's work ends here; the listener fails what it knows
            logger.exception("the encoder is lost")
            self._tell(self._listener.on_lost, error)
        finally:
            self._tell(self._listener.on_end)

    def _tell(self, hear: Callable[..., None], *args: object) -> None:
        # RuntimeError: the loop is closed, so nobody listens any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(hear, *args)
