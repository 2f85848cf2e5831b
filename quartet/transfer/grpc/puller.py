"""The puller's side of hand-offs: accept one, keep it alive, fetch its pieces, let it go."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import TypeVar

import grpc

from quartet.discovery.base import HostIdentity
from quartet.errors import (
    HandOffNotFoundError,
    HandOffStateError,
    LayoutMismatchError,
    ServingError,
    StaleEpochError,
    TransferError,
    TransferTimeoutError,
    WorkerUnavailableError,
)
from quartet.kvcache.layout import HandOff, OpaquePayload, PieceLayout
from quartet.rpc.errors import HiddenStatusError
from quartet.transfer.base import FetchResult, PieceCopy, PoolMemory, TransferWay
from quartet.transfer.config import TransferConfig
from quartet.transfer.grpc.messages import WAY_FROM_PB, WAY_TO_PB, PiecePart, PullMessage, host_to_pb, ticket_to_pb
from quartet.transfer.grpc.streams import PeerChannels, PullStream, SpareStreams, keep_freed_memory
from quartet.transfer.shm import PoolOwner, SharedPool, ShmPools, copy_runs, merge_runs
from quartet.v1 import transfer_pb2 as pb

#: By then whoever fetched goes on, and the engine's thread wants nothing of the time that the event loop takes.
_REST_S = 0.005

#: What a source answered may be lost so often before that is told as what it is.
_MAX_HIDDEN = 2

#: One thread comes near a core's memory bandwidth; the second is for another fetch, not for more of one.
_NUM_COPY_THREADS = 2


class TransferPuller:
    """A ``Puller`` by every way that this worker speaks. Lives on one event loop.

    Without ``attach`` it takes opaque hand-offs only, and keeps alive (``keep``) any.
    """

    def __init__(
        self,
        channel_factory: Callable[[str], grpc.aio.Channel],
        *,
        host: HostIdentity,
        config: TransferConfig,
        on_fetch: Callable[[FetchResult], None] = lambda _result: None,
    ) -> None:
        """Open nothing yet.

        Args:
            channel_factory: makes a channel to a peer's ``host:port``; closed here.
            host: where this worker runs.
            config: ways and bounds.
            on_fetch: told of each fetch that went well.
        """
        self._on_fetch = on_fetch
        self._channels = PeerChannels(channel_factory)
        self._host = host
        self._config = config
        self._shm_pools = ShmPools()
        self._copy_threads = ThreadPoolExecutor(_NUM_COPY_THREADS, thread_name_prefix="kv-copy")
        self._pool: LocalPool | None = None
        self._leases: set[HandOffLease] = set()
        self._spares = SpareStreams(self._open)
        self._endings: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()
        keep_freed_memory()

    def attach(self, memory: PoolMemory, layout: PieceLayout) -> None:
        """Name the pool that is fetched into; called once, before the first ``claim``."""
        assert self._pool is None, "a pool is attached once"
        assert memory.piece_size_bytes == layout.piece_size_bytes, "the pool's pieces are the layout's blocks"
        self._pool = LocalPool(memory, layout)

    def claim(self, hand_off: HandOff) -> PullClaim:
        """Accept ``hand_off`` and renew its lease until it is fetched or aborted.

        Raises:
            LayoutMismatchError: its blocks cannot be taken over here; nothing was started.
            TransferError: the puller is closed.
        """
        if not isinstance(hand_off.payload, OpaquePayload):
            _check_layout(hand_off.payload.layout, self._pool)
        lease = self.keep(hand_off)
        self._prepare(hand_off)
        return PullClaim(self, lease)

    def keep(self, hand_off: HandOff) -> HandOffLease:
        """Renew the lease of ``hand_off`` for somebody else, whatever its payload.

        Raises:
            TransferError: the puller is closed.
        """
        if self._closing.is_set():
            raise TransferError("the puller is closed")
        lease = HandOffLease(hand_off, self._channels, call_timeout_s=self._config.stall_timeout_s)
        self._leases.add(lease)
        lease.add_done_callback(lambda: self._leases.discard(lease))
        return lease

    async def close(self) -> None:
        """End every renewal, mapping and channel; fetches under way end with ``TransferError``."""
        self._closing.set()
        for lease in list(self._leases):
            lease.stop()
        self._spares.close()
        await asyncio.gather(*self._endings)
        await self._channels.close()
        await asyncio.to_thread(self._copy_threads.shutdown)
        self._shm_pools.close()

    async def fetch(self, hand_off: HandOff, copies: Sequence[PieceCopy]) -> FetchResult:
        """Take over ``hand_off``; see ``Claim.fetch``."""
        started = time.monotonic()
        with self._channels.use(hand_off.address):
            stream = self._spares.take(hand_off.address) or self._open(hand_off.address)
            fetch = Fetch(
                hand_off,
                sorted(copies, key=lambda copy: copy.piece),
                pool=self._pool,
                host=self._host,
                config=self._config,
                shm_pools=self._shm_pools,
                executor=self._copy_threads,
            )
            for _ in range(_MAX_HIDDEN):
                with contextlib.suppress(HiddenStatusError):
                    way = await self._run(fetch, stream)
                    break
                stream = self._open(hand_off.address)
            else:
                way = await self._run(fetch, stream)
            self._end(stream, hand_off)
        result = FetchResult(way, fetch.size_bytes, time.monotonic() - started)
        self._on_fetch(result)
        return result

    async def _run(self, fetch: Fetch, stream: PullStream) -> TransferWay:
        try:
            return await fetch.run(stream)
        except BaseException:
            stream.cancel()
            raise

    def _prepare(self, hand_off: HandOff) -> None:
        """Have a stream ready for ``hand_off``, or the next one of its source."""
        # Well before the source, which waits for a lease, ends what says nothing.
        self._spares.prepare(hand_off.address, hand_off.lease.total_seconds() / 3)

    def _open(self, address: str, max_idle_s: float = 0.0) -> PullStream:
        with self._channels.use(address) as channel:
            return PullStream(
                channel,
                timeout_s=max_idle_s + self._config.max_pull_s,
                stall_timeout_s=self._config.stall_timeout_s,
            )

    def _end(self, stream: PullStream, hand_off: HandOff) -> None:
        """End a stream in order and open the next, soon: what counts has come, and whoever waits for it goes first."""
        task = asyncio.create_task(self._replace(stream, hand_off), name="end-pull")
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)

    async def _replace(self, stream: PullStream, hand_off: HandOff) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REST_S):
                await self._closing.wait()
        await stream.end()
        if not self._closing.is_set():
            self._prepare(hand_off)


class PullClaim:
    """A ``Claim``: one accepted hand-off."""

    def __init__(self, puller: TransferPuller, lease: HandOffLease) -> None:
        """Made by ``TransferPuller.claim``."""
        self._puller = puller
        self._lease = lease
        self._is_used = False
        self._has_fetched = False

    async def fetch(self, copies: Sequence[PieceCopy]) -> FetchResult:
        """Move the pieces, then tell the source that it may let go.

        Returns only when nothing writes to the local blocks any more, also when it raises or is cancelled; ``abort``
        then frees the source sooner than the lease would.

        Raises:
            TransferError, TransferTimeoutError, HandOffNotFoundError, HandOffStateError, StaleEpochError,
            LayoutMismatchError: what arrived must be thrown away. A source that is gone is a ``TransferError`` too.
        """
        if self._is_used:
            raise HandOffStateError("a claim is fetched once, and not after it was aborted")
        self._is_used = True
        self._lease.stop()
        result = await self._puller.fetch(self._lease.hand_off, copies)
        self._has_fetched = True
        return result

    async def abort(self) -> None:
        """Tell the source that nobody will take it. Never raises; bounded in time; may be called twice."""
        self._is_used = True
        if not self._has_fetched:
            await self._lease.abort()


def _check_layout(theirs: PieceLayout, pool: LocalPool | None) -> None:
    if pool is None:
        raise LayoutMismatchError("this worker has no block pool to take blocks into")
    if type(theirs) is not type(pool.layout):
        raise LayoutMismatchError("KV blocks and embeddings of media lie in pools of their own")
    for field in fields(theirs):
        if getattr(theirs, field.name) != getattr(pool.layout, field.name):
            raise LayoutMismatchError(
                f"the hand-off's blocks differ in {field.name}: {getattr(theirs, field.name)!r} there, "
                f"{getattr(pool.layout, field.name)!r} here"
            )


# One fetch: begin, move the pieces by the way that the source chose, finish; or read, begin and finish at once.

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


# Keeping a hand-off alive on behalf of whoever will take it, and letting go of one that nobody will.

#: How long letting go may take; the lease ends what it misses.
_ABORT_TIMEOUT_S = 1.0

#: A lease this short is a mistake, but must not make us a flood.
_MIN_RENEWAL_INTERVAL_S = 0.01

_log = logging.getLogger(__name__)


class HandOffLease:
    """Renews a hand-off every third of its lease until ``stop`` or ``abort``.

    A renewal is a short stream of its own: most hand-offs are taken before the first is due. One that is refused, lost
    or left unanswered is asked again soon, two more times before the lease ends. The first is due a third of a lease
    from now; of a hand-off that was that old when it came, one renewal may fail.
    """

    def __init__(self, hand_off: HandOff, channels: PeerChannels, *, call_timeout_s: float) -> None:
        """Begin to renew; a renewal waits ``call_timeout_s`` for its answer at most."""
        self.hand_off = hand_off
        self._channels = channels
        self._call_timeout_s = call_timeout_s
        self._has_aborted = False
        self._renewing = asyncio.create_task(self._renew_on(), name="renew-hand-off")

    def stop(self) -> None:
        """Renew no more; the hand-off lives on for what is left of its lease. May be called twice."""
        self._renewing.cancel()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called when this stops renewing, for whatever reason."""
        self._renewing.add_done_callback(lambda _task: callback())

    async def abort(self) -> None:
        """Tell the source that nobody will take it. Never raises; takes a second at most; may be called twice."""
        self.stop()
        if self._has_aborted:
            return
        self._has_aborted = True
        request = pb.PullRequest(abort=pb.PullAbort(ticket=ticket_to_pb(self.hand_off)))
        try:
            await self._ask(request, _ABORT_TIMEOUT_S)
        except ServingError as error:
            _log.debug("a hand-off of %s is left to its lease: %s", self.hand_off.worker_id, error)

    async def _renew_on(self) -> None:
        interval_s = max(self.hand_off.lease.total_seconds() / 3, _MIN_RENEWAL_INTERVAL_S)
        retry_interval_s = interval_s / 3
        request = pb.PullRequest(renew=pb.PullRenew(ticket=ticket_to_pb(self.hand_off)))
        pause_s = interval_s
        while True:
            await asyncio.sleep(pause_s)
            try:
                await self._ask(request, min(retry_interval_s, self._call_timeout_s))
                pause_s = interval_s
            except (HandOffNotFoundError, HandOffStateError, StaleEpochError) as error:
                _log.debug("a hand-off of %s has ended: %s", self.hand_off.worker_id, error)
                return  # whoever takes it will be told
            except ServingError as error:
                pause_s = retry_interval_s
                _log.info("could not renew a hand-off of %s, trying again: %s", self.hand_off.worker_id, error)

    async def _ask(self, request: pb.PullRequest, timeout_s: float) -> None:
        """Send one message on a stream of its own and wait for the answer. Raises ``ServingError``."""
        with self._channels.use(self.hand_off.address) as channel:
            stream = PullStream(channel, timeout_s=timeout_s, stall_timeout_s=timeout_s)
            try:
                await stream.ask(request)
            finally:
                stream.cancel()


# Putting pieces that come in parts where they belong, believing nothing that the sender says.


class PieceReceiver:
    """Takes the parts of the pieces asked for, each piece's in order and once, into their blocks."""

    def __init__(self, memory: PoolMemory, copies: Sequence[PieceCopy]) -> None:
        """Expect every piece of ``copies``, which differ."""
        self._memory = memory
        self._block_by_piece = {copy.piece: copy.block_id for copy in copies}
        self._num_received = dict.fromkeys(self._block_by_piece, 0)  # bytes
        self._num_missing_bytes = len(copies) * memory.piece_size_bytes

    @property
    def is_complete(self) -> bool:
        """Whether every byte has come."""
        return self._num_missing_bytes == 0

    def accept(self, part: PiecePart) -> None:
        """Write a part into its block.

        Raises:
            TransferError: nobody asked for it, or it is not the next one of its piece; nothing was written.
        """
        size = len(part.data)
        end = part.offset_bytes + size
        if part.offset_bytes != self._num_received.get(part.index) or size == 0:
            raise TransferError("the source sent a piece that was not asked for, or its parts out of order")
        if end > self._memory.piece_size_bytes:
            raise TransferError("the source sent more of a piece than a piece is long")
        self._memory.piece(self._block_by_piece[part.index])[part.offset_bytes : end] = part.data
        self._num_received[part.index] = end
        self._num_missing_bytes -= size
