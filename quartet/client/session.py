"""A request as one of many on the client's one stream with a router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from quartet.api.answer import Answer
from quartet.api.convert.request import to_generate_start
from quartet.api.request import AnswerPart, GenerateStart
from quartet.api.session_client import SessionCall, SessionClient
from quartet.client.request import check_size
from quartet.client.routers import (
    DEADLINE_GRACE_S,
    MAX_OPENINGS,
    MAX_UNREAD,
    ClientClosedError,
    Router,
    Routers,
)
from quartet.errors import (
    RequestCancelledError,
    RequestTimeoutError,
    RouterUnavailableError,
)


class Sessions:
    """The session with each router, shared by all requests that go there."""

    def __init__(self) -> None:
        """Start without sessions."""
        self._sessions: dict[str, SessionClient] = {}
        self._is_closed = False

    def at(self, router: Router) -> SessionClient:
        """The session with ``router``. Raises ``ClientClosedError``."""
        if self._is_closed:
            raise ClientClosedError
        session = self._sessions.get(router.address)
        if session is None:
            session = self._sessions[router.address] = SessionClient(
                router.address, router.stub, lambda error: router.error(error, is_begun=True)
            )
        return session

    async def close(self) -> None:
        """End all requests, for good."""
        self._is_closed = True
        await asyncio.gather(*(session.close() for session in self._sessions.values()))


class SessionRequest:
    """One request by ``Session``; see ``ClientRequest``.

    Attributes:
        router: ``host:port`` of the router that took it.
    """

    def __init__(self, routers: Routers, sessions: Sessions, start: GenerateStart, traceparent: str = "") -> None:
        """Raises ``InvalidRequestError``: a field that its message can't hold."""
        self.router: str | None = None
        self._routers = routers
        self._sessions = sessions
        self._start = to_generate_start(start)
        check_size(start, self._start)
        self._traceparent = traceparent
        self._deadline_s = None if start.timeout_s is None else start.timeout_s + DEADLINE_GRACE_S
        self._deadline: asyncio.TimerHandle | None = None
        self._answer = Answer()
        self._call: SessionCall | None = None
        self._is_cancelled = False

    async def cancel(self) -> None:
        """Ask for an early end."""
        self._is_cancelled = True
        if self._call is not None:
            self._call.cancel()

    async def parts(self) -> AsyncGenerator[AnswerPart, None]:
        """Send the request and yield its answer. Raises ``ServingError``."""
        try:
            for part in await self._routers.call(self._ask):
                yield part
            answer = self._answer
            # As ``Answer.parts``, copied because a generator within this one would cost time for each token.
            while (parts := answer.take()) is not None:
                for part in parts:
                    yield part
                if not parts:
                    await answer.more()
        finally:
            self._drop()

    async def _ask(self, router: Router) -> Sequence[AnswerPart]:
        """The first parts from ``router``, to which there is a connection.

        If the stream broke, ask again while the router can be reached: the stream of earlier requests may have broken
        under this one, and a request that is refused at once may end with a status that isn't the router's.
        """
        for number in range(MAX_OPENINGS):
            if number:
                await router.connect()
            self._begin(router)
            try:
                parts = await self._answer.next()
            except RouterUnavailableError as error:
                self._drop()
                failure = error
            else:
                self.router = router.address
                return parts
        raise failure

    def _begin(self, router: Router) -> None:
        self._answer = Answer(max_unread=MAX_UNREAD)
        self._call = self._sessions.at(router).start(self._start, self._answer, self._traceparent)
        if self._is_cancelled:
            self._call.cancel()
        if self._deadline_s is not None:
            self._deadline = asyncio.get_running_loop().call_later(self._deadline_s, self._give_up)

    def _give_up(self) -> None:
        assert self._call is not None, "it has begun"
        self._call.drop(RequestTimeoutError("the router did not end the request at its timeout"))

    def _drop(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        if self._call is not None:
            self._call.drop(RequestCancelledError("the request was dropped"))
