"""The router's side of the inner streams: one stream to a worker, any number of requests on it by slot."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import grpc

from quartet.errors import ServingError, TransferError, WorkerUnavailableError
from quartet.kvcache.layout import HandOff
from quartet.rpc import convert
from quartet.rpc.errors import from_failure, from_rpc_error
from quartet.rpc.inner import (
    MAX_INNER_MESSAGE_BYTES,
    DecodeFinished,
    DecodeProgress,
    InnerStart,
    PrefillOutcome,
)
from quartet.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, types_pb2

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT", decode_pb2.DecodeRequest, prefill_pb2.PrefillRequest)
ResponseT = TypeVar("ResponseT", decode_pb2.DecodeResponse, prefill_pb2.PrefillResponse)
CallT = TypeVar("CallT", bound="_Call")

# Room for the rest of a start beside the token ids that ride in it.
_MAX_INLINE_BYTES = MAX_INNER_MESSAGE_BYTES - (64 << 10)


class _Call:
    """One request on a stream, from its start to its terminal output."""

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel
        self._wake = asyncio.Event()
        self._error: ServingError | None = None
        self.is_over = False

    def cancel(self) -> None:
        """Ask the worker to end it; harmless when it has ended. Nobody needs to wait for the end."""
        if not self.is_over:
            self._cancel()

    def fail(self, error: ServingError) -> None:
        """End it badly."""
        self._error = error
        self.is_over = True
        self._wake.set()


class DecodeCall(_Call):
    """One decode: ``next`` gives what has gathered."""

    def __init__(self, cancel: Callable[[], None]) -> None:
        """Begin with nothing gathered."""
        super().__init__(cancel)
        self.progress = DecodeProgress()

    async def next(self) -> DecodeProgress:
        """Wait for more; the last one has ``finished`` set.

        Raises:
            ServingError: it ended badly; tokens that came before are given out first.
        """
        await self._wake.wait()
        self._wake.clear()
        progress, self.progress = self.progress, DecodeProgress()
        is_empty = not (progress.token_ids or progress.started or progress.finished)
        if self._error is not None:
            self._wake.set()
            if is_empty:
                raise self._error
        return progress

    def wake(self) -> None:
        """Something was put into ``progress``."""
        self._wake.set()


class PrefillCall(_Call):
    """One prefill: ``outcome`` gives its one output."""

    def __init__(self, cancel: Callable[[], None], drop: Callable[[HandOff], None]) -> None:
        """``drop`` is given the hand-off when it comes after nobody waits any more."""
        super().__init__(cancel)
        self._drop = drop
        self._outcome: PrefillOutcome | None = None
        self._is_wanted = True

    async def outcome(self) -> PrefillOutcome:
        """Wait for the output. A caller that is cancelled here leaves nothing behind.

        Raises:
            ServingError: it ended badly.
        """
        try:
            await self._wake.wait()
        except asyncio.CancelledError:
            self._is_wanted = False
            if self._outcome is None:
                self.cancel()
            elif self._outcome.hand_off is not None:
                self._drop(self._outcome.hand_off)
            raise
        if self._error is not None:
            raise self._error
        assert self._outcome is not None
        return self._outcome

    def succeed(self, outcome: PrefillOutcome) -> None:
        """End it well."""
        self.is_over = True
        if not self._is_wanted:
            if outcome.hand_off is not None:
                self._drop(outcome.hand_off)
            return
        self._outcome = outcome
        self._wake.set()


class _InnerClient(Generic[RequestT, ResponseT, CallT]):
    """A multiplexed stream that opens at the first start and again after a break."""

    def __init__(self, worker_id: str, on_broken: Callable[[ServingError], None]) -> None:
        self._worker_id = worker_id
        self._on_broken = on_broken
        self._calls: dict[int, CallT] = {}
        self._free_slots: list[int] = []
        self._num_slots = 0
        self._pending: deque[RequestT] = deque()
        self._has_pending = asyncio.Event()
        self._stream: asyncio.Task[None] | None = None

    @abstractmethod
    def _open(self) -> grpc.aio.StreamStreamCall[RequestT, ResponseT]:
        """Open the RPC."""

    @abstractmethod
    def _receive(self, response: ResponseT) -> None:
        """Route one message to its calls; IndexError or KeyError where it makes no sense."""

    @abstractmethod
    def _messages(self, slot: int, start: InnerStart) -> Iterator[RequestT]:
        """The start as one message, or in chunks."""

    @abstractmethod
    def _cancel_message(self, slot: int) -> RequestT:
        """The message that ends a slot early."""

    async def close(self) -> None:
        """Break the stream: the worker ends all its requests; calls fail with ``WorkerUnavailableError``."""
        if self._stream is not None:
            self._stream.cancel()
            await asyncio.wait([self._stream])

    def _begin(self, make_call: Callable[[int], CallT], start: InnerStart) -> CallT:
        if self._free_slots:
            slot = self._free_slots.pop()
        else:
            slot = self._num_slots
            self._num_slots += 1
        call = self._calls[slot] = make_call(slot)
        self._pending.extend(self._messages(slot, start))
        self._has_pending.set()
        if self._stream is None:
            self._stream = asyncio.create_task(self._run())
        return call

    def _end(self, slot: int) -> CallT:
        call = self._calls.pop(slot)
        self._free_slots.append(slot)
        return call

    def _send_cancel(self, slot: int, call: _Call | None) -> None:
        if call is not None and self._calls.get(slot) is call:
            self._pending.append(self._cancel_message(slot))
            self._has_pending.set()

    async def _run(self) -> None:
        error: ServingError = WorkerUnavailableError(f"the stream to worker {self._worker_id} was closed")
        rpc = self._open()
        writer = asyncio.create_task(self._write(rpc))
        try:
            while (response := await rpc.read()) is not grpc.aio.EOF:
                self._receive(response)
            error = await self._why_ended(rpc)
        except grpc.aio.AioRpcError as rpc_error:
            error = _stream_error(self._worker_id, from_rpc_error(rpc_error))
        except (IndexError, KeyError) as broken:
            logger.warning("worker %s broke the protocol: %s", self._worker_id, broken)
            error = WorkerUnavailableError(f"worker {self._worker_id} broke the protocol of its stream")
        finally:
            rpc.cancel()
            writer.cancel()
            self._break(error)

    async def _why_ended(self, rpc: grpc.aio.StreamStreamCall[RequestT, ResponseT]) -> ServingError:
        if await rpc.code() == grpc.StatusCode.OK:
            return WorkerUnavailableError(f"worker {self._worker_id} ended its stream")
        return WorkerUnavailableError(f"the stream to worker {self._worker_id} broke: {await rpc.details()}")

    async def _write(self, rpc: grpc.aio.StreamStreamCall[RequestT, ResponseT]) -> None:
        try:
            while True:
                await self._has_pending.wait()
                while self._pending:
                    await rpc.write(self._pending.popleft())
                self._has_pending.clear()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reader sees why

    def _break(self, error: ServingError) -> None:
        calls, self._calls = self._calls, {}
        self._free_slots, self._num_slots = [], 0
        self._pending.clear()
        self._has_pending.clear()
        self._stream = None
        for call in calls.values():
            call.fail(error)
        self._on_broken(error)


class DecodeClient(_InnerClient[decode_pb2.DecodeRequest, decode_pb2.DecodeResponse, DecodeCall]):
    """Decodes on one worker."""

    def __init__(self, worker_id: str, channel: grpc.aio.Channel, on_broken: Callable[[ServingError], None]) -> None:
        """Speak over ``channel``; ``on_broken`` hears of every end of the stream."""
        super().__init__(worker_id, on_broken)
        self._stub = decode_pb2_grpc.DecodeServiceStub(channel)

    def start(self, start: InnerStart) -> DecodeCall:
        """Start a decode; never waits."""

        def make(slot: int) -> DecodeCall:
            call = DecodeCall(lambda: self._send_cancel(slot, call))
            return call

        return self._begin(make, start)

    def _open(self) -> grpc.aio.StreamStreamCall[decode_pb2.DecodeRequest, decode_pb2.DecodeResponse]:
        return self._stub.Decode()  # type: ignore[return-value, call-arg]

    def _receive(self, response: decode_pb2.DecodeResponse) -> None:
        for started in response.started:
            call = self._calls[started.slot]
            call.progress.started = convert.from_slot_started(started)
            call.wake()
        self._receive_tokens(response)
        for finished in response.finished:
            call = self._end(finished.slot)
            call.is_over = True
            reason = convert.from_finish_reason(finished.reason)
            call.progress.finished = DecodeFinished(reason=reason, num_output_tokens=finished.num_output_tokens)
            call.wake()
        for failed in response.failures:
            self._end(failed.slot).fail(from_failure(failed.failure))

    def _receive_tokens(self, response: decode_pb2.DecodeResponse) -> None:
        token_ids = list(response.token_ids)
        logprobs = {entry.slot: entry for entry in response.logprobs}
        begin = 0
        columns = zip(response.slots, response.num_tokens, response.token_offsets, strict=True)
        for slot, num_tokens, offset in columns:
            call = self._calls[slot]
            end = begin + num_tokens
            call.progress.merge_tokens(offset, token_ids[begin:end])
            if slot in logprobs:
                call.progress.logprobs.extend(map(convert.from_token_logprobs, logprobs[slot].tokens))
            call.wake()
            begin = end

    def _messages(self, slot: int, start: InnerStart) -> Iterator[decode_pb2.DecodeRequest]:
        message = convert.to_decode_start(slot, start)
        for part in _chunked(message):
            yield decode_pb2.DecodeRequest(**part)  # type: ignore[arg-type]

    def _cancel_message(self, slot: int) -> decode_pb2.DecodeRequest:
        return decode_pb2.DecodeRequest(cancel=types_pb2.Cancel(slot=slot))


class PrefillClient(_InnerClient[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse, PrefillCall]):
    """Prefills on one worker."""

    def __init__(
        self,
        worker_id: str,
        channel: grpc.aio.Channel,
        on_broken: Callable[[ServingError], None],
        drop: Callable[[HandOff], None],
    ) -> None:
        """Speak over ``channel``; ``drop`` is given hand-offs that come after nobody waits for them any more."""
        super().__init__(worker_id, on_broken)
        self._stub = prefill_pb2_grpc.PrefillServiceStub(channel)
        self._drop = drop

    def start(self, start: InnerStart) -> PrefillCall:
        """Start a prefill; never waits."""

        def make(slot: int) -> PrefillCall:
            call = PrefillCall(lambda: self._send_cancel(slot, call), self._drop)
            return call

        return self._begin(make, start)

    def _open(self) -> grpc.aio.StreamStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse]:
        return self._stub.Prefill()  # type: ignore[return-value, call-arg]

    def _receive(self, response: prefill_pb2.PrefillResponse) -> None:
        for output in response.outputs:
            call = self._end(output.slot)
            if output.WhichOneof("outcome") == "result":
                call.succeed(convert.from_prefill_result(output.result))
            else:
                call.fail(from_failure(output.failure))

    def _messages(self, slot: int, start: InnerStart) -> Iterator[prefill_pb2.PrefillRequest]:
        message = convert.to_prefill_start(slot, start)
        for part in _chunked(message):
            yield prefill_pb2.PrefillRequest(**part)  # type: ignore[arg-type]

    def _cancel_message(self, slot: int) -> prefill_pb2.PrefillRequest:
        return prefill_pb2.PrefillRequest(cancel=types_pb2.Cancel(slot=slot))


_StartMessage = decode_pb2.DecodeStart | prefill_pb2.PrefillStart
_Part = dict[str, _StartMessage | types_pb2.StartChunk | types_pb2.StartDone]


def _chunked(start: _StartMessage) -> Iterator[_Part]:
    """``start`` whole where it fits into a message, else without its token ids, which follow in chunks."""
    if start.ByteSize() <= _MAX_INLINE_BYTES:
        yield {"start": start}
        return
    generation = start.generation
    prompt, generated = generation.prompt_token_ids, generation.generated_token_ids
    generation.ClearField("prompt_token_ids")
    generation.ClearField("generated_token_ids")
    start.chunked = True
    yield {"start": start}
    for target, data in (
        (types_pb2.CHUNK_TARGET_PROMPT_TOKEN_IDS, prompt),
        (types_pb2.CHUNK_TARGET_GENERATED_TOKEN_IDS, generated),
    ):
        for begin in range(0, len(data), _MAX_INLINE_BYTES):
            part = data[begin : begin + _MAX_INLINE_BYTES]
            yield {"chunk": types_pb2.StartChunk(slot=start.slot, target=target, data=part)}
    yield {"start_done": types_pb2.StartDone(slot=start.slot)}


def _stream_error(worker_id: str, error: ServingError) -> ServingError:
    """A broken stream says nothing about any one request: all of them may try elsewhere."""
    if isinstance(error, WorkerUnavailableError | TransferError):
        return error
    return WorkerUnavailableError(f"the stream to worker {worker_id} broke: {error.message}")
