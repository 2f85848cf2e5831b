"""Ends calls whose client takes nothing: such a client still answers pings, so nothing else would."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from quartet.errors import StalledStreamError

_MAX_LOOK_INTERVAL_S = 1.0


class WatchedCall:
    """One call's writes. Say ``began`` before each and ``ended`` after it."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        """``task`` writes."""
        self.is_stalled = False
        self._task = task
        self._since: float | None = None

    def began(self) -> None:
        """A write begins."""
        self._since = time.monotonic()

    def ended(self) -> None:
        """The client took it."""
        self._since = None

    def look(self, limit: float) -> None:
        """End the call if it has been writing since before ``limit``, monotonic seconds."""
        if self._since is not None and self._since < limit and not self.is_stalled:
            self.is_stalled = True
            self._task.cancel()


class StalledCalls:
    """Bounds writes. One look now and then, for all calls of a server, costs less than a timer a message."""

    def __init__(self, timeout_s: float) -> None:
        """A client may take nothing for ``timeout_s`` seconds. ``run`` must run for that to be noticed."""
        self._timeout_s = timeout_s
        self._calls: set[WatchedCall] = set()

    @contextmanager
    def watch(self) -> Iterator[WatchedCall]:
        """The call of the current task, for as long as the block lasts.

        Raises:
            StalledStreamError: out of the block, where the client took nothing for too long.
        """
        task = asyncio.current_task()
        assert task is not None, "a handler runs in a task"
        call = WatchedCall(task)
        self._calls.add(call)
        try:
            yield call
        except asyncio.CancelledError:
            if call.is_stalled and task.uncancel() == 0:
                raise StalledStreamError("the client took nothing for too long") from None
            raise
        finally:
            self._calls.discard(call)

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(min(_MAX_LOOK_INTERVAL_S, self._timeout_s / 4))
            limit = time.monotonic() - self._timeout_s
            for call in tuple(self._calls):
                call.look(limit)
