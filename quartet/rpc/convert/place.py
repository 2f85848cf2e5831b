"""Place: what is asked of a router, and the placements that it answers with."""

from __future__ import annotations

from quartet.errors import InvalidRequestError, ProtocolError
from quartet.rpc.convert.edge_answer import (
    from_choice_finished,
    from_choice_placement,
    put_choice_finished,
    put_choice_placement,
)
from quartet.rpc.convert.edge_start import from_generate_start, to_generate_start
from quartet.rpc.convert.generation import from_token_logprobs, to_token_logprobs
from quartet.rpc.convert.resume import from_resume, to_resume
from quartet.rpc.durations import put_duration, to_duration, to_seconds
from quartet.rpc.edge import ChoiceFinished, GenerateStart, Resume
from quartet.rpc.placement import PlacedChoice, PlacedRequest, SealedPlacement
from quartet.v1 import decode_pb2, router_pb2


def to_place_request(start: GenerateStart, resume: Resume | None = None) -> router_pb2.PlaceRequest:
    """The message. Raises ``InvalidRequestError`` for what it can't hold; ``field`` is its path within ``start``."""
    return router_pb2.PlaceRequest(start=to_generate_start(start), resume=None if resume is None else to_resume(resume))


def from_place_request(message: router_pb2.PlaceRequest) -> tuple[GenerateStart, Resume | None]:
    """The request, and what it resumes. Raises ``InvalidRequestError``; ``field`` is its path within ``start``."""
    if not message.HasField("start"):
        raise InvalidRequestError("start is missing", field="start")
    return from_generate_start(message.start), from_resume(message.resume) if message.HasField("resume") else None


def to_place_response(placed: PlacedRequest) -> router_pb2.PlaceResponse:
    """The message."""
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
    )


def from_place_response(message: router_pb2.PlaceResponse) -> PlacedRequest:
    """What a router placed. Raises ``ProtocolError`` where it makes no sense."""
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
    )


def to_sealed_decode_start(slot: int, sealed: SealedPlacement) -> decode_pb2.SealedDecodeStart:
    """The message that starts at the decode worker what was placed there."""
    return decode_pb2.SealedDecodeStart(
        slot=slot, sealed_start=sealed.sealed_start, key_id=sealed.key_id, mac=sealed.mac
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
        message.stream.sealed_start = placed.next.sealed_start
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


def _from_next(message: router_pb2.PlacedChoice) -> SealedPlacement | ChoiceFinished:
    match message.WhichOneof("next"):
        case "stream":
            stream = message.stream
            return SealedPlacement(
                address=stream.address, sealed_start=stream.sealed_start, key_id=stream.key_id, mac=stream.mac
            )
        case "finished":
            return from_choice_finished(message.finished)
        case _:
            raise ProtocolError("the router placed a choice nowhere")
