"""The messages of worker streams: what is started on a worker, and what comes back.

The order is that of a request: starts, their parts, outputs, and then the same of the encode hop.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Sequence
from typing import Any

from quartet.engine.base import EngineRequest, FinishReason, Generation, Prefilled, RequestKind, Started
from quartet.engine.sampling import (
    GrammarKind,
    GuidedDecoding,
    OutputOptions,
    PromptLogprobs,
    Sampling,
    TokenLogprobs,
    check_counts,
    guided_choice,
)
from quartet.errors import InvalidRequestError, ProtocolError
from quartet.kvcache.block_hash import TOKEN_SIZE_BYTES, MediaSpan, pack_token_ids
from quartet.kvcache.layout import EmbeddingsPayload, HandOff, OpaquePayload
from quartet.media.items import MediaFile, MediaItem, MediaSize
from quartet.media.media_id import MEDIA_ID_SIZE_BYTES
from quartet.rpc.errors import put_duration, to_duration, to_non_negative_seconds, to_seconds
from quartet.streams.chunks import StartMessage, check_num_media
from quartet.streams.convert.hand_off import from_hand_off, to_hand_off
from quartet.streams.convert.media import (
    from_media_file,
    from_media_input,
    from_media_size,
    to_media_file,
    to_media_input,
    to_media_size,
)
from quartet.streams.convert.workers import from_transfer_way, to_transfer_way
from quartet.streams.messages import (
    DecodeStarted,
    EncodedItem,
    EncodeStart,
    MediaInput,
    PrefillOutcome,
    RequestContext,
    SignedPlacement,
    WorkerStart,
)
from quartet.v1 import decode_pb2, encode_pb2, prefill_pb2, types_pb2

# Optional fields with the same name and type on both sides.
_SCALAR_FIELDS = frozenset(
    {
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "max_tokens",
        "min_tokens",
        "ignore_eos",
    }
)
_NO_LOGPROBS = OutputOptions()
_FINISH_REASONS = {
    FinishReason.STOP_ID: types_pb2.FINISH_REASON_STOP_ID,
    FinishReason.STOP_STRING: types_pb2.FINISH_REASON_STOP_STRING,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: types_pb2.FINISH_REASON_CANCELLED,
    FinishReason.TOOL_CALLS: types_pb2.FINISH_REASON_TOOL_CALLS,
}
_FINISH_REASONS_BACK = {number: reason for reason, number in _FINISH_REASONS.items()}
_ENGINE_FINISH_REASONS = frozenset({FinishReason.STOP_ID, FinishReason.LENGTH})


def put_start(into: StartMessage, slot: int, start: WorkerStart) -> None:
    """Set ``into``, which is empty, to the whole start; a prefill has no ``hand_off``.

    In place: assigning a message to a field copies it.
    """
    into.slot = slot
    _put_request_context(into.context, start.context)
    put_generation(into.generation, start.generation)
    if start.hand_off is not None and isinstance(into, decode_pb2.DecodeStart):
        into.hand_off.CopyFrom(to_hand_off(start.hand_off))
    into.media.extend(map(to_media_input, start.media))


def from_start(message: StartMessage) -> WorkerStart:
    """A complete start. Raises ``InvalidRequestError``, ``UnsupportedFieldError``."""
    check_num_media(message)
    context = from_request_context(message.context)
    if not message.HasField("generation"):
        raise InvalidRequestError("generation is missing", field="generation")
    hand_off = None
    if isinstance(message, decode_pb2.DecodeStart) and message.HasField("hand_off"):
        hand_off = from_hand_off(message.hand_off)
    return WorkerStart(
        context=context,
        generation=from_generation(message.generation, choice=context.choice),
        hand_off=hand_off,
        media=_media_inputs(message) if message.media else (),
    )


def to_signed_decode_start(slot: int, signed: SignedPlacement) -> decode_pb2.SignedDecodeStart:
    """The message that starts at the decode worker what was placed there."""
    return decode_pb2.SignedDecodeStart(
        slot=slot, signed_start=signed.signed_start, key_id=signed.key_id, mac=signed.mac
    )


def to_engine_request(id: int, kind: RequestKind, start: WorkerStart) -> EngineRequest:
    """What the engine is asked for; ``id`` is the caller's, unique in the life of the engine."""
    return EngineRequest(
        id=id,
        kind=kind,
        generation=start.generation,
        hand_off=start.hand_off,
        priority=start.context.priority,
        traceparent=start.context.traceparent,
        session_key=start.context.session_key,
        tenant=start.context.tenant,
        trust_domain=start.context.trust_domain,
    )


def to_request_context(context: RequestContext) -> types_pb2.RequestContext:
    """The message."""
    message = types_pb2.RequestContext()
    _put_request_context(message, context)
    return message


def from_request_context(message: types_pb2.RequestContext) -> RequestContext:
    """The context. Raises ``InvalidRequestError`` with ``field`` ``context.NAME``."""
    timeout_s = to_non_negative_seconds(message.timeout, "context.timeout") if message.HasField("timeout") else None
    return RequestContext(
        request_id=message.request_id,
        attempt=message.attempt,
        choice=message.choice,
        timeout_s=timeout_s,
        traceparent=message.traceparent,
        tenant=message.tenant,
        priority=message.priority,
        session_key=message.session_key,
        router_id=message.router_id,
        router_request_number=message.router_request_number,
        trust_domain=message.trust_domain,
        sent_at_unix_ns=message.sent_at_unix_ns,
    )


def put_generation(into: types_pb2.Generation, generation: Generation) -> None:
    """Set ``into``, which is empty; in place, as ``put_start``. ``choice`` travels in the request's context."""
    into.prompt_token_ids = pack_token_ids(generation.prompt_token_ids)
    if generation.generated_token_ids:
        into.generated_token_ids = pack_token_ids(generation.generated_token_ids)
    _put_sampling(into.sampling, generation.sampling)
    into.seed = generation.seed
    into.adapter = generation.adapter
    into.cache_salt = generation.cache_salt
    into.data_parallel_rank = generation.data_parallel_rank
    into.media.extend(map(to_media_span, generation.media))
    into.output.SetInParent()
    if generation.output.logprobs is not None:
        into.output.logprobs = generation.output.logprobs
    if generation.output.num_prompt_logprobs is not None:
        into.output.num_prompt_logprobs = generation.output.num_prompt_logprobs


def from_generation(message: types_pb2.Generation, *, choice: int = 0) -> Generation:
    """The generation; token ids are arrays of unsigned 32-bit numbers.

    Raises:
        InvalidRequestError: ``field`` is ``generation.NAME``, ``sampling.NAME``, ``output.NAME`` or ``media``.
    """
    prompt = unpack_token_ids(message.prompt_token_ids, "generation.prompt_token_ids")
    if not prompt:
        raise InvalidRequestError("the prompt is empty", field="generation.prompt_token_ids")
    return Generation(
        prompt_token_ids=prompt,
        generated_token_ids=unpack_token_ids(message.generated_token_ids, "generation.generated_token_ids"),
        sampling=from_sampling(message.sampling),
        seed=message.seed,
        choice=choice,
        adapter=message.adapter,
        cache_salt=message.cache_salt,
        data_parallel_rank=message.data_parallel_rank,
        media=tuple(map(from_media_span, message.media)),
        output=from_output_options(message.output),
    )


def unpack_token_ids(packed: bytes, field: str) -> array[int]:
    """Token ids from little-endian u32. Raises ``InvalidRequestError`` naming ``field`` for half a number."""
    if len(packed) % TOKEN_SIZE_BYTES:
        raise InvalidRequestError(f"{len(packed)} bytes are not a whole number of u32", field=field)
    token_ids = array("I", packed)
    if sys.byteorder == "big":
        token_ids.byteswap()
    return token_ids


def to_sampling(sampling: Sampling) -> types_pb2.Sampling:
    """The message; what has its default is left out."""
    message = types_pb2.Sampling()
    _put_sampling(message, sampling)
    return message


def from_sampling(message: types_pb2.Sampling) -> Sampling:
    """The parameters; absent fields have their defaults.

    Raises:
        InvalidRequestError: a value out of range; ``field`` is ``sampling.NAME``.
    """
    check_sampling_counts(message)
    # Few fields are set: listing them costs half of asking for each.
    given: dict[str, Any] = {field.name: value for field, value in message.ListFields() if field.name in _SCALAR_FIELDS}
    if message.logit_bias:
        given["logit_bias"] = dict(message.logit_bias)
    if message.stop_token_ids:
        given["stop_token_ids"] = tuple(message.stop_token_ids)
    if message.HasField("guided"):
        given["guided"] = _from_guided(message.guided)
    return Sampling(**given)


def check_sampling_counts(message: types_pb2.Sampling) -> None:
    """Refuse too many biases or stop ids before they are converted. Raises ``InvalidRequestError`` as sampling does."""
    check_counts(message.logit_bias, message.stop_token_ids)


def to_output_options(output: OutputOptions) -> types_pb2.OutputOptions:
    """The message."""
    return types_pb2.OutputOptions(logprobs=output.logprobs, num_prompt_logprobs=output.num_prompt_logprobs)


def from_output_options(message: types_pb2.OutputOptions) -> OutputOptions:
    """The options. Raises ``InvalidRequestError`` with ``field`` ``output.NAME``."""
    given = {field.name: value for field, value in message.ListFields()}
    return OutputOptions(**given) if given else _NO_LOGPROBS


def to_media_span(span: MediaSpan) -> types_pb2.MediaSpan:
    """The message."""
    return types_pb2.MediaSpan(media_id=span.media_id, first_position=span.first_position, num_tokens=span.num_tokens)


def from_media_span(message: types_pb2.MediaSpan) -> MediaSpan:
    """Where an item lies. Raises ``InvalidRequestError``, field ``media``, where it lies nowhere."""
    return MediaSpan(message.media_id, message.first_position, message.num_tokens)


def to_slot_started(slot: int, started: Started, num_prompt_tokens: int = 0) -> decode_pb2.SlotStarted:
    """The message; ``num_prompt_tokens`` where the prompt is not as it came."""
    return decode_pb2.SlotStarted(
        slot=slot,
        num_cached_tokens=started.num_cached_tokens,
        queue=to_duration(started.queue_s),
        transfer=to_duration(started.transfer_s) if started.transfer_s else None,
        transfer_bytes=started.transfer_bytes,
        num_prompt_tokens=num_prompt_tokens,
        transfer_way=to_transfer_way(started.transfer_way),
        num_evicted_tokens=started.num_evicted_tokens,
        onboard=to_duration(started.onboard_s) if started.onboard_s else None,
    )


def from_slot_started(message: decode_pb2.SlotStarted) -> DecodeStarted:
    """What the worker reports when a request joins its batch."""
    return DecodeStarted(
        num_cached_tokens=message.num_cached_tokens,
        queue_s=to_seconds(message.queue),
        transfer_s=to_seconds(message.transfer),
        transfer_bytes=message.transfer_bytes,
        transfer_way=from_transfer_way(message.transfer_way),
        num_prompt_tokens=message.num_prompt_tokens,
        num_evicted_tokens=message.num_evicted_tokens,
        onboard_s=to_seconds(message.onboard),
    )


def to_slot_logprobs(slot: int, logprobs: Sequence[TokenLogprobs]) -> decode_pb2.SlotLogprobs:
    """The message."""
    return decode_pb2.SlotLogprobs(slot=slot, tokens=[to_token_logprobs(entry) for entry in logprobs])


def to_token_logprobs(logprobs: TokenLogprobs) -> types_pb2.TokenLogprobs:
    """The message."""
    return types_pb2.TokenLogprobs(
        token_id=logprobs.token_id,
        logprob=logprobs.logprob,
        top_token_ids=logprobs.top_token_ids,
        top_logprobs=logprobs.top_logprobs,
    )


def from_token_logprobs(message: types_pb2.TokenLogprobs) -> TokenLogprobs:
    """The log probabilities. Raises ``ProtocolError`` where ids and values are not aligned."""
    if len(message.top_token_ids) != len(message.top_logprobs):
        raise ProtocolError("top_token_ids and top_logprobs are not aligned")
    return TokenLogprobs(
        token_id=message.token_id,
        logprob=message.logprob,
        top_token_ids=tuple(message.top_token_ids),
        top_logprobs=tuple(message.top_logprobs),
    )


def to_slot_prompt_logprobs(slot: int, logprobs: PromptLogprobs) -> decode_pb2.SlotPromptLogprobs:
    """The message."""
    message = decode_pb2.SlotPromptLogprobs(slot=slot)
    put_prompt_logprobs(message.prompt_logprobs, logprobs)
    return message


def put_prompt_logprobs(into: types_pb2.PromptLogprobs, logprobs: PromptLogprobs) -> None:
    """Set ``into``, which is empty."""
    into.SetInParent()
    into.token_ids.extend(logprobs.token_ids)
    into.logprobs.extend(logprobs.logprobs)
    into.top_token_ids.extend(logprobs.top_token_ids)
    into.top_logprobs.extend(logprobs.top_logprobs)


def from_prompt_logprobs(message: types_pb2.PromptLogprobs) -> PromptLogprobs:
    """The log probabilities. Raises ``ProtocolError`` where the columns are not aligned."""
    num_tokens, num_positions, num_top = len(message.token_ids), len(message.logprobs), len(message.top_token_ids)
    is_aligned = num_top == len(message.top_logprobs) and not (num_top % num_positions if num_positions else num_top)
    if not is_aligned or (num_tokens and num_tokens != num_positions + 1):
        raise ProtocolError("the columns of prompt_logprobs are not aligned")
    return PromptLogprobs(
        array("I", message.token_ids[:]),
        array("f", message.logprobs[:]),
        array("I", message.top_token_ids[:]),
        array("f", message.top_logprobs[:]),
    )


def to_prefill_result(
    prefilled: Prefilled,
    hand_off: HandOff | None,
    expanded: Generation | None = None,
    *,
    sent_at_unix_ns: int = 0,
) -> prefill_pb2.PrefillResult:
    """The message.

    ``hand_off`` is ``None`` where the first token ended the generation; ``expanded`` has the prompt where that is not
    as it came; ``sent_at_unix_ns`` is 0 if the request is not traced.
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
        num_evicted_tokens=prefilled.num_evicted_tokens,
        onboard=to_duration(prefilled.onboard_s) if prefilled.onboard_s else None,
        sent_at_unix_ns=sent_at_unix_ns,
    )
    if prefilled.prompt_logprobs is not None:
        put_prompt_logprobs(result.prompt_logprobs, prefilled.prompt_logprobs)
    if expanded is not None:
        result.prompt_token_ids = pack_token_ids(expanded.prompt_token_ids)
        result.media.extend(map(to_media_span, expanded.media))
    return result


def from_prefill_result(message: prefill_pb2.PrefillResult) -> PrefillOutcome:
    """How a prefill ended well. Raises ``ProtocolError`` or ``InvalidRequestError`` for an impossible message."""
    is_finished = message.finish_reason != types_pb2.FINISH_REASON_UNSPECIFIED
    packed = message.prompt_token_ids
    return PrefillOutcome(
        token_id=message.token_id,
        logprobs=from_token_logprobs(message.logprobs) if message.HasField("logprobs") else None,
        finish_reason=from_engine_finish_reason(message.finish_reason) if is_finished else None,
        hand_off=from_hand_off(message.hand_off) if message.HasField("hand_off") else None,
        num_cached_tokens=message.num_cached_tokens,
        queue_s=to_seconds(message.queue),
        compute_s=to_seconds(message.compute),
        prompt_token_ids=unpack_token_ids(packed, "prompt_token_ids") if packed else (),
        media=tuple(map(from_media_span, message.media)),
        prompt_logprobs=(
            from_prompt_logprobs(message.prompt_logprobs) if message.HasField("prompt_logprobs") else None
        ),
        num_evicted_tokens=message.num_evicted_tokens,
        onboard_s=to_seconds(message.onboard),
        sent_at_unix_ns=message.sent_at_unix_ns,
    )


def to_prefill_outcome(outcome: PrefillOutcome) -> prefill_pb2.PrefillResult:
    """The message of an outcome that a worker gave, for another router."""
    result = prefill_pb2.PrefillResult(
        token_id=outcome.token_id,
        logprobs=None if outcome.logprobs is None else to_token_logprobs(outcome.logprobs),
        finish_reason=(
            types_pb2.FINISH_REASON_UNSPECIFIED
            if outcome.finish_reason is None
            else to_finish_reason(outcome.finish_reason)
        ),
        hand_off=None if outcome.hand_off is None else to_hand_off(outcome.hand_off),
        num_cached_tokens=outcome.num_cached_tokens,
        queue=to_duration(outcome.queue_s),
        compute=to_duration(outcome.compute_s),
        sent_at_unix_ns=outcome.sent_at_unix_ns,
    )
    if outcome.prompt_logprobs is not None:
        put_prompt_logprobs(result.prompt_logprobs, outcome.prompt_logprobs)
    return result


def to_finish_reason(reason: FinishReason) -> types_pb2.FinishReason.ValueType:
    """The enum's value."""
    return _FINISH_REASONS[reason]


def from_finish_reason(value: types_pb2.FinishReason.ValueType) -> FinishReason:
    """Why a choice ended well. Raises ``ProtocolError`` for a value that says no such thing."""
    reason = _FINISH_REASONS_BACK.get(value)
    if reason is None:
        raise ProtocolError(f"{value} is no reason for which a generation ends well")
    return reason


def from_engine_finish_reason(value: types_pb2.FinishReason.ValueType) -> FinishReason:
    """Why an engine ended a generation. Raises ``ProtocolError`` also for what only the API can say."""
    reason = from_finish_reason(value)
    if reason not in _ENGINE_FINISH_REASONS:
        raise ProtocolError(f"{reason} is no reason for which an engine ends a generation")
    return reason


def to_encode_start(start: EncodeStart) -> encode_pb2.EncodeStart:
    """The message, whole."""
    return encode_pb2.EncodeStart(
        context=to_request_context(start.context),
        items=[encode_pb2.EncodeItem(media_id=item.media_id, file=to_media_file(item.file)) for item in start.items],
    )


def from_encode_start(message: encode_pb2.EncodeStart) -> EncodeStart:
    """A complete start. Raises ``InvalidRequestError`` with ``field`` such as ``items[1].file.kind``."""
    if not message.items:
        raise InvalidRequestError("there is nothing to encode", field="items")
    items = tuple(_from_encode_item(item, f"items[{index}]") for index, item in enumerate(message.items))
    return EncodeStart(context=from_request_context(message.context), items=items)


def to_encode_sized(sizes: Sequence[MediaSize]) -> encode_pb2.EncodeSized:
    """The message."""
    return encode_pb2.EncodeSized(items=map(to_media_size, sizes))


def from_encode_sized(message: encode_pb2.EncodeSized) -> tuple[MediaSize, ...]:
    """The sizes, item by item. Raises ``ProtocolError`` for an impossible one."""
    return tuple(map(from_media_size, message.items))


def to_encoded_item(encoded: EncodedItem) -> encode_pb2.EncodedItem:
    """The message."""
    message = encode_pb2.EncodedItem(item=encoded.item, hand_off=to_hand_off(encoded.hand_off))
    if encoded.queue_s:
        put_duration(message.queue, encoded.queue_s)
    if encoded.compute_s:
        put_duration(message.compute, encoded.compute_s)
    return message


def from_encoded_item(message: encode_pb2.EncodedItem) -> EncodedItem:
    """One item's hand-off. Raises ``ProtocolError`` or ``InvalidRequestError`` for an impossible message."""
    hand_off = from_hand_off(message.hand_off)
    if not isinstance(hand_off.payload, EmbeddingsPayload | OpaquePayload):
        raise ProtocolError("an encode worker handed something else off than embeddings")
    return EncodedItem(
        item=message.item,
        hand_off=hand_off,
        queue_s=to_seconds(message.queue),
        compute_s=to_seconds(message.compute),
    )


def _put_request_context(into: types_pb2.RequestContext, context: RequestContext) -> None:
    into.request_id = context.request_id
    into.attempt = context.attempt
    into.choice = context.choice
    if context.timeout_s is not None:
        put_duration(into.timeout, context.timeout_s)
    into.traceparent = context.traceparent
    into.tenant = context.tenant
    into.priority = context.priority
    into.session_key = context.session_key
    into.router_id = context.router_id
    into.router_request_number = context.router_request_number
    if context.trust_domain:
        into.trust_domain = context.trust_domain
    if context.sent_at_unix_ns:
        into.sent_at_unix_ns = context.sent_at_unix_ns


def _put_sampling(into: types_pb2.Sampling, sampling: Sampling) -> None:
    into.SetInParent()
    for name in sampling.changed_fields:
        if name in _SCALAR_FIELDS:
            setattr(into, name, getattr(sampling, name))
    into.logit_bias.update(sampling.logit_bias)
    into.stop_token_ids.extend(sampling.stop_token_ids)
    if sampling.guided is not None:
        _put_guided(into.guided, sampling.guided)


def _put_guided(into: types_pb2.GuidedDecoding, guided: GuidedDecoding) -> None:
    if guided.kind is GrammarKind.CHOICE:
        into.choice.texts.extend(json.loads(guided.text))
    else:
        setattr(into, guided.kind.value, guided.text)


def _from_guided(message: types_pb2.GuidedDecoding) -> GuidedDecoding:
    kind = message.WhichOneof("grammar")
    if kind is None:
        raise InvalidRequestError("a grammar must be given", field="sampling.guided")
    if kind == "choice":
        return guided_choice(message.choice.texts)
    return GuidedDecoding(GrammarKind(kind), getattr(message, kind))


def _media_inputs(message: StartMessage) -> tuple[MediaInput, ...]:
    media = tuple(from_media_input(item, f"media[{index}]") for index, item in enumerate(message.media))
    num_files = sum(isinstance(item.source, MediaFile) for item in media)
    if num_files not in (0, len(media)):
        raise InvalidRequestError("a start has media files or hand-offs, not both", field="media")
    if len(message.generation.media) != (0 if num_files else len(media)):
        what = "files come without spans" if num_files else "each hand-off takes a span"
        raise InvalidRequestError(what, field="generation.media")
    return media


def _from_encode_item(message: encode_pb2.EncodeItem, field: str) -> MediaItem:
    if len(message.media_id) not in (0, MEDIA_ID_SIZE_BYTES):
        raise InvalidRequestError(f"a media id has {MEDIA_ID_SIZE_BYTES} bytes", field=f"{field}.media_id")
    return MediaItem(message.media_id, from_media_file(message.file, f"{field}.file"))
