"""The transfers of an engine: claims that wait for blocks, and fetches on their way. Lives on the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from quartet.engine.scheduler import Pull
from quartet.errors import ServingError, TransferError
from quartet.kvcache.layout import HandOff
from quartet.supervision import report_failure
from quartet.transfer.base import Claim, FetchResult, Puller

logger = logging.getLogger(__name__)


class Pulls:
    """Claims hand-offs, fetches them, and calls back when nothing of a fetch writes any more."""

    def __init__(self, puller: Puller, on_end: Callable[[int, FetchResult | ServingError], None]) -> None:
        """``on_end`` is called once for each ``fetch``, on the event loop."""
        self._puller = puller
        self._on_end = on_end
        self._claims: dict[int, Claim] = {}
        self._fetches: dict[int, asyncio.Task[FetchResult]] = {}
        self._releases: set[asyncio.Task[None]] = set()

    def claim(self, id: int, hand_off: HandOff) -> None:
        """Claim the hand-off of request ``id``; it is renewed from now on.

        Raises:
            LayoutMismatchError: its blocks cannot be taken over here.
        """
        self._claims[id] = self._puller.claim(hand_off)

    def fetch(self, pull: Pull) -> None:
        """Fetch the pieces of a claimed hand-off."""
        claim = self._claims.pop(pull.id, None)
        if claim is None:  # ``stop_all`` was faster
            self._on_end(pull.id, TransferError("the transfer was stopped"))
            return
        task = asyncio.get_running_loop().create_task(claim.fetch(pull.copies))
        self._fetches[pull.id] = task
        task.add_done_callback(partial(self._end, pull.id, claim))

    def stop(self, id: int) -> None:
        """End what goes on for request ``id``: release a claim, cancel a fetch. Unknown ids are ignored."""
        if id in self._claims:
            self._release(self._claims.pop(id))
        elif id in self._fetches:
            self._fetches[id].cancel()

    def stop_all(self) -> None:
        """End everything; fetches still report their end."""
        for id in (*self._claims, *self._fetches):
            self.stop(id)

    async def close(self, timeout_s: float) -> None:
        """End everything and wait until nothing writes any more, ``timeout_s`` at most."""
        self.stop_all()
        try:
            async with asyncio.timeout(timeout_s):
                while tasks := (*self._fetches.values(), *self._releases):
                    await asyncio.wait(tasks)
        except TimeoutError:
            logger.error("%s transfers have not stopped within %s s", len(self._fetches), timeout_s)

    def _end(self, id: int, claim: Claim, task: asyncio.Task[FetchResult]) -> None:
        del self._fetches[id]
        outcome = _outcome(task)
        if isinstance(outcome, ServingError):
            self._release(claim)
        self._on_end(id, outcome)

    def _release(self, claim: Claim) -> None:
        task = asyncio.get_running_loop().create_task(claim.release())
        self._releases.add(task)
        task.add_done_callback(report_failure)
        task.add_done_callback(self._releases.discard)


def _outcome(task: asyncio.Task[FetchResult]) -> FetchResult | ServingError:
    if task.cancelled():
        return TransferError("the transfer was stopped")
    error = task.exception()
    if error is None:
        return task.result()
    if isinstance(error, ServingError):
        return error
    logger.error("a transfer broke", exc_info=error)
    return TransferError(f"the transfer broke: {error!r}")
