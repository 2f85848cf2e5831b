"""A request as one of many on the client's one stream with a router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from quartet.api.answer import Answer
from quartet.api.convert.request import to_resume
from quartet.api.request import AnswerPart, GenerateStart, Resume
from quartet.api.session_client import SessionCall
from quartet.client.request import check_resumed_size, check_size
from quartet.client.resume import LOST, RESUME_TIMEOUT_S, AnswerSoFar, Resumption, to_resumable_start
from quartet.client.routers import DEADLINE_GRACE_S, MAX_OPENINGS, MAX_UNREAD, Router, Routers
from quartet.errors import (
    RequestCancelledError,
    RequestTimeoutError,
    RouterUnavailableError,
)
from quartet.rpc.errors import to_duration


class SessionRequest:
    """One request by ``Session``; see ``ClientRequest``.

    Attributes:
        router: ``host:port`` of the router that took it, or went on with it.
    """

    def __init__(
        self,
        routers: Routers,
        start: GenerateStart,
        traceparent: str = "",
        *,
        resume_timeout_s: float = RESUME_TIMEOUT_S,
    ) -> None:
        """``resume_timeout_s`` is that of ``Resumption``.

        Raises ``InvalidRequestError``: a field that its message can't hold.
        """
        self.router: str | None = None
        self._routers = routers
        self._start = to_resumable_start(start, resume_timeout_s)
        check_size(start, self._start)
        self._traceparent = traceparent
        self._so_far = AnswerSoFar(start)
        self._resumption = Resumption(routers, self._so_far, timeout_s=resume_timeout_s)
        self._calls: set[SessionCall] = set()
        self._is_cancelled = False

    @property
    def lost_routers(self) -> Sequence[str]:
        """``host:port`` of the routers that were lost after they had begun the answer."""
        return self._so_far.lost_routers

    async def cancel(self) -> None:
        """Ask for an early end."""
        self._is_cancelled = True
        self._resumption.cancel()
        for call in self._calls:
            call.cancel()

    async def parts(self) -> AsyncGenerator[AnswerPart, None]:
        """Send the request and yield its answer. Raises ``ServingError``."""
        so_far = self._so_far
        so_far.start()
        leg, parts = await self._routers.call(self._ask)
        answer = leg.answer
        try:
            # As ``Answer.parts``, copied because a generator within this one would cost time for each token.
            while parts is not None:
                for part in parts:
                    if so_far.take(part):
                        yield part
                if not parts:
                    await answer.more()
                parts = answer.take()
            return
        except LOST as error:
            failure = error
        finally:
            leg.drop()
        async with aclosing(self._resumption.parts(self._resumed, leg.router, failure)) as rest:
            async for part in rest:
                yield part

    async def _ask(self, router: Router) -> tuple[_Leg, Sequence[AnswerPart] | None]:
        """The request at ``router``, to which there is a connection, and its first parts.

        If the stream broke, ask again while the router can be reached: the stream of earlier requests may have broken
        under this one, and a request that is refused at once may end with a status that isn't the router's.
        """
        for number in range(MAX_OPENINGS):
            if number:
                await router.connect()
            leg = self._begin(router)
            try:
                parts = await leg.answer.next()
            except RouterUnavailableError as error:
                leg.drop()
                failure = error
            except BaseException:
                leg.drop()
                raise
            else:
                self.router = router.address
                return leg, parts
        raise failure

    async def _resumed(self, router: Router, resume: Resume) -> AsyncGenerator[AnswerPart, None]:
        leg = self._begin(router, resume)
        try:
            async for part in leg.answer.parts():
                self.router = router.address
                yield part
        finally:
            leg.drop()

    def _begin(self, router: Router, resume: Resume | None = None) -> _Leg:
        timeout_s = self._so_far.time_left_s()
        if resume is not None and timeout_s is not None:
            self._start.timeout.CopyFrom(to_duration(timeout_s))
        answer = Answer(max_unread=MAX_UNREAD)
        resuming = None if resume is None else to_resume(resume)
        if resuming is not None:
            check_resumed_size(self._start.ByteSize() + resuming.ByteSize() + len(self._traceparent))
        call = router.session.start(self._start, answer, self._traceparent, resuming)
        if self._is_cancelled:
            call.cancel()
        deadline = None
        if timeout_s is not None:
            deadline = asyncio.get_running_loop().call_later(timeout_s + DEADLINE_GRACE_S, _give_up, call)
        return _Leg(router, answer, call, deadline, self._calls)


class _Leg:
    """A request at one router.

    Attributes:
        router: the router.
        answer: takes what comes.
    """

    def __init__(
        self,
        router: Router,
        answer: Answer,
        call: SessionCall,
        deadline: asyncio.TimerHandle | None,
        calls: set[SessionCall],
    ) -> None:
        """``call`` is one of ``calls`` until it is dropped."""
        self.router = router
        self.answer = answer
        self._call = call
        self._deadline = deadline
        self._calls = calls
        calls.add(call)

    def drop(self) -> None:
        """End it, whatever its state."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._calls.discard(self._call)
        self._call.drop(RequestCancelledError("the request was dropped"))


def _give_up(call: SessionCall) -> None:
    call.drop(RequestTimeoutError("the router did not end the request at its timeout"))
