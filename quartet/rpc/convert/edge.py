"""Requests and answers at the edge: proto to domain and back."""

from __future__ import annotations

from quartet.discovery.place import Place
from quartet.errors import InvalidRequestError, UnsupportedFieldError
from quartet.rpc.convert.generation import from_output_options, from_sampling, to_token_logprobs
from quartet.rpc.durations import to_duration, to_seconds
from quartet.rpc.edge import (
    Accepted,
    AnswerPart,
    ChatPrompt,
    ChoiceFinished,
    ChoicePlacement,
    Delta,
    EndReason,
    GenerateStart,
    Prompt,
    TextOptions,
    TextPrompt,
    TimeBreakdown,
    TokenPrompt,
)
from quartet.text.chat_template import ChatMessage
from quartet.v1 import router_pb2, types_pb2

_END_REASONS = {
    EndReason.STOP_ID: types_pb2.FINISH_REASON_STOP_ID,
    EndReason.STOP_STRING: types_pb2.FINISH_REASON_STOP_STRING,
    EndReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    EndReason.CANCELLED: types_pb2.FINISH_REASON_CANCELLED,
}


def from_generate_start(message: router_pb2.GenerateStart) -> GenerateStart:
    """The request; what depends on the model or on limits is not checked yet.

    Raises:
        InvalidRequestError: an impossible field; ``field`` is its path.
        UnsupportedFieldError: media or a grammar.
    """
    if message.media:
        raise UnsupportedFieldError("media are not supported", field="media")
    return GenerateStart(
        model=message.model,
        prompt=_from_prompt(message),
        sampling=from_sampling(message.sampling),
        seed=message.seed if message.HasField("seed") else None,
        output=from_output_options(message.output),
        text_options=_from_text_options(message.text_options),
        adapter=message.adapter,
        cache_salt=message.cache_salt,
        tenant=message.tenant,
        priority=message.priority,
        session_key=message.session_key,
        timeout_s=to_seconds(message.timeout) if message.HasField("timeout") else None,
        num_choices=message.num_choices if message.HasField("num_choices") else 1,
        client_request_id=message.client_request_id,
    )


def to_generate_response(part: AnswerPart) -> router_pb2.GenerateResponse:
    """One message down."""
    if isinstance(part, Delta):
        return router_pb2.GenerateResponse(delta=to_delta(part))
    if isinstance(part, ChoiceFinished):
        return router_pb2.GenerateResponse(finished=to_choice_finished(part))
    return router_pb2.GenerateResponse(accepted=to_accepted(part))


def to_accepted(accepted: Accepted) -> router_pb2.Accepted:
    """The message."""
    return router_pb2.Accepted(
        request_id=accepted.request_id,
        choices=[_to_choice_placement(choice) for choice in accepted.choices],
        num_prompt_tokens=accepted.num_prompt_tokens,
        seed=accepted.seed,
    )


def to_delta(delta: Delta) -> router_pb2.Delta:
    """The message."""
    return router_pb2.Delta(
        choice=delta.choice,
        token_offset=delta.token_offset,
        token_ids=delta.token_ids,
        text=delta.text,
        logprobs=[to_token_logprobs(entry) for entry in delta.logprobs],
    )


def to_choice_finished(finished: ChoiceFinished) -> router_pb2.ChoiceFinished:
    """The message."""
    usage = finished.usage
    return router_pb2.ChoiceFinished(
        choice=finished.choice,
        reason=_END_REASONS[finished.reason],
        stop_string=finished.stop_string,
        usage=router_pb2.Usage(
            num_prompt_tokens=usage.num_prompt_tokens,
            num_cached_tokens=usage.num_cached_tokens,
            num_output_tokens=usage.num_output_tokens,
            num_attempts=usage.num_attempts,
        ),
        time=_to_time_breakdown(finished.time),
    )


def to_place(place: Place) -> types_pb2.Place:
    """The message."""
    return types_pb2.Place(worker_id=place.worker_id, data_parallel_rank=place.data_parallel_rank)


def _to_choice_placement(placement: ChoicePlacement) -> router_pb2.ChoicePlacement:
    return router_pb2.ChoicePlacement(
        choice=placement.choice,
        prefill=None if placement.prefill is None else to_place(placement.prefill),
        decode=to_place(placement.decode),
        num_matched_tokens=placement.num_matched_tokens,
    )


def _to_time_breakdown(time: TimeBreakdown) -> router_pb2.TimeBreakdown:
    message = router_pb2.TimeBreakdown()
    for name, seconds in (
        ("tokenize", time.tokenize_s),
        ("router_queue", time.router_queue_s),
        ("prefill", time.prefill_s),
        ("prefill_queue", time.prefill_queue_s),
        ("decode_queue", time.decode_queue_s),
        ("transfer", time.transfer_s),
        ("first_token", time.first_token_s),
        ("total", time.total_s),
    ):
        if seconds is not None:
            getattr(message, name).CopyFrom(to_duration(seconds))
    return message


def _from_prompt(message: router_pb2.GenerateStart) -> Prompt:
    kind = message.WhichOneof("prompt")
    if kind == "text":
        return TextPrompt(message.text)
    if kind == "token_ids":
        return TokenPrompt(tuple(message.token_ids.ids))
    if kind == "chat":
        chat = message.chat
        has_choice = chat.HasField("add_generation_prompt")
        messages = tuple(_from_chat_message(item) for item in chat.messages)
        return ChatPrompt(messages, chat.add_generation_prompt if has_choice else True)
    raise InvalidRequestError("a request needs a prompt: text, chat or token_ids", field="prompt")


def _from_chat_message(message: router_pb2.ChatMessage) -> ChatMessage:
    if not message.role:
        raise InvalidRequestError("a message needs a role", field="chat.messages.role")
    if message.parts and message.content:
        raise InvalidRequestError("a message has content or parts, not both", field="chat.messages.content")
    content = "".join(map(_from_content_part, message.parts)) if message.parts else message.content
    return ChatMessage(role=message.role, content=content)


def _from_content_part(part: router_pb2.ContentPart) -> str:
    kind = part.WhichOneof("part")
    if kind == "media":
        raise UnsupportedFieldError("media are not supported", field="chat.messages.parts.media")
    if kind is None:
        raise InvalidRequestError("a part holds text or media", field="chat.messages.parts.part")
    return part.text


def _from_text_options(message: router_pb2.TextOptions) -> TextOptions:
    return TextOptions(
        stop_strings=tuple(message.stop_strings),
        include_stop_string=message.include_stop_string,
        omit_text=message.omit_text,
        omit_token_ids=message.omit_token_ids,
        show_special_tokens=message.show_special_tokens,
    )
