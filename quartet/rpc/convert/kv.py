"""Snapshots of KV blocks: a worker's tables in short messages, and chains of blocks again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from quartet.errors import ProtocolError
from quartet.events.kv import KvSnapshot, KvSnapshotPart, Stored, StoredBlocks, Tier
from quartet.events.wire import MalformedFrameError, from_tier, to_tier
from quartet.v1 import worker_pb2 as pb

#: Blocks of one message: 128 KiB, and a few milliseconds of an event loop's time at either end.
MAX_PART_BLOCKS = 8192


def to_kv_snapshot_parts(snapshot: KvSnapshot, epoch: int) -> Iterator[pb.StreamKvSnapshotResponse]:
    """``snapshot`` in messages of ``MAX_PART_BLOCKS``; at least one for each of its tables, and at least one."""
    for blocks in snapshot.blocks or [StoredBlocks(0, {})]:
        left = iter(blocks.parent_hashes.items())
        part = list(islice(left, MAX_PART_BLOCKS))
        is_first = True
        while part or is_first:
            is_first = False
            yield pb.StreamKvSnapshotResponse(
                number=snapshot.number,
                epoch=epoch,
                data_parallel_rank=blocks.data_parallel_rank,
                tier=to_tier(blocks.tier),
                sequence_hashes=[named for named, _ in part],
                parent_hashes=[parent or 0 for _, parent in part],
                first_blocks=[position for position, (_, parent) in enumerate(part) if parent is None],
            )
            part = list(islice(left, MAX_PART_BLOCKS))


def from_kv_snapshot_part(message: pb.StreamKvSnapshotResponse) -> KvSnapshotPart:
    """The part, its blocks in chains as long as they come.

    Raises:
        ProtocolError: an unknown tier, or columns that don't fit together.
    """
    hashes, parents = list(message.sequence_hashes), list[int | None](message.parent_hashes)
    if len(hashes) != len(parents) or any(position >= len(parents) for position in message.first_blocks):
        raise ProtocolError("the columns of a KV snapshot do not fit together")
    for position in message.first_blocks:
        parents[position] = None
    try:
        tier = from_tier(message.tier)
    except MalformedFrameError as error:
        raise ProtocolError(f"a KV snapshot with an {error}") from None
    return KvSnapshotPart(
        number=message.number,
        epoch=message.epoch,
        data_parallel_rank=message.data_parallel_rank,
        stored=_chains(hashes, parents, tier),
    )


def _chains(hashes: Sequence[int], parents: Sequence[int | None], tier: Tier) -> list[Stored]:
    """Cut where a block does not follow the one that stands before it."""
    chains: list[Stored] = []
    begin = 0
    for position in range(1, len(hashes)):
        if parents[position] != hashes[position - 1]:
            chains.append(Stored(parents[begin], hashes[begin:position], tier))
            begin = position
    if hashes:
        chains.append(Stored(parents[begin], hashes[begin:], tier))
    return chains
