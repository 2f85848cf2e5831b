"""Frames between workers' PUB and routers' SUB sockets: topic, number (u64 big-endian), protobuf payload."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from math import inf
from operator import attrgetter
from typing import TypeVar

from google.protobuf.message import DecodeError

from quartet.errors import ProtocolError
from quartet.events.bookings import BookedStart, RouterBookings
from quartet.events.kv import Cleared, KvBatch, KvEvent, Removed, Stored, Tier
from quartet.events.load import (
    NumberedLoad,
    OnboardTime,
    PlacementProgress,
    RankCounts,
    RankLoad,
    StepTime,
    TransferTotal,
    WorkerLoad,
)
from quartet.v1 import kv_events_pb2 as pb
from quartet.v1 import transfer_pb2

#: Topic of ``WorkerLoad`` frames.
LOAD_TOPIC = b"load"
#: Topic of ``KvEventBatch`` frames.
KV_TOPIC = b"kv"
#: Topic of ``RouterBookings`` frames.
BOOKINGS_TOPIC = b"bookings"
#: Subscribers refuse a longer frame.
MAX_FRAME_BYTES = 1 << 20
#: And a batch of more events: one event takes as long to read as hundreds of hashes.
MAX_EVENTS = 8192
#: And a load report that is longer, or has more entries: each is read by itself.
MAX_LOAD_BYTES = 1 << 18
#: And bookings that are longer, or name more starts.
MAX_BOOKINGS_BYTES, MAX_BOOKED_STARTS = 1 << 16, 256
#: Ranks that a worker may have, as discovery allows, routers that it may report to, and ways that it may have used.
MAX_RANKS, MAX_ROUTERS, MAX_WAYS = 1024, 4096, 16

_NUM_FRAMES = 3
_NUMBER_BYTES = 8
_NO_PLACEMENTS = PlacementProgress()
# Of a batch's bytes: all that is not events; an event less its hashes; a hash.
_HEAD_BYTES, _EVENT_BYTES, _HASH_BYTES = 1024, 32, 8
_MAX_HASHES = 1 << 16

# The fields that a ``RankLoad`` and its message have under one name and as one type.
_COUNTS = tuple(field.name for field in fields(RankCounts) if field.name not in ("step_time", "onboard_time"))
_counts = attrgetter(*_COUNTS)

MessageT = TypeVar("MessageT", pb.WorkerLoad, pb.KvEventBatch, pb.RouterBookings)

# Names of ways are those of the enumerators, without the prefix and in lower case.
_WAY_PREFIX = "TRANSFER_WAY_"
_WAYS = {name.removeprefix(_WAY_PREFIX).lower(): number for name, number in transfer_pb2.TransferWay.items() if number}
_WAYS_BACK = {number: way for way, number in _WAYS.items()}

_TIERS = {Tier.DEVICE: pb.TIER_DEVICE, Tier.HOST: pb.TIER_HOST, Tier.DISK: pb.TIER_DISK}
_TIERS_BACK = {value: tier for tier, value in _TIERS.items()}


class MalformedFrameError(ProtocolError):
    """What arrived is no message of ours."""


def encode_load(load: WorkerLoad, number: int) -> list[bytes]:
    """The frames of a load report; ``number`` is that of the last ``kv`` frame sent before it.

    A report that readers would refuse for its length, or for the routers in it, says nothing of placements, or, if need
    be, of any router's starts. Routers then keep these booked for longer, but still know the load.
    """
    bare = replace(load, placements={})
    for said in (load, bare, replace(bare, router_progress={}, router_arrivals={})):
        message = to_worker_load(said)
        frames = _frames(LOAD_TOPIC, number, message)
        if sum(map(len, frames)) <= MAX_LOAD_BYTES and len(message.routers) <= MAX_ROUTERS:
            break
    return frames


def decode_load(frames: Sequence[bytes]) -> NumberedLoad:
    """Read the frames of a load report. Raises ``MalformedFrameError``."""
    if sum(map(len, frames)) > MAX_LOAD_BYTES:
        raise MalformedFrameError(f"a load report is longer than {MAX_LOAD_BYTES} bytes")
    number, message = _parse(frames, LOAD_TOPIC, pb.WorkerLoad)
    if len(message.ranks) > MAX_RANKS or len(message.routers) > MAX_ROUTERS or len(message.transfers) > MAX_WAYS:
        most = f"{MAX_RANKS} ranks, {MAX_ROUTERS} routers or {MAX_WAYS} ways"
        raise MalformedFrameError(f"a load report of more than {most}")
    return NumberedLoad(from_worker_load(message), number)


def encode_kv(batch: KvBatch) -> list[bytes]:
    """The frames of a batch, which ``split_events`` has found short enough."""
    message = pb.KvEventBatch(
        worker_id=batch.worker_id,
        epoch=batch.epoch,
        data_parallel_rank=batch.data_parallel_rank,
        events=map(_to_event, batch.events),
    )
    return _frames(KV_TOPIC, batch.number, message)


def decode_kv(frames: Sequence[bytes]) -> KvBatch:
    """Read the frames of a batch. Raises ``MalformedFrameError``."""
    number, message = _parse(frames, KV_TOPIC, pb.KvEventBatch)
    if len(message.events) > MAX_EVENTS:
        raise MalformedFrameError(f"a batch of {len(message.events)} events; at most {MAX_EVENTS} may come in one")
    return KvBatch(
        worker_id=message.worker_id,
        epoch=message.epoch,
        number=number,
        data_parallel_rank=message.data_parallel_rank,
        events=[_from_event(event) for event in message.events],
    )


def encode_bookings(bookings: RouterBookings, number: int) -> list[bytes]:
    """The frames of a router's bookings, of at most ``MAX_BOOKED_STARTS`` starts."""
    message = pb.RouterBookings(router_id=bookings.router_id, starts=map(_to_booked_start, bookings.starts))
    return _frames(BOOKINGS_TOPIC, number, message)


def decode_bookings(frames: Sequence[bytes]) -> RouterBookings:
    """Read the frames of a router's bookings. Raises ``MalformedFrameError``."""
    if sum(map(len, frames)) > MAX_BOOKINGS_BYTES:
        raise MalformedFrameError(f"bookings are longer than {MAX_BOOKINGS_BYTES} bytes")
    _number, message = _parse(frames, BOOKINGS_TOPIC, pb.RouterBookings)
    if not 0 < len(message.starts) <= MAX_BOOKED_STARTS:
        raise MalformedFrameError(f"bookings of {len(message.starts)} starts")
    return RouterBookings(message.router_id, list(map(_from_booked_start, message.starts)))


def split_events(events: Sequence[KvEvent]) -> Iterator[Sequence[KvEvent]]:
    """The same changes in as many batches, in order, as the bounds of a batch make it."""
    part: list[KvEvent] = []
    num_bytes_left = MAX_FRAME_BYTES - _HEAD_BYTES
    for event in _short_events(events):
        size_bytes = _size_bytes(event)
        if size_bytes > num_bytes_left or len(part) == MAX_EVENTS:
            yield part
            part, num_bytes_left = [], MAX_FRAME_BYTES - _HEAD_BYTES
        part.append(event)
        num_bytes_left -= size_bytes
    if part:
        yield part


def to_tier(tier: Tier) -> pb.Tier.ValueType:
    """The enum's value."""
    return _TIERS[tier]


def from_tier(value: pb.Tier.ValueType) -> Tier:
    """The tier. Raises ``MalformedFrameError`` for one that is unknown here."""
    tier = _TIERS_BACK.get(value)
    if tier is None:
        raise MalformedFrameError(f"unknown tier {value}")
    return tier


def to_worker_load(load: WorkerLoad) -> pb.WorkerLoad:
    """``load`` as a message."""
    return pb.WorkerLoad(
        worker_id=load.worker_id,
        epoch=load.epoch,
        ranks=map(_to_rank_load, load.ranks),
        routers=map(
            partial(_to_router_progress, load), {**load.router_progress, **load.router_arrivals, **load.placements}
        ),
        is_draining=load.is_draining,
        is_healthy=load.is_healthy,
        transfers=map(_to_transfer_total, load.transfers),
    )


def from_worker_load(message: pb.WorkerLoad) -> WorkerLoad:
    """The report that ``message`` holds."""
    progress: dict[str, int] = {}
    arrivals: dict[str, int] = {}
    placements: dict[str, PlacementProgress] = {}
    for entry in message.routers:
        progress[entry.router_id] = entry.router_request_number
        if entry.arrived_request_number:
            arrivals[entry.router_id] = entry.arrived_request_number
        if entry.started_placements or entry.ended_placements:
            placed = PlacementProgress(
                tuple(entry.started_placements), tuple(entry.ended_placements), tuple(entry.ended_output_tokens)
            )
            placements[entry.router_id] = placed
    return WorkerLoad(
        worker_id=message.worker_id,
        epoch=message.epoch,
        ranks=tuple(map(_from_rank_load, message.ranks)),
        router_progress=progress,
        router_arrivals=arrivals,
        placements=placements,
        is_draining=message.is_draining,
        is_healthy=message.is_healthy,
        transfers=tuple(_from_transfer_total(total) for total in message.transfers if total.way in _WAYS_BACK),
    )


def _to_transfer_total(total: TransferTotal) -> pb.TransferTotal:
    return pb.TransferTotal(way=_WAYS[total.way], size_bytes=total.size_bytes, duration_s=total.duration_s)


def _from_transfer_total(message: pb.TransferTotal) -> TransferTotal:
    return TransferTotal(_WAYS_BACK[message.way], message.size_bytes, _seconds(message.duration_s))


def _to_router_progress(load: WorkerLoad, router_id: str) -> pb.RouterProgress:
    placements = load.placements.get(router_id, _NO_PLACEMENTS)
    return pb.RouterProgress(
        router_id=router_id,
        router_request_number=load.router_progress.get(router_id, 0),
        started_placements=placements.started,
        ended_placements=placements.ended,
        ended_output_tokens=placements.num_output_tokens,
        arrived_request_number=load.router_arrivals.get(router_id, 0),
    )


def _to_rank_load(rank: RankLoad) -> pb.RankLoad:
    return pb.RankLoad(
        **dict(zip(_COUNTS, _counts(rank), strict=True)),
        step_ends_in_s=rank.step_ends_in_s,
        step_time=None if rank.step_time is None else pb.StepTime(**asdict(rank.step_time)),
        onboard_time=None if rank.onboard_time is None else pb.OnboardTime(**asdict(rank.onboard_time)),
    )


def _from_rank_load(message: pb.RankLoad) -> RankLoad:
    return RankLoad(
        **dict(zip(_COUNTS, _counts(message), strict=True)),
        step_ends_in_s=_seconds(message.step_ends_in_s),
        step_time=_step_time(message.step_time) if message.HasField("step_time") else None,
        onboard_time=_onboard_time(message.onboard_time) if message.HasField("onboard_time") else None,
    )


def _step_time(message: pb.StepTime) -> StepTime:
    return StepTime(**{field.name: _seconds(getattr(message, field.name)) for field in fields(StepTime)})


def _onboard_time(message: pb.OnboardTime) -> OnboardTime:
    return OnboardTime(**{field.name: _seconds(getattr(message, field.name)) for field in fields(OnboardTime)})


def _seconds(value: float) -> float:
    # A forecast that is no number would spoil all that it is compared with.
    if not 0.0 <= value < inf:
        raise MalformedFrameError(f"{value} are no seconds")
    return value


def _to_booked_start(start: BookedStart) -> pb.BookedStart:
    return pb.BookedStart(
        worker_id=start.worker_id,
        worker_epoch=start.worker_epoch,
        data_parallel_rank=start.data_parallel_rank,
        router_request_number=start.number,
        num_queued_prefill_tokens=start.num_queued_tokens,
        num_reserved_blocks=start.num_reserved_blocks,
    )


def _from_booked_start(message: pb.BookedStart) -> BookedStart:
    return BookedStart(
        message.worker_id,
        message.worker_epoch,
        message.data_parallel_rank,
        message.router_request_number,
        message.num_queued_prefill_tokens,
        message.num_reserved_blocks,
    )


def _frames(topic: bytes, number: int, message: pb.WorkerLoad | pb.KvEventBatch | pb.RouterBookings) -> list[bytes]:
    return [topic, number.to_bytes(_NUMBER_BYTES, "big"), message.SerializeToString()]


def _parse(frames: Sequence[bytes], topic: bytes, kind: type[MessageT]) -> tuple[int, MessageT]:
    """Number and payload of the frames of ``topic``."""
    if len(frames) != _NUM_FRAMES or frames[0] != topic or len(frames[1]) != _NUMBER_BYTES:
        raise MalformedFrameError(f"not the frames of topic {topic.decode()}")
    try:
        message = kind.FromString(frames[2])
    except DecodeError as error:
        raise MalformedFrameError(f"the payload is no {kind.DESCRIPTOR.name}") from error
    sender = message.router_id if isinstance(message, pb.RouterBookings) else message.worker_id
    if not sender:
        raise MalformedFrameError(f"the {kind.DESCRIPTOR.name} names no sender")
    return int.from_bytes(frames[1], "big"), message


def _to_event(event: KvEvent) -> pb.KvEvent:
    match event:
        case Stored(parent_hash, sequence_hashes, tier):
            stored = pb.BlocksStored(parent_hash=parent_hash, sequence_hashes=sequence_hashes, tier=_TIERS[tier])
            return pb.KvEvent(stored=stored)
        case Removed(sequence_hashes, tier):
            return pb.KvEvent(removed=pb.BlocksRemoved(sequence_hashes=sequence_hashes, tier=_TIERS[tier]))
        case Cleared():
            return pb.KvEvent(cleared=pb.AllBlocksCleared())


def _from_event(message: pb.KvEvent) -> KvEvent:
    match message.WhichOneof("event"):
        case "stored":
            stored = message.stored
            parent_hash = stored.parent_hash if stored.HasField("parent_hash") else None
            return Stored(parent_hash, _hashes(stored), from_tier(stored.tier))
        case "removed":
            return Removed(_hashes(message.removed), from_tier(message.removed.tier))
        case "cleared":
            return Cleared()
        case _:
            raise MalformedFrameError("an event of an unknown kind")


def _hashes(message: pb.BlocksStored | pb.BlocksRemoved) -> list[int]:
    if not message.sequence_hashes:
        raise MalformedFrameError("an event of no block")
    return list(message.sequence_hashes)


def _size_bytes(event: KvEvent) -> int:
    """Bytes that ``event`` takes in a batch, at most."""
    return _EVENT_BYTES + (0 if isinstance(event, Cleared) else _HASH_BYTES * len(event.sequence_hashes))


def _short_events(events: Iterable[KvEvent]) -> Iterator[KvEvent]:
    """The same changes, none of more than ``_MAX_HASHES`` blocks."""
    for event in events:
        if isinstance(event, Cleared) or len(event.sequence_hashes) <= _MAX_HASHES:
            yield event
            continue
        hashes = event.sequence_hashes
        for begin in range(0, len(hashes), _MAX_HASHES):
            piece = hashes[begin : begin + _MAX_HASHES]
            if isinstance(event, Stored):
                yield Stored(hashes[begin - 1] if begin else event.parent_hash, piece, event.tier)
            else:
                yield Removed(piece, event.tier)
