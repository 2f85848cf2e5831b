"""The client's end of a stream of many requests: one RPC, any number of requests on it by slot."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Generic, Protocol, TypeAlias, TypeVar

import grpc

from quartet.errors import DrainingError, ProtocolError, ServingError, StreamIdleError, WorkerUnavailableError
from quartet.limited_log import LimitedLog
from quartet.rpc.errors import from_rpc_error, is_connection_lost
from quartet.v1 import decode_pb2, prefill_pb2, router_pb2

logger = logging.getLogger(__name__)

# A stream without a call for one to two of these ends. That is far below what peers wait for (`idle_timeout_s`).
_IDLE_POLL_S = 60.0

RequestT = TypeVar("RequestT", decode_pb2.DecodeRequest, prefill_pb2.PrefillRequest, router_pb2.SessionRequest)
ResponseT = TypeVar("ResponseT", decode_pb2.DecodeResponse, prefill_pb2.PrefillResponse, router_pb2.SessionResponse)


class PeerLostError(WorkerUnavailableError):
    """The connection to a worker broke, which had requests by then: its process may have ended, for one of them."""


class SlotCall(Protocol):
    """One request on the stream."""

    def fail(self, error: ServingError) -> None:
        """End it badly, unless it is over."""
        ...


CallT = TypeVar("CallT", bound=SlotCall)

_Rpc: TypeAlias = "grpc.aio.StreamStreamCall[RequestT, ResponseT]"


@dataclass
class _Stream(Generic[RequestT, CallT]):
    """One life of the stream: what is on it, and what still has to be written."""

    calls: dict[int, CallT] = field(default_factory=dict)
    free_slots: list[int] = field(default_factory=list)
    new_slots: Iterator[int] = field(default_factory=count)
    pending: deque[RequestT] = field(default_factory=deque)
    has_pending: asyncio.Event = field(default_factory=asyncio.Event)
    idle_timer: asyncio.TimerHandle | None = None
    was_idle: bool = False  # at the last poll, and no call has begun since
    has_written: bool = False  # the peer was reached

    def send(self, messages: Iterable[RequestT]) -> None:
        self.pending.extend(messages)
        self.has_pending.set()


class SlotClient(Generic[RequestT, ResponseT, CallT]):
    """A multiplexed stream that opens at the first start, and again at the next one after a break.

    Without a call for a minute or two it ends the stream by itself, long before its peer would. Only this side knows
    whether a start is on its way, so no start ever meets that end.
    """

    def __init__(
        self,
        peer: str,
        response_type: type[ResponseT],
        on_broken: Callable[[ServingError], None],
        *,
        lost_error: type[ServingError] = WorkerUnavailableError,
        ends_with_calls: bool = False,
    ) -> None:
        """``on_broken`` is called when the stream breaks, and at ``close``, after its calls have failed.

        ``peer`` names the other side in messages; ``lost_error`` is what calls fail with when the stream breaks; those
        to a worker that was reached fail with ``PeerLostError`` if its connection broke. With ``ends_with_calls`` the
        stream is ended as soon as no call is left on it. The end of a stream without calls, so or because it was idle,
        does not call ``on_broken``.
        """
        self._peer = peer
        self._nonsense_log = LimitedLog(logger)
        self._lost_error = lost_error
        self._ends_with_calls = ends_with_calls
        self._response_type: type[ResponseT] = response_type
        self._on_broken = on_broken
        self._stream: _Stream[RequestT, CallT] | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def is_open(self) -> bool:
        """Whether there is a stream now: if it breaks, that will call ``on_broken``."""
        return self._stream is not None

    @property
    def num_calls(self) -> int:
        """Calls that have not ended."""
        return 0 if self._stream is None else len(self._stream.calls)

    async def close(self) -> None:
        """Break the stream for good: the peer ends its requests, and calls fail."""
        self._is_closed = True
        await self.reset()

    async def reset(self) -> None:
        """Break the stream: the peer ends its requests, and calls fail. The next start opens another one."""
        task, stream = self._task, self._stream
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        if stream is not None and stream is self._stream:  # the task never ran
            self._break(stream, self._closed_error(stream))

    @abstractmethod
    def _open(self) -> _Rpc[RequestT, ResponseT]:
        """Open the RPC."""

    @abstractmethod
    def _receive(self, response: ResponseT) -> None:
        """Bring one message to its calls. Raises ``LookupError``, ``ValueError`` or ``ServingError``."""

    @abstractmethod
    def _cancel_message(self, slot: int) -> RequestT:
        """The message that ends a slot early."""

    def _begin(
        self, make_call: Callable[[Callable[[SlotCall], None]], CallT], make_messages: Callable[[int], list[RequestT]]
    ) -> CallT:
        """Start a request: ``make_call`` is given a way to cancel it, ``make_messages`` its slot, or fails for it.

        The way takes the call as an argument: if it referred to it, only the garbage collector would free both.
        """
        if self._is_closed:
            call = make_call(_nothing)
            call.fail(self._closed_error())
            return call
        if self._stream is None:
            self._stream = _Stream()
            self._task = asyncio.create_task(self._run(self._stream), name=f"stream to {self._peer}")
            self._poll_idle_later(self._stream)
        stream = self._stream
        stream.was_idle = False
        slot = stream.free_slots.pop() if stream.free_slots else next(stream.new_slots)
        call = make_call(partial(self._cancel_slot, stream, slot))
        try:
            messages = make_messages(slot)
        except ServingError as error:
            stream.free_slots.append(slot)
            call.fail(error)
            if self._ends_with_calls and self._task is not None and not stream.calls:
                self._task.cancel()
            return call
        stream.calls[slot] = call
        stream.send(messages)
        return call

    def _calls(self) -> Mapping[int, CallT]:
        """The calls by slot."""
        assert self._stream is not None, "called while a message is received"
        return self._stream.calls

    def _call(self, slot: int) -> CallT:
        return self._calls()[slot]

    def _end(self, slot: int) -> CallT:
        """The call whose terminal output came; its slot is free again."""
        assert self._stream is not None, "called while a message is received"
        call = self._stream.calls.pop(slot)
        self._stream.free_slots.append(slot)
        return call

    def _cancel_slot(self, stream: _Stream[RequestT, CallT], slot: int, call: SlotCall) -> None:
        if stream is self._stream and stream.calls.get(slot) is call:
            stream.send([self._cancel_message(slot)])

    async def _run(self, stream: _Stream[RequestT, CallT]) -> None:
        error: ServingError | None = None
        try:
            with ExitStack() as ends:
                rpc = self._open()
                ends.callback(rpc.cancel)
                ends.callback(asyncio.create_task(_write(rpc, stream)).cancel)
                await self._read(rpc, stream)
            error = self._lost_error(f"{self._peer} ended its stream")
        except grpc.aio.AioRpcError as rpc_error:
            error = self._stream_error(rpc_error)
            if self._may_be_lost(stream) and is_connection_lost(rpc_error):
                error = PeerLostError(error.message)
        except (LookupError, ValueError, ServingError) as nonsense:
            self._nonsense_log.warning("%s broke the protocol: %s", self._peer, nonsense)
            error = self._lost_error(f"{self._peer} broke the protocol of its stream")
        except grpc.aio.UsageError:  # the channel was closed before it could be opened
            logger.debug("the channel to %s is closed", self._peer)
        finally:
            self._break(stream, error or self._closed_error(stream))

    async def _read(self, rpc: _Rpc[RequestT, ResponseT], stream: _Stream[RequestT, CallT]) -> None:
        while True:
            response: object = await rpc.read()
            if isinstance(response, self._response_type):
                self._receive(response)
                if self._ends_with_calls and not stream.calls:
                    return
            elif response is grpc.aio.EOF:
                return
            else:  # gRPC returns `None` for a message that it can't parse
                raise ProtocolError("a message is malformed")

    def _break(self, stream: _Stream[RequestT, CallT], error: ServingError) -> None:
        if stream is not self._stream:
            return  # it was given up as idle, without calls
        self._stream = self._task = None
        if stream.idle_timer is not None:
            stream.idle_timer.cancel()
        for call in stream.calls.values():
            call.fail(error)
        if stream.calls or not (self._ends_with_calls or isinstance(error, StreamIdleError)):
            self._on_broken(error)

    def _poll_idle_later(self, stream: _Stream[RequestT, CallT]) -> None:
        stream.idle_timer = asyncio.get_running_loop().call_later(_IDLE_POLL_S, self._poll_idle, stream)

    def _poll_idle(self, stream: _Stream[RequestT, CallT]) -> None:
        """Give the stream up if it has had no call since the last poll."""
        if not stream.was_idle or stream.calls:
            stream.was_idle = not stream.calls
            self._poll_idle_later(stream)
            return
        task, self._stream, self._task = self._task, None, None
        if task is not None:
            task.cancel()

    def _closed_error(self, stream: _Stream[RequestT, CallT] | None = None) -> ServingError:
        kind = PeerLostError if self._may_be_lost(stream) else self._lost_error
        return kind(f"the stream to {self._peer} was closed")

    def _may_be_lost(self, stream: _Stream[RequestT, CallT] | None) -> bool:
        """Whether calls on the stream may be why a worker is gone."""
        return stream is not None and stream.has_written and self._lost_error is WorkerUnavailableError

    def _stream_error(self, rpc_error: grpc.aio.AioRpcError) -> ServingError:
        """The error of a broken stream's calls. It says nothing about any one request: all may be tried elsewhere."""
        error = from_rpc_error(rpc_error)
        if isinstance(error, (self._lost_error, DrainingError)):
            return error
        return self._lost_error(f"the stream to {self._peer} broke: {error.message}")


async def _write(rpc: _Rpc[RequestT, ResponseT], stream: _Stream[RequestT, CallT]) -> None:
    try:
        while True:
            await stream.has_pending.wait()
            while stream.pending:
                await rpc.write(stream.pending.popleft())
                stream.has_written = True
            stream.has_pending.clear()
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return  # the reader sees why
    except Exception:  # the task ends here, and so must the stream: its requests would wait for ever
        logger.exception("a message could not be written")
        rpc.cancel()


def _nothing(_call: SlotCall) -> None:
    """There is no stream that a cancel could go to."""
