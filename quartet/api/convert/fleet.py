"""A router's workers and models to proto and back; an impossible message raises ``ProtocolError``."""

from __future__ import annotations

from dataclasses import asdict

from quartet.api.convert.answer import from_rank, put_rank
from quartet.api.convert.request import to_generate_start
from quartet.api.convert.unread import UnreadStart
from quartet.api.fleet import Explanation, FleetTotals, Model, RankOption, WorkerState, WorkerStatus
from quartet.api.request import AskedStart, GenerateStart
from quartet.errors import InvalidRequestError, ProtocolError
from quartet.events.wire import from_worker_load, to_worker_load
from quartet.rpc.errors import to_duration, to_seconds
from quartet.streams.convert.workers import (
    from_worker_record,
    from_worker_role,
    get_fields,
    read_fields,
    same_fields,
    to_worker_record,
    to_worker_role,
)
from quartet.v1 import router_pb2

_STATES = {
    WorkerState.JOINING: router_pb2.WORKER_STATE_JOINING,
    WorkerState.READY: router_pb2.WORKER_STATE_READY,
    WorkerState.SUSPECT: router_pb2.WORKER_STATE_SUSPECT,
    WorkerState.DRAINING: router_pb2.WORKER_STATE_DRAINING,
    WorkerState.INCOMPATIBLE: router_pb2.WORKER_STATE_INCOMPATIBLE,
}

_STATES_BACK = {number: state for state, number in _STATES.items()}

_MODEL, _EXPLANATION, _OPTION, _TOTALS = map(same_fields, (Model, Explanation, RankOption, FleetTotals))


def to_worker_status(status: WorkerStatus) -> router_pb2.WorkerStatus:
    """The message."""
    return router_pb2.WorkerStatus(
        record=to_worker_record(status.record),
        state=_STATES[status.state],
        load=None if status.load is None else to_worker_load(status.load),
        load_age=None if status.load_age_s is None else to_duration(status.load_age_s),
        num_requests=status.num_requests,
    )


def from_worker_status(message: router_pb2.WorkerStatus) -> WorkerStatus:
    """A worker as the router sees it."""
    state = _STATES_BACK.get(message.state)
    if state is None:
        raise ProtocolError(f"{message.state} is no state of a worker")
    return WorkerStatus(
        record=from_worker_record(message.record),
        state=state,
        load=from_worker_load(message.load) if message.HasField("load") else None,
        load_age_s=to_seconds(message.load_age) if message.HasField("load_age") else None,
        num_requests=message.num_requests,
    )


def to_fleet_totals(totals: FleetTotals) -> router_pb2.FleetTotals:
    """The message."""
    return router_pb2.FleetTotals(**asdict(totals))


def from_fleet_totals(message: router_pb2.FleetTotals) -> FleetTotals:
    """What a router has counted."""
    return FleetTotals(
        **read_fields(message, _TOTALS),
        outcomes=dict(message.outcomes),
        ttft_bounds_s=tuple(message.ttft_bounds_s),
        ttft_counts=tuple(message.ttft_counts),
    )


def to_model(model: Model) -> router_pb2.Model:
    """The message."""
    return router_pb2.Model(**asdict(model))


def from_model(message: router_pb2.Model) -> Model:
    """A model and its pool."""
    return Model(**read_fields(message, _MODEL))


# Explain.


def to_explain_request(start: GenerateStart) -> router_pb2.ExplainRequest:
    """The message. Raises ``InvalidRequestError`` for what it can't hold; ``field`` is its path within ``start``."""
    return router_pb2.ExplainRequest(start=to_generate_start(start))


def from_explain_request(message: router_pb2.ExplainRequest) -> AskedStart:
    """The request. Raises ``InvalidRequestError``; ``field`` is its path within ``start``."""
    if not message.HasField("start"):
        raise InvalidRequestError("start is missing", field="start")
    return UnreadStart(message.start)


def to_explain_response(explanation: Explanation) -> router_pb2.ExplainResponse:
    """The message."""
    return router_pb2.ExplainResponse(
        **get_fields(explanation, _EXPLANATION),
        options=map(_to_rank_option, explanation.options),
        wait=None if explanation.wait_s is None else to_duration(explanation.wait_s),
    )


def from_explain_response(message: router_pb2.ExplainResponse) -> Explanation:
    """What a router explained. Raises ``ProtocolError`` for a role that is none."""
    return Explanation(
        **read_fields(message, _EXPLANATION),
        options=tuple(map(_from_rank_option, message.options)),
        wait_s=to_seconds(message.wait) if message.HasField("wait") else None,
    )


def _to_rank_option(option: RankOption) -> router_pb2.RankOption:
    message = router_pb2.RankOption(
        **get_fields(option, _OPTION), role=to_worker_role(option.role), cost=option.cost, terms=option.terms
    )
    put_rank(message.rank, option.rank)
    return message


def _from_rank_option(message: router_pb2.RankOption) -> RankOption:
    return RankOption(
        rank=from_rank(message.rank),
        role=from_worker_role(message.role),
        **read_fields(message, _OPTION),
        cost=message.cost if message.HasField("cost") else None,
        terms=dict(message.terms),
    )
