"""How many calls of a kind are open at a time: of one connection, and in all."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from typing import Any, TypeAlias

import grpc

from quartet.errors import QueueFullError

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class OpenCalls:
    """Counts the open calls of one kind, and refuses more than there may be.

    A call is open until its status has left. Where the client takes nothing, that is long after its handler has ended:
    gRPC keeps what is still to be sent, and has no way to drop it.

    The bound of one connection is far below that of all, so that one client can't take the room of the others.
    """

    def __init__(self, what: str, *, max_of_connection: int, max_calls: float = math.inf) -> None:
        """``what`` names the calls in errors: "health watches"."""
        self._what = what
        self._max_of_connection = max_of_connection
        self._max_calls = max_calls
        self._by_peer: Counter[str] = Counter()
        self._num_calls = 0

    def __len__(self) -> int:
        """Calls that are open."""
        return self._num_calls

    def enter(self, context: _Context) -> None:
        """Count the call of ``context`` until it is over.

        Raises:
            QueueFullError: its connection, or the server, has as many as it may have.
        """
        self.check(context)
        self.count(context)

    def check(self, context: _Context) -> None:
        """Raise as ``enter`` does, but count nothing."""
        if self._by_peer[context.peer()] >= self._max_of_connection:
            raise QueueFullError(f"a connection may have {self._max_of_connection} {self._what} open at a time")
        if self._num_calls >= self._max_calls:
            raise QueueFullError(f"this server has {self._max_calls} {self._what} open, and may have no more")

    def count(self, context: _Context) -> None:
        """Count the call of ``context`` until it is over, whatever the bounds are."""
        peer = context.peer()
        self._by_peer[peer] += 1
        self._num_calls += 1
        context.add_done_callback(partial(self._leave, peer))  # type: ignore[arg-type]  # the stubs forgot that it is a Protocol

    def _leave(self, peer: str, _context: _Context) -> None:
        self._num_calls -= 1
        self._by_peer[peer] -= 1
        if not self._by_peer[peer]:
            del self._by_peer[peer]
