"""What a router answers, from its messages; fields that make no sense raise ``ProtocolError``."""

from __future__ import annotations

from dataclasses import fields

from google.protobuf.duration_pb2 import Duration

from quartet.client.events import (
    Accepted,
    ChoicePlacement,
    Delta,
    Event,
    Finished,
    FinishReason,
    Model,
    TimeBreakdown,
    Usage,
    WorkerState,
    WorkerStatus,
)
from quartet.errors import ProtocolError
from quartet.events.wire import from_worker_load
from quartet.rpc import convert
from quartet.rpc.durations import to_seconds
from quartet.v1 import router_pb2, types_pb2

_FINISH_REASONS = {
    types_pb2.FINISH_REASON_STOP_ID: FinishReason.STOP_ID,
    types_pb2.FINISH_REASON_STOP_STRING: FinishReason.STOP_STRING,
    types_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    types_pb2.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
}
_WORKER_STATES = {
    router_pb2.WORKER_STATE_JOINING: WorkerState.JOINING,
    router_pb2.WORKER_STATE_READY: WorkerState.READY,
    router_pb2.WORKER_STATE_SUSPECT: WorkerState.SUSPECT,
    router_pb2.WORKER_STATE_DRAINING: WorkerState.DRAINING,
}


def from_generate_response(message: router_pb2.GenerateResponse, router: str) -> Event:
    """The event that ``message`` of the router at ``router`` tells."""
    match message.WhichOneof("message"):
        case "accepted":
            return _from_accepted(message.accepted, router)
        case "delta":
            return _from_delta(message.delta)
        case "finished":
            return _from_finished(message.finished)
        case _:
            raise ProtocolError("the router sent a message that says nothing")


def from_worker_status(message: router_pb2.WorkerStatus) -> WorkerStatus:
    """A worker as the router sees it."""
    state = _WORKER_STATES.get(message.state)
    if state is None:
        raise ProtocolError(f"{message.state} is no state of a worker")
    return WorkerStatus(
        record=convert.from_worker_record(message.record),
        state=state,
        load=from_worker_load(message.load) if message.HasField("load") else None,
        load_age_s=to_seconds(message.load_age),
        num_requests=message.num_requests,
    )


def from_model(message: router_pb2.Model) -> Model:
    """A model and its pool."""
    return Model(
        name=message.name,
        fingerprint=message.fingerprint,
        max_model_len=message.max_model_len,
        num_prefill_workers=message.num_prefill_workers,
        num_decode_workers=message.num_decode_workers,
        sampling_fields=tuple(message.sampling_fields),
        media=tuple(message.media),
        adapters=tuple(message.adapters),
        has_chat_template=message.has_chat_template,
    )


def _from_accepted(message: router_pb2.Accepted, router: str) -> Accepted:
    return Accepted(
        request_id=message.request_id,
        placements=tuple(_from_placement(placement) for placement in message.choices),
        num_prompt_tokens=message.num_prompt_tokens,
        seed=message.seed,
        router=router,
    )


def _from_placement(message: router_pb2.ChoicePlacement) -> ChoicePlacement:
    return ChoicePlacement(
        choice=message.choice,
        prefill_worker_id=message.prefill.worker_id if message.HasField("prefill") else None,
        decode_worker_id=message.decode.worker_id,
        num_matched_tokens=message.num_matched_tokens,
    )


def _from_delta(message: router_pb2.Delta) -> Delta:
    return Delta(
        choice=message.choice,
        token_offset=message.token_offset,
        token_ids=tuple(message.token_ids),
        text=message.text,
        logprobs=tuple(convert.from_token_logprobs(entry) for entry in message.logprobs),
    )


def _from_finished(message: router_pb2.ChoiceFinished) -> Finished:
    reason = _FINISH_REASONS.get(message.reason)
    if reason is None:
        raise ProtocolError(f"{message.reason} is no reason for which a choice ends")
    return Finished(
        choice=message.choice,
        reason=reason,
        stop_string=message.stop_string or None,
        usage=Usage(
            num_prompt_tokens=message.usage.num_prompt_tokens,
            num_cached_tokens=message.usage.num_cached_tokens,
            num_output_tokens=message.usage.num_output_tokens,
            num_attempts=message.usage.num_attempts,
        ),
        time=_from_time(message.time),
    )


def _from_time(message: router_pb2.TimeBreakdown) -> TimeBreakdown:
    # The fields are the message's, with the unit in the name.
    names = [item.name.removesuffix("_s") for item in fields(TimeBreakdown)]
    spent: dict[str, Duration] = {name: getattr(message, name) for name in names if message.HasField(name)}  # type: ignore[arg-type]
    return TimeBreakdown(**{f"{name}_s": to_seconds(duration) for name, duration in spent.items()})
