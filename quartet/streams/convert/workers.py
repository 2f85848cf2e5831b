"""Workers: what they announce, where they run, how loaded they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, get_type_hints

from google.protobuf.message import Message

from quartet.discovery.base import Role, WorkerRecord
from quartet.engine.base import EngineStats
from quartet.errors import ProtocolError
from quartet.events.load import RankLoad
from quartet.transfer.base import TransferWay
from quartet.transfer.grpc.messages import WAY_FROM_PB, WAY_TO_PB, host_from_pb, host_to_pb
from quartet.v1 import transfer_pb2, worker_pb2

# Routers announce no WorkerRecord.
_ROLES = {
    Role.ENCODE: worker_pb2.WORKER_ROLE_ENCODE,
    Role.PREFILL: worker_pb2.WORKER_ROLE_PREFILL,
    Role.DECODE: worker_pb2.WORKER_ROLE_DECODE,
}
_ROLES_BACK = {number: role for role, number in _ROLES.items()}


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
    return [WAY_TO_PB[TransferWay(way)] for way in ways if way in WAY_TO_PB]


def from_transfer_ways(values: Iterable[transfer_pb2.TransferWay.ValueType]) -> tuple[TransferWay, ...]:
    """The ways, in order; values that only newer versions know are left out."""
    return tuple(WAY_FROM_PB[value] for value in values if value in WAY_FROM_PB)


def to_transfer_way(way: TransferWay | None) -> transfer_pb2.TransferWay.ValueType:
    """The enum's value, unspecified for ``None``."""
    return transfer_pb2.TRANSFER_WAY_UNSPECIFIED if way is None else WAY_TO_PB[way]


def from_transfer_way(value: transfer_pb2.TransferWay.ValueType) -> TransferWay | None:
    """The way; ``None`` where none is said, or one that only newer versions know."""
    return WAY_FROM_PB.get(value)


def same_fields(cls: type) -> Mapping[str, object]:
    """By name, the types of those fields of ``cls`` that its message has alike: text, numbers and lists of text."""
    return {name: kind for name, kind in get_type_hints(cls).items() if kind in (str, int, bool, tuple[str, ...])}


def get_fields(value: object, kinds: Mapping[str, object]) -> dict[str, Any]:
    """The values of these fields, for a message."""
    return {name: getattr(value, name) for name in kinds}


def read_fields(message: Message, kinds: Mapping[str, object]) -> dict[str, Any]:
    """The values of these fields, for a dataclass."""
    return {
        name: tuple(getattr(message, name)) if kind == tuple[str, ...] else getattr(message, name)
        for name, kind in kinds.items()
    }


_SAME = {name: kind for name, kind in same_fields(WorkerRecord).items() if name != "transfer_ways"}


def to_worker_record(record: WorkerRecord) -> worker_pb2.WorkerRecord:
    """The message."""
    return worker_pb2.WorkerRecord(
        **get_fields(record, _SAME),
        role=to_worker_role(record.role),
        host=host_to_pb(record.host),
        transfer_ways=to_transfer_ways(record.transfer_ways),
    )


def from_worker_record(message: worker_pb2.WorkerRecord) -> WorkerRecord:
    """The record. Raises ``ProtocolError`` where it is impossible."""
    try:
        return WorkerRecord(
            **read_fields(message, _SAME),
            role=from_worker_role(message.role),
            host=host_from_pb(message.host),
            transfer_ways=from_transfer_ways(message.transfer_ways),
        )
    except ValueError as error:
        raise ProtocolError(f"the worker record is impossible: {error}") from error


def rank_load(stats: EngineStats, now: float) -> RankLoad:
    """What a worker reports of one data-parallel rank: the part of its engine's figures that routers want.

    ``now`` is in monotonic seconds, like those figures.
    """
    return RankLoad.of(stats, step_ends_in_s=max(stats.step_ends_at - now, 0.0) if stats.step_ends_at else 0.0)
