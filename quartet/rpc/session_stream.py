"""A router's side of a session: many requests by slot, one writer, exactly one end a start."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import grpc

from quartet.engine.sampling import TokenLogprobs
from quartet.errors import DrainingError, ProtocolError, QueueFullError, RequestCancelledError, ServingError
from quartet.rpc.answer import AnswerSink
from quartet.rpc.convert.session import from_session_start
from quartet.rpc.edge import Accepted, ChoiceFinished, ChoicePlacement
from quartet.rpc.session import SessionLimits, SessionRun, SessionStart
from quartet.rpc.session_outbox import SessionOutbox
from quartet.rpc.stalled_calls import WatchedCall
from quartet.v1 import router_pb2 as pb

# To come back to another router, or to the next one at this address.
_DRAINING_RETRY_DELAY_S = 1.0
# The event loop's timers count milliseconds: for less than half of one none is set.
_TIMER_RESOLUTION_S = 0.0005

_Context: TypeAlias = "grpc.aio.ServicerContext[pb.SessionRequest, pb.SessionResponse]"
#: Begins a request whose answer goes to the sink; raises ``ServingError`` where it can't.
Begin: TypeAlias = Callable[[SessionStart, AnswerSink], SessionRun]


class SessionStream:
    """Serves one call of Session until both sides are done."""

    def __init__(self, begin: Begin, limits: SessionLimits) -> None:
        """Run requests with ``begin``."""
        self._begin = begin
        self._limits = limits
        self._outbox = SessionOutbox(limits, self._overflowed)
        self._requests = _Requests()
        self._is_half_closed = False
        self._is_draining = False

    async def serve(self, context: _Context, watched: WatchedCall) -> None:
        """Read and write until the client has half-closed and every request has ended; writes go by ``watched``.

        Whatever way it ends, its requests have ended then and hold nothing.

        Raises:
            ProtocolError: messages that make no sense; in an ``ExceptionGroup``.
            DrainingError: ``drain`` was called and the last request has ended; in an ``ExceptionGroup``.
        """
        # Else it goes out with the first message, and while that is being written gRPC can send no status.
        await context.send_initial_metadata(())
        try:
            async with asyncio.TaskGroup() as group:
                reader = group.create_task(self._read(context))
                await self._write(context, watched)
                reader.cancel()
        finally:
            await self._end_requests()

    def drain(self) -> None:
        """Take nothing new; end when the last request has ended, also where the client doesn't half-close."""
        self._is_draining = True
        self._outbox.wake()

    async def _end_requests(self) -> None:
        """End what runs, and wait until nothing holds anything."""
        # Whoever is cancelled once may be again before the next turn: every request is told before anything is awaited.
        for request in tuple(self._requests.by_slot.values()):
            request.silence()
            if not request.is_cancelled:
                self._requests.runs[request].abort(RequestCancelledError("its session is over"))
        self._requests.none_runs.clear()
        if self._requests.runs:
            await self._requests.none_runs.wait()

    async def _read(self, context: _Context) -> None:
        while True:
            request: object = await context.read()
            if not isinstance(request, pb.SessionRequest):
                break  # end of stream
            match request.WhichOneof("message"):
                case "start":
                    self._start(request.start)
                case "cancel":
                    self._cancel(request.cancel.slot)
                case _:
                    raise ProtocolError("a message must hold a start or cancel", field="message")
            await self._outbox.room()
        self._is_half_closed = True
        self._outbox.wake()

    def _start(self, message: pb.SessionStart) -> None:
        slot = message.slot
        # A slot is free only once its end was sent: whoever reuses it earlier can't tell the two requests apart.
        if slot in self._requests.by_slot or self._outbox.owes(slot):
            raise ProtocolError(f"slot {slot} is still in use", field="start.slot")
        try:
            self._check_open()
            asked = from_session_start(message)
            request = _Request(asked, self._outbox, self._requests)
            run = self._begin(asked, request)
        except ServingError as error:
            self._outbox.fail(slot, error)
        else:
            self._requests.by_slot[slot] = request
            self._requests.runs[request] = run

    def _check_open(self) -> None:
        if self._is_draining:
            raise DrainingError("the router is going away", retry_delay_s=_DRAINING_RETRY_DELAY_S)
        if len(self._requests.by_slot) + self._outbox.num_ended >= self._limits.max_requests:
            raise QueueFullError("the session has as many requests as it may have")

    def _cancel(self, slot: int) -> None:
        request = self._requests.by_slot.get(slot)
        if request is not None and not request.is_cancelled:
            request.is_cancelled = True
            self._requests.runs[request].cancel()

    def _overflowed(self, slot: int, error: ServingError) -> None:
        request = self._requests.by_slot.pop(slot, None)
        if request is not None:  # else it ended before
            request.silence()
            self._requests.runs[request].abort(error)

    async def _write(self, context: _Context, watched: WatchedCall) -> None:
        loop, outbox = asyncio.get_running_loop(), self._outbox
        next_at = 0.0
        while not self._is_over():
            await outbox.wait()
            now = loop.time()
            if now < next_at - _TIMER_RESOLUTION_S:
                await outbox.pause(next_at - now)
            if (message := outbox.take()) is not None:
                next_at = loop.time() + self._limits.tick_s
                watched.began()
                await context.write(message)
                watched.ended()
        if not self._is_half_closed:
            raise DrainingError("the router is going away", retry_delay_s=_DRAINING_RETRY_DELAY_S)

    def _is_over(self) -> bool:
        return (self._is_half_closed or self._is_draining) and not self._requests.by_slot and self._outbox.is_empty


@dataclass
class _Requests:
    """Those of one session: ``by_slot`` such as have no end yet, ``runs`` such as still may hold something.

    ``none_runs`` is set when the last of these ends.
    """

    by_slot: dict[int, _Request] = field(default_factory=dict)
    runs: dict[_Request, SessionRun] = field(default_factory=dict)
    none_runs: asyncio.Event = field(default_factory=asyncio.Event)


class _Request:
    """Brings one request's answer to the outbox, until it has its end there."""

    # There are thousands, and a token finds each of them cold: without a dictionary they lie closer together.
    __slots__ = ("_entries", "_is_over", "_num_open", "_outbox", "_requests", "_slot", "is_cancelled")

    def __init__(self, asked: SessionStart, outbox: SessionOutbox, requests: _Requests) -> None:
        """It leaves ``requests`` with its end."""
        self.is_cancelled = False
        self._slot = asked.slot
        self._num_open = asked.start.num_choices if asked.resume is None else 1
        self._outbox = outbox
        self._entries = outbox.entries
        self._requests = requests
        self._is_over = False

    def accept(self, accepted: Accepted) -> None:
        """The first of its choices is placed."""
        if not self._is_over:
            self._outbox.accept(self._slot, accepted)

    def place(self, placement: ChoicePlacement) -> None:
        """One more of them is."""
        if not self._is_over:
            self._outbox.place(self._slot, placement)

    def add(
        self, choice: int, token_offset: int, token_ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        """More of one choice."""
        if self._is_over:
            return
        entries = self._entries
        entries.append((self._slot, choice, token_offset, token_ids, text, logprobs))
        if len(entries) >= self._outbox.look_at:
            self._outbox.look()

    def finish(self, finished: ChoiceFinished) -> None:
        """One choice has ended: with the last one the request has, for the client."""
        if self._is_over:
            return
        self._num_open -= 1
        is_last = self._num_open == 0
        if is_last:
            self._leave()
        self._outbox.finish(self._slot, finished, is_last=is_last)

    def end(self, error: BaseException | None = None) -> None:
        """Nothing runs any more."""
        del self._requests.runs[self]
        if not self._requests.runs:
            self._requests.none_runs.set()
        if not self._is_over:
            assert error is not None, "it ends with its last choice, or badly"
            self._leave()
            self._outbox.fail(self._slot, error)

    def silence(self) -> None:
        """The client has its end, or is gone: whatever still comes goes nowhere."""
        self._is_over = True

    def _leave(self) -> None:
        self._is_over = True
        del self._requests.by_slot[self._slot]
