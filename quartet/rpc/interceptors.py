"""What every call passes: audience, drain and count of calls; malformed messages and errors become statuses.

Costs are per call, not per message; a method's handler is wrapped once. Made by hand because OpenTelemetry's ready-made
interceptor breaks streaming handlers that use ``context.write``.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from quartet.errors import DrainingError, ProtocolError
from quartet.rpc.audience import Gate
from quartet.rpc.errors import abort

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
# gRPC's own types: a request (or an iterator of them) and a response are whatever the method's (de)serializers say.
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Behavior: TypeAlias = Callable[[Any, _Context], Any]
_Deserializer: TypeAlias = Callable[[bytes], Any]


class CallCounter:
    """Calls that run now, and whether new ones are taken.

    Health, reflection and channelz are left out: they answer until the end, and may stay open for ever.
    """

    def __init__(self) -> None:
        self.num_active = 0
        self.is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self, context: _Context) -> None:
        """Count a call until its status has been sent. Raises ``DrainingError`` once ``is_draining`` is set."""
        if self.is_draining:
            raise DrainingError("the server is going away")
        self.num_active += 1
        self._idle.clear()
        context.add_done_callback(self._leave)  # type: ignore[arg-type]  # the stubs forgot that it is a Protocol

    async def wait_idle(self) -> None:
        """Return when no call runs."""
        await self._idle.wait()

    def _leave(self, ctx: _Context) -> None:
        self.num_active -= 1
        if self.num_active == 0:
            self._idle.set()


class ServingInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler, whether it yields its responses, writes them, or works on raw bytes.

    A ``ServingError`` becomes its status; a message that can't be parsed INVALID_ARGUMENT; anything unexpected
    INTERNAL, which leaks nothing. Cancellation passes through, and a generator is always closed.
    """

    def __init__(self, gate: Gate | None, calls: CallCounter) -> None:
        """``gate`` is ``None`` where everybody may call everything: without TLS."""
        self._gate = gate
        self._calls = calls
        self._wrapped: dict[str, _Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """The method's handler, wrapped; ``None`` (gRPC answers UNIMPLEMENTED) where there is none."""
        method = str(handler_call_details.method)
        wrapped = self._wrapped.get(method)
        if wrapped is None:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            wrapped = self._wrapped[method] = self._wrap(method, handler)
        return wrapped

    def _wrap(self, method: str, handler: _Handler) -> _Handler:
        behavior, make_handler = _parts(handler)
        parse = _parser(handler.request_deserializer)
        respond = _writer(behavior) if inspect.isasyncgenfunction(behavior) else behavior
        is_counted = not method.startswith("/grpc.")

        async def serve(request: Any, context: _Context) -> Any:
            try:
                if is_counted:
                    self._calls.enter(context)
                if self._gate is not None:
                    self._gate.check(method, context.auth_context())
                return await respond(request if handler.request_streaming else parse(request), context)
            except grpc.aio.AbortError:
                raise
            except Exception as error:  # noqa: BLE001 - the call ends here; `abort` logs what is not a ServingError
                return await abort(context, error)

        # A lone request is parsed in `serve`, where a failure gets a status; those of a stream where they are read.
        return make_handler(serve, parse if handler.request_streaming else None, handler.response_serializer)


def _parts(handler: _Handler) -> tuple[_Behavior, Callable[..., _Handler]]:
    if handler.request_streaming and handler.response_streaming:
        return handler.stream_stream, grpc.stream_stream_rpc_method_handler  # type: ignore[return-value]
    if handler.request_streaming:
        return handler.stream_unary, grpc.stream_unary_rpc_method_handler  # type: ignore[return-value]
    if handler.response_streaming:
        return handler.unary_stream, grpc.unary_stream_rpc_method_handler  # type: ignore[return-value]
    return handler.unary_unary, grpc.unary_unary_rpc_method_handler  # type: ignore[return-value]


def _parser(deserialize: _Deserializer | None) -> _Deserializer:
    def parse(message: bytes) -> Any:
        try:
            return message if deserialize is None else deserialize(message)
        except DecodeError as error:
            raise ProtocolError("the message is malformed") from error

    return parse


def _writer(generate: _Behavior) -> _Behavior:
    async def write_all(request: Any, context: _Context) -> None:
        # Closed also when the call is cancelled in `write`: its `finally` blocks free what the request held.
        async with aclosing(generate(request, context)) as responses:
            async for response in responses:
                await context.write(response)

    return write_all
