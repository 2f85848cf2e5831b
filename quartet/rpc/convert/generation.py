"""What to generate, and how tokens are chosen and told."""

from __future__ import annotations

import sys
from array import array
from typing import Any

from quartet.engine.base import FinishReason, Generation
from quartet.engine.sampling import GrammarKind, GuidedDecoding, OutputOptions, Sampling, TokenLogprobs
from quartet.errors import InvalidRequestError, ProtocolError
from quartet.kvcache.block_hash import TOKEN_SIZE_BYTES, MediaSpan, pack_token_ids
from quartet.v1 import types_pb2

# Fields of presence and of the same name and type on both sides.
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
}
_ENGINE_FINISH_REASONS = frozenset({FinishReason.STOP_ID, FinishReason.LENGTH})
_FINISH_REASONS_BACK = {number: reason for reason, number in _FINISH_REASONS.items()}


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
    # Few fields are there: listing them costs half of asking for each.
    given: dict[str, Any] = {field.name: value for field, value in message.ListFields() if field.name in _SCALAR_FIELDS}
    if message.logit_bias:
        given["logit_bias"] = dict(message.logit_bias)
    if message.stop_token_ids:
        given["stop_token_ids"] = tuple(message.stop_token_ids)
    if message.HasField("guided"):
        given["guided"] = _from_guided(message.guided)
    return Sampling(**given)


def to_output_options(output: OutputOptions) -> types_pb2.OutputOptions:
    """The message."""
    return types_pb2.OutputOptions(logprobs=output.logprobs)


def from_output_options(message: types_pb2.OutputOptions) -> OutputOptions:
    """The options. Raises ``InvalidRequestError`` with ``field`` ``output.NAME``."""
    return OutputOptions(logprobs=message.logprobs) if message.HasField("logprobs") else _NO_LOGPROBS


def to_generation(generation: Generation) -> types_pb2.Generation:
    """The message; ``choice`` travels in the request's context."""
    message = types_pb2.Generation()
    put_generation(message, generation)
    return message


def put_generation(into: types_pb2.Generation, generation: Generation) -> None:
    """Set ``into``, which is empty, as ``to_generation`` would: a message given to another one is copied."""
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
    """Why an engine ended a generation. Raises ``ProtocolError`` also for what only the edge can say."""
    reason = from_finish_reason(value)
    if reason not in _ENGINE_FINISH_REASONS:
        raise ProtocolError(f"{reason} is no reason for which an engine ends a generation")
    return reason


def to_media_span(span: MediaSpan) -> types_pb2.MediaSpan:
    """The message."""
    return types_pb2.MediaSpan(media_id=span.media_id, first_position=span.first_position, num_tokens=span.num_tokens)


def from_media_span(message: types_pb2.MediaSpan) -> MediaSpan:
    """Where an item lies. Raises ``InvalidRequestError``, field ``media``, where it lies nowhere."""
    return MediaSpan(message.media_id, message.first_position, message.num_tokens)


def _put_sampling(into: types_pb2.Sampling, sampling: Sampling) -> None:
    into.SetInParent()
    for name in sampling.changed_fields():
        if name in _SCALAR_FIELDS:
            setattr(into, name, getattr(sampling, name))
    into.logit_bias.update(sampling.logit_bias)
    into.stop_token_ids.extend(sampling.stop_token_ids)
    if sampling.guided is not None:
        setattr(into.guided, sampling.guided.kind.value, sampling.guided.text)


def _from_guided(message: types_pb2.GuidedDecoding) -> GuidedDecoding:
    kind = message.WhichOneof("grammar")
    if kind is None:
        raise InvalidRequestError("a grammar must be given", field="sampling.guided")
    return GuidedDecoding(GrammarKind(kind), getattr(message, kind))
