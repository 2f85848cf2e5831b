"""Ends calls whose client takes nothing: such a client still answers pings, so nothing else would."""

from __future__ import annotations

import asyncio
import time
from typing import Any, TypeAlias

import grpc

from quartet.errors import StalledStreamError

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_MAX_LOOK_INTERVAL_S = 1.0


class StalledCalls:
    """Writes with a bound. One look now and then, for all calls of a server, costs less than a timer a message."""

    def __init__(self, timeout_s: float) -> None:
        """A client may take nothing for ``timeout_s`` seconds. ``run`` must run for that to be noticed."""
        self._timeout_s = timeout_s
        self._writing_since: dict[asyncio.Task[Any], float] = {}
        self._stalled: set[asyncio.Task[Any]] = set()

    async def write(self, context: _Context, message: object) -> None:
        """Write ``message``. Raises ``StalledStreamError`` where the client takes nothing for too long."""
        task = asyncio.current_task()
        assert task is not None, "a handler runs in a task"
        self._writing_since[task] = time.monotonic()
        try:
            await context.write(message)
        except asyncio.CancelledError:
            if task in self._stalled and task.uncancel() == 0:
                raise StalledStreamError("the client took nothing for too long") from None
            raise
        finally:
            del self._writing_since[task]
            self._stalled.discard(task)

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(min(_MAX_LOOK_INTERVAL_S, self._timeout_s / 4))
            limit = time.monotonic() - self._timeout_s
            for task, since in self._writing_since.items():
                if since < limit and task not in self._stalled:
                    self._stalled.add(task)
                    task.cancel()
