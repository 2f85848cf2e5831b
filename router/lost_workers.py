"""The workers that were lost while they ran one request: a request that ends its worker must not end one after another.

A prompt, a picture or a parameter that crashes a worker's process would be sent on to the next one at each attempt.
"""

from __future__ import annotations

import time

from quartet.discovery.base import WorkerKey
from quartet.errors import EngineError, ServingError, WorkersLostError
from quartet.streams.slots import PeerLostError
from router.workers import WorkerTable

# The connection broke, or the engine did, which ends its process.
_MAY_BE_LOST = (PeerLostError, EngineError)


class LostWorkers:
    """Counts, for one choice or one encode, the workers whose processes ended while they had it."""

    def __init__(self, table: WorkerTable, max_lost_workers: int) -> None:
        """None yet; once there are ``max_lost_workers``, the request ends."""
        self._table = table
        self._max_lost_workers = max_lost_workers
        self._lost: set[tuple[WorkerKey, int]] = set()

    def note(self, error: ServingError, worker: WorkerKey, epoch: int) -> None:
        """An attempt at ``worker``, in that epoch, failed with ``error``.

        Only its connection may have broken. So all but this one are looked up again: those that are well count no more.

        Raises:
            WorkersLostError: the request may take with it no other worker.
        """
        if not isinstance(error, _MAY_BE_LOST):
            return
        now, here = time.monotonic(), (worker, epoch)
        self._lost = {one for one in self._lost if one == here or not self._table.is_well(*one, now)} | {here}
        if len(self._lost) >= self._max_lost_workers:
            names = ", ".join(sorted(key.worker_id for key, _epoch in self._lost))
            raise WorkersLostError(
                f"{len(self._lost)} workers ({names}) were lost while they ran this request: it may be the cause, so it"
                " is not tried again"
            ) from error
