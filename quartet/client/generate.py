"""A request as a call of its own to a router."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import TypeAlias

import grpc

from quartet.api.convert.answer import from_generate_response
from quartet.api.convert.request import to_generate_start
from quartet.api.request import AnswerPart, ChoiceFinished, GenerateStart
from quartet.client.request import check_size, trace_metadata
from quartet.client.routers import (
    DEADLINE_GRACE_S,
    MADE_UP_DETAILS,
    MAX_OPENINGS,
    ClientClosedError,
    Router,
    Routers,
    go_on_or_raise,
    raise_all,
)
from quartet.errors import ProtocolError, RouterUnavailableError, ServingError
from quartet.v1 import router_pb2, types_pb2

_Call: TypeAlias = "grpc.aio.StreamStreamCall[router_pb2.GenerateRequest, router_pb2.GenerateResponse]"


class GenerateRequest:
    """One request by ``Generate``; see ``ClientRequest``.

    Attributes:
        router: ``host:port`` of the router that took it.
    """

    def __init__(self, routers: Routers, start: GenerateStart, traceparent: str = "") -> None:
        """Raises ``InvalidRequestError``: a field that its message can't hold."""
        self.router: str | None = None
        self._routers = routers
        self._start = router_pb2.GenerateRequest(start=to_generate_start(start))
        check_size(start, self._start)
        self._metadata = trace_metadata(traceparent)
        self._num_choices = start.num_choices
        self._deadline_s = None if start.timeout_s is None else start.timeout_s + DEADLINE_GRACE_S
        self._call: _Call | None = None
        self._is_cancelled = self._is_started = self._has_sent_cancel = False

    async def cancel(self) -> None:
        """Ask for an early end."""
        self._is_cancelled = True
        await self._send_cancel()

    async def parts(self) -> AsyncGenerator[AnswerPart, None]:
        """Send the request and yield its answer. Raises ``ServingError``."""
        failures: list[ServingError] = []
        for router in self._routers.in_order():
            is_begun = False
            try:
                await router.connect()
                # Close it at once, also when this generator is closed: its end cancels the call.
                async with contextlib.aclosing(self._parts_from(router)) as parts:
                    async for part in parts:
                        is_begun = True
                        yield part
            except RouterUnavailableError as error:
                failures.append(error)
            except grpc.aio.AioRpcError as error:
                failure = router.error(error, is_begun=is_begun)
                if is_begun:
                    raise failure from error
                failures.append(go_on_or_raise(failure))
            else:
                return
        raise_all(failures)

    async def _parts_from(self, router: Router) -> AsyncGenerator[AnswerPart, None]:
        num_finished = 0
        try:
            call = await self._open(router)
            self._is_started = True
            if self._is_cancelled:
                await self._send_cancel()
            async for message in call:
                self._routers.prefer(router)
                self.router = router.address
                part = from_generate_response(message)
                num_finished += isinstance(part, ChoiceFinished)
                yield part
        except grpc.aio.AioRpcError as error:
            # If a cancel loses the race with the end, gRPC replaces the router's status with its own.
            if error.details() != MADE_UP_DETAILS or num_finished < self._num_choices:
                raise
        except asyncio.CancelledError:
            # Closing a call's channel cancels the call, as if the reader had been cancelled.
            if router.is_closed and not _is_cancelled():
                raise ClientClosedError from None
            raise
        finally:
            if self._call is not None:
                self._call.cancel()
        if num_finished != self._num_choices:
            raise ProtocolError(f"the router ended the answer after {num_finished} of {self._num_choices} choices")

    async def _send_cancel(self) -> None:
        # Never two writes at once: one would overtake the other, or gRPC would call the call ended, while the router
        # goes on with it. A cancel that comes before the start is sent by the task that sends the start, after it.
        if self._call is not None and self._is_started and not self._has_sent_cancel:
            self._has_sent_cancel = True
            await _write(self._call, router_pb2.GenerateRequest(cancel=types_pb2.Cancel()))

    async def _open(self, router: Router) -> _Call:
        """Open the call and send the start.

        A router that refuses at once ends the call while the start is being sent. If the write loses that race, gRPC
        replaces the router's status with its own. Nothing was sent then, and asking again gives the router's status.
        """
        self._is_started = self._has_sent_cancel = False
        for _ in range(MAX_OPENINGS):
            call = self._call = router.stub.Generate(timeout=self._deadline_s, metadata=self._metadata)
            await _write(call, self._start)
            if not (call.done() and await call.details() == MADE_UP_DETAILS):
                break
        return call


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _write(call: _Call, message: router_pb2.GenerateRequest) -> None:
    # If the call has ended, its reader gets the status.
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await call.write(message)
