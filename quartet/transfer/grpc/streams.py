"""The taker's connections to sources: one Pull stream, streams opened ahead of need, and channels.

Every wait of a ``PullStream`` is bounded, and every failure is a ``ServingError``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

import grpc

from quartet.errors import ServingError, TransferError, TransferTimeoutError
from quartet.kvcache.layout import HandOff
from quartet.rpc.errors import from_pull_error
from quartet.transfer.grpc.messages import PiecePart, PullMessage, open_pull
from quartet.v1 import transfer_pb2 as pb

#: How long ``PullStream.end`` waits for the source. All data has come by then; cancelling the call instead would leave
#: an odd line in the source's log.
_END_TIMEOUT_S = 0.5

#: Unused channels that are kept. A peer that comes back on another port would otherwise leave one behind each time.
_MAX_IDLE = 64


@dataclass(frozen=True)
class SourceLife:
    """One epoch of a source, and the ``host:port`` at which it serves; other epochs may have served there before."""

    address: str
    epoch: int

    @classmethod
    def of(cls, hand_off: HandOff) -> SourceLife:
        """The one that made ``hand_off``."""
        return cls(hand_off.address, hand_off.epoch)


class PullStream:
    """One stream to a source; ``cancel`` it when it is no longer needed."""

    def __init__(self, channel: grpc.aio.Channel, *, timeout_s: float, stall_timeout_s: float) -> None:
        """Open the stream, for ``timeout_s`` in all and ``stall_timeout_s`` for each step."""
        self._stall_timeout_s = stall_timeout_s
        self._call = open_pull(channel, timeout_s)
        self._writing: asyncio.Future[None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether it has not ended yet, as far as is known here."""
        return not self._call.done()

    async def send(self, request: pb.PullRequest) -> None:
        """Begin to send one message, once the one before it is out.

        A write that fails raises nothing here: ``receive`` raises what ended the stream.

        Raises:
            TransferTimeoutError: the one before it has not gone out in time.
        """
        if self._writing is not None and not self._writing.done():
            async with self._bounded(self._stall_timeout_s):
                await asyncio.wait([self._writing])
        # Waiting for the write's own end would cost one more turn of two threads before reading begins.
        self._writing = asyncio.ensure_future(self._call.write(request))
        self._writing.add_done_callback(_ignore_outcome)
        await asyncio.sleep(0)  # it begins now, also when the caller goes on to something that takes long

    async def ask(self, request: pb.PullRequest) -> PullMessage:
        """Send one message and wait for the next one that comes. Raises as ``receive`` does."""
        await self.send(request)
        return await self.receive()

    async def receive(self) -> PullMessage:
        """The next message.

        Raises:
            TransferTimeoutError: nothing came in time.
            TransferError: the stream ended, by either side, without a message.
            ServingError: what the source answered instead.
        """
        async with self._bounded(self._stall_timeout_s):
            message: object = await self._call.read()
        if isinstance(message, (pb.PullResponse, PiecePart)):
            return message
        raise TransferError("the source ended the stream early")

    async def end(self) -> None:
        """Close our side and let the source close its own. Never raises; takes half a second at most."""
        with contextlib.suppress(ServingError):
            async with self._bounded(_END_TIMEOUT_S):
                await self._call.done_writing()
                while await self._call.read() is not grpc.aio.EOF:
                    pass

    def cancel(self) -> None:
        """Give up; the source takes that for a lost stream. Does nothing to a stream that has ended."""
        self._call.cancel()
        if self._writing is not None:
            self._writing.cancel()

    @contextlib.asynccontextmanager
    async def _bounded(self, timeout_s: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError:
            raise TransferTimeoutError("the source of the hand-off said nothing for too long") from None
        except grpc.aio.AioRpcError as error:
            raise from_pull_error(error) from None
        except asyncio.CancelledError:
            # gRPC also raises this when the channel is closed under the call and no task was cancelled.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise TransferError("the channel to the source was closed") from None


def _ignore_outcome(task: asyncio.Future[None]) -> None:
    if not task.cancelled():
        task.exception()


class SpareStreams:
    """One open Pull stream for each life of a source from which hand-offs came lately.

    A stream belongs to no hand-off before its `begin`. Opening one takes about as long as a question and its answer,
    half a millisecond of a fetch's two, so it is opened ahead. A source ends a stream that stays silent, so an unused
    spare is given up after a while.
    """

    def __init__(self, open_stream: Callable[[SourceLife, float], PullStream]) -> None:
        """Open nothing yet; ``open_stream(source, max_idle_s)`` opens one that is idle for so long at most."""
        self._open_stream = open_stream
        self._spares: dict[SourceLife, _Spare] = {}

    def prepare(self, source: SourceLife, max_idle_s: float) -> None:
        """Have a stream to ``source`` ready, for the next ``max_idle_s`` at most."""
        spare = self._spares.get(source)
        if spare is not None and spare.stream.is_open:
            return
        if spare is not None:
            spare.timer.cancel()
        stream = self._open_stream(source, max_idle_s)
        timer = asyncio.get_running_loop().call_later(max_idle_s, self._give_up, source)
        self._spares[source] = _Spare(stream, timer)

    def take(self, source: SourceLife) -> PullStream | None:
        """The stream to ``source``, which is the caller's from now on; ``None`` where there is none."""
        spare = self._spares.pop(source, None)
        if spare is None:
            return None
        spare.timer.cancel()
        return spare.stream if spare.stream.is_open else None

    def close(self) -> None:
        """Give all of them up."""
        for source in list(self._spares):
            self._give_up(source)

    def _give_up(self, source: SourceLife) -> None:
        spare = self._spares.pop(source)
        spare.timer.cancel()
        spare.stream.cancel()


@dataclass(frozen=True)
class _Spare:
    stream: PullStream
    timer: asyncio.TimerHandle


class PeerChannels:
    """One gRPC channel for each life of a source, shared by all its hand-offs; the longest unused is closed first.

    A restarted source gets a new channel: that of its earlier life may be pausing after a failed try to connect, and
    until it tries again every call on it fails with the old error.
    """

    def __init__(self, factory: Callable[[str], grpc.aio.Channel]) -> None:
        """Open nothing yet; ``factory`` makes a channel to ``host:port``, as ``Dialer.open`` does."""
        self._factory = factory
        self._used: dict[SourceLife, _UsedChannel] = {}
        self._idle: OrderedDict[SourceLife, grpc.aio.Channel] = OrderedDict()
        self._is_closed = False
        self._closing: set[asyncio.Task[None]] = set()

    @contextlib.contextmanager
    def use(self, source: SourceLife) -> Iterator[grpc.aio.Channel]:
        """The channel to ``source``, open for the length of the block.

        Raises:
            TransferError: the channels are closed.
        """
        if self._is_closed:
            raise TransferError("the puller is closed")
        used = self._used.get(source)
        if used is None:
            channel = self._idle.pop(source, None) or self._open(source)
            used = self._used[source] = _UsedChannel(channel)
        used.num_users += 1
        try:
            yield used.channel
        finally:
            used.num_users -= 1
            if used.num_users == 0:
                self._rest(source)

    async def close(self) -> None:
        """Close every channel; calls on them end."""
        self._is_closed = True
        channels = [*self._idle.values(), *(used.channel for used in self._used.values())]
        self._idle.clear()
        await asyncio.gather(*(channel.close() for channel in channels), *self._closing)

    def _open(self, source: SourceLife) -> grpc.aio.Channel:
        # The last life's hand-offs may still be asked about, in turn with the new one's: its channel stays.
        earlier = [life for life in self._idle if life.address == source.address]
        for life in earlier[:-1]:
            self._close(self._idle.pop(life))
        return self._factory(source.address)

    def _rest(self, source: SourceLife) -> None:
        self._idle[source] = self._used.pop(source).channel
        if len(self._idle) > _MAX_IDLE:
            _source, oldest = self._idle.popitem(last=False)
            self._close(oldest)

    def _close(self, channel: grpc.aio.Channel) -> None:
        task = asyncio.create_task(channel.close(), name="close-channel")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


@dataclass
class _UsedChannel:
    channel: grpc.aio.Channel
    num_users: int = 0
