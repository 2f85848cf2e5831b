"""The server's end of one streaming call: what worker, session and encode streams share."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Generic, Protocol, TypeAlias, TypeVar

import grpc
from google.protobuf.message import Message

from quartet.errors import MessageTooLargeError
from quartet.rpc.server import StalledCalls

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)

#: Of any streaming RPC; a ``ServerStream`` checks what is read and written.
Context: TypeAlias = "grpc.aio.ServicerContext[object, object]"


class CountsEnds(Protocol):
    """What a stream still has to write, as far as the number of requests that it may start depends on it."""

    @property
    def num_ended(self) -> int:
        """Requests that have ended but whose end is in no message yet."""
        ...


class ServerStream(ABC, Generic[RequestT, ResponseT]):
    """Serves one streaming call: one task reads, one writes, until both sides are done."""

    def __init__(self, outbox: CountsEnds, stalled: StalledCalls, *, max_owed_ends: int) -> None:
        """``stalled`` ends the call of a caller that takes nothing for too long, or says nothing at first.

        Nothing is read while ``outbox`` has more than ``max_owed_ends`` ends of requests.
        """
        self._is_half_closed = False
        self._owed = outbox
        self._max_owed_ends = max_owed_ends
        self._stalled = stalled
        self._was_taken = asyncio.Event()

    async def serve(self, context: Context) -> None:
        """Read and write until both sides are done. However it ends, what it started has ended and holds nothing.

        Raises:
            RequestTimeoutError: no message came for too long.
            StalledStreamError: the caller takes nothing.
            ServingError: as the subclass says; it may come in an ``ExceptionGroup``.
        """
        # Else the metadata goes out with the first message, and while that is being written gRPC can send no status.
        await context.send_initial_metadata(())
        try:
            with self._stalled.watch(context) as call:
                async with asyncio.TaskGroup() as group:
                    reader = group.create_task(self._read(context, group))
                    while (message := await self._next()) is not None:
                        self._was_taken.set()
                        await call.write(message)
                    reader.cancel()
        finally:
            await self._end()

    @abstractmethod
    def _handle(self, request: RequestT, group: asyncio.TaskGroup) -> None:
        """A message came. An error of a task in ``group``, or raised here, ends the call."""

    @abstractmethod
    def _half_closed(self) -> None:
        """The caller will send no more, as ``_is_half_closed`` says from now on."""

    @abstractmethod
    async def _next(self) -> ResponseT | None:
        """Wait for the next message to write; ``None``: all is written and done. The one before has been written."""

    @abstractmethod
    async def _end(self) -> None:
        """The call is over: end what it started."""

    def _refused(self, error: MessageTooLargeError) -> None:
        """A message was refused before it was parsed. An error raised here ends the call."""
        raise error

    async def _read(self, context: Context, group: asyncio.TaskGroup) -> None:
        is_first = True
        while True:
            # A refused start costs its caller next to nothing, but its end takes memory here until a message takes it.
            while self._owed.num_ended > self._max_owed_ends:
                self._was_taken.clear()
                await self._was_taken.wait()
            try:
                request: object = await (self._stalled.read_first(context) if is_first else context.read())
            except MessageTooLargeError as error:
                self._refused(error)
                continue
            finally:
                is_first = False
            if not isinstance(request, Message):
                break  # end of stream
            self._handle(request, group)  # type: ignore[arg-type]  # the method's deserializer made it
        self._is_half_closed = True
        self._half_closed()
