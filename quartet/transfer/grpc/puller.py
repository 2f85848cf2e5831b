"""The puller's side of hand-offs: accept one, keep it alive, fetch its pieces, let it go."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields

import grpc

from quartet.discovery.base import HostIdentity
from quartet.errors import HandOffStateError, LayoutMismatchError, TransferError
from quartet.kvcache.layout import HandOff, OpaquePayload, PieceLayout
from quartet.transfer.base import FetchResult, PieceCopy, PoolMemory, TransferWay
from quartet.transfer.config import TransferConfig
from quartet.transfer.grpc.fetch import Fetch, LocalPool
from quartet.transfer.grpc.heap import keep_freed_memory
from quartet.transfer.grpc.lease import HandOffLease
from quartet.transfer.grpc.peer_channels import PeerChannels
from quartet.transfer.grpc.pull_stream import PullStream
from quartet.transfer.grpc.spare_streams import SpareStreams
from quartet.transfer.grpc.status import HiddenStatusError
from quartet.transfer.shm_pools import ShmPools

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
