"""A router's answer: what it sends, what the client makes of it; what makes no sense raises ``ProtocolError``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from quartet.discovery.place import Place
from quartet.engine.sampling import TokenLogprobs
from quartet.errors import ProtocolError
from quartet.rpc.convert.generation import (
    from_finish_reason,
    from_token_logprobs,
    to_finish_reason,
    to_token_logprobs,
)
from quartet.rpc.durations import put_duration, to_seconds
from quartet.rpc.edge import (
    Accepted,
    AnswerPart,
    ChoiceFinished,
    ChoicePlacement,
    Delta,
    Placed,
    TimeBreakdown,
    Usage,
)
from quartet.v1 import router_pb2, types_pb2

# Field of ours and of the message, whose type says what ours says by its unit.
_TIMES = {item.name: item.name.removesuffix("_s") for item in fields(TimeBreakdown)}


def to_generate_response(part: AnswerPart) -> router_pb2.GenerateResponse:
    """One message down."""
    if isinstance(part, Delta):
        return router_pb2.GenerateResponse(delta=_to_delta(part))
    if isinstance(part, ChoiceFinished):
        return router_pb2.GenerateResponse(finished=to_choice_finished(part))
    if isinstance(part, Placed):
        return router_pb2.GenerateResponse(placed=to_choice_placement(part.placement))
    return router_pb2.GenerateResponse(accepted=to_accepted(part))


def from_generate_response(message: router_pb2.GenerateResponse) -> AnswerPart:
    """The part of the answer that one message tells."""
    match message.WhichOneof("message"):
        case "accepted":
            return from_accepted(message.accepted)
        case "placed":
            return Placed(placement=from_choice_placement(message.placed))
        case "delta":
            return _from_delta(message.delta)
        case "finished":
            return from_choice_finished(message.finished)
        case _:
            raise ProtocolError("the router sent a message that says nothing")


def to_accepted(accepted: Accepted) -> router_pb2.Accepted:
    """The message."""
    return router_pb2.Accepted(
        request_id=accepted.request_id,
        choices=map(to_choice_placement, accepted.choices),
        num_prompt_tokens=accepted.num_prompt_tokens,
        seed=accepted.seed,
        model_fingerprint=accepted.model_fingerprint,
    )


def from_accepted(message: router_pb2.Accepted) -> Accepted:
    """What a router accepted."""
    return Accepted(
        request_id=message.request_id,
        choices=tuple(map(from_choice_placement, message.choices)),
        num_prompt_tokens=message.num_prompt_tokens,
        seed=message.seed,
        model_fingerprint=message.model_fingerprint,
    )


def to_choice_placement(placement: ChoicePlacement) -> router_pb2.ChoicePlacement:
    """The message."""
    return router_pb2.ChoicePlacement(
        choice=placement.choice,
        prefill=None if placement.prefill is None else _to_place(placement.prefill),
        decode=_to_place(placement.decode),
        num_matched_tokens=placement.num_matched_tokens,
    )


def from_choice_placement(message: router_pb2.ChoicePlacement) -> ChoicePlacement:
    """Where a choice runs."""
    return ChoicePlacement(
        choice=message.choice,
        prefill=_from_place(message.prefill) if message.HasField("prefill") else None,
        decode=_from_place(message.decode),
        num_matched_tokens=message.num_matched_tokens,
    )


def _to_place(place: Place) -> types_pb2.Place:
    return types_pb2.Place(worker_id=place.worker_id, data_parallel_rank=place.data_parallel_rank)


def _from_place(message: types_pb2.Place) -> Place:
    return Place(message.worker_id, message.data_parallel_rank)


def put_delta(into: router_pb2.Delta, token_ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]) -> None:
    """Append to a delta of one choice, in place: there is one for each token."""
    into.token_ids.extend(token_ids)
    if text:
        into.text += text
    if logprobs:
        into.logprobs.extend([to_token_logprobs(entry) for entry in logprobs])


def _to_delta(delta: Delta) -> router_pb2.Delta:
    message = router_pb2.Delta(choice=delta.choice, token_offset=delta.token_offset)
    put_delta(message, delta.token_ids, delta.text, delta.logprobs)
    return message


def _from_delta(message: router_pb2.Delta) -> Delta:
    return Delta(
        choice=message.choice,
        token_offset=message.token_offset,
        token_ids=tuple(message.token_ids),
        text=message.text,
        logprobs=tuple(from_token_logprobs(entry) for entry in message.logprobs),
    )


def to_choice_finished(finished: ChoiceFinished) -> router_pb2.ChoiceFinished:
    """The message."""
    return router_pb2.ChoiceFinished(
        choice=finished.choice,
        reason=to_finish_reason(finished.reason),
        stop_string=finished.stop_string or "",
        usage=_to_usage(finished.usage),
        time=_to_time_breakdown(finished.time),
    )


def from_choice_finished(message: router_pb2.ChoiceFinished) -> ChoiceFinished:
    """How a choice ended. Raises ``ProtocolError`` for a reason that is none."""
    return ChoiceFinished(
        choice=message.choice,
        reason=from_finish_reason(message.reason),
        stop_string=message.stop_string or None,
        usage=_from_usage(message.usage),
        time=_from_time_breakdown(message.time),
    )


def _to_usage(usage: Usage) -> router_pb2.Usage:
    return router_pb2.Usage(
        num_prompt_tokens=usage.num_prompt_tokens,
        num_cached_tokens=usage.num_cached_tokens,
        num_output_tokens=usage.num_output_tokens,
        num_attempts=usage.num_attempts,
    )


def _from_usage(message: router_pb2.Usage) -> Usage:
    return Usage(
        num_prompt_tokens=message.num_prompt_tokens,
        num_cached_tokens=message.num_cached_tokens,
        num_output_tokens=message.num_output_tokens,
        num_attempts=message.num_attempts,
    )


def _to_time_breakdown(time: TimeBreakdown) -> router_pb2.TimeBreakdown:
    message = router_pb2.TimeBreakdown()
    for ours, theirs in _TIMES.items():
        seconds = getattr(time, ours)
        if seconds is not None:
            put_duration(getattr(message, theirs), seconds)
    return message


def _from_time_breakdown(message: router_pb2.TimeBreakdown) -> TimeBreakdown:
    spent = {ours: theirs for ours, theirs in _TIMES.items() if message.HasField(theirs)}  # type: ignore[arg-type]
    return TimeBreakdown(**{ours: to_seconds(getattr(message, theirs)) for ours, theirs in spent.items()})
