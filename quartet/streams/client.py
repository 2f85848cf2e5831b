"""Decodes and prefills on one worker, as a router or a direct client runs them.

Starts go up on one stream, outputs come down to their calls. Beside them stand what both users of the stream need: a
wait that gives up on a silent worker, and what a failed attempt means for the next one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeAlias
from weakref import WeakSet

import grpc

from quartet import errors
from quartet.engine.sampling import PromptLogprobs, TokenLogprobs
from quartet.errors import MessageTooLargeError, RequestCancelledError, ServingError
from quartet.kvcache.layout import HandOff
from quartet.media.items import MediaFile
from quartet.rpc.channels import MAX_STREAM_MESSAGE_BYTES
from quartet.rpc.errors import from_failure
from quartet.streams.chunks import StartRest, take_chunks
from quartet.streams.convert.messages import (
    from_engine_finish_reason,
    from_prefill_result,
    from_prompt_logprobs,
    from_slot_started,
    from_token_logprobs,
    put_start,
    to_signed_decode_start,
)
from quartet.streams.messages import (
    DecodeFinished,
    DecodeSink,
    DecodeStarted,
    PrefillOutcome,
    SignedPlacement,
    WorkerStart,
    split_tokens,
)
from quartet.streams.slots import SlotCall, SlotClient
from quartet.streams.wakeable import Wakeable
from quartet.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, types_pb2

#: A request that ended with one of these is not tried again: it would end the same way, or its client has gone.
FINAL = (
    errors.InvalidRequestError,
    errors.ProtocolError,
    errors.MessageTooLargeError,
    errors.ModelNotFoundError,
    errors.PermissionDeniedError,
    errors.UnauthenticatedError,
    errors.UnimplementedError,
    errors.RequestTimeoutError,
    errors.WorkersLostError,
)

#: No room just now.
_CAPACITY = (errors.OutOfBlocksError, errors.QueueFullError)
_FIRST_PAUSE_S, _PAUSE_GROWTH, _MAX_PAUSE_S = 0.02, 4.0, 1.0

# A stream of a single start may last as long as its request and a little longer, so that its end can arrive. A request
# without a time limit gets the second.
_LAST_WORDS_S, _MAX_ALONE_S = 5.0, 3600.0

_Take: TypeAlias = Callable[[int, Sequence[int], Sequence[TokenLogprobs], float], bool]


class WorkerCall(Wakeable):
    """A request on a worker stream as the router sees it, from its start to its terminal output.

    ``is_over``: nothing that still comes for it matters.
    """

    # There are thousands, and a token finds each of them cold: without a dictionary they lie closer together.
    __slots__ = ("_error", "_is_cancelled", "_send_cancel", "is_over")

    def __init__(self, send_cancel: Callable[[SlotCall], None]) -> None:
        """``send_cancel`` asks the worker to end it; it is given this."""
        super().__init__()
        self._send_cancel = send_cancel
        self._error: Exception | None = None
        self._is_cancelled = False
        self.is_over = False

    def cancel(self) -> None:
        """Ask the worker to end it; harmless when it has ended. The caller need not wait for the end."""
        if not self.is_over and not self._is_cancelled:
            self._is_cancelled = True
            self._send_cancel(self)

    def fail(self, error: ServingError) -> None:
        """End it badly, unless it is over."""
        if not self.is_over:
            self._end(error)

    def _end(self, error: Exception | None) -> None:
        self._error = error
        self.is_over = True
        self._wake()


class DecodeCall(WorkerCall):
    """One decode: what it gives goes to its sink, and ``outcome`` waits for its end.

    Attributes:
        received_at: when the worker last sent something of it, monotonic seconds; ``None``: it has sent nothing yet.
        take: brings tokens to the sink, as its ``take``; drops them once the decode is over or cancelled.
        first_sent_at_unix_ns: when the worker had the first token; 0: it does not say, or has none.
    """

    __slots__ = ("_outcome", "_sink", "first_sent_at_unix_ns", "received_at", "take")

    def __init__(self, send_cancel: Callable[[SlotCall], None], sink: DecodeSink) -> None:
        """Nothing has come yet."""
        super().__init__(send_cancel)
        self.received_at: float | None = None
        self.first_sent_at_unix_ns = 0
        self._sink = sink
        self.take: _Take = sink.take
        self._outcome: DecodeFinished | None = None

    async def outcome(self) -> DecodeFinished | None:
        """Wait for the end; ``None``: the sink wanted no more. For one reader; cancelled here, it loses nothing.

        Raises:
            ServingError: it ended badly, after all tokens that came before have gone to the sink.
        """
        while not self.is_over:
            await self._woken()
        if self._error is not None:
            raise self._error
        return self._outcome

    def cancel(self) -> None:
        """As ``WorkerCall.cancel``. The sink gets nothing more: it may have another attempt's output by then."""
        super().cancel()
        self.take = _drop_tokens

    def start(self, started: DecodeStarted, now: float) -> None:
        """It joined the running batch."""
        if not (self.is_over or self._is_cancelled):
            self.received_at = now
            self._sink.started(started)

    def take_prompt_logprobs(self, logprobs: PromptLogprobs, now: float) -> None:
        """Its prompt was computed, and this was asked for."""
        if not (self.is_over or self._is_cancelled):
            self.received_at = now
            try:
                self._sink.take_prompt_logprobs(logprobs)
            except ServingError as error:
                self.stop(error)

    def stop(self, error: Exception | None = None) -> None:
        """End this decode alone, unless it is over: the sink wants no more, or ``error`` says why."""
        if not self.is_over:
            self.cancel()
            self._end(error)

    def finish(self, finished: DecodeFinished) -> None:
        """End it well, unless it is over."""
        if not self.is_over:
            self._outcome = finished
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        self.take = _drop_tokens
        super()._end(error)


class DecodeClient(SlotClient[decode_pb2.DecodeRequest, decode_pb2.DecodeResponse, DecodeCall]):
    """Decodes on one worker."""

    def __init__(
        self,
        worker_id: str,
        channel: grpc.aio.Channel,
        on_broken: Callable[[ServingError], None],
        *,
        alone_for_s: float | None = None,
    ) -> None:
        """Use ``channel``; ``on_broken`` is called at every end of the stream.

        ``alone_for_s``: it is for one start, which ends within that time.
        """
        super().__init__(
            f"worker {worker_id}", decode_pb2.DecodeResponse, on_broken, ends_with_calls=alone_for_s is not None
        )
        self._stub = decode_pb2_grpc.DecodeServiceStub(channel)
        self._make_own = partial(DecodeClient, worker_id, channel, on_broken)
        self._timeout_s = alone_for_s
        self._has_traced = False  # whether a message may say when first tokens came
        # The task of a stream holds it while it runs.
        self._own: WeakSet[DecodeClient] = WeakSet()

    def start(self, start: WorkerStart, sink: DecodeSink) -> DecodeCall:
        """Start a decode with its outputs going to ``sink``; never waits or raises: errors come out of the call.

        One with media files has a stream of its own.
        """
        if start.media and not self._ends_with_calls and has_files(start):
            own = self._make_own(alone_for_s=_alone_for_s(start))
            self._own.add(own)
            return own.start(start, sink)
        if start.context.sent_at_unix_ns:
            self._has_traced = True
        return self._begin(partial(DecodeCall, sink=sink), partial(_decode_messages, start))

    def start_signed(self, placement: SignedPlacement, sink: DecodeSink) -> DecodeCall:
        """Start a decode that a router signed for this worker; else as ``start``."""
        return self._begin(partial(DecodeCall, sink=sink), lambda slot: [_signed_message(slot, placement)])

    async def close(self) -> None:
        """Break the stream for good, and the streams of single decodes too."""
        await asyncio.gather(super().close(), *(own.close() for own in self._own))

    async def reset(self) -> None:
        """Break the stream, and the streams of single decodes too. The next start opens another one."""
        await asyncio.gather(super().reset(), *(own.reset() for own in self._own))

    def _open(self) -> grpc.aio.StreamStreamCall[decode_pb2.DecodeRequest, decode_pb2.DecodeResponse]:
        return self._stub.Decode(timeout=self._timeout_s)

    def _receive(self, response: decode_pb2.DecodeResponse) -> None:
        now, calls = time.monotonic(), self._calls()
        for started in response.started:
            calls[started.slot].start(from_slot_started(started), now)
        for report in response.prompt_logprobs:
            calls[report.slot].take_prompt_logprobs(from_prompt_logprobs(report.prompt_logprobs), now)
        take_tokens(calls, response, now)
        if self._has_traced:
            for first in response.first_tokens:
                calls[first.slot].first_sent_at_unix_ns = first.sent_at_unix_ns
        for finished in response.finished:
            reason = from_engine_finish_reason(finished.reason)
            outcome = DecodeFinished(reason=reason, num_output_tokens=finished.num_output_tokens)
            self._end(finished.slot).finish(outcome)
        for failed in response.failures:
            self._end(failed.slot).fail(from_failure(failed.failure))

    def _cancel_message(self, slot: int) -> decode_pb2.DecodeRequest:
        return decode_pb2.DecodeRequest(cancel=types_pb2.Cancel(slot=slot))


def take_tokens(calls: Mapping[int, DecodeCall], response: decode_pb2.DecodeResponse, now: float) -> None:
    """Bring the tokens of ``response`` to the sinks of ``calls``, by slot; ``now`` is monotonic seconds.

    Raises:
        LookupError, ValueError: the message is impossible.
    """
    logprobs: Mapping[int, Sequence[TokenLogprobs]] = {}
    if response.logprobs:
        logprobs = {entry.slot: list(map(from_token_logprobs, entry.tokens)) for entry in response.logprobs}
    parts = split_tokens(response.token_ids[:], response.num_tokens[:])
    # Slices: to read a repeated field element by element costs as much as the rest of the loop.
    for slot, offset, token_ids in zip(response.slots[:], response.token_offsets[:], parts, strict=True):
        call = calls[slot]
        call.received_at = now
        take = call.take
        try:
            if not take(offset, token_ids, logprobs.get(slot, ()) if logprobs else (), now):
                call.stop()
        except ServingError as error:
            call.stop(error)


class PrefillCall(WorkerCall):
    """One prefill: ``outcome`` gives its one output. A hand-off that is not taken goes to ``drop``."""

    __slots__ = ("_drop", "_is_taken", "_outcome")

    def __init__(self, send_cancel: Callable[[SlotCall], None], drop: Callable[[HandOff], None]) -> None:
        """``drop`` is given a hand-off that comes after the call was cancelled."""
        super().__init__(send_cancel)
        self._drop = drop
        self._outcome: PrefillOutcome | None = None
        self._is_taken = False

    async def outcome(self) -> PrefillOutcome:
        """Wait for the output. A caller that is cancelled here leaves nothing behind.

        Raises:
            ServingError: it ended badly; ``RequestCancelledError`` at once after ``cancel``.
        """
        try:
            while not self.is_over:
                await self._woken()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self._error is not None:
            raise self._error
        assert self._outcome is not None, "woken with one or the other"
        self._is_taken = True
        return self._outcome

    def cancel(self) -> None:
        """End it and drop its hand-off, whether it has come or still comes. No-op once the output was taken."""
        if self._is_taken:
            return
        super().cancel()
        outcome, self._outcome = self._outcome, None
        if outcome is not None and outcome.hand_off is not None:
            self._drop(outcome.hand_off)
        if self._error is None:
            self._error = RequestCancelledError("cancelled by the caller")
        self.is_over = True
        self._wake()

    def succeed(self, outcome: PrefillOutcome) -> None:
        """End it well, or drop what comes too late."""
        if self.is_over:
            if outcome.hand_off is not None:
                self._drop(outcome.hand_off)
            return
        self._outcome = outcome
        self.is_over = True
        self._wake()


class PrefillClient(SlotClient[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse, PrefillCall]):
    """Prefills on one worker."""

    def __init__(
        self,
        worker_id: str,
        channel: grpc.aio.Channel,
        on_broken: Callable[[ServingError], None],
        drop: Callable[[HandOff], None],
        *,
        alone_for_s: float | None = None,
    ) -> None:
        """Use ``channel``; ``drop`` is given hand-offs of calls that were cancelled.

        ``alone_for_s``: it is for one start, which ends within that time.
        """
        super().__init__(
            f"worker {worker_id}", prefill_pb2.PrefillResponse, on_broken, ends_with_calls=alone_for_s is not None
        )
        self._stub = prefill_pb2_grpc.PrefillServiceStub(channel)
        self._drop = drop
        self._make_own = partial(PrefillClient, worker_id, channel, on_broken, drop)
        self._timeout_s = alone_for_s
        # The task of a stream holds it while it runs.
        self._own: WeakSet[PrefillClient] = WeakSet()

    def start(self, start: WorkerStart) -> PrefillCall:
        """Start a prefill; never waits or raises: errors come out of the call.

        One with media files has a stream of its own.
        """
        if start.media and not self._ends_with_calls and has_files(start):
            own = self._make_own(alone_for_s=_alone_for_s(start))
            self._own.add(own)
            return own.start(start)
        return self._begin(partial(PrefillCall, drop=self._drop), partial(_prefill_messages, start))

    async def close(self) -> None:
        """Break the stream for good, and the streams of single prefills too."""
        await asyncio.gather(super().close(), *(own.close() for own in self._own))

    async def reset(self) -> None:
        """Break the stream, and the streams of single prefills too. The next start opens another one."""
        await asyncio.gather(super().reset(), *(own.reset() for own in self._own))

    def _open(self) -> grpc.aio.StreamStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse]:
        return self._stub.Prefill(timeout=self._timeout_s)

    def _receive(self, response: prefill_pb2.PrefillResponse) -> None:
        for output in response.outputs:
            if output.WhichOneof("outcome") == "result":
                outcome = from_prefill_result(output.result)
                self._end(output.slot).succeed(outcome)
            else:
                self._end(output.slot).fail(from_failure(output.failure))

    def _cancel_message(self, slot: int) -> prefill_pb2.PrefillRequest:
        return prefill_pb2.PrefillRequest(cancel=types_pb2.Cancel(slot=slot))


def has_files(start: WorkerStart) -> bool:
    """Whether ``start`` brings media files: such a start never shares a stream."""
    return any(isinstance(item.source, MediaFile) for item in start.media)


class RunningDecode(Protocol):
    """A decode under way."""

    @property
    def received_at(self) -> float | None:
        """When the worker last sent something of it, monotonic seconds; ``None``: it has sent nothing yet."""
        ...

    async def outcome(self) -> DecodeFinished | None:
        """Wait for its end; ``None``: the sink wanted no more tokens. Cancelled here, it loses nothing.

        Raises:
            ServingError: it failed.
        """
        ...

    def stop(self, error: Exception) -> None:
        """Ask the worker to end it; ``outcome`` raises ``error``. Harmless after its end."""
        ...


async def outcome_in_time(
    decode: RunningDecode, *, start_timeout_s: float, stall_timeout_s: float
) -> DecodeFinished | None:
    """What ``decode.outcome`` gives.

    Raises:
        TimeoutError: the worker sent nothing of it within ``start_timeout_s``, or nothing more for ``stall_timeout_s``.
        ServingError: it ended badly.
    """
    patience = _Patience(decode, start_timeout_s, stall_timeout_s)
    try:
        return await decode.outcome()
    finally:
        patience.end()


class _Patience:
    """Stops a decode whose worker is silent for too long.

    It polls, which costs nothing for each token; moving a timer would. ``asyncio.timeout`` takes more steps.
    """

    __slots__ = ("_decode", "_loop", "_stall_timeout_s", "_start_by", "_timer")

    def __init__(self, decode: RunningDecode, start_timeout_s: float, stall_timeout_s: float) -> None:
        self._decode = decode
        self._stall_timeout_s = stall_timeout_s
        self._loop = asyncio.get_running_loop()
        now = self._loop.time()
        self._start_by = now + start_timeout_s
        self._poll_later(self._start_by, now)

    def end(self) -> None:
        self._timer.cancel()

    def _poll_later(self, give_up_at: float, now: float) -> None:
        # Nothing is told of the first output, so wait no longer than the stall timeout: by then an output may have
        # come, and be that old.
        self._timer = self._loop.call_at(min(give_up_at, now + self._stall_timeout_s), self._poll)

    def _poll(self) -> None:
        now, heard_at = self._loop.time(), self._decode.received_at
        give_up_at = self._start_by if heard_at is None else heard_at + self._stall_timeout_s
        if give_up_at <= now:
            self._decode.stop(TimeoutError())
        else:
            self._poll_later(give_up_at, now)


def pause_s(error: ServingError, num_failures: int) -> float:
    """Seconds to pause after ``num_failures`` failed attempts; a worker ended the last one with ``error``."""
    is_capacity = isinstance(error, _CAPACITY)
    if error.retry_delay_s is not None and is_capacity:
        return min(error.retry_delay_s, _MAX_PAUSE_S)
    # The first try elsewhere needs no pause, unless all workers may be short of the same thing.
    num_pauses = num_failures - (0 if is_capacity else 1)
    return min(_FIRST_PAUSE_S * _PAUSE_GROWTH ** (num_pauses - 1), _MAX_PAUSE_S) if num_pauses else 0.0


def _drop_tokens(_offset: int, _token_ids: Sequence[int], _logprobs: Sequence[TokenLogprobs], _now: float) -> bool:
    """Drop them: the decode is over or cancelled."""
    return True


def _alone_for_s(start: WorkerStart) -> float:
    timeout_s = start.context.timeout_s
    return _MAX_ALONE_S if timeout_s is None else timeout_s + _LAST_WORDS_S


def _decode_messages(start: WorkerStart, slot: int) -> list[decode_pb2.DecodeRequest]:
    message = decode_pb2.DecodeRequest()
    put_start(message.start, slot, start)
    return [message, *map(_decode_rest, take_chunks(message.start))]


def _prefill_messages(start: WorkerStart, slot: int) -> list[prefill_pb2.PrefillRequest]:
    message = prefill_pb2.PrefillRequest()
    put_start(message.start, slot, start)
    return [message, *map(_prefill_rest, take_chunks(message.start))]


def _signed_message(slot: int, placement: SignedPlacement) -> decode_pb2.DecodeRequest:
    message = decode_pb2.DecodeRequest(signed_start=to_signed_decode_start(slot, placement))
    if message.ByteSize() > MAX_STREAM_MESSAGE_BYTES:
        raise MessageTooLargeError("a signed start exceeds 1 MiB")
    return message


def _decode_rest(part: StartRest) -> decode_pb2.DecodeRequest:
    if isinstance(part, types_pb2.StartChunk):
        return decode_pb2.DecodeRequest(chunk=part)
    return decode_pb2.DecodeRequest(start_done=part)


def _prefill_rest(part: StartRest) -> prefill_pb2.PrefillRequest:
    if isinstance(part, types_pb2.StartChunk):
        return prefill_pb2.PrefillRequest(chunk=part)
    return prefill_pb2.PrefillRequest(start_done=part)
