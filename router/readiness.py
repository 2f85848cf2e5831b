"""Whether a router is ready: it knows the workers, and each role that it needs has a ready worker.

Until then load balancers should send requests elsewhere. Requests that come all the same are not refused for good:
``model_error`` tells "not known now" from "no such model".
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection

from quartet.discovery.base import Role
from quartet.errors import ModelNotFoundError, ModelUnavailableError, ServingError
from router.workers import WorkerTable

logger = logging.getLogger(__name__)

# Load reports change the table dozens of times a second; readiness follows at most this often.
_MIN_INTERVAL_S = 0.1

_RETRY_DELAY_S = 1.0


class Readiness:
    """Follows whether the workers in a table are enough to serve.

    Attributes:
        is_ready: as of the last change. Any thread may read it.
    """

    def __init__(self, table: WorkerTable, required_roles: Collection[Role]) -> None:
        """Not ready before ``follow`` runs. ``required_roles`` each need one ready worker, of any model."""
        self.is_ready = False
        self._table = table
        self._required_roles = frozenset(required_roles)

    async def follow(self, on_change: Callable[[bool], Awaitable[None]]) -> None:
        """Keep ``is_ready`` up to date and give it to ``on_change`` whenever it changes. Runs until cancelled."""
        changed = asyncio.Event()
        stop = self._table.listen(changed.set)
        lacking = ""
        try:
            while True:
                before, lacking = lacking, self._lacking()
                if lacking and lacking != before:
                    logger.log(logging.WARNING if self.is_ready else logging.INFO, "not ready: %s", lacking)
                if self.is_ready is bool(lacking):
                    self.is_ready = not lacking
                    await on_change(self.is_ready)
                await asyncio.sleep(_MIN_INTERVAL_S)
                await changed.wait()
                changed.clear()
        finally:
            stop()

    def _lacking(self) -> str:
        """What is missing to serve, in words; empty: nothing."""
        if not self._table.is_synchronised:
            return "discovery has not listed the workers yet"
        missing = self._required_roles - self._table.ready_roles(time.monotonic())
        return f"no {' and no '.join(sorted(missing))} worker is ready" if missing else ""


def model_error(table: WorkerTable, name: str, field: str, now: float) -> ServingError:
    """Why no worker of the model ``name`` is known; empty: the client named none. ``field`` has the name."""
    if not table.is_synchronised:
        return _unavailable("this router has not heard of the workers yet")
    if not table.pools(now):
        return _unavailable("no worker serves any model now")
    if table.is_joining(name):
        return _unavailable("no worker of this model has answered yet")
    if table.has_served(name, now):
        return _unavailable("the workers of this model have gone, and may come back")
    return ModelNotFoundError("no worker serves a model of this name", field=field)


def _unavailable(message: str) -> ModelUnavailableError:
    return ModelUnavailableError(message, retry_delay_s=_RETRY_DELAY_S)
