"""What a router tells of its workers and models; what makes no sense raises ``ProtocolError``."""

from __future__ import annotations

from quartet.errors import ProtocolError
from quartet.events.wire import from_worker_load, to_worker_load
from quartet.rpc.convert.workers import from_worker_record, to_worker_record
from quartet.rpc.durations import to_duration, to_seconds
from quartet.rpc.fleet import Model, WorkerState, WorkerStatus
from quartet.v1 import router_pb2

_STATES = {
    WorkerState.JOINING: router_pb2.WORKER_STATE_JOINING,
    WorkerState.READY: router_pb2.WORKER_STATE_READY,
    WorkerState.SUSPECT: router_pb2.WORKER_STATE_SUSPECT,
    WorkerState.DRAINING: router_pb2.WORKER_STATE_DRAINING,
}
_STATES_BACK = {number: state for state, number in _STATES.items()}


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


def to_model(model: Model) -> router_pb2.Model:
    """The message."""
    return router_pb2.Model(
        name=model.name,
        fingerprint=model.fingerprint,
        max_model_len=model.max_model_len,
        num_prefill_workers=model.num_prefill_workers,
        num_decode_workers=model.num_decode_workers,
        sampling_fields=model.sampling_fields,
        media=model.media,
        adapters=model.adapters,
        has_chat_template=model.has_chat_template,
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
