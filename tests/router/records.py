"""Workers for tests."""

from __future__ import annotations

from dataclasses import replace

from quartet.discovery.base import HostIdentity, Role, WorkerRecord
from quartet.events.load import RankLoad, WorkerLoad

ALL_SAMPLING_FIELDS = (
    "seed",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "max_tokens",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
    "num_prompt_logprobs",
)

_RECORD = WorkerRecord(
    worker_id="decode-0",
    role=Role.DECODE,
    epoch=1,
    grpc_address="127.0.0.1:50051",
    events_address="tcp://127.0.0.1:50052",
    model_name="tiny",
    model_fingerprint="ab" * 32,
    host=HostIdentity(boot_id="boot", ipc_namespace="ipc:[1]"),
    num_blocks=100,
    block_size=10,
    max_model_len=2000,
    transfer_ways=("grpc",),
    sampling_fields=ALL_SAMPLING_FIELDS,
    contract_version="quartet.v1",
)


def make_record(worker_id: str = "decode-0", **changes: object) -> WorkerRecord:
    """A worker's record; its role is the beginning of its id unless given."""
    role = Role(worker_id.split("-", maxsplit=1)[0]) if "role" not in changes else changes["role"]
    return replace(_RECORD, worker_id=worker_id, **{**changes, "role": role})


def make_load(record: WorkerRecord, *, router_progress: dict[str, int] | None = None, **changes: object) -> WorkerLoad:
    """A load report of ``record``'s worker; ``changes`` are to its ranks or, where it has them, to itself."""
    own = {name: changes.pop(name) for name in ("is_draining", "is_healthy", "placements") if name in changes}
    rank = RankLoad(num_total_blocks=record.num_blocks, **changes)
    return WorkerLoad(
        worker_id=record.worker_id,
        epoch=record.epoch,
        ranks=(rank,) * record.data_parallel_size,
        router_progress=router_progress or {},
        **own,
    )
