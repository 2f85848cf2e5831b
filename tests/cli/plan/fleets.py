"""Workers of a running fleet, as a router lists them, that have measured their steps."""

from __future__ import annotations

from quartet.client import WorkerState, WorkerStatus
from quartet.discovery.base import HostIdentity, Role, WorkerRecord
from quartet.events.load import RankLoad, StepTime, WorkerLoad

MEASURED = StepTime(
    prefill_base_s=0.02,
    prefill_s_per_token=1e-4,
    prefill_s_per_token2=1e-9,
    decode_base_s=0.008,
    decode_s_per_context_token=1e-7,
)


def status(role: Role, number: int, step_time: StepTime | None = MEASURED, **load: int) -> WorkerStatus:
    record = WorkerRecord(
        worker_id=f"{role}-{number}",
        role=role,
        epoch=1,
        grpc_address="127.0.0.1:1",
        events_address="",
        model_name="m",
        host=HostIdentity(boot_id="boot", ipc_namespace="ipc"),
        transfer_ways=(),
        contract_version="1",
        model_fingerprint="f",
        num_blocks=100,
        block_size=16,
        max_model_len=4000,
        sampling_fields=(),
    )
    sizes = {"num_total_blocks": 100, "max_running": 32, "max_step_tokens": 512, **load}
    report = WorkerLoad(worker_id=record.worker_id, epoch=1, ranks=(RankLoad(step_time=step_time, **sizes),))
    return WorkerStatus(record=record, state=WorkerState.READY, load=report, load_age_s=0.0, num_requests=0)
