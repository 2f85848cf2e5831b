"""Waking the one task that waits for something, at half the price of an event, and results that come in that moment."""

from __future__ import annotations

import asyncio
from typing import TypeVar

ResultT = TypeVar("ResultT")


class Wakeable:
    """Base of what one task waits for: does what an ``asyncio.Event`` does at half its price for each token.

    ``_waiter`` is set only while a task may wait; on a hot path check it before calling ``_wake``.
    """

    __slots__ = ("_loop", "_waiter")

    def __init__(self) -> None:
        """Begin with no task that waits."""
        self._waiter: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def _woken(self) -> asyncio.Future[None]:
        """Done at the next ``_wake``. For one task; it loses nothing if it is cancelled while it waits.

        A future and not a coroutine: each coroutine in between would cost something for each token.
        """
        assert self._waiter is None or self._waiter.done(), "one task waits"
        if self._loop is None:
            self._loop = asyncio.get_running_loop()  # a system call in Python 3.11: once is enough
        self._waiter = self._loop.create_future()
        return self._waiter

    def _wake(self) -> None:
        """Let the task go on that waits now, if one does."""
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():  # the task may have been cancelled
                waiter.set_result(None)


def result_if_done(future: asyncio.Future[ResultT]) -> ResultT | None:
    """The result of ``future``, if it ended well: it may have at the very moment when its waiter was cancelled."""
    is_good = future.done() and not future.cancelled() and future.exception() is None
    return future.result() if is_good else None
