"""Hand-offs, the layout of the blocks behind them, and snapshots of KV blocks, to and from messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from quartet.errors import InvalidRequestError, ProtocolError
from quartet.events.kv import KvSnapshot, KvSnapshotPart, Stored, StoredBlocks, Tier
from quartet.events.wire import MalformedFrameError, from_tier, to_tier
from quartet.kvcache.layout import (
    DTYPE_SIZE_BYTES,
    BlocksPayload,
    EmbeddingLayout,
    EmbeddingsPayload,
    HandOff,
    KvLayout,
    OpaquePayload,
    Payload,
)
from quartet.rpc.errors import to_duration, to_timedelta
from quartet.v1 import types_pb2
from quartet.v1 import worker_pb2 as pb

#: Blocks of one message of a snapshot: 128 KiB, and a few milliseconds of an event loop's time at either end.
MAX_PART_BLOCKS = 8192

_ID_SIZE_BYTES = 16


def to_kv_layout(layout: KvLayout) -> types_pb2.KvLayout:
    """The message."""
    return types_pb2.KvLayout(
        model_fingerprint=layout.model_fingerprint,
        dtype=layout.dtype,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        block_size=layout.block_size,
    )


def from_kv_layout(message: types_pb2.KvLayout, field: str = "layout") -> KvLayout:
    """The layout. Raises ``InvalidRequestError`` with ``field`` below the one given: an unknown dtype, or a zero."""
    _check_layout(message, ("num_layers", "num_kv_heads", "head_dim", "block_size"), field)
    return KvLayout(
        model_fingerprint=message.model_fingerprint,
        dtype=message.dtype,
        num_layers=message.num_layers,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
        block_size=message.block_size,
    )


def to_embedding_layout(layout: EmbeddingLayout) -> types_pb2.EmbeddingLayout:
    """The message."""
    return types_pb2.EmbeddingLayout(
        model_fingerprint=layout.model_fingerprint,
        dtype=layout.dtype,
        hidden_size=layout.hidden_size,
        block_size=layout.block_size,
    )


def from_embedding_layout(message: types_pb2.EmbeddingLayout, field: str = "layout") -> EmbeddingLayout:
    """The layout. Raises ``InvalidRequestError`` as ``from_kv_layout`` does."""
    _check_layout(message, ("hidden_size", "block_size"), field)
    return EmbeddingLayout(
        model_fingerprint=message.model_fingerprint,
        dtype=message.dtype,
        hidden_size=message.hidden_size,
        block_size=message.block_size,
    )


def to_hand_off(hand_off: HandOff) -> types_pb2.HandOff:
    """The message."""
    message = types_pb2.HandOff(
        hand_off_id=hand_off.hand_off_id,
        secret=hand_off.secret,
        worker_id=hand_off.worker_id,
        epoch=hand_off.epoch,
        address=hand_off.address,
        time_to_live=to_duration(hand_off.time_to_live.total_seconds()),
    )
    match hand_off.payload:
        case BlocksPayload(layout, num_tokens, block_ids):
            message.blocks.CopyFrom(
                types_pb2.BlocksPayload(layout=to_kv_layout(layout), num_tokens=num_tokens, block_ids=block_ids)
            )
        case EmbeddingsPayload(layout, num_tokens, block_ids):
            message.embeddings.CopyFrom(
                types_pb2.EmbeddingsPayload(
                    layout=to_embedding_layout(layout), num_tokens=num_tokens, block_ids=block_ids
                )
            )
        case OpaquePayload(engine, state):
            message.opaque.CopyFrom(types_pb2.OpaquePayload(engine=engine, state=state))
    return message


def from_hand_off(message: types_pb2.HandOff, field: str = "hand_off") -> HandOff:
    """The hand-off. Raises ``InvalidRequestError`` with ``field`` below the one given."""
    for name in ("hand_off_id", "secret"):
        if len(getattr(message, name)) != _ID_SIZE_BYTES:
            raise InvalidRequestError(f"{name} must have {_ID_SIZE_BYTES} bytes", field=f"{field}.{name}")
    for name in ("worker_id", "address"):
        if not getattr(message, name):
            raise InvalidRequestError(f"{name} is empty", field=f"{field}.{name}")
    return HandOff(
        hand_off_id=message.hand_off_id,
        secret=message.secret,
        worker_id=message.worker_id,
        epoch=message.epoch,
        address=message.address,
        time_to_live=to_timedelta(message.time_to_live, f"{field}.time_to_live"),
        payload=_from_payload(message, field),
    )


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


def _from_payload(message: types_pb2.HandOff, field: str) -> Payload:
    match message.WhichOneof("payload"):
        case "blocks":
            _check_num_tokens(message.blocks.num_tokens, f"{field}.blocks.num_tokens")
            layout = from_kv_layout(message.blocks.layout, f"{field}.blocks.layout")
            return BlocksPayload(layout, message.blocks.num_tokens, tuple(message.blocks.block_ids))
        case "embeddings":
            held = message.embeddings
            _check_num_tokens(held.num_tokens, f"{field}.embeddings.num_tokens")
            of_embeddings = from_embedding_layout(held.layout, f"{field}.embeddings.layout")
            return EmbeddingsPayload(of_embeddings, held.num_tokens, tuple(held.block_ids))
        case "opaque":
            return OpaquePayload(message.opaque.engine, message.opaque.state)
        case _:
            raise InvalidRequestError("the hand-off holds nothing", field=f"{field}.payload")


def _check_layout(
    message: types_pb2.KvLayout | types_pb2.EmbeddingLayout, at_least_one: tuple[str, ...], field: str
) -> None:
    if message.dtype not in DTYPE_SIZE_BYTES:
        raise InvalidRequestError(f"unknown dtype {message.dtype[:32]!r}", field=f"{field}.dtype")
    for name in at_least_one:
        if getattr(message, name) < 1:
            raise InvalidRequestError(f"{name} must be at least 1", field=f"{field}.{name}")


def _check_num_tokens(num_tokens: int, field: str) -> None:
    if num_tokens < 1:
        raise InvalidRequestError("num_tokens must be at least 1", field=field)


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
