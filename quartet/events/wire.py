"""Frames between workers' PUB and routers' SUB sockets: topic, number (u64 big-endian), protobuf payload."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import DecodeError

from quartet.events.load import PlacementProgress, RankLoad, WorkerLoad
from quartet.v1 import kv_events_pb2 as pb

#: Topic of ``WorkerLoad`` frames.
LOAD_TOPIC = b"load"

_NUM_FRAMES = 3
_NUMBER_BYTES = 8
_NO_PLACEMENTS = PlacementProgress()


class MalformedFrameError(Exception):
    """What arrived is no message of ours."""


def encode_load(load: WorkerLoad, number: int) -> list[bytes]:
    """The frames of a load report; ``number`` is that of the last ``kv`` frame sent before it."""
    return [LOAD_TOPIC, number.to_bytes(_NUMBER_BYTES, "big"), to_worker_load(load).SerializeToString()]


def decode_load(frames: Sequence[bytes]) -> WorkerLoad:
    """Read the frames of a load report. Raises ``MalformedFrameError``."""
    if len(frames) != _NUM_FRAMES or frames[0] != LOAD_TOPIC or len(frames[1]) != _NUMBER_BYTES:
        raise MalformedFrameError("not the frames of a load report")
    try:
        message = pb.WorkerLoad.FromString(frames[2])
    except DecodeError as error:
        raise MalformedFrameError("the payload is no WorkerLoad") from error
    if not message.worker_id:
        raise MalformedFrameError("the report names no worker")
    return from_worker_load(message)


def to_worker_load(load: WorkerLoad) -> pb.WorkerLoad:
    """``load`` as a message."""
    return pb.WorkerLoad(
        worker_id=load.worker_id,
        epoch=load.epoch,
        ranks=[_to_rank_load(rank) for rank in load.ranks],
        routers=[_to_router_progress(load, router_id) for router_id in {**load.router_progress, **load.placements}],
        is_draining=load.is_draining,
        is_healthy=load.is_healthy,
    )


def from_worker_load(message: pb.WorkerLoad) -> WorkerLoad:
    """The report that ``message`` holds."""
    return WorkerLoad(
        worker_id=message.worker_id,
        epoch=message.epoch,
        ranks=tuple(_from_rank_load(rank) for rank in message.ranks),
        router_progress={entry.router_id: entry.router_request_number for entry in message.routers},
        placements={
            entry.router_id: PlacementProgress(tuple(entry.started_placements), tuple(entry.ended_placements))
            for entry in message.routers
            if entry.started_placements or entry.ended_placements
        },
        is_draining=message.is_draining,
        is_healthy=message.is_healthy,
    )


def _to_router_progress(load: WorkerLoad, router_id: str) -> pb.RouterProgress:
    placements = load.placements.get(router_id, _NO_PLACEMENTS)
    return pb.RouterProgress(
        router_id=router_id,
        router_request_number=load.router_progress.get(router_id, 0),
        started_placements=placements.started,
        ended_placements=placements.ended,
    )


def _to_rank_load(rank: RankLoad) -> pb.RankLoad:
    return pb.RankLoad(
        num_running=rank.num_running,
        num_waiting=rank.num_waiting,
        num_queued_prefill_tokens=rank.num_queued_prefill_tokens,
        num_in_use_blocks=rank.num_in_use_blocks,
        num_held_blocks=rank.num_held_blocks,
        num_cached_blocks=rank.num_cached_blocks,
        num_free_blocks=rank.num_free_blocks,
        num_total_blocks=rank.num_total_blocks,
        num_steps=rank.num_steps,
    )


def _from_rank_load(message: pb.RankLoad) -> RankLoad:
    return RankLoad(
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        num_queued_prefill_tokens=message.num_queued_prefill_tokens,
        num_in_use_blocks=message.num_in_use_blocks,
        num_held_blocks=message.num_held_blocks,
        num_cached_blocks=message.num_cached_blocks,
        num_free_blocks=message.num_free_blocks,
        num_total_blocks=message.num_total_blocks,
        num_steps=message.num_steps,
    )
