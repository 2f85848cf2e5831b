"""How many calls of one method are open at a time: of one connection, and in all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from quartet.errors import QueueFullError


class OpenCalls:
    """Counts the open calls of one method, and refuses more than it may have.

    The bound of one connection is far below that of all, so that one client can't take the room of the others.
    """

    def __init__(self, what: str, *, max_calls: int, max_of_connection: int) -> None:
        """``what`` names the calls in errors: "health watches"."""
        self._what = what
        self._max_calls = max_calls
        self._max_of_connection = max_of_connection
        self._by_peer: Counter[str] = Counter()
        self._num_calls = 0

    def __len__(self) -> int:
        """Calls that are open."""
        return self._num_calls

    @contextmanager
    def enter(self, context: grpc.aio.ServicerContext[Any, Any]) -> Iterator[None]:
        """Count the call of ``context`` for as long as the block lasts.

        Raises:
            QueueFullError: its connection, or the server, has as many as it may have.
        """
        peer = context.peer()
        if self._by_peer[peer] >= self._max_of_connection:
            raise QueueFullError(f"a connection may have {self._max_of_connection} {self._what} open at a time")
        if self._num_calls >= self._max_calls:
            raise QueueFullError(f"this server has {self._max_calls} {self._what} open, and may have no more")
        self._by_peer[peer] += 1
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1
            self._by_peer[peer] -= 1
            if not self._by_peer[peer]:
                del self._by_peer[peer]
