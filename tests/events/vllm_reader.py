"""A reader of vLLM's KV events, written from the format alone: it shares no code with what publishes ours.

The types say what vLLM's documentation and engines show of its events: one set for those that are maps (from 0.24 on),
and one for those that are arrays.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import zmq
import zmq.asyncio

TIMEOUT_S = 60.0
#: Stands for a number after the last batch of a replay.
END = b"\xff" * 8

ExternalBlockHash = bytes | int


class BlockStored(msgspec.Struct, tag=True):
    block_hashes: list[ExternalBlockHash]
    parent_block_hash: ExternalBlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    block_hashes: list[ExternalBlockHash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


class MapBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class ArrayStored(msgspec.Struct, array_like=True, omit_defaults=True, tag="BlockStored"):
    block_hashes: list[ExternalBlockHash]
    parent_block_hash: ExternalBlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None


class ArrayRemoved(msgspec.Struct, array_like=True, omit_defaults=True, tag="BlockRemoved"):
    block_hashes: list[ExternalBlockHash]
    medium: str | None
    group_idx: int | None = None


class ArrayCleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


class ArrayBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[ArrayStored | ArrayRemoved | ArrayCleared]
    data_parallel_rank: int | None = None


class Index:
    """The blocks that a reader of a feed believes to be there: of each hash, all tokens up to the block's end."""

    def __init__(self) -> None:
        self.blocks: dict[ExternalBlockHash, tuple[int, ...]] = {}

    def take(self, events: list[Any]) -> None:
        """Apply events as a strict reader does: nothing is stored twice, nor after a block that is not there, and
        nothing is removed that is not there."""
        for event in events:
            if isinstance(event, BlockStored | ArrayStored):
                parent = event.parent_block_hash
                tokens = () if parent is None else self.blocks[parent]
                for index, name in enumerate(event.block_hashes):
                    tokens += tuple(event.token_ids[index * event.block_size : (index + 1) * event.block_size])
                    assert name not in self.blocks
                    self.blocks[name] = tokens
            elif isinstance(event, BlockRemoved | ArrayRemoved):
                for name in event.block_hashes:
                    del self.blocks[name]
            else:
                self.blocks.clear()


def read_maps(payload: bytes) -> MapBatch:
    """A batch whose events are maps."""
    return msgspec.msgpack.decode(payload, type=MapBatch)


def read_arrays(payload: bytes) -> ArrayBatch:
    """A batch whose events are arrays."""
    return msgspec.msgpack.decode(payload, type=ArrayBatch)


async def replay_of(port: int, first_number: int) -> list[tuple[int, bytes]]:
    """All that a ROUTER replays, as bare sockets get it."""
    context = zmq.asyncio.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        dealer.connect(f"tcp://127.0.0.1:{port}")
        await dealer.send_multipart([b"", first_number.to_bytes(8, "big")])
        batches: list[tuple[int, bytes]] = []
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                empty, number, content = await dealer.recv_multipart()
                assert empty == b""
                if number == END:
                    assert content == b""
                    return batches
                batches.append((int.from_bytes(number, "big"), content))
    finally:
        context.destroy(linger=0)
