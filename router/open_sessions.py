"""The sessions that are open: how many each client may have, and which idle one ends where there are too many."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from quartet.api.session_server import SessionStream
from quartet.errors import QueueFullError
from quartet.rpc.open_calls import OpenCalls
from quartet.streams.base import Context
from router.config import CallLimits

# Of all sessions, as a part: those that were ended to make room, and whose status has not left. Then none is ended.
_LEAVING = 4


class OpenSessions:
    """The sessions of one router.

    One client can't have more than its bounds. When all clients together have too many, an idle session ends for each
    one that is opened: of the client with most of them that has an idle one, the one that was opened first.
    """

    def __init__(self, limits: CallLimits) -> None:
        """Start without sessions."""
        self._limits = limits
        self._calls = OpenCalls(
            "sessions",
            max_of_connection=limits.max_sessions_of_connection,
            max_of_identity=limits.max_sessions_of_identity,
            max_calls=limits.max_sessions + limits.max_sessions // _LEAVING,
            setting="calls.max_sessions",
        )
        # By client, in the order in which they were opened.
        self._by_client: dict[str, dict[SessionStream, None]] = {}
        self._num_sessions = 0

    def __len__(self) -> int:
        """Sessions whose calls are served."""
        return self._num_sessions

    def __iter__(self) -> Iterator[SessionStream]:
        for sessions in self._by_client.values():
            yield from sessions

    def enter(self, context: Context, identity: str | None) -> None:
        """Count the call of ``context``, of the client ``identity``; where there are too many an idle session ends.

        Raises:
            QueueFullError: the client has as many as it may have, or all clients have, and none is idle.
        """
        self._calls.check(context, identity)
        if self._num_sessions >= self._limits.max_sessions and not self._end_one():
            raise QueueFullError(
                f"this server may have {self._limits.max_sessions} sessions open at a time (the router's "
                "calls.max_sessions), and none of them is idle"
            )
        self._calls.count(context, identity)

    @contextmanager
    def serving(self, client: str, session: SessionStream) -> Iterator[None]:
        """``session`` of ``client``, an identity or a connection, is served in the block."""
        sessions = self._by_client.setdefault(client, {})
        sessions[session] = None
        self._num_sessions += 1
        try:
            yield
        finally:
            self._num_sessions -= 1
            del sessions[session]
            if not sessions:
                del self._by_client[client]

    def _end_one(self) -> bool:
        """Let an idle session end; return whether there was one."""
        by_number = sorted(self._by_client.values(), key=len, reverse=True)
        return any(session.end_idle() for sessions in by_number for session in sessions)
