"""The events of one request, from whichever router takes it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import TypeAlias

import grpc

from quartet.client.events import Event, Finished
from quartet.client.request import GenerateOptions, to_generate_start
from quartet.client.responses import from_generate_response
from quartet.client.routers import Router, Routers, go_on_or_raise, raise_all
from quartet.errors import ProtocolError, RouterUnavailableError, ServingError
from quartet.v1 import router_pb2, types_pb2

# The router ends a request at its timeout and says so; only a router that no longer does is cut off.
_DEADLINE_GRACE_S = 2.0

_Call: TypeAlias = "grpc.aio.StreamStreamCall[router_pb2.GenerateRequest, router_pb2.GenerateResponse]"


class GenerateStream:
    """Iterate it once: ``Accepted``, then ``Delta``s, and a ``Finished`` for each choice.

    Dropping it, or ``aclose``, cancels the request; ``cancel`` ends it in order. The request is sent when the first
    event is asked for. Until the first event has come, another router takes over from one that can't be reached.

    Raises, while it is iterated:
        ServingError: of the type that the router failed with; ``RouterUnavailableError`` where none answers.
    """

    def __init__(self, routers: Routers, options: GenerateOptions) -> None:
        """Raises ``InvalidRequestError``: a field that no router could take."""
        self._request = _Request(routers, options)
        # Nobody else may hold it: its end, which also comes when it is dropped, cancels the call.
        self._events = self._request.events()

    def __aiter__(self) -> GenerateStream:
        return self

    async def __anext__(self) -> Event:
        return await anext(self._events)

    async def cancel(self) -> None:
        """Ask for an early end; each choice that runs still gets its ``Finished``. Keep on iterating for it."""
        await self._request.cancel()

    async def aclose(self) -> None:
        """Drop the request, wherever it is. May be called twice."""
        await self._events.aclose()

    async def __aenter__(self) -> GenerateStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class _Request:
    def __init__(self, routers: Routers, options: GenerateOptions) -> None:
        self._routers = routers
        self._start = router_pb2.GenerateRequest(start=to_generate_start(options))
        self._num_choices = options.num_choices
        self._deadline_s = None if options.timeout_s is None else options.timeout_s + _DEADLINE_GRACE_S
        self._call: _Call | None = None
        self._is_cancelled = False

    async def cancel(self) -> None:
        self._is_cancelled = True
        if self._call is not None:
            await _write(self._call, router_pb2.GenerateRequest(cancel=types_pb2.Cancel()))

    async def events(self) -> AsyncGenerator[Event, None]:
        failures: list[ServingError] = []
        for router in self._routers.in_order():
            is_begun = False
            try:
                await router.connect()
                # Closed here and now, also when this generator is: its end cancels the call.
                async with contextlib.aclosing(self._events_from(router)) as events:
                    async for event in events:
                        is_begun = True
                        yield event
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

    async def _events_from(self, router: Router) -> AsyncGenerator[Event, None]:
        call = self._call = router.stub.Generate(timeout=self._deadline_s)
        num_finished = 0
        try:
            await _write(call, self._start)
            if self._is_cancelled:
                await self.cancel()
            async for message in call:
                self._routers.prefer(router)
                event = from_generate_response(message, router.address)
                num_finished += isinstance(event, Finished)
                yield event
        finally:
            call.cancel()
        if num_finished != self._num_choices:
            raise ProtocolError(f"the router ended the answer after {num_finished} of {self._num_choices} choices")


async def _write(call: _Call, message: router_pb2.GenerateRequest) -> None:
    # Where the call has ended, whoever reads it learns how.
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await call.write(message)
