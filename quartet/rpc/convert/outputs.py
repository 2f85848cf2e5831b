"""Outputs of the inner plane beside the tokens themselves."""

from __future__ import annotations

from collections.abc import Sequence

from quartet.engine.base import Generation, Prefilled, Started
from quartet.engine.sampling import TokenLogprobs
from quartet.kvcache.block_hash import pack_token_ids
from quartet.kvcache.layout import HandOff
from quartet.rpc.convert.generation import (
    from_engine_finish_reason,
    from_media_span,
    from_token_logprobs,
    to_finish_reason,
    to_media_span,
    to_token_logprobs,
    unpack_token_ids,
)
from quartet.rpc.convert.hand_off import from_hand_off, to_hand_off
from quartet.rpc.durations import to_duration, to_seconds
from quartet.rpc.inner import DecodeStarted, PrefillOutcome
from quartet.v1 import decode_pb2, prefill_pb2, types_pb2


def to_slot_started(slot: int, started: Started, num_prompt_tokens: int = 0) -> decode_pb2.SlotStarted:
    """The message; ``num_prompt_tokens`` where the prompt is not as it came."""
    return decode_pb2.SlotStarted(
        slot=slot,
        num_cached_tokens=started.num_cached_tokens,
        queue=to_duration(started.queue_s),
        transfer=to_duration(started.transfer_s) if started.transfer_s else None,
        transfer_bytes=started.transfer_bytes,
        num_prompt_tokens=num_prompt_tokens,
    )


def from_slot_started(message: decode_pb2.SlotStarted) -> DecodeStarted:
    """What the worker told when the request joined its batch."""
    return DecodeStarted(
        num_cached_tokens=message.num_cached_tokens,
        queue_s=to_seconds(message.queue),
        transfer_s=to_seconds(message.transfer),
        transfer_bytes=message.transfer_bytes,
        num_prompt_tokens=message.num_prompt_tokens,
    )


def to_slot_logprobs(slot: int, logprobs: Sequence[TokenLogprobs]) -> decode_pb2.SlotLogprobs:
    """The message."""
    return decode_pb2.SlotLogprobs(slot=slot, tokens=[to_token_logprobs(entry) for entry in logprobs])


def to_prefill_result(
    prefilled: Prefilled, hand_off: HandOff | None, expanded: Generation | None = None
) -> prefill_pb2.PrefillResult:
    """The message.

    ``hand_off`` is ``None`` where the first token ended the generation; ``expanded`` has the prompt where that is not
    as it came.
    """
    result = prefill_pb2.PrefillResult(
        token_id=prefilled.token_id,
        logprobs=None if prefilled.logprobs is None else to_token_logprobs(prefilled.logprobs),
        finish_reason=(
            types_pb2.FINISH_REASON_UNSPECIFIED if prefilled.finished is None else to_finish_reason(prefilled.finished)
        ),
        hand_off=None if hand_off is None else to_hand_off(hand_off),
        num_cached_tokens=prefilled.num_cached_tokens,
        queue=to_duration(prefilled.queue_s),
        compute=to_duration(prefilled.compute_s),
    )
    if expanded is not None:
        result.prompt_token_ids = pack_token_ids(expanded.prompt_token_ids)
        result.media.extend(map(to_media_span, expanded.media))
    return result


def from_prefill_result(message: prefill_pb2.PrefillResult) -> PrefillOutcome:
    """How a prefill ended well. Raises ``ProtocolError`` or ``InvalidRequestError`` where it makes no sense."""
    is_finished = message.finish_reason != types_pb2.FINISH_REASON_UNSPECIFIED
    return PrefillOutcome(
        token_id=message.token_id,
        logprobs=from_token_logprobs(message.logprobs) if message.HasField("logprobs") else None,
        finish_reason=from_engine_finish_reason(message.finish_reason) if is_finished else None,
        hand_off=from_hand_off(message.hand_off) if message.HasField("hand_off") else None,
        num_cached_tokens=message.num_cached_tokens,
        queue_s=to_seconds(message.queue),
        compute_s=to_seconds(message.compute),
        prompt_token_ids=_expanded_prompt(message),
        media=tuple(map(from_media_span, message.media)),
    )


def _expanded_prompt(message: prefill_pb2.PrefillResult) -> Sequence[int]:
    packed = message.prompt_token_ids
    return unpack_token_ids(packed, "prompt_token_ids") if packed else ()
