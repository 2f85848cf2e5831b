"""A router's answer to proto and back; an impossible message raises ``ProtocolError``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quartet.api.convert.request import from_resume, to_generate_start, to_resume
from quartet.api.convert.unread import UnreadStart
from quartet.api.placement import PlacedChoice, PlacedParsing, PlacedRequest
from quartet.api.request import (
    TIMES,
    Accepted,
    AnswerPart,
    AskedStart,
    ChoiceFinished,
    ChoicePlacement,
    Delta,
    GenerateStart,
    Placed,
    Relayed,
    Resume,
    SessionStart,
    TimeBreakdown,
    Usage,
    check_relayed,
)
from quartet.api.session_columns import Columns
from quartet.discovery.base import Rank
from quartet.engine.sampling import PromptLogprobs, TokenLogprobs
from quartet.errors import InvalidRequestError, ProtocolError
from quartet.rpc.errors import put_duration, to_duration, to_failure, to_seconds
from quartet.streams.convert.messages import (
    from_finish_reason,
    from_prompt_logprobs,
    from_token_logprobs,
    put_prompt_logprobs,
    to_finish_reason,
    to_token_logprobs,
)
from quartet.streams.convert.workers import from_transfer_way, to_transfer_way
from quartet.streams.messages import SignedPlacement
from quartet.text.parsed import Parsed, ToolCallDelta
from quartet.v1 import router_pb2, types_pb2
from quartet.v1 import router_pb2 as pb

# Of `SessionRequest.start` and `SessionStart.slot`: field 1, a message; field 1, a number.
_START_TAG, _SLOT_TAG = b"\x0a", b"\x08"
_MAX_SLOT = 2**32 - 1

# Our fields, which end in their unit, and those of the message, whose type is the unit.
_TIMES = {name: name.removesuffix("_s") for name in TIMES}


def to_generate_response(part: AnswerPart) -> router_pb2.GenerateResponse:
    """One message down."""
    message = router_pb2.GenerateResponse()
    # In place: a message given to another one is copied.
    if isinstance(part, Delta):
        _put_delta(message.delta, part)
    elif isinstance(part, ChoiceFinished):
        put_choice_finished(message.finished, part)
    elif isinstance(part, Placed):
        put_choice_placement(message.placed, part.placement)
    elif isinstance(part, PromptLogprobs):
        put_prompt_logprobs(message.prompt_logprobs, part)
    else:
        put_accepted(message.accepted, part)
    return message


def from_generate_response(message: router_pb2.GenerateResponse) -> AnswerPart:
    """The part of the answer that one message holds."""
    match message.WhichOneof("message"):
        case "accepted":
            return from_accepted(message.accepted)
        case "prompt_logprobs":
            return from_prompt_logprobs(message.prompt_logprobs)
        case "placed":
            return Placed(placement=from_choice_placement(message.placed))
        case "delta":
            return _from_delta(message.delta)
        case "finished":
            return from_choice_finished(message.finished)
        case _:
            raise ProtocolError("the router sent a message that says nothing")


def put_accepted(into: router_pb2.Accepted, accepted: Accepted) -> None:
    """Set ``into``, which is empty."""
    into.request_id = accepted.request_id
    for placement in accepted.choices:
        put_choice_placement(into.choices.add(), placement)
    into.num_prompt_tokens = accepted.num_prompt_tokens
    into.seed = accepted.seed
    into.model_fingerprint = accepted.model_fingerprint
    if accepted.encode is not None:
        put_rank(into.encode, accepted.encode)


def from_accepted(message: router_pb2.Accepted) -> Accepted:
    """What a router accepted."""
    return Accepted(
        request_id=message.request_id,
        choices=tuple(map(from_choice_placement, message.choices)),
        num_prompt_tokens=message.num_prompt_tokens,
        seed=message.seed,
        model_fingerprint=message.model_fingerprint,
        encode=from_rank(message.encode) if message.HasField("encode") else None,
    )


def put_choice_placement(into: router_pb2.ChoicePlacement, placement: ChoicePlacement) -> None:
    """Set ``into``, which is empty."""
    into.choice = placement.choice
    if placement.prefill is not None:
        put_rank(into.prefill, placement.prefill)
    put_rank(into.decode, placement.decode)
    into.num_matched_tokens = placement.num_matched_tokens
    into.num_held_tokens = placement.num_held_tokens
    if placement.cost is not None:
        into.cost = placement.cost


def from_choice_placement(message: router_pb2.ChoicePlacement) -> ChoicePlacement:
    """Where a choice runs."""
    return ChoicePlacement(
        choice=message.choice,
        prefill=from_rank(message.prefill) if message.HasField("prefill") else None,
        decode=from_rank(message.decode),
        num_matched_tokens=message.num_matched_tokens,
        cost=message.cost if message.HasField("cost") else None,
        num_held_tokens=message.num_held_tokens,
    )


def put_rank(into: types_pb2.Rank, rank: Rank) -> None:
    """Set ``into``, which is empty."""
    into.worker_id = rank.worker_id
    into.data_parallel_rank = rank.data_parallel_rank


def from_rank(message: types_pb2.Rank) -> Rank:
    """Where something runs."""
    return Rank(message.worker_id, message.data_parallel_rank)


def put_delta(into: router_pb2.Delta, token_ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]) -> None:
    """Append to a delta of one choice, in place: there is one for each token."""
    into.token_ids.extend(token_ids)
    if text:
        into.text += text
    if logprobs:
        into.logprobs.extend([to_token_logprobs(entry) for entry in logprobs])


def put_parsed(into: router_pb2.Delta, reasoning: str, tool_calls: Iterable[ToolCallDelta]) -> None:
    """Append to a delta of one choice, whose reasoning is not set yet."""
    if reasoning:
        into.reasoning = reasoning
    if tool_calls:
        into.tool_calls.extend(map(_to_tool_call_delta, tool_calls))


def to_session_parsed(
    slot: int, choice: int, reasoning: str, tool_calls: Iterable[ToolCallDelta]
) -> router_pb2.SessionParsed:
    """The side message."""
    return router_pb2.SessionParsed(
        slot=slot, choice=choice, reasoning=reasoning, tool_calls=map(_to_tool_call_delta, tool_calls)
    )


def from_session_parsed(message: router_pb2.SessionParsed) -> Parsed:
    """What of an answer was parsed."""
    return Parsed("", message.reasoning, tuple(map(_from_tool_call_delta, message.tool_calls)))


def _to_tool_call_delta(delta: ToolCallDelta) -> router_pb2.ToolCallDelta:
    return router_pb2.ToolCallDelta(
        index=delta.index, id=delta.id, name=delta.name, arguments=delta.arguments, is_complete=delta.is_complete
    )


def _from_tool_call_delta(message: router_pb2.ToolCallDelta) -> ToolCallDelta:
    return ToolCallDelta(message.index, message.id, message.name, message.arguments, message.is_complete)


def _put_delta(into: router_pb2.Delta, delta: Delta) -> None:
    into.choice = delta.choice
    into.token_offset = delta.token_offset
    put_delta(into, delta.token_ids, delta.text, delta.logprobs)
    put_parsed(into, delta.reasoning, delta.tool_calls)


def _from_delta(message: router_pb2.Delta) -> Delta:
    return Delta(
        choice=message.choice,
        token_offset=message.token_offset,
        token_ids=tuple(message.token_ids),
        text=message.text,
        logprobs=tuple(from_token_logprobs(entry) for entry in message.logprobs),
        reasoning=message.reasoning,
        tool_calls=tuple(map(_from_tool_call_delta, message.tool_calls)) if message.tool_calls else (),
    )


def put_choice_finished(into: router_pb2.ChoiceFinished, finished: ChoiceFinished) -> None:
    """Set ``into``, which is empty."""
    into.choice = finished.choice
    into.reason = to_finish_reason(finished.reason)
    if finished.stop_string is not None:
        into.stop_string = finished.stop_string
    used, usage = into.usage, finished.usage
    used.num_prompt_tokens = usage.num_prompt_tokens
    used.num_cached_tokens = usage.num_cached_tokens
    used.num_output_tokens = usage.num_output_tokens
    used.num_attempts = usage.num_attempts
    used.num_media_tokens = usage.num_media_tokens
    used.num_evicted_tokens = usage.num_evicted_tokens
    _put_time_breakdown(into.time, finished.time)


def from_choice_finished(message: router_pb2.ChoiceFinished) -> ChoiceFinished:
    """How a choice ended. Raises ``ProtocolError`` for a reason that is none."""
    return ChoiceFinished(
        choice=message.choice,
        reason=from_finish_reason(message.reason),
        stop_string=message.stop_string or None,
        usage=_from_usage(message.usage),
        time=_from_time_breakdown(message.time),
    )


def _from_usage(message: router_pb2.Usage) -> Usage:
    return Usage(
        num_prompt_tokens=message.num_prompt_tokens,
        num_cached_tokens=message.num_cached_tokens,
        num_output_tokens=message.num_output_tokens,
        num_attempts=message.num_attempts,
        num_media_tokens=message.num_media_tokens,
        num_evicted_tokens=message.num_evicted_tokens,
    )


def _put_time_breakdown(into: router_pb2.TimeBreakdown, time: TimeBreakdown) -> None:
    into.SetInParent()
    spent = vars(time)
    for ours, theirs in _TIMES.items():
        seconds = spent[ours]
        if seconds is not None:
            put_duration(getattr(into, theirs), seconds)
    if time.transfer_bytes:
        into.transfer_bytes = time.transfer_bytes
        into.transfer_way = to_transfer_way(time.transfer_way)


def _from_time_breakdown(message: router_pb2.TimeBreakdown) -> TimeBreakdown:
    spent = {ours: theirs for ours, theirs in _TIMES.items() if message.HasField(theirs)}  # type: ignore[arg-type]
    return TimeBreakdown(
        **{ours: to_seconds(getattr(message, theirs)) for ours, theirs in spent.items()},
        transfer_bytes=message.transfer_bytes,
        transfer_way=from_transfer_way(message.transfer_way),
    )


def from_generate_request(message: router_pb2.GenerateRequest) -> tuple[AskedStart, Resume | None]:
    """The request and what it resumes, of a message with a start.

    Raises:
        InvalidRequestError: ``field`` is its path within ``resume``.
    """
    return UnreadStart(message.start), from_resume(message.resume) if message.HasField("resume") else None


# A session's messages: starts up; columns and side messages down.


def from_session_start(message: pb.SessionStart) -> SessionStart:
    """The request. Raises ``InvalidRequestError``; ``field`` is its path within ``start``, or ``resume``'s."""
    return SessionStart(
        slot=message.slot,
        start=UnreadStart(message.start),
        resume=from_resume(message.resume) if message.HasField("resume") else None,
        traceparent=message.traceparent,
        relayed=_from_relayed(message) if _is_relayed(message) else None,
    )


def to_session_start(
    slot: int, start: pb.GenerateStart, resume: Resume | None, traceparent: str, relayed: Relayed
) -> pb.SessionStart:
    """The message of a request that a router over several pools relays."""
    return pb.SessionStart(
        slot=slot,
        start=start,
        resume=None if resume is None else to_resume(resume),
        traceparent=traceparent,
        prefill_namespaces=relayed.prefill_namespaces,
        request_id=relayed.request_id,
        sent_at_unix_ns=relayed.sent_at_unix_ns,
    )


def _is_relayed(message: pb.SessionStart) -> bool:
    return bool(message.request_id or message.prefill_namespaces or message.sent_at_unix_ns)


def _from_relayed(message: pb.SessionStart | pb.PlaceRequest) -> Relayed:
    relayed = Relayed(
        request_id=message.request_id,
        prefill_namespaces=tuple(message.prefill_namespaces),
        sent_at_unix_ns=message.sent_at_unix_ns,
    )
    check_relayed(relayed)
    return relayed


def start_slot(head: bytes) -> int | None:
    """The slot of a ``SessionRequest`` that holds a start and begins with ``head``; ``None``: it holds something else.

    As protobuf's writers do, it must have its fields in order: the slot comes first, unless it is 0.
    """
    if head[:1] != _START_TAG:
        return None
    start = 1
    while head[start : start + 1] and head[start] > 127:  # the length of the start
        start += 1
    slot, shift, position = 0, 0, start + 1
    if head[position : position + 1] != _SLOT_TAG:
        return 0
    for byte in head[position + 1 :]:
        slot |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return slot if slot <= _MAX_SLOT else None
    return None


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


def to_session_prompt_logprobs(slot: int, logprobs: PromptLogprobs) -> pb.SessionPromptLogprobs:
    """The side message."""
    message = pb.SessionPromptLogprobs(slot=slot)
    put_prompt_logprobs(message.prompt_logprobs, logprobs)
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


# Place: what is asked of a router, and the placements that it answers with.


def to_place_request(
    start: GenerateStart, resume: Resume | None = None, relayed: Relayed | None = None
) -> router_pb2.PlaceRequest:
    """The message. Raises ``InvalidRequestError`` for what it can't hold; ``field`` is its path within ``start``."""
    return router_pb2.PlaceRequest(
        start=to_generate_start(start),
        resume=None if resume is None else to_resume(resume),
        prefill_namespaces=() if relayed is None else relayed.prefill_namespaces,
        request_id="" if relayed is None else relayed.request_id,
        sent_at_unix_ns=0 if relayed is None else relayed.sent_at_unix_ns,
    )


def from_place_request(message: router_pb2.PlaceRequest) -> tuple[AskedStart, Resume | None, Relayed]:
    """The request, what it resumes, and what a router over several pools said beside.

    Raises ``InvalidRequestError``; ``field`` is its path within ``start``.
    """
    if not message.HasField("start"):
        raise InvalidRequestError("start is missing", field="start")
    resume = from_resume(message.resume) if message.HasField("resume") else None
    return UnreadStart(message.start), resume, _from_relayed(message)


def to_place_response(placed: PlacedRequest, sent_at_unix_ns: int = 0) -> router_pb2.PlaceResponse:
    """The message; ``sent_at_unix_ns`` is now, or 0 if its sender does not trace the request."""
    return router_pb2.PlaceResponse(
        request_id=placed.request_id,
        attempt=placed.attempt,
        seed=placed.seed,
        num_prompt_tokens=placed.num_prompt_tokens,
        choices=map(_to_placed_choice, placed.choices),
        model=placed.model,
        model_fingerprint=placed.model_fingerprint,
        prompt_tail_token_ids=placed.prompt_tail_token_ids,
        tokenize=to_duration(placed.tokenize_s),
        parsing=None if placed.parsing is None else router_pb2.OutputParsing(**vars(placed.parsing)),
        sent_at_unix_ns=sent_at_unix_ns,
    )


def from_place_response(message: router_pb2.PlaceResponse) -> PlacedRequest:
    """What a router placed. Raises ``ProtocolError`` where that is impossible."""
    return PlacedRequest(
        request_id=message.request_id,
        attempt=message.attempt,
        seed=message.seed,
        num_prompt_tokens=message.num_prompt_tokens,
        choices=tuple(map(_from_placed_choice, message.choices)),
        model=message.model,
        model_fingerprint=message.model_fingerprint,
        prompt_tail_token_ids=tuple(message.prompt_tail_token_ids),
        tokenize_s=to_seconds(message.tokenize),
        parsing=_from_parsing(message.parsing) if message.HasField("parsing") else None,
        sent_at_unix_ns=message.sent_at_unix_ns,
    )


def _from_parsing(message: router_pb2.OutputParsing) -> PlacedParsing:
    return PlacedParsing(
        reasoning_parser=message.reasoning_parser,
        tool_call_parser=message.tool_call_parser,
        prompt_end=message.prompt_end,
    )


def _to_placed_choice(placed: PlacedChoice) -> router_pb2.PlacedChoice:
    message = router_pb2.PlacedChoice(
        choice=placed.choice,
        token_ids=placed.token_ids,
        logprobs=map(to_token_logprobs, placed.logprobs),
        num_cached_tokens=placed.num_cached_tokens,
        num_attempts=placed.num_attempts,
    )
    if placed.placement is not None:
        put_choice_placement(message.placement, placed.placement)
    if placed.router_queue_s is not None:
        put_duration(message.router_queue, placed.router_queue_s)
    if placed.prefill_s is not None:
        put_duration(message.prefill, placed.prefill_s)
    if placed.prefill_queue_s is not None:
        put_duration(message.prefill_queue, placed.prefill_queue_s)
    if isinstance(placed.next, ChoiceFinished):
        put_choice_finished(message.finished, placed.next)
    else:
        message.stream.address = placed.next.address
        message.stream.signed_start = placed.next.signed_start
        message.stream.key_id = placed.next.key_id
        message.stream.mac = placed.next.mac
    return message


def _from_placed_choice(message: router_pb2.PlacedChoice) -> PlacedChoice:
    return PlacedChoice(
        choice=message.choice,
        placement=from_choice_placement(message.placement) if message.HasField("placement") else None,
        token_ids=tuple(message.token_ids),
        logprobs=tuple(map(from_token_logprobs, message.logprobs)),
        next=_from_next(message),
        num_cached_tokens=message.num_cached_tokens,
        num_attempts=message.num_attempts,
        router_queue_s=to_seconds(message.router_queue) if message.HasField("router_queue") else None,
        prefill_s=to_seconds(message.prefill) if message.HasField("prefill") else None,
        prefill_queue_s=to_seconds(message.prefill_queue) if message.HasField("prefill_queue") else None,
    )


def _from_next(message: router_pb2.PlacedChoice) -> SignedPlacement | ChoiceFinished:
    match message.WhichOneof("next"):
        case "stream":
            stream = message.stream
            return SignedPlacement(
                address=stream.address, signed_start=stream.signed_start, key_id=stream.key_id, mac=stream.mac
            )
        case "finished":
            return from_choice_finished(message.finished)
        case _:
            raise ProtocolError("the router placed a choice nowhere")
