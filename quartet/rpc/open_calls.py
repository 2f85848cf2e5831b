"""How many calls of a kind are open at a time: of one connection, of one identity, and in all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import grpc

from quartet.errors import QueueFullError

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class OpenCalls:
    """Counts the open calls of one kind, and refuses more than there may be.

    A call is open until its status has left. Where the client takes nothing, that is long after its handler has ended:
    gRPC keeps what is still to be sent, and has no way to drop it.

    The bound of one connection is far below that of all, so that one client can't take the room of the others. With
    certificates an identity has a bound, too, over all its connections.
    """

    def __init__(
        self,
        what: str,
        *,
        max_of_connection: int,
        max_of_identity: float = math.inf,
        max_calls: float = math.inf,
        setting: str = "",
    ) -> None:
        """``what`` names the calls in errors: "health watches".

        Errors name the setting that bounds them: ``setting``, with ``_of_connection`` or ``_of_identity`` behind.
        """
        self._what = what
        self._max_of_connection = max_of_connection
        self._max_of_identity = max_of_identity
        self._max_calls = max_calls
        self._setting = setting
        # Of connections, by address, and of identities, by name: a name has no colon.
        self._by_caller: dict[str, int] = {}
        self._num_calls = 0

    def __len__(self) -> int:
        """Calls that are open."""
        return self._num_calls

    def enter(self, context: _Context, identity: str | None = None) -> None:
        """Count the call of ``context`` until it is over; its caller has the name ``identity``, if any.

        Raises:
            QueueFullError: its connection, its identity, or the server has as many as it may have.
        """
        peer = context.peer()
        self._check(peer, identity)
        self._count(context, peer, identity)

    def check(self, context: _Context, identity: str | None = None) -> None:
        """Raise as ``enter`` does, but count nothing."""
        self._check(context.peer(), identity)

    def count(self, context: _Context, identity: str | None = None) -> None:
        """Count the call of ``context`` until it is over, whatever the bounds are."""
        self._count(context, context.peer(), identity)

    def _check(self, peer: str, identity: str | None) -> None:
        if self._by_caller.get(peer, 0) >= self._max_of_connection:
            raise self._error(f"a connection may have {self._max_of_connection} {self._what} open", "_of_connection")
        if identity is not None and self._by_caller.get(identity, 0) >= self._max_of_identity:
            raise self._error(f"an identity may have {self._max_of_identity} {self._what} open", "_of_identity")
        if self._num_calls >= self._max_calls:
            raise self._error(f"this server may have {self._max_calls} {self._what} open", "")

    def _count(self, context: _Context, peer: str, identity: str | None) -> None:
        callers = (peer,) if identity is None else (peer, identity)
        for caller in callers:
            self._by_caller[caller] = self._by_caller.get(caller, 0) + 1
        self._num_calls += 1
        context.add_done_callback(partial(self._leave, callers))  # type: ignore[arg-type]  # the stubs forgot that it is a Protocol

    def _leave(self, callers: Sequence[str], _context: _Context) -> None:
        self._num_calls -= 1
        for caller in callers:
            num_left = self._by_caller[caller] - 1
            if num_left:
                self._by_caller[caller] = num_left
            else:
                del self._by_caller[caller]

    def _error(self, message: str, scope: str) -> QueueFullError:
        setting = f" (the router's {self._setting}{scope})" if self._setting else ""
        return QueueFullError(f"{message} at a time{setting}, and has them")
