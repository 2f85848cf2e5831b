"""Encodes on one worker: each request's media on a stream of their own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TypeAlias

import grpc

from quartet.errors import ProtocolError, RequestCancelledError, ServingError, WorkerUnavailableError
from quartet.kvcache.layout import HandOff
from quartet.limited_log import LimitedLog
from quartet.media.items import MediaSize
from quartet.rpc.errors import from_rpc_error, is_connection_lost
from quartet.streams.chunks import StartRest, take_chunks
from quartet.streams.convert.messages import from_encode_sized, from_encoded_item, to_encode_start
from quartet.streams.messages import EncodedItem, EncodeStart
from quartet.streams.slots import PeerLostError
from quartet.v1 import encode_pb2, encode_pb2_grpc, types_pb2

logger = logging.getLogger(__name__)

_Rpc: TypeAlias = "grpc.aio.StreamStreamCall[encode_pb2.EncodeRequest, encode_pb2.EncodeResponse]"

# After a cancel the worker has so long to say what it had already handed off.
_LAST_WORDS_S = 2.0


class EncodeCall:
    """One request's media on one worker: first their sizes, then their hand-offs.

    The caller that takes the hand-offs owns them. If the call ends otherwise, they are dropped.
    """

    def __init__(self, num_items: int, on_encoded: Callable[[HandOff], None], drop: Callable[[HandOff], None]) -> None:
        """``on_encoded`` is called with each hand-off as it comes, ``drop`` with each that will not be taken."""
        self._on_encoded = on_encoded
        self._drop = drop
        self._sizes: tuple[MediaSize, ...] | None = None
        self._hand_offs: list[HandOff | None] = [None] * num_items
        self._error: ServingError | None = None
        self._is_taken = False
        self._has_sizes, self._has_ended = asyncio.Event(), asyncio.Event()
        #: The worker was reached.
        self.has_written = False
        #: Set once it was cancelled.
        self.is_cancelled = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Whether it has ended, well or badly."""
        return self._has_ended.is_set()

    async def sizes(self) -> Sequence[MediaSize]:
        """Wait for the size of each item, in order. Raises ``ServingError`` when it ended badly before."""
        await self._has_sizes.wait()
        if self._sizes is None:
            assert self._error is not None, "it ended without them"
            raise self._error
        return self._sizes

    async def hand_offs(self) -> Sequence[HandOff]:
        """Wait for the hand-off of each item, in order; from then on they are the caller's.

        Raises:
            ServingError: it ended badly; nothing of it is held then.
        """
        await self._has_ended.wait()
        if self._error is not None:
            raise self._error
        self._is_taken = True
        return [hand_off for hand_off in self._hand_offs if hand_off is not None]

    def cancel(self) -> None:
        """End it and drop its hand-offs, those that have come and those that still come. No-op once they were taken."""
        if not self._is_taken and self._error is None:
            self.is_cancelled.set()
            self._give_up(RequestCancelledError("cancelled by the caller"))

    def take(self, response: encode_pb2.EncodeResponse) -> None:
        """A message came. Raises ``ServingError`` where it is impossible."""
        match response.WhichOneof("message"):
            case "sized":
                self._take_sizes(from_encode_sized(response.sized))
            case "encoded":
                self._take_item(from_encoded_item(response.encoded))
            case _:
                raise ProtocolError("an encode worker sent a message that says nothing")

    def end(self) -> None:
        """The stream ended well. Raises ``ProtocolError`` where something is missing."""
        if not self.is_over:
            raise ProtocolError("an encode worker left out an item")

    def fail(self, error: ServingError) -> None:
        """It ended badly: drop what came. No-op once it is over: its hand-offs can be pulled without the stream."""
        if not self.is_over:
            self._give_up(error)

    def _give_up(self, error: ServingError) -> None:
        self._error = error
        held, self._hand_offs = self._hand_offs, [None] * len(self._hand_offs)
        for hand_off in held:
            if hand_off is not None:
                self._drop(hand_off)
        self._has_sizes.set()
        self._has_ended.set()

    def _take_sizes(self, sizes: tuple[MediaSize, ...]) -> None:
        if self._sizes is not None or len(sizes) != len(self._hand_offs):
            raise ProtocolError("an encode worker reported sizes twice, or not one an item")
        self._sizes = sizes
        self._has_sizes.set()

    def _take_item(self, encoded: EncodedItem) -> None:
        if self._error is not None:
            self._drop(encoded.hand_off)
            return
        is_known = self._sizes is not None and encoded.item < len(self._hand_offs)
        if not is_known or self._hand_offs[encoded.item] is not None:
            self._drop(encoded.hand_off)
            raise ProtocolError("an encode worker sent an item before its size, twice, or that was never asked for")
        self._hand_offs[encoded.item] = encoded.hand_off
        self._on_encoded(encoded.hand_off)
        if None not in self._hand_offs:
            self._has_ended.set()


class EncodeClient:
    """Encodes on one worker."""

    def __init__(self, worker_id: str, channel: grpc.aio.Channel, drop: Callable[[HandOff], None]) -> None:
        """Use ``channel``; ``drop`` is given hand-offs of calls that were cancelled or failed."""
        self._worker_id = worker_id
        self._nonsense_log = LimitedLog(logger)
        self._stub = encode_pb2_grpc.EncodeServiceStub(channel)
        self._drop = drop
        self._running: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def start(self, start: EncodeStart, on_encoded: Callable[[HandOff], None] = lambda _hand_off: None) -> EncodeCall:
        """Start to encode; never waits or raises: errors come out of the call.

        ``on_encoded`` is called with each hand-off as it comes, before the caller can take it: its time to
        live has begun.
        """
        call = EncodeCall(len(start.items), on_encoded, self._drop)
        if self._is_closed:
            call.fail(self._closed_error())
            return call
        task = asyncio.create_task(self._run(call, start), name=f"encode at {self._worker_id}")
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda _task: self._ended(call))
        return call

    async def close(self) -> None:
        """End all calls, which fail, for good."""
        self._is_closed = True
        await self.reset()

    async def reset(self) -> None:
        """End all calls, which fail."""
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, call: EncodeCall, start: EncodeStart) -> None:
        try:
            with ExitStack() as ends:
                messages = _messages(start)
                rpc = self._stub.Encode(timeout=start.context.timeout_s)
                ends.callback(rpc.cancel)
                ends.callback(asyncio.create_task(_write(rpc, call, messages)).cancel)
                ends.callback(asyncio.create_task(_end_soon(rpc, call)).cancel)
                await self._read(rpc, call)
        except grpc.aio.AioRpcError as rpc_error:
            call.fail(self._stream_error(rpc_error, call))
        except grpc.aio.UsageError:  # the channel was closed before it could be opened
            call.fail(self._closed_error())
        except ServingError as error:
            call.fail(error)

    async def _read(self, rpc: _Rpc, call: EncodeCall) -> None:
        try:
            while True:
                response: object = await rpc.read()
                if response is grpc.aio.EOF:
                    call.end()
                    return
                if not isinstance(response, encode_pb2.EncodeResponse):  # `None`: gRPC can't parse it
                    raise ProtocolError("a message is malformed")
                call.take(response)
        except ServingError as nonsense:
            self._nonsense_log.warning("worker %s broke the protocol: %s", self._worker_id, nonsense)
            raise WorkerUnavailableError(f"worker {self._worker_id} broke the protocol of its stream") from nonsense

    def _ended(self, call: EncodeCall) -> None:
        """The task may have been cancelled before it ever ran."""
        if not call.is_over:
            call.fail(self._closed_error())

    def _stream_error(self, rpc_error: grpc.aio.AioRpcError, call: EncodeCall) -> ServingError:
        error = from_rpc_error(rpc_error)
        if call.has_written and is_connection_lost(rpc_error):
            return PeerLostError(error.message)
        if type(error) is ServingError and rpc_error.code() is grpc.StatusCode.INTERNAL:
            # A refusal that overtakes the start's last chunks becomes this status; its reason is lost.
            return WorkerUnavailableError(f"the stream to worker {self._worker_id} broke: {error.message}")
        return error

    def _closed_error(self) -> ServingError:
        return WorkerUnavailableError(f"the connection to worker {self._worker_id} was closed")


def _messages(start: EncodeStart) -> list[encode_pb2.EncodeRequest]:
    message = encode_pb2.EncodeRequest(start=to_encode_start(start))
    return [message, *map(_rest, take_chunks(message.start))]


def _rest(part: StartRest) -> encode_pb2.EncodeRequest:
    if isinstance(part, types_pb2.StartChunk):
        return encode_pb2.EncodeRequest(chunk=part)
    return encode_pb2.EncodeRequest(start_done=part)


async def _write(rpc: _Rpc, call: EncodeCall, messages: Sequence[encode_pb2.EncodeRequest]) -> None:
    """All of the start; it stays open for a cancel."""
    try:
        for message in messages:
            await rpc.write(message)
            call.has_written = True
        await call.is_cancelled.wait()
        await rpc.write(encode_pb2.EncodeRequest(cancel=types_pb2.Cancel()))
        await rpc.done_writing()
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return  # the reader sees why
    except Exception:  # the task ends here, and so must the call
        logger.exception("a start could not be written")
        rpc.cancel()


async def _end_soon(rpc: _Rpc, call: EncodeCall) -> None:
    """Keep reading for a while after a cancel: what was handed off before it must be dropped."""
    await call.is_cancelled.wait()
    await asyncio.sleep(_LAST_WORDS_S)
    rpc.cancel()
