"""One fetch: begin, move the pieces by the way that the source chose, finish; or read, begin and finish at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

from quartet.discovery.base import HostIdentity
from quartet.errors import LayoutMismatchError, TransferError, TransferTimeoutError, WorkerUnavailableError
from quartet.kvcache.layout import HandOff, OpaquePayload, PieceLayout
from quartet.transfer.base import PieceCopy, PoolMemory, TransferWay
from quartet.transfer.block_copy import copy_runs, merge_runs
from quartet.transfer.config import TransferConfig
from quartet.transfer.grpc.messages import WAY_FROM_PB, WAY_TO_PB, PullMessage, host_to_pb, ticket_to_pb
from quartet.transfer.grpc.pull_stream import PullStream
from quartet.transfer.piece_frame import PiecePart
from quartet.transfer.piece_receiver import PieceReceiver
from quartet.transfer.shm_pools import PoolOwner, SharedPool, ShmPools
from quartet.v1 import transfer_pb2 as pb

_FINISH = pb.PullRequest(finish=pb.PullFinish())
_Part = TypeVar("_Part", pb.PullGranted, pb.PullFinished)


@dataclass(frozen=True)
class LocalPool:
    """Where pieces go, and their shape."""

    memory: PoolMemory
    layout: PieceLayout


class Fetch:
    """Takes over one hand-off. Used once."""

    def __init__(
        self,
        hand_off: HandOff,
        copies: Sequence[PieceCopy],
        *,
        pool: LocalPool | None,
        host: HostIdentity,
        config: TransferConfig,
        shm_pools: ShmPools,
        executor: Executor,
    ) -> None:
        """Plan to put the pieces of ``copies``, ascending, into their blocks of ``pool``."""
        assert pool is not None or not copies, "blocks are fetched into an attached pool"
        self._hand_off = hand_off
        self._copies = copies
        self._pool = pool
        self._host = host
        self._config = config
        self._shm_pools = shm_pools
        self._executor = executor
        self._owner = PoolOwner(hand_off.worker_id, hand_off.epoch)

    @property
    def size_bytes(self) -> int:
        """Bytes that move."""
        return len(self._copies) * self._pool.layout.piece_size_bytes if self._pool is not None else 0

    async def run(self, stream: PullStream) -> TransferWay:
        """Move everything and let the source go, over ``stream``, which stays the caller's to end.

        Returns the way taken. Raises as ``Claim.fetch`` does.
        """
        max_pull_s = self._config.max_pull_s
        try:
            async with asyncio.timeout(max_pull_s):
                return await self._run(stream)
        except TimeoutError:
            raise TransferTimeoutError(f"the pull took more than {max_pull_s} s") from None
        except WorkerUnavailableError as error:
            # Unavailable is the source, not the worker that says so: whoever sent the hand-off must not blame that one.
            raise TransferError(f"the source cannot be reached: {error.message}") from None

    async def _run(self, stream: PullStream) -> TransferWay:
        await stream.send(pb.PullRequest(begin=self._begin()))
        async with _awaited(stream.receive()) as answer:
            read_ahead = await self._read_ahead()
            if read_ahead is not None:
                # Nothing more will be read, so this need not wait for `granted`; what was read still has to.
                await stream.send(_FINISH)
            granted = _expect(await answer, "granted", pb.PullGranted)
        way = self._check(granted)
        if read_ahead is None:
            await self._move(stream, way, granted)
            await stream.send(_FINISH)
        elif read_ahead and not (way is TransferWay.SHM and read_ahead == list(granted.shm.offsets)):
            raise TransferError("the source granted other blocks than its hand-off names")
        _expect(await stream.receive(), "finished", pb.PullFinished)
        return way

    def _begin(self) -> pb.PullBegin:
        ways = [way for way in self._config.ways if way is not TransferWay.SHM or self._shm_pools.may_open(self._owner)]
        return pb.PullBegin(
            ticket=ticket_to_pb(self._hand_off),
            pieces=[copy.piece for copy in self._copies],
            ways=[WAY_TO_PB[way] for way in ways],
            host=host_to_pb(self._host),
        )

    def _check(self, granted: pb.PullGranted) -> TransferWay:
        way = WAY_FROM_PB.get(granted.way)
        if way not in self._config.ways:
            raise TransferError("the source granted a way that was not offered")
        if self._copies and self._pool is not None and granted.piece_size_bytes != self._pool.layout.piece_size_bytes:
            raise LayoutMismatchError(
                f"pieces have {granted.piece_size_bytes} bytes there, {self._pool.layout.piece_size_bytes} here"
            )
        if way is TransferWay.SHM and len(granted.shm.offsets) != len(self._copies):
            raise TransferError("the source did not say where each piece is")
        return way

    async def _move(self, stream: PullStream, way: TransferWay, granted: pb.PullGranted) -> None:
        assert self._pool is not None
        if way is TransferWay.SHM:
            await self._copy_shared(self._pool, granted.shm)
        else:
            receiver = PieceReceiver(self._pool.memory, self._copies)
            while not receiver.is_complete:
                receiver.accept(_expect_part(await stream.receive()))

    async def _read_ahead(self) -> list[int] | None:
        """Copy while `begin` is on the way, where the source's pool is mapped and the hand-off says where in it.

        A source that grants and then finishes has held the blocks from when it made the hand-off until it was told
        that all is read, so what is read in between is right.

        Returns:
            The offsets that were read, none where nothing is wanted; ``None``: the source has to be asked first.
        """
        if not self._copies:
            return []
        payload, source = self._hand_off.payload, self._shm_pools.mapped(self._owner)
        if self._pool is None or source is None or isinstance(payload, OpaquePayload):
            return None
        if self._copies[-1].piece >= len(payload.block_ids):
            return None
        size = self._pool.layout.piece_size_bytes
        offsets = [payload.block_ids[copy.piece] * size for copy in self._copies]
        await self._copy_from(self._pool, source, offsets)
        return offsets

    async def _copy_shared(self, pool: LocalPool, shm: pb.ShmDescriptor) -> None:
        shared = SharedPool(shm.socket_path, shm.token, shm.pool_size_bytes)
        source = await self._shm_pools.open(self._owner, shared, timeout_s=self._config.stall_timeout_s)
        await self._copy_from(pool, source, list(shm.offsets))

    async def _copy_from(self, pool: LocalPool, source: memoryview, offsets: list[int]) -> None:
        """Copy the pieces, which are at ``offsets`` of ``source``. Raises ``TransferError``: they are outside it."""
        size = pool.layout.piece_size_bytes
        runs = merge_runs(offsets, [copy.block_id * size for copy in self._copies], size)
        try:
            await copy_runs(source, pool.memory.view, runs, self._executor)
        except ValueError as error:
            raise TransferError(f"the source's offsets are wrong: {error}") from None


@contextlib.asynccontextmanager
async def _awaited(receiving: Coroutine[object, object, PullMessage]) -> AsyncIterator[asyncio.Task[PullMessage]]:
    """Have the answer received within the block while that does something else; nothing of it stays behind."""
    answer = asyncio.create_task(receiving)
    try:
        await asyncio.sleep(0)  # it begins before the block does, which may keep the event loop
        yield answer
    finally:
        answer.cancel()  # does nothing to what is done
        await asyncio.gather(answer, return_exceptions=True)


def _expect(message: pb.PullResponse | PiecePart, name: str, message_type: type[_Part]) -> _Part:
    """The part of a response that has to come now."""
    if isinstance(message, pb.PullResponse) and message.WhichOneof("message") == name:
        part = getattr(message, name)
        assert isinstance(part, message_type)
        return part
    raise TransferError(f"the source sent something else than `{name}`")


def _expect_part(message: pb.PullResponse | PiecePart) -> PiecePart:
    if isinstance(message, PiecePart):
        return message
    raise TransferError("the source sent something else than a piece")
