"""The server's end of one streaming call: what worker, session and encode streams share."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from contextlib import ExitStack
from typing import Generic, Protocol, TypeAlias, TypeVar

import grpc
from google.protobuf.message import Message

from quartet.errors import MessageTooLargeError, ProtocolError, ServingError
from quartet.rpc.refusal_pace import RefusalPace, forget_frames, take_message_bytes
from quartet.rpc.server import StalledCalls
from quartet.streams.read_pace import Account, ReadPace, message_credit

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)

# The messages that begin a request. Others, for slots in which nothing runs, may come for ever.
_STARTS = frozenset({"start", "signed_start"})

_IDLE_POLLS = 4

#: Of any streaming RPC; a ``ServerStream`` checks what is read and written.
Context: TypeAlias = "grpc.aio.ServicerContext[object, object]"


class CountsEnds(Protocol):
    """What a stream still has to write, as far as the number of requests that it may start depends on it."""

    @property
    def num_ended(self) -> int:
        """Requests that have ended but whose end is in no message yet."""
        ...


class ServerStream(ABC, Generic[RequestT, ResponseT]):
    """Serves one streaming call: one task reads, one writes, until both sides are done, or no request ran for long."""

    def __init__(
        self,
        outbox: CountsEnds,
        stalled: StalledCalls,
        account: Account | None = None,
        *,
        max_owed_ends: int,
        idle_timeout_s: float | None = None,
    ) -> None:
        """``stalled`` ends the call of a caller that takes nothing for too long, or starts nothing at first.

        Nothing is read while the caller's ``account`` is empty (``None``: its messages are free), or while
        ``outbox`` has more than ``max_owed_ends`` ends of requests. After ``idle_timeout_s`` seconds in which no
        request ran, or up to half as much more, ``_is_idle`` holds; ``None``: never.
        """
        self._is_half_closed = False
        self._owed = outbox
        self._max_owed_ends = max_owed_ends
        self._stalled = stalled
        self._was_taken = asyncio.Event()
        self._refusals = RefusalPace()
        self._account = ReadPace.free_account() if account is None else account
        self._idle_timeout_s = idle_timeout_s
        self._idle_timer: asyncio.TimerHandle | None = None
        self._num_idle_polls = 0
        self._has_idled = False  # for so long, at the last poll
        self._num_starts = 0
        self._message_bytes = 0  # while a long message is handled, its size
        self._num_starts_polled: int | None = 0  # None: it was busy

    async def serve(self, context: Context) -> None:
        """Read and write until both sides are done. However it ends, what it started has ended and holds nothing.

        Raises:
            RequestTimeoutError: no start came for too long.
            StalledStreamError: the caller takes nothing.
            ServingError: as the subclass says; it may come in an ``ExceptionGroup``.
        """
        # Else the metadata goes out with the first message, and while that is being written gRPC can send no status.
        await context.send_initial_metadata(())
        if self._idle_timeout_s is not None:
            self._poll_idle()
        try:
            with self._stalled.watch(context) as call:
                async with asyncio.TaskGroup() as group:
                    reader = group.create_task(self._read(context, group))
                    while (message := await self._next()) is not None:
                        self._was_taken.set()
                        await call.write(message)
                    reader.cancel()
        finally:
            if self._idle_timer is not None:
                self._idle_timer.cancel()
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

    def _is_busy(self) -> bool:
        """Whether a request runs, or its end waits here."""
        return True

    def _wake(self) -> None:
        """Let ``_next`` look again: ``_is_idle`` holds now."""

    def _is_idle(self) -> bool:
        """Whether no request has run for ``idle_timeout_s``, and none does now."""
        return self._has_idled and not self._is_busy()

    def _poll_idle(self) -> None:
        """Count for how long no request has run. While this process gets no CPU nothing is counted."""
        # A request may begin and end between two polls.
        num_starts = None if self._is_busy() else self._num_starts
        is_idle = num_starts is not None and num_starts == self._num_starts_polled
        self._num_starts_polled = num_starts
        self._num_idle_polls = self._num_idle_polls + 1 if is_idle else 0
        self._has_idled = self._num_idle_polls > _IDLE_POLLS
        if self._has_idled:
            self._wake()
        assert self._idle_timeout_s is not None, "else there is no poll"
        delay_s = self._idle_timeout_s / _IDLE_POLLS
        self._idle_timer = asyncio.get_running_loop().call_later(delay_s, self._poll_idle)

    async def _read(self, context: Context, group: asyncio.TaskGroup) -> None:
        account = self._account
        with ExitStack() as until_start:
            until_start.enter_context(self._stalled.until_first())
            while True:
                # A refused start costs its caller next to nothing, but its end takes memory here until a message
                # takes it.
                while self._owed.num_ended > self._max_owed_ends:
                    self._was_taken.clear()
                    await self._was_taken.wait()
                if account.credit <= 0:
                    await account.wait()
                try:
                    request: object = await context.read()
                except (MessageTooLargeError, ProtocolError) as error:
                    account.credit -= message_credit()
                    take_message_bytes()
                    # Also where it ends the stream: the caller can open another one.
                    account.refused(error.size_bytes, error.measure_s)
                    forget_frames(error)
                    if isinstance(error, ProtocolError):
                        raise
                    self._count_start(until_start)
                    self._refused(error)
                    await self._refusals.wait(context.peer(), error, error.size_bytes, error.measure_s)
                    continue
                if not isinstance(request, Message):
                    break  # end of stream
                self._message_bytes = take_message_bytes()
                if request.WhichOneof("message") in _STARTS:
                    account.credit -= message_credit()  # its length counts if it comes to nothing
                    self._count_start(until_start)
                else:
                    account.credit -= message_credit(self._message_bytes)
                try:
                    self._handle(request, group)  # type: ignore[arg-type]  # the method's deserializer made it
                except ServingError:
                    account.in_vain(self._message_bytes)
                    raise
                self._message_bytes = 0
        self._is_half_closed = True
        self._half_closed()

    def _count_start(self, until_start: ExitStack) -> None:
        if not self._num_starts:
            until_start.close()
        self._num_starts += 1
