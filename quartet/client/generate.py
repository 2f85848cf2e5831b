"""A request as a call of its own to a router."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import TypeAlias

import grpc

from quartet.api.convert.answer import from_generate_response
from quartet.api.convert.request import to_resume
from quartet.api.request import AnswerPart, ChoiceFinished, GenerateStart, Resume
from quartet.client.request import check_resumed_size, check_size, trace_metadata
from quartet.client.resume import RESUME_TIMEOUT_S, AnswerSoFar, Resumption, to_resumable_start
from quartet.client.routers import (
    DEADLINE_GRACE_S,
    MADE_UP_DETAILS,
    MAX_OPENINGS,
    Router,
    Routers,
    go_on_or_raise,
    raise_all,
)
from quartet.errors import ProtocolError, ServingError
from quartet.rpc.errors import to_duration
from quartet.v1 import router_pb2, types_pb2

_Rpc: TypeAlias = "grpc.aio.StreamStreamCall[router_pb2.GenerateRequest, router_pb2.GenerateResponse]"


class GenerateRequest:
    """One request by ``Generate``; see ``ClientRequest``.

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
        self._start = router_pb2.GenerateRequest(start=to_resumable_start(start, resume_timeout_s))
        check_size(start, self._start)
        self._metadata = trace_metadata(traceparent)
        self._num_choices = start.num_choices
        self._answer = AnswerSoFar(start)
        self._resumption = Resumption(routers, self._answer, timeout_s=resume_timeout_s)
        self._calls: set[_Call] = set()
        self._is_cancelled = False

    @property
    def lost_routers(self) -> Sequence[str]:
        """``host:port`` of the routers that were lost after they had begun the answer."""
        return self._answer.lost_routers

    async def cancel(self) -> None:
        """Ask for an early end."""
        self._is_cancelled = True
        self._resumption.cancel()
        for call in tuple(self._calls):
            await call.send_cancel()

    async def parts(self) -> AsyncGenerator[AnswerPart, None]:
        """Send the request and yield its answer. Raises ``ServingError``."""
        answer = self._answer
        answer.start()
        failures: list[ServingError] = []
        async for router in self._routers.candidates():
            try:
                await router.connect()
                # Close it at once, also when this generator is closed: its end cancels the call.
                async with contextlib.aclosing(self._parts_from(router)) as parts:
                    async for part in parts:
                        if answer.take(part):
                            yield part
            except ServingError as error:
                failures.append(error if answer.is_begun else go_on_or_raise(error))
                if answer.is_begun:
                    break
            else:
                return
        else:
            raise_all(failures)
        async with contextlib.aclosing(self._resumption.parts(self._parts_from, router, failures[-1])) as rest:
            async for part in rest:
                yield part

    async def _parts_from(self, router: Router, resume: Resume | None = None) -> AsyncGenerator[AnswerPart, None]:
        """The answer of one router, or what it goes on with. Raises ``ServingError``."""
        num_choices = self._num_choices if resume is None else 1
        call = self._make_call(router, resume)
        self._calls.add(call)
        num_finished = 0
        try:
            rpc = await call.open()
            if self._is_cancelled:
                await call.send_cancel()
            async for message in rpc:
                if not call.is_begun:
                    call.is_begun, self.router = True, router.address
                    self._routers.prefer(router)
                part = from_generate_response(message)
                num_finished += isinstance(part, ChoiceFinished)
                yield part
        except grpc.aio.AioRpcError as error:
            # The answer is whole once each choice has ended, whatever the status: the router may be lost before giving
            # one, and if a cancel loses the race with the end, gRPC replaces the router's status with its own.
            if num_finished < num_choices:
                raise router.error(error, is_begun=call.is_begun) from error
        except (asyncio.CancelledError, grpc.aio.UsageError):
            # Closing a call's channel cancels the call, as if the reader had been cancelled, or refuses to open it.
            if router.is_closed and not _is_cancelled():
                raise router.closed_error from None
            raise
        finally:
            self._calls.discard(call)
            call.drop()
        if num_finished != num_choices:
            raise ProtocolError(f"the router ended the answer after {num_finished} of {num_choices} choices")

    def _make_call(self, router: Router, resume: Resume | None) -> _Call:
        """The call of the request, or of what is left of it.

        Raises ``RequestTimeoutError``; ``MessageTooLargeError``: what is left, with the answer so far, can't be sent.
        """
        timeout_s = self._answer.time_left_s()
        deadline_s = None if timeout_s is None else timeout_s + DEADLINE_GRACE_S
        if resume is None:
            return _Call(router, self._start, deadline_s, self._metadata)
        message = router_pb2.GenerateRequest(start=self._start.start, resume=to_resume(resume))
        if timeout_s is not None:
            message.start.timeout.CopyFrom(to_duration(timeout_s))
        check_resumed_size(message.ByteSize())
        return _Call(router, message, deadline_s, self._metadata)


class _Call:
    """One call of Generate. ``is_begun``: the router has answered something."""

    def __init__(
        self,
        router: Router,
        start: router_pb2.GenerateRequest,
        deadline_s: float | None,
        metadata: Sequence[tuple[str, str]],
    ) -> None:
        self._router = router
        self._start = start
        self._deadline_s = deadline_s
        self._metadata = metadata
        self._rpc: _Rpc | None = None
        self.is_begun = self._is_started = self._has_sent_cancel = False

    async def open(self) -> _Rpc:
        """Open the call and send the start.

        A router that refuses at once ends the call while the start is being sent. If the write loses that race, gRPC
        replaces the router's status with its own. Nothing was sent then, and asking again gives the router's status.
        """
        for _ in range(MAX_OPENINGS):
            rpc = self._rpc = self._router.stub.Generate(timeout=self._deadline_s, metadata=self._metadata)
            await _write(rpc, self._start)
            if not (rpc.done() and await rpc.details() == MADE_UP_DETAILS):
                break
        self._is_started = True
        return rpc

    async def send_cancel(self) -> None:
        """Ask for an early end."""
        # Never two writes at once: one would overtake the other, or gRPC would call the call ended, while the router
        # goes on with it. A cancel that comes before the start is sent by the task that sends the start, after it.
        if self._rpc is not None and self._is_started and not self._has_sent_cancel:
            self._has_sent_cancel = True
            await _write(self._rpc, router_pb2.GenerateRequest(cancel=types_pb2.Cancel()))

    def drop(self) -> None:
        """End it, whatever its state."""
        if self._rpc is not None:
            self._rpc.cancel()


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _write(call: _Rpc, message: router_pb2.GenerateRequest) -> None:
    # If the call has ended, its reader gets the status.
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await call.write(message)
