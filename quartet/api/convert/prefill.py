"""Prefills that a router does for another one, to proto and back."""

from __future__ import annotations

from dataclasses import dataclass

from quartet.api.convert.answer import from_rank, put_rank
from quartet.discovery.base import Rank
from quartet.errors import InvalidRequestError
from quartet.streams.convert.messages import from_prefill_result, from_start, put_start, to_prefill_outcome
from quartet.streams.messages import PrefillOutcome, WorkerStart
from quartet.v1 import router_pb2


@dataclass(frozen=True, kw_only=True)
class AskedPrefill:
    """A prompt that another router wants prefilled, for workers of the very same model."""

    model_name: str
    model_fingerprint: str
    start: WorkerStart


@dataclass(frozen=True, kw_only=True)
class PrefilledFor:
    """How that went, and where."""

    outcome: PrefillOutcome
    rank: Rank


def to_prefill_for_request(asked: AskedPrefill) -> router_pb2.PrefillForRequest:
    """The message."""
    message = router_pb2.PrefillForRequest(model=asked.model_name, model_fingerprint=asked.model_fingerprint)
    put_start(message.start, 0, asked.start)
    return message


def from_prefill_for_request(message: router_pb2.PrefillForRequest) -> AskedPrefill:
    """The prompt. Raises ``InvalidRequestError``; ``field`` is its path."""
    if not message.HasField("start"):
        raise InvalidRequestError("start is missing", field="start")
    start = from_start(message.start)
    if start.media:
        raise InvalidRequestError("prompts with media are prefilled where they are decoded", field="start.media")
    return AskedPrefill(model_name=message.model, model_fingerprint=message.model_fingerprint, start=start)


def to_prefill_for_response(prefilled: PrefilledFor) -> router_pb2.PrefillForResponse:
    """The message."""
    message = router_pb2.PrefillForResponse(result=to_prefill_outcome(prefilled.outcome))
    put_rank(message.rank, prefilled.rank)
    return message


def from_prefill_for_response(message: router_pb2.PrefillForResponse) -> PrefilledFor:
    """What a router answered. Raises ``ProtocolError`` or ``InvalidRequestError`` for an impossible message."""
    return PrefilledFor(outcome=from_prefill_result(message.result), rank=from_rank(message.rank))
