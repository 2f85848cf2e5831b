"""Explain: what a router says of a request's places; what makes no sense raises ``ProtocolError``."""

from __future__ import annotations

from quartet.errors import InvalidRequestError
from quartet.rpc.convert.edge_answer import from_place, put_place
from quartet.rpc.convert.edge_start import from_generate_start, to_generate_start
from quartet.rpc.convert.workers import from_worker_role, to_worker_role
from quartet.rpc.durations import to_duration, to_seconds
from quartet.rpc.edge import GenerateStart
from quartet.rpc.explanation import Explanation, PlaceOption
from quartet.v1 import router_pb2


def to_explain_request(start: GenerateStart) -> router_pb2.ExplainRequest:
    """The message. Raises ``InvalidRequestError`` for what it can't hold; ``field`` is its path within ``start``."""
    return router_pb2.ExplainRequest(start=to_generate_start(start))


def from_explain_request(message: router_pb2.ExplainRequest) -> GenerateStart:
    """The request. Raises ``InvalidRequestError``; ``field`` is its path within ``start``."""
    if not message.HasField("start"):
        raise InvalidRequestError("start is missing", field="start")
    return from_generate_start(message.start)


def to_explain_response(explanation: Explanation) -> router_pb2.ExplainResponse:
    """The message."""
    return router_pb2.ExplainResponse(
        policy=explanation.policy,
        model=explanation.model,
        model_fingerprint=explanation.model_fingerprint,
        num_prompt_tokens=explanation.num_prompt_tokens,
        num_waiting=explanation.num_waiting,
        options=map(_to_place_option, explanation.options),
        wait=None if explanation.wait_s is None else to_duration(explanation.wait_s),
    )


def from_explain_response(message: router_pb2.ExplainResponse) -> Explanation:
    """What a router explained. Raises ``ProtocolError`` for a role that is none."""
    return Explanation(
        policy=message.policy,
        model=message.model,
        model_fingerprint=message.model_fingerprint,
        num_prompt_tokens=message.num_prompt_tokens,
        num_waiting=message.num_waiting,
        options=tuple(map(_from_place_option, message.options)),
        wait_s=to_seconds(message.wait) if message.HasField("wait") else None,
    )


def _to_place_option(option: PlaceOption) -> router_pb2.PlaceOption:
    message = router_pb2.PlaceOption(
        role=to_worker_role(option.role),
        is_chosen=option.is_chosen,
        num_matched_tokens=option.num_matched_tokens,
        cost=option.cost,
        cost_unit=option.cost_unit,
        terms=option.terms,
        obstacle=option.obstacle,
    )
    put_place(message.place, option.place)
    return message


def _from_place_option(message: router_pb2.PlaceOption) -> PlaceOption:
    return PlaceOption(
        place=from_place(message.place),
        role=from_worker_role(message.role),
        is_chosen=message.is_chosen,
        num_matched_tokens=message.num_matched_tokens,
        cost=message.cost if message.HasField("cost") else None,
        cost_unit=message.cost_unit,
        terms=dict(message.terms),
        obstacle=message.obstacle,
    )
