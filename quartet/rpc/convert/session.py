"""A session's messages: starts up; columns and side messages down."""

from __future__ import annotations

from quartet.rpc.convert.edge_answer import put_accepted, put_choice_finished, put_choice_placement
from quartet.rpc.convert.edge_start import from_generate_start, to_generate_start
from quartet.rpc.convert.generation import to_token_logprobs
from quartet.rpc.convert.resume import from_resume, to_resume
from quartet.rpc.edge import Accepted, ChoiceFinished, ChoicePlacement
from quartet.rpc.errors import to_failure
from quartet.rpc.session import SessionStart
from quartet.rpc.session_backlog import Columns
from quartet.v1 import router_pb2 as pb


def to_session_start(asked: SessionStart) -> pb.SessionStart:
    """The message. Raises ``InvalidRequestError`` for what it can't hold; ``field`` is its path."""
    return pb.SessionStart(
        slot=asked.slot,
        start=to_generate_start(asked.start),
        resume=None if asked.resume is None else to_resume(asked.resume),
        traceparent=asked.traceparent,
    )


def from_session_start(message: pb.SessionStart) -> SessionStart:
    """The request. Raises ``InvalidRequestError``; ``field`` is its path within ``start``, or ``resume``'s."""
    return SessionStart(
        slot=message.slot,
        start=from_generate_start(message.start),
        resume=from_resume(message.resume) if message.HasField("resume") else None,
        traceparent=message.traceparent,
    )


def to_session_accepted(slot: int, accepted: Accepted) -> pb.SessionAccepted:
    """The side message."""
    message = pb.SessionAccepted(slot=slot)
    put_accepted(message.accepted, accepted)
    return message


def to_session_placed(slot: int, placement: ChoicePlacement) -> pb.SessionPlaced:
    """The side message."""
    message = pb.SessionPlaced(slot=slot)
    put_choice_placement(message.placement, placement)
    return message


def to_session_finished(slot: int, finished: ChoiceFinished) -> pb.SessionFinished:
    """The side message."""
    message = pb.SessionFinished(slot=slot)
    put_choice_finished(message.finished, finished)
    return message


def to_session_failure(slot: int, error: BaseException) -> pb.SessionFailure:
    """The side message."""
    return pb.SessionFailure(slot=slot, failure=to_failure(error))


def to_session_response(columns: Columns) -> pb.SessionResponse:
    """A message with ``columns``; side messages are yet to be added."""
    return pb.SessionResponse(
        slots=columns.slots,
        choices=columns.choices if any(columns.choices) else (),
        num_tokens=columns.num_tokens,
        token_offsets=columns.offsets,
        token_ids=columns.token_ids,
        texts=columns.texts,
        logprobs=_to_session_logprobs(columns) if columns.logprobs else (),
    )


def _to_session_logprobs(columns: Columns) -> list[pb.SessionLogprobs]:
    return [
        pb.SessionLogprobs(slot=slot, choice=choice, tokens=map(to_token_logprobs, logprobs))
        for slot, choice, logprobs in zip(columns.slots, columns.choices, columns.logprobs, strict=True)
        if logprobs
    ]
