"""Workers: what they announce, where they run, how loaded they are."""

from __future__ import annotations

from collections.abc import Iterable

from quartet.discovery.base import HostIdentity, Role, WorkerRecord
from quartet.engine.base import EngineStats
from quartet.errors import ProtocolError
from quartet.events.load import RankLoad
from quartet.transfer.base import TransferWay
from quartet.v1 import transfer_pb2, worker_pb2

# Routers announce no WorkerRecord.
_ROLES = {
    Role.ENCODE: worker_pb2.WORKER_ROLE_ENCODE,
    Role.PREFILL: worker_pb2.WORKER_ROLE_PREFILL,
    Role.DECODE: worker_pb2.WORKER_ROLE_DECODE,
}
_ROLES_BACK = {number: role for role, number in _ROLES.items()}

_WAYS = {
    TransferWay.GRPC: transfer_pb2.TRANSFER_WAY_GRPC,
    TransferWay.SHM: transfer_pb2.TRANSFER_WAY_SHM,
    TransferWay.CUDA_IPC: transfer_pb2.TRANSFER_WAY_CUDA_IPC,
    TransferWay.NIXL: transfer_pb2.TRANSFER_WAY_NIXL,
}
_WAYS_BACK = {number: way for way, number in _WAYS.items()}


def to_worker_role(role: Role) -> worker_pb2.WorkerRole.ValueType:
    """The enum's value, unspecified for a router."""
    return _ROLES.get(role, worker_pb2.WORKER_ROLE_UNSPECIFIED)


def from_worker_role(value: worker_pb2.WorkerRole.ValueType) -> Role:
    """The role. Raises ``ProtocolError`` for one that is unknown here."""
    role = _ROLES_BACK.get(value)
    if role is None:
        raise ProtocolError(f"unknown worker role {value}")
    return role


def to_transfer_ways(ways: Iterable[str]) -> list[transfer_pb2.TransferWay.ValueType]:
    """The enum's values, in order; names that only newer versions know are left out."""
    return [_WAYS[TransferWay(way)] for way in ways if way in _WAYS]


def from_transfer_ways(values: Iterable[transfer_pb2.TransferWay.ValueType]) -> tuple[TransferWay, ...]:
    """The ways, in order; values that only newer versions know are left out."""
    return tuple(_WAYS_BACK[value] for value in values if value in _WAYS_BACK)


def to_host_identity(host: HostIdentity) -> transfer_pb2.HostIdentity:
    """The message."""
    return transfer_pb2.HostIdentity(boot_id=host.boot_id, ipc_namespace=host.ipc_namespace)


def from_host_identity(message: transfer_pb2.HostIdentity) -> HostIdentity:
    """The identity."""
    return HostIdentity(boot_id=message.boot_id, ipc_namespace=message.ipc_namespace)


def to_worker_record(record: WorkerRecord) -> worker_pb2.WorkerRecord:
    """The message."""
    return worker_pb2.WorkerRecord(
        worker_id=record.worker_id,
        role=to_worker_role(record.role),
        epoch=record.epoch,
        grpc_address=record.grpc_address,
        events_address=record.events_address,
        http_address=record.http_address,
        model_name=record.model_name,
        model_fingerprint=record.model_fingerprint,
        host=to_host_identity(record.host),
        data_parallel_size=record.data_parallel_size,
        num_blocks=record.num_blocks,
        block_size=record.block_size,
        max_model_len=record.max_model_len,
        transfer_ways=to_transfer_ways(record.transfer_ways),
        sampling_fields=record.sampling_fields,
        media=record.media,
        adapters=record.adapters,
        contract_version=record.contract_version,
        max_media_tokens=record.max_media_tokens,
    )


def from_worker_record(message: worker_pb2.WorkerRecord) -> WorkerRecord:
    """The record. Raises ``ProtocolError`` where it is impossible."""
    try:
        return WorkerRecord(
            worker_id=message.worker_id,
            role=from_worker_role(message.role),
            epoch=message.epoch,
            grpc_address=message.grpc_address,
            events_address=message.events_address,
            http_address=message.http_address,
            model_name=message.model_name,
            model_fingerprint=message.model_fingerprint,
            host=from_host_identity(message.host),
            data_parallel_size=message.data_parallel_size,
            num_blocks=message.num_blocks,
            block_size=message.block_size,
            max_model_len=message.max_model_len,
            transfer_ways=from_transfer_ways(message.transfer_ways),
            sampling_fields=tuple(message.sampling_fields),
            media=tuple(message.media),
            adapters=tuple(message.adapters),
            contract_version=message.contract_version,
            max_media_tokens=message.max_media_tokens,
        )
    except ValueError as error:
        raise ProtocolError(f"the worker record is impossible: {error}") from error


def rank_load(stats: EngineStats, now: float) -> RankLoad:
    """What a worker reports of one data-parallel rank: the part of its engine's figures that routers want.

    ``now`` is in monotonic seconds, like those figures.
    """
    return RankLoad(
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_queued_prefill_tokens=stats.num_queued_prefill_tokens,
        num_unbegun_prefill_tokens=stats.num_unbegun_prefill_tokens,
        step_ends_in_s=max(stats.step_ends_at - now, 0.0) if stats.step_ends_at else 0.0,
        num_decoding=stats.num_decoding,
        num_context_tokens=stats.num_context_tokens,
        max_step_tokens=stats.max_step_tokens,
        step_time=stats.step_time,
        num_in_use_blocks=stats.num_in_use_blocks,
        num_held_blocks=stats.num_held_blocks,
        num_cached_blocks=stats.num_cached_blocks,
        num_free_blocks=stats.num_free_blocks,
        num_total_blocks=stats.num_total_blocks,
        num_steps=stats.num_steps,
    )
