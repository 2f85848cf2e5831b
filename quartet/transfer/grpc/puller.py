"""The taker's side of hand-offs: claim one, renew it, fetch its pieces, release it.

``TransferPuller.claim`` gives a ``PullClaim``, which renews the hand-off until it is fetched or released. A fetch takes
one Pull stream: `begin`, then the pieces by the way that the source chose, then `finish`. Where this worker has opened
the source's pool already and the hand-off says which blocks it holds, the fetch copies them while `begin` is on its
way, and `finish` follows at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, fields
from itertools import chain
from typing import TypeAlias, TypeVar

import grpc
import numpy as np
import numpy.typing as npt

from quartet.discovery.base import HostIdentity
from quartet.errors import (
    HandOffNotFoundError,
    HandOffStateError,
    LayoutMismatchError,
    NoHandOffError,
    ServingError,
    StaleEpochError,
    TransferError,
    TransferTimeoutError,
    WorkerUnavailableError,
)
from quartet.kvcache.layout import HandOff, OpaquePayload, PieceLayout
from quartet.rpc.errors import HiddenStatusError
from quartet.supervision import report_failure
from quartet.transfer.base import BlockMemory, FetchResult, PieceCopy, PieceRun, TransferWay, never
from quartet.transfer.config import TransferConfig, seen_way
from quartet.transfer.cuda.lent import from_opaque
from quartet.transfer.grpc.messages import (
    WAY_FROM_PB,
    WAY_TO_PB,
    PiecePart,
    PullMessage,
    host_to_pb,
    keep_freed_memory,
    ticket_to_pb,
)
from quartet.transfer.grpc.streams import PeerChannels, PullStream, SourceLife, SpareStreams
from quartet.transfer.life_line import LentPool, PoolOwner
from quartet.transfer.reader import PoolInputs, PoolReader, pool_inputs
from quartet.transfer.runs import Offsets, merge_runs
from quartet.transfer.shm import SharedPool
from quartet.v1 import transfer_pb2 as pb

logger = logging.getLogger(__name__)

#: How long a finished stream rests before it is closed. By then the request that fetched goes on, and closing takes
#: no event loop time that the engine's thread wants.
_REST_S = 0.005

#: How often a fetch asks again after gRPC hid the source's answer.
_MAX_HIDDEN = 2

#: How long a release may take; a hand-off whose source was not reached expires.
_RELEASE_TIMEOUT_S = 1.0

#: A time to live this short is a mistake, but its renewals must not flood the source.
_MIN_RENEWAL_INTERVAL_S = 0.01

_FINISH = pb.PullRequest(finish=pb.PullFinish())


class TransferPuller:
    """A ``Puller`` by every way that this worker speaks. Lives on one event loop.

    Without ``attach`` it claims opaque hand-offs, and any for another worker.
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
            channel_factory: makes a channel to a peer's ``host:port``, as ``Dialer.open`` does; closed here.
            host: where this worker runs.
            config: ways and bounds.
            on_fetch: called after each fetch that went well.
        """
        self.config = config
        self._on_fetch = on_fetch
        self._channels = PeerChannels(channel_factory)
        self._host = host
        self._pool: _LocalPool | None = None
        self._renewals: set[asyncio.Task[None]] = set()
        self._spares = SpareStreams(self._open)
        self._endings: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()
        keep_freed_memory()

    def attach(self, memory: BlockMemory, layout: PieceLayout, is_busy: Callable[[], bool] = never) -> None:
        """As ``Puller``."""
        assert self._pool is None, "a pool is attached once"
        assert memory.piece_size_bytes == layout.piece_size_bytes, "the pool's pieces are the layout's blocks"
        self._pool = _LocalPool(memory, layout, pool_inputs(memory, is_busy))

    def claim(self, hand_off: HandOff) -> PullClaim:
        """Accept ``hand_off`` and renew it until it is fetched or released.

        Raises:
            LayoutMismatchError: its blocks cannot be taken over here; nothing was started.
            TransferError: the puller is closed.
        """
        if not isinstance(hand_off.payload, OpaquePayload):
            _check_layout(hand_off.payload.layout, self._pool)
        claim = self.claim_for_another(hand_off)
        self._prepare_stream(hand_off)
        return claim

    def claim_for_another(self, hand_off: HandOff) -> PullClaim:
        """Renew ``hand_off``, whatever its payload, until another worker claims it.

        Raises:
            TransferError: the puller is closed.
        """
        if self._closing.is_set():
            raise TransferError("the puller is closed")
        claim = PullClaim(self, hand_off)
        self._renewals.add(claim.renewal)
        claim.renewal.add_done_callback(report_failure)
        claim.renewal.add_done_callback(self._renewals.discard)
        return claim

    async def close(self) -> None:
        """End every renewal, mapping and channel; fetches under way end with ``TransferError``."""
        self._closing.set()
        for renewal in self._renewals:
            renewal.cancel()
        self._spares.close()
        await asyncio.gather(*self._endings, return_exceptions=True)
        await self._channels.close()
        if self._pool is not None:
            await self._pool.inputs.close()

    async def fetch(self, hand_off: HandOff, copies: Sequence[PieceCopy]) -> FetchResult:
        """Take over ``hand_off``; see ``Claim.fetch``."""
        started = time.monotonic()
        fetch = _Fetch(
            hand_off,
            copies,
            pool=self._pool,
            host=self._host,
            config=self.config,
        )
        source = SourceLife.of(hand_off)
        with self._channels.use(source):
            stream, way = await self._run(fetch, source)
            ending = asyncio.create_task(self._replace(stream, hand_off), name="end-pull")
            self._endings.add(ending)
            ending.add_done_callback(report_failure)
            ending.add_done_callback(self._endings.discard)
        size_bytes = 0
        if copies and self._pool is not None:
            way, size_bytes = seen_way(way, self._pool.memory), len(copies) * self._pool.layout.piece_size_bytes
        result = FetchResult(way, size_bytes, time.monotonic() - started)
        self._on_fetch(result)
        return result

    async def ask(self, hand_off: HandOff, request: pb.PullRequest, timeout_s: float) -> None:
        """Send one message on a stream of its own and wait for the answer. Raises ``ServingError``."""
        with self._channels.use(SourceLife.of(hand_off)) as channel:
            stream = PullStream(channel, timeout_s=timeout_s, stall_timeout_s=timeout_s)
            try:
                await stream.ask(request)
            finally:
                stream.cancel()

    async def _run(self, fetch: _Fetch, source: SourceLife) -> tuple[PullStream, TransferWay]:
        """Run ``fetch``, again where gRPC hid the source's answer. Returns its open stream and the way taken."""
        stream = self._spares.take(source) or self._open(source)
        num_hidden = 0
        while True:
            try:
                return stream, await fetch.run(stream, waits=num_hidden > 0)
            except BaseException as error:
                stream.cancel()
                num_hidden += 1
                if not isinstance(error, HiddenStatusError) or num_hidden > _MAX_HIDDEN:
                    raise
            stream = self._open(source)

    def _prepare_stream(self, hand_off: HandOff) -> None:
        """Have a stream ready for ``hand_off``, or the next one of its source."""
        # The source ends a stream that is silent for a time to live; ours is given up well before.
        self._spares.prepare(SourceLife.of(hand_off), hand_off.time_to_live.total_seconds() / 3)

    def _open(self, source: SourceLife, max_idle_s: float = 0.0) -> PullStream:
        with self._channels.use(source) as channel:
            return PullStream(
                channel,
                timeout_s=max_idle_s + self.config.max_pull_s,
                stall_timeout_s=self.config.stall_timeout_s,
            )

    async def _replace(self, stream: PullStream, hand_off: HandOff) -> None:
        """End a stream in order and open the next, once the request that fetched has gone on: its data is here."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REST_S):
                await self._closing.wait()
        await stream.end()
        if not self._closing.is_set():
            self._prepare_stream(hand_off)


class PullClaim:
    """A ``Claim``: one hand-off, renewed every third of its time to live until it is fetched, released or stopped.

    A renewal is a short stream of its own, since most hand-offs are fetched before the first is due. The claim repeats
    one that was refused, lost or left unanswered soon, two more times before the hand-off expires. The first is due a
    third of the time to live from now; of a hand-off that was that old when it came, one renewal may fail.
    """

    def __init__(self, puller: TransferPuller, hand_off: HandOff) -> None:
        """Begin to renew; made by ``TransferPuller``."""
        self.hand_off = hand_off
        self._puller = puller
        self._is_used = False
        self._has_ended = False
        self.renewal = asyncio.create_task(_renew(hand_off, puller), name="renew-hand-off")

    async def fetch(self, copies: Sequence[PieceCopy]) -> FetchResult:
        """As ``Claim.fetch``."""
        if self._is_used:
            raise HandOffStateError("a claim is fetched once, and not after it was released")
        self._is_used = True
        self.stop()
        result = await self._puller.fetch(self.hand_off, copies)
        self._has_ended = True
        return result

    async def release(self) -> None:
        """As ``Claim.release``; takes a second at most."""
        self._is_used = True
        self.stop()
        if self._has_ended:
            return
        self._has_ended = True
        request = pb.PullRequest(abort=pb.PullAbort(ticket=ticket_to_pb(self.hand_off)))
        try:
            await self._puller.ask(self.hand_off, request, _RELEASE_TIMEOUT_S)
        except ServingError as error:
            logger.debug("a hand-off of %s is left to expire: %s", self.hand_off.worker_id, error)

    def stop(self) -> None:
        """Renew no more; the hand-off lives on for what is left of its time to live. May be called twice."""
        self.renewal.cancel()


async def _renew(hand_off: HandOff, puller: TransferPuller) -> None:
    """As ``PullClaim`` says. No method of it: a cancelled task refers to its frames, and the claim to the task."""
    interval_s = max(hand_off.time_to_live.total_seconds() / 3, _MIN_RENEWAL_INTERVAL_S)
    retry_interval_s = interval_s / 3
    timeout_s = min(retry_interval_s, puller.config.stall_timeout_s)
    request = pb.PullRequest(renew=pb.PullRenew(ticket=ticket_to_pb(hand_off)))
    pause_s = interval_s
    while True:
        await asyncio.sleep(pause_s)
        try:
            await puller.ask(hand_off, request, timeout_s)
            pause_s = interval_s
        except (HandOffNotFoundError, HandOffStateError, StaleEpochError) as error:
            logger.debug("a hand-off of %s has ended: %s", hand_off.worker_id, error)
            return  # its fetch will fail with the same error
        except ServingError as error:
            pause_s = retry_interval_s
            logger.info("could not renew a hand-off of %s, trying again: %s", hand_off.worker_id, error)


@dataclass(frozen=True)
class _LocalPool:
    """Where pieces go, their shape, and what brings them there."""

    memory: BlockMemory
    layout: PieceLayout
    inputs: PoolInputs


def _check_layout(theirs: PieceLayout, pool: _LocalPool | None) -> None:
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


# ``[num_pieces]``.
_Numbers: TypeAlias = npt.NDArray[np.int64]


def _ascending(copies: Sequence[PieceCopy]) -> tuple[_Numbers, _Numbers]:
    """Pieces, ascending, and the block of each."""
    if isinstance(copies, PieceRun):
        first, num_pieces = copies.first_piece, len(copies)
        return np.arange(first, first + num_pieces), np.fromiter(copies.block_ids, np.int64, num_pieces)
    # numpy takes ten times as long for a list of tuples as for their numbers.
    table = np.fromiter(chain.from_iterable(copies), np.int64, 2 * len(copies)).reshape(-1, 2)
    if (np.diff(table[:, 0]) < 0).any():
        table = table[table[:, 0].argsort()]
    return table[:, 0], table[:, 1]


class _Fetch:
    """Takes over one hand-off."""

    def __init__(
        self,
        hand_off: HandOff,
        copies: Sequence[PieceCopy],
        *,
        pool: _LocalPool | None,
        host: HostIdentity,
        config: TransferConfig,
    ) -> None:
        """Plan to put the pieces of ``copies``, in any order, into their blocks of ``pool``."""
        assert pool is not None or not copies, "blocks are fetched into an attached pool"
        self._hand_off = hand_off
        self._pieces, self._block_ids = _ascending(copies)
        self._pool = pool
        self._host = host
        self._config = config
        self._offered: Sequence[TransferWay] = ()
        self._owner = PoolOwner(hand_off.worker_id, hand_off.epoch)

    async def run(self, stream: PullStream, *, waits: bool = False) -> TransferWay:
        """Move everything and let the source go, over ``stream``, which stays the caller's to end.

        ``waits``: nothing is sent before the source has granted, so that gRPC cannot hide a refusal.

        Returns the way taken. Raises as ``Claim.fetch`` does.
        """
        max_pull_s = self._config.max_pull_s
        try:
            async with asyncio.timeout(max_pull_s):
                self._offered = self._ways()
                read_ahead = self._plan_ahead()
                async with AsyncExitStack() as running:
                    # The copies begin before the source is asked: a long prompt's message takes as long as some of
                    # them to put together.
                    copying: asyncio.Task[None] | None = None
                    if read_ahead:
                        copying = await running.enter_async_context(_running(self._copy_ahead(read_ahead)))
                    await stream.send(pb.PullRequest(begin=self._begin()))
                    answer = await running.enter_async_context(_running(stream.receive()))
                    if copying is not None:
                        await copying
                    if read_ahead is not None and not waits:
                        # Everything was read, so `finish` need not wait for `granted`; what was read counts only after
                        # both.
                        await stream.send(_FINISH)
                    granted = _expect(await answer, "granted", pb.PullGranted)
                way = self._check(granted)
                if read_ahead is None:
                    await self._move(stream, way, granted)
                elif read_ahead and not read_ahead.is_of(way, self._lent(granted)[1]):
                    raise TransferError("the source granted other blocks than its hand-off names")
                if read_ahead is None or waits:
                    await stream.send(_FINISH)
                _expect(await stream.receive(), "finished", pb.PullFinished)
                return way
        except TimeoutError:
            raise TransferTimeoutError(f"the pull took more than {max_pull_s} s") from None
        except WorkerUnavailableError as error:
            # The source is unavailable. The router must not take that for this worker, which answers it.
            raise TransferError(f"the source cannot be reached: {error.message}") from None

    def _begin(self) -> pb.PullBegin:
        return pb.PullBegin(
            ticket=ticket_to_pb(self._hand_off),
            pieces=self._pieces.tolist(),
            ways=[WAY_TO_PB[way] for way in self._offered],
            host=host_to_pb(self._host),
        )

    def _ways(self) -> Sequence[TransferWay]:
        """The ways to offer, best first. Raises ``NoHandOffError``: none leads to the local pool."""
        if self._pool is None or not len(self._pieces):
            return (TransferWay.GRPC,)  # nothing is moved: messages alone end it, wherever the pools are
        ways = [way for way in self._config.ways_of(self._pool.memory) if self._may_take(self._pool, way)]
        if not ways:
            raise NoHandOffError(f"no way leads from the pool of {self._hand_off.worker_id} into this worker's")
        # Every worker takes what is staged. A source on a GPU sends it, unless `shm` says that it can be mapped.
        ways.insert(int(ways[0] is TransferWay.CUDA_IPC), TransferWay.STAGED)
        return ways

    def _may_take(self, pool: _LocalPool, way: TransferWay) -> bool:
        """False once what ``way`` reads could not be opened; ``shm`` stands for what is staged, too."""
        readers = pool.inputs.readers
        opened = (way, TransferWay.STAGED) if way is TransferWay.SHM else (way,)
        return all(readers[one].may_open(self._owner) for one in opened if one in readers)

    def _is_read(self, granted: pb.PullGranted) -> bool:
        """Whether this worker moves the pieces by itself."""
        if granted.way == pb.TRANSFER_WAY_STAGED:
            return granted.HasField("shm")
        return granted.way != pb.TRANSFER_WAY_GRPC

    def _check(self, granted: pb.PullGranted) -> TransferWay:
        way = WAY_FROM_PB.get(granted.way)
        if way is None or way not in self._offered:
            raise TransferError("the source granted a way that was not offered")
        if (
            len(self._pieces)
            and self._pool is not None
            and granted.piece_size_bytes != self._pool.layout.piece_size_bytes
        ):
            raise LayoutMismatchError(
                f"pieces have {granted.piece_size_bytes} bytes there, {self._pool.layout.piece_size_bytes} here"
            )
        if self._is_read(granted) and len(self._pieces) and len(self._lent(granted)[1]) != len(self._pieces):
            raise TransferError("the source did not say where each piece is")
        return way

    async def _move(self, stream: PullStream, way: TransferWay, granted: pb.PullGranted) -> None:
        assert self._pool is not None
        if self._is_read(granted):
            await self._read(self._pool, self._pool.inputs.readers[way], granted)
            return
        receiver = _PieceReceiver(self._pool, self._pieces, self._block_ids)
        while not receiver.is_complete:
            await receiver.accept(await stream.receive())
        await receiver.end()

    def _plan_ahead(self) -> _ReadAhead | None:
        """What to copy while `begin` is on the way, where the source's pool is open and the hand-off says where in it.

        A source that grants and then finishes has held the blocks from when it made the hand-off until it received
        `finish`, so what was read in between is right.

        Returns:
            Nothing where nothing is wanted; ``None``: the source has to be asked first.
        """
        if not len(self._pieces):
            return _ReadAhead(None, self._pieces)
        payload, reader = self._hand_off.payload, self._open_reader()
        if self._pool is None or reader is None:
            return None
        if isinstance(payload, OpaquePayload) or self._pieces[-1] >= len(payload.block_ids):
            return None
        block_ids = np.fromiter(payload.block_ids, np.int64, len(payload.block_ids))
        return _ReadAhead(reader, block_ids[self._pieces] * self._pool.layout.piece_size_bytes)

    async def _copy_ahead(self, read_ahead: _ReadAhead) -> None:
        assert self._pool is not None and read_ahead.reader is not None, "there is something to read"
        await self._copy(self._pool, read_ahead.reader, read_ahead.offsets)

    def _open_reader(self) -> PoolReader | None:
        """What has the source's pool open; what is staged lies elsewhere at each pull."""
        if self._pool is None:
            return None
        readers = self._pool.inputs.readers.values()
        is_offered = (reader for reader in readers if reader.way in self._offered)
        can_read = (reader for reader in is_offered if reader.way is not TransferWay.STAGED)
        return next((reader for reader in can_read if reader.is_open(self._owner)), None)

    async def _read(self, pool: _LocalPool, reader: PoolReader, granted: pb.PullGranted) -> None:
        lent, offsets = self._lent(granted)
        try:
            await reader.open(self._owner, lent, timeout_s=self._config.stall_timeout_s)
        except TransferError:
            self._ways()  # raises if this was the only way
            raise
        await self._copy(pool, reader, offsets)

    def _lent(self, granted: pb.PullGranted) -> tuple[LentPool, Offsets]:
        """The pool that ``granted`` names, and where in it each piece is. Raises ``TransferError``: it says neither.

        Offsets that no pool reaches are negative, so that no run of them passes.
        """
        if granted.way == pb.TRANSFER_WAY_CUDA_IPC:
            return from_opaque(granted.opaque)
        shm = granted.shm
        offsets = np.fromiter(shm.offsets, np.uint64, len(shm.offsets)).astype(np.int64)
        return SharedPool(shm.socket_path, shm.token, shm.pool_size_bytes), offsets

    async def _copy(self, pool: _LocalPool, reader: PoolReader, offsets: Offsets) -> None:
        """Copy the pieces, which are at ``offsets`` of the source's pool."""
        size = pool.layout.piece_size_bytes
        await reader.copy(self._owner, merge_runs(offsets, self._block_ids * size, size))


@dataclass(frozen=True, eq=False)
class _ReadAhead:
    """What is read before it is granted: by what, and where in the source's pool; false: nothing."""

    reader: PoolReader | None
    offsets: Offsets

    def __bool__(self) -> bool:
        return len(self.offsets) > 0

    def is_of(self, way: TransferWay, offsets: Offsets) -> bool:
        """Whether it was read by this way from these places."""
        return self.reader is not None and way is self.reader.way and np.array_equal(offsets, self.offsets)


class _PieceReceiver:
    """Takes the parts of the pieces asked for, each piece's in order and once, for their blocks.

    It believes nothing that the source says.
    """

    def __init__(self, pool: _LocalPool, pieces: _Numbers, block_ids: _Numbers) -> None:
        """Expect every one of ``pieces``, which differ, for its block."""
        self._sink = pool.inputs.sink()
        self._piece_size_bytes = size = pool.layout.piece_size_bytes
        self._start_by_piece = dict(zip(pieces.tolist(), (block_ids * size).tolist(), strict=True))
        self._num_received = dict.fromkeys(self._start_by_piece, 0)  # bytes
        self._num_missing_bytes = len(pieces) * size

    @property
    def is_complete(self) -> bool:
        """Whether every byte has come."""
        return self._num_missing_bytes == 0

    async def accept(self, part: PullMessage) -> None:
        """Take a part for its block; ends as ``PieceSink.put`` does.

        Raises:
            TransferError: it is no piece, was not asked for, or is not the next part of its piece, and was not written;
                or a copy failed.
        """
        if not isinstance(part, PiecePart):
            raise TransferError("the source sent something else than a piece")
        size = len(part.data)
        end = part.offset_bytes + size
        if part.offset_bytes != self._num_received.get(part.index) or size == 0:
            raise TransferError("the source sent a piece that was not asked for, or its parts out of order")
        if end > self._piece_size_bytes:
            raise TransferError("the source sent more of a piece than a piece is long")
        self._num_received[part.index] = end
        self._num_missing_bytes -= size
        await self._sink.put(self._start_by_piece[part.index] + part.offset_bytes, part.data)

    async def end(self) -> None:
        """Return once all is written. Raises ``TransferError``: a copy failed."""
        await self._sink.flush()


_Result = TypeVar("_Result")


@contextlib.asynccontextmanager
async def _running(work: Coroutine[object, object, _Result]) -> AsyncIterator[asyncio.Task[_Result]]:
    """Have ``work`` done while the block does something else; leave nothing of it behind."""
    task = asyncio.create_task(work)
    try:
        await asyncio.sleep(0)  # it begins before the block does, which may keep the event loop
        yield task
    finally:
        task.cancel()  # no effect on a task that is done
        await asyncio.gather(task, return_exceptions=True)


_Part = TypeVar("_Part", pb.PullGranted, pb.PullFinished)


def _expect(message: PullMessage, name: str, message_type: type[_Part]) -> _Part:
    """The part of a response that has to come now."""
    if isinstance(message, pb.PullResponse) and message.WhichOneof("message") == name:
        part = getattr(message, name)
        assert isinstance(part, message_type)
        return part
    raise TransferError(f"the source sent something else than `{name}`")
