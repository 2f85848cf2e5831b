"""Starts of the inner plane: who asks for what, from which hand-off."""

from __future__ import annotations

from quartet.engine.base import EngineRequest, Generation, RequestKind
from quartet.errors import InvalidRequestError
from quartet.media.items import MediaFile
from quartet.rpc.context import RequestContext
from quartet.rpc.convert.generation import from_generation, put_generation
from quartet.rpc.convert.hand_off import from_hand_off, to_hand_off
from quartet.rpc.convert.media import from_media_input, to_media_input
from quartet.rpc.durations import put_duration, to_non_negative_seconds
from quartet.rpc.inner import InnerStart, MediaInput
from quartet.v1 import decode_pb2, prefill_pb2, types_pb2


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
    )


def to_prefill_start(slot: int, start: InnerStart) -> prefill_pb2.PrefillStart:
    """The message, whole; ``hand_off`` is not part of it."""
    message = prefill_pb2.PrefillStart()
    put_prefill_start(message, slot, start)
    return message


def put_prefill_start(into: prefill_pb2.PrefillStart, slot: int, start: InnerStart) -> None:
    """Set ``into``, which is empty, as ``to_prefill_start`` would: a message given to another one is copied."""
    into.slot = slot
    _put_request_context(into.context, start.context)
    put_generation(into.generation, start.generation)
    into.media.extend(map(to_media_input, start.media))


def from_prefill_start(message: prefill_pb2.PrefillStart) -> InnerStart:
    """A complete start. Raises ``InvalidRequestError``, ``UnsupportedFieldError``."""
    context = from_request_context(message.context)
    return InnerStart(
        context=context, generation=_required_generation(message, context.choice), media=_media_inputs(message)
    )


def to_decode_start(slot: int, start: InnerStart) -> decode_pb2.DecodeStart:
    """The message, whole."""
    message = decode_pb2.DecodeStart()
    put_decode_start(message, slot, start)
    return message


def put_decode_start(into: decode_pb2.DecodeStart, slot: int, start: InnerStart) -> None:
    """Set ``into``, which is empty, as ``to_decode_start`` would: a message given to another one is copied."""
    into.slot = slot
    _put_request_context(into.context, start.context)
    put_generation(into.generation, start.generation)
    if start.hand_off is not None:
        into.hand_off.CopyFrom(to_hand_off(start.hand_off))
    into.media.extend(map(to_media_input, start.media))


def from_decode_start(message: decode_pb2.DecodeStart) -> InnerStart:
    """A complete start. Raises ``InvalidRequestError``, ``UnsupportedFieldError``."""
    context = from_request_context(message.context)
    return InnerStart(
        context=context,
        generation=_required_generation(message, context.choice),
        hand_off=from_hand_off(message.hand_off) if message.HasField("hand_off") else None,
        media=_media_inputs(message),
    )


def to_engine_request(id: int, kind: RequestKind, start: InnerStart) -> EngineRequest:
    """What the engine is asked for; ``id`` is the caller's, unique in the life of the engine."""
    return EngineRequest(
        id=id, kind=kind, generation=start.generation, hand_off=start.hand_off, priority=start.context.priority
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


def _media_inputs(message: prefill_pb2.PrefillStart | decode_pb2.DecodeStart) -> tuple[MediaInput, ...]:
    media = tuple(from_media_input(item, f"media[{index}]") for index, item in enumerate(message.media))
    num_files = sum(isinstance(item.source, MediaFile) for item in media)
    if num_files not in (0, len(media)):
        raise InvalidRequestError("a start has media files or hand-offs, not both", field="media")
    if media and len(message.generation.media) != (0 if num_files else len(media)):
        what = "files come without spans" if num_files else "each hand-off takes a span"
        raise InvalidRequestError(what, field="generation.media")
    return media


def _required_generation(message: prefill_pb2.PrefillStart | decode_pb2.DecodeStart, choice: int) -> Generation:
    if not message.HasField("generation"):
        raise InvalidRequestError("generation is missing", field="generation")
    return from_generation(message.generation, choice=choice)
