"""The sending side of ``benchmarks.transfer``, in a process of its own: a pool, and the server that sends its blocks.

It answers two orders: ``offer`` holds the blocks for one fetch; ``cpu`` gives the CPU seconds of this process so far.
``benchmarks.gpu_pull_side`` lends pools on GPUs by the same ``lending``.
"""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import uvloop

from benchmarks.children import answer, argument, orders
from quartet.discovery.host import host_identity
from quartet.kvcache.layout import (
    DTYPE_SIZE_BYTES,
    BlocksPayload,
    EmbeddingLayout,
    EmbeddingsPayload,
    KvLayout,
    PieceLayout,
    PiecesPayload,
)
from quartet.rpc.server import RpcServer, ServerConfig, Service
from quartet.streams.convert.hand_off import to_hand_off
from quartet.transfer.base import PoolMemory
from quartet.transfer.config import TransferConfig
from quartet.transfer.cuda.lent import CudaServer
from quartet.transfer.cuda.memory import DeviceMemory
from quartet.transfer.grpc.messages import SERVICE
from quartet.transfer.grpc.servicer import TransferServicer, add_transfer_servicer
from quartet.transfer.shm import ShmServer
from quartet.transfer.source import TransferSource

_BLOCK_SIZE = 32
_FINGERPRINT = "0" * 64
_EPOCH = 1
# The puller's last stream ends by itself.
_GRACE_S = 0.2


@dataclass(frozen=True)
class PoolShape:
    """A pool of ``num_blocks`` pieces of ``piece_size_bytes``: of KV, or of media embeddings; 32 tokens each."""

    num_blocks: int
    piece_size_bytes: int
    holds_embeddings: bool = False

    @property
    def size_bytes(self) -> int:
        """Size of the whole pool."""
        return self.num_blocks * self.piece_size_bytes

    @property
    def layout(self) -> PieceLayout:
        """A layout with blocks of this size."""
        if self.holds_embeddings:
            return self._embedding_layout
        return self.kv_layout

    @property
    def payload(self) -> PiecesPayload:
        """The payload of a hand-off of all blocks."""
        num_tokens = self.num_blocks * _BLOCK_SIZE
        if self.holds_embeddings:
            return EmbeddingsPayload(self._embedding_layout, num_tokens)
        return BlocksPayload(self.kv_layout, num_tokens)

    @property
    def kv_layout(self) -> KvLayout:
        """Of its blocks, if they are of KV."""
        return KvLayout(
            model_fingerprint=_FINGERPRINT,
            dtype="uint8",
            num_layers=1,
            num_kv_heads=1,
            head_dim=self.piece_size_bytes // (2 * _BLOCK_SIZE),
            block_size=_BLOCK_SIZE,
        )

    @property
    def _embedding_layout(self) -> EmbeddingLayout:
        return EmbeddingLayout(
            model_fingerprint=_FINGERPRINT,
            dtype="bfloat16",
            hidden_size=self.piece_size_bytes // (_BLOCK_SIZE * DTYPE_SIZE_BYTES["bfloat16"]),
            block_size=_BLOCK_SIZE,
        )

    def scattered(self, seed: int) -> list[int]:
        """All block ids, almost none next to its neighbour, as in a pool that has been used for a while."""
        block_ids = list(range(self.num_blocks))
        random.Random(seed).shuffle(block_ids)
        return block_ids


def fill(memory: PoolMemory, block_id: int, piece: int) -> None:
    """Fill ``block_id`` with bytes that differ from those of every other piece."""
    pattern = random.Random(piece).randbytes(64)
    memory.piece(block_id)[:] = pattern * (memory.piece_size_bytes // len(pattern))


class Lender:
    """All blocks of one pool, held again and again."""

    def __init__(self, shape: PoolShape, memory: PoolMemory | DeviceMemory) -> None:
        self._shape = shape
        self.block_ids = shape.scattered(seed=1)
        self._next_holder = 1
        self.source = TransferSource(
            worker_id="source",
            epoch=_EPOCH,
            config=TransferConfig(),
            on_end=lambda _holder, _state: None,
            memory=memory,
        )

    def offer(self) -> str:
        """Hold all blocks for one fetch; returns the hand-off as hexadecimal bytes."""
        hand_off = self.source.offer(self._next_holder, self.block_ids, self._shape.payload)
        self._next_holder += 1
        return to_hand_off(hand_off).SerializeToString().hex()


def main() -> None:
    """Hold the pool whose shape is the argument until the standard input ends."""
    uvloop.run(_serve(PoolShape(**argument())))


async def _serve(shape: PoolShape) -> None:
    memory = PoolMemory(shape.num_blocks, shape.piece_size_bytes)
    try:
        async with lending(shape, memory) as lender:
            for piece, block_id in enumerate(lender.block_ids):
                fill(memory, block_id, piece)
            answer("ready")
            async for order in orders():
                answer(_answer(lender, order))
    finally:
        memory.close()


def _answer(lender: Lender, order: str) -> dict[str, object]:
    offered = {} if order == "cpu" else {"hand_off": lender.offer()}
    return {**offered, "cpu_s": time.process_time()}


@asynccontextmanager
async def lending(shape: PoolShape, memory: PoolMemory | DeviceMemory) -> AsyncIterator[Lender]:
    """Serve pulls out of ``memory``, a pool of this shape, as a worker does; the caller closes it."""
    lender = Lender(shape, memory)
    shm = ShmServer(memory) if isinstance(memory, PoolMemory) else None
    cuda = CudaServer(memory, _EPOCH) if isinstance(memory, DeviceMemory) else None
    servicer = TransferServicer(lender.source, host=host_identity(), config=TransferConfig(), shm=shm, cuda=cuda)
    server = RpcServer(ServerConfig(), [Service(SERVICE, lambda server: add_transfer_servicer(servicer, server))])
    lender.source.advertise(f"127.0.0.1:{await server.start()}")
    pool_servers = [pool_server for pool_server in (shm, cuda) if pool_server is not None]
    for pool_server in pool_servers:
        await pool_server.start()
    try:
        yield lender
    finally:
        await server.drain(_GRACE_S)
        for pool_server in pool_servers:
            await pool_server.close()
        lender.source.close()


if __name__ == "__main__":
    main()
