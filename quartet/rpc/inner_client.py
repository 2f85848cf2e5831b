"""Decodes and prefills on one worker: starts go up, outputs come down to their calls."""

from __future__ import annotations

import time
from collections.abc import Callable

import grpc

from quartet.errors import MessageTooLargeError, ServingError
from quartet.kvcache.layout import HandOff
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


class DecodeClient(SlotClient[decode_pb2.DecodeRequest, decode_pb2.DecodeResponse, DecodeCall]):
    """Decodes on one worker."""

    def __init__(self, worker_id: str, channel: grpc.aio.Channel, on_broken: Callable[[ServingError], None]) -> None:
        """Speak over ``channel``; ``on_broken`` hears of every end of the stream."""
        super().__init__(f"worker {worker_id}", decode_pb2.DecodeResponse, on_broken)
        self._stub = decode_pb2_grpc.DecodeServiceStub(channel)

    def start(self, start: InnerStart, sink: DecodeSink) -> DecodeCall:
        """Start a decode, whose outputs go to ``sink``; never waits or raises: what is wrong comes out of the call."""
        return self._begin(
            lambda send_cancel: DecodeCall(send_cancel, sink), lambda slot: _decode_messages(slot, start)
        )

    def start_sealed(self, placement: SealedPlacement, sink: DecodeSink) -> DecodeCall:
        """Start a decode that a router sealed for this worker; else as ``start``."""
        return self._begin(
            lambda send_cancel: DecodeCall(send_cancel, sink), lambda slot: [_sealed_message(slot, placement)]
        )

    def _open(self) -> grpc.aio.StreamStreamCall[decode_pb2.DecodeRequest, decode_pb2.DecodeResponse]:
        return self._stub.Decode()

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
    ) -> None:
        """Speak over ``channel``; ``drop`` is given hand-offs that come after nobody waits for them any more."""
        super().__init__(f"worker {worker_id}", prefill_pb2.PrefillResponse, on_broken)
        self._stub = prefill_pb2_grpc.PrefillServiceStub(channel)
        self._drop = drop

    def start(self, start: InnerStart) -> PrefillCall:
        """Start a prefill; never waits or raises: what is wrong comes out of the call."""
        return self._begin(
            lambda send_cancel: PrefillCall(send_cancel, self._drop), lambda slot: _prefill_messages(slot, start)
        )

    def _open(self) -> grpc.aio.StreamStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse]:
        return self._stub.Prefill()

    def _receive(self, response: prefill_pb2.PrefillResponse) -> None:
        for output in response.outputs:
            if output.WhichOneof("outcome") == "result":
                outcome = convert.from_prefill_result(output.result)
                self._end(output.slot).succeed(outcome)
            else:
                self._end(output.slot).fail(from_failure(output.failure))

    def _cancel_message(self, slot: int) -> prefill_pb2.PrefillRequest:
        return prefill_pb2.PrefillRequest(cancel=types_pb2.Cancel(slot=slot))


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
