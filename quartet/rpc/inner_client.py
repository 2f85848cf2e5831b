"""Decodes and prefills on one worker: starts go up, outputs come down to their calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from weakref import WeakSet

import grpc

from quartet.errors import MessageTooLargeError, ServingError
from quartet.kvcache.layout import HandOff
from quartet.media.items import MediaFile
from quartet.rpc import convert
from quartet.rpc.chunked_starts import StartRest, take_chunks
from quartet.rpc.convert.place import to_sealed_decode_start
from quartet.rpc.convert.starts import put_decode_start, put_prefill_start
from quartet.rpc.errors import from_failure
from quartet.rpc.inner import MAX_INNER_MESSAGE_BYTES, DecodeFinished, DecodeSink, InnerStart
from quartet.rpc.inner_calls import DecodeCall, PrefillCall
from quartet.rpc.placement import SealedPlacement
from quartet.rpc.slot_client import SlotClient
from quartet.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, types_pb2

__all__ = ["DecodeCall", "DecodeClient", "PrefillCall", "PrefillClient"]

# A stream of a single start lasts as long as its request may, and a little longer: its end has to be told. So long at
# most where nothing is said of that.
_LAST_WORDS_S, _MAX_ALONE_S = 5.0, 3600.0


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
        """Speak over ``channel``; ``on_broken`` hears of every end of the stream.

        ``alone_for_s``: it is for one start, which ends within that time.
        """
        super().__init__(
            f"worker {worker_id}", decode_pb2.DecodeResponse, on_broken, ends_with_calls=alone_for_s is not None
        )
        self._stub = decode_pb2_grpc.DecodeServiceStub(channel)
        self._make_own = partial(DecodeClient, worker_id, channel, on_broken)
        self._timeout_s = alone_for_s
        # While one runs its task holds it; then nobody does.
        self._own: WeakSet[DecodeClient] = WeakSet()

    def start(self, start: InnerStart, sink: DecodeSink) -> DecodeCall:
        """Start a decode, whose outputs go to ``sink``; never waits or raises: what is wrong comes out of the call.

        One with media files has a stream of its own.
        """
        if start.media and not self._ends_with_calls and has_files(start):
            own = self._make_own(alone_for_s=_alone_for_s(start))
            self._own.add(own)
            return own.start(start, sink)
        return self._begin(
            lambda send_cancel: DecodeCall(send_cancel, sink), lambda slot: _decode_messages(slot, start)
        )

    def start_sealed(self, placement: SealedPlacement, sink: DecodeSink) -> DecodeCall:
        """Start a decode that a router sealed for this worker; else as ``start``."""
        return self._begin(
            lambda send_cancel: DecodeCall(send_cancel, sink), lambda slot: [_sealed_message(slot, placement)]
        )

    async def close(self) -> None:
        """As that of any; the streams of single decodes too."""
        await asyncio.gather(super().close(), *(own.close() for own in self._own))

    def _open(self) -> grpc.aio.StreamStreamCall[decode_pb2.DecodeRequest, decode_pb2.DecodeResponse]:
        return self._stub.Decode(timeout=self._timeout_s)

    def _receive(self, response: decode_pb2.DecodeResponse) -> None:
        now = time.monotonic()
        for started in response.started:
            self._call(started.slot).start(convert.from_slot_started(started), now)
        self._receive_tokens(response, now)
        for finished in response.finished:
            reason = convert.from_engine_finish_reason(finished.reason)
            outcome = DecodeFinished(reason=reason, num_output_tokens=finished.num_output_tokens)
            self._end(finished.slot).finish(outcome)
        for failed in response.failures:
            self._end(failed.slot).fail(from_failure(failed.failure))

    def _receive_tokens(self, response: decode_pb2.DecodeResponse, now: float) -> None:
        token_ids = list(response.token_ids)
        logprobs = {entry.slot: list(map(convert.from_token_logprobs, entry.tokens)) for entry in response.logprobs}
        calls = self._calls()
        begin = 0
        # Lists first: each look into a repeated field costs as much as the rest of the loop.
        columns = zip(list(response.slots), list(response.num_tokens), list(response.token_offsets), strict=True)
        for slot, num_tokens, offset in columns:
            end = begin + num_tokens
            calls[slot].take_tokens(offset, token_ids[begin:end], logprobs.get(slot, ()) if logprobs else (), now)
            begin = end
        if begin != len(token_ids):
            raise ValueError("num_tokens does not add up to the tokens")

    def _cancel_message(self, slot: int) -> decode_pb2.DecodeRequest:
        return decode_pb2.DecodeRequest(cancel=types_pb2.Cancel(slot=slot))


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
        """Speak over ``channel``; ``drop`` is given hand-offs that come after nobody waits for them any more.

        ``alone_for_s``: it is for one start, which ends within that time.
        """
        super().__init__(
            f"worker {worker_id}", prefill_pb2.PrefillResponse, on_broken, ends_with_calls=alone_for_s is not None
        )
        self._stub = prefill_pb2_grpc.PrefillServiceStub(channel)
        self._drop = drop
        self._make_own = partial(PrefillClient, worker_id, channel, on_broken, drop)
        self._timeout_s = alone_for_s
        # While one runs its task holds it; then nobody does.
        self._own: WeakSet[PrefillClient] = WeakSet()

    def start(self, start: InnerStart) -> PrefillCall:
        """Start a prefill; never waits or raises: what is wrong comes out of the call.

        One with media files has a stream of its own.
        """
        if start.media and not self._ends_with_calls and has_files(start):
            own = self._make_own(alone_for_s=_alone_for_s(start))
            self._own.add(own)
            return own.start(start)
        return self._begin(
            lambda send_cancel: PrefillCall(send_cancel, self._drop), lambda slot: _prefill_messages(slot, start)
        )

    async def close(self) -> None:
        """As that of any; the streams of single prefills too."""
        await asyncio.gather(super().close(), *(own.close() for own in self._own))

    def _open(self) -> grpc.aio.StreamStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse]:
        return self._stub.Prefill(timeout=self._timeout_s)

    def _receive(self, response: prefill_pb2.PrefillResponse) -> None:
        for output in response.outputs:
            if output.WhichOneof("outcome") == "result":
                outcome = convert.from_prefill_result(output.result)
                self._end(output.slot).succeed(outcome)
            else:
                self._end(output.slot).fail(from_failure(output.failure))

    def _cancel_message(self, slot: int) -> prefill_pb2.PrefillRequest:
        return prefill_pb2.PrefillRequest(cancel=types_pb2.Cancel(slot=slot))


def has_files(start: InnerStart) -> bool:
    """Whether ``start`` brings media files: these never ride a stream with others."""
    return any(isinstance(item.source, MediaFile) for item in start.media)


def _alone_for_s(start: InnerStart) -> float:
    timeout_s = start.context.timeout_s
    return _MAX_ALONE_S if timeout_s is None else timeout_s + _LAST_WORDS_S


def _decode_messages(slot: int, start: InnerStart) -> list[decode_pb2.DecodeRequest]:
    message = decode_pb2.DecodeRequest()
    put_decode_start(message.start, slot, start)
    return [message, *map(_decode_rest, take_chunks(message.start))]


def _prefill_messages(slot: int, start: InnerStart) -> list[prefill_pb2.PrefillRequest]:
    message = prefill_pb2.PrefillRequest()
    put_prefill_start(message.start, slot, start)
    return [message, *map(_prefill_rest, take_chunks(message.start))]


def _sealed_message(slot: int, placement: SealedPlacement) -> decode_pb2.DecodeRequest:
    message = decode_pb2.DecodeRequest(sealed_start=to_sealed_decode_start(slot, placement))
    if message.ByteSize() > MAX_INNER_MESSAGE_BYTES:
        raise MessageTooLargeError("a sealed start exceeds 1 MiB")
    return message


def _decode_rest(part: StartRest) -> decode_pb2.DecodeRequest:
    if isinstance(part, types_pb2.StartChunk):
        return decode_pb2.DecodeRequest(chunk=part)
    return decode_pb2.DecodeRequest(start_done=part)


def _prefill_rest(part: StartRest) -> prefill_pb2.PrefillRequest:
    if isinstance(part, types_pb2.StartChunk):
        return prefill_pb2.PrefillRequest(chunk=part)
    return prefill_pb2.PrefillRequest(start_done=part)
