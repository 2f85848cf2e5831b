"""One gRPC channel per peer, kept while somebody uses it and a while after."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from quartet.errors import TransferError

#: Peers that come back on another port would otherwise leave a channel behind each time.
_MAX_IDLE = 64


class PeerChannels:
    """Channels by address, shared by all hand-offs of a peer; unused ones go, the longest unused first."""

    def __init__(self, factory: Callable[[str], grpc.aio.Channel]) -> None:
        """Open nothing yet; ``factory`` makes a channel to ``host:port``."""
        self._factory = factory
        self._used: dict[str, _UsedChannel] = {}
        self._idle: OrderedDict[str, grpc.aio.Channel] = OrderedDict()
        self._is_closed = False
        self._closing: set[asyncio.Task[None]] = set()

    @contextmanager
    def use(self, address: str) -> Iterator[grpc.aio.Channel]:
        """The channel to ``address``, open for the length of the block.

        Raises:
            TransferError: the channels are closed.
        """
        if self._is_closed:
            raise TransferError("the puller is closed")
        used = self._used.get(address)
        if used is None:
            channel = self._idle.pop(address, None) or self._factory(address)
            used = self._used[address] = _UsedChannel(channel)
        used.num_users += 1
        try:
            yield used.channel
        finally:
            used.num_users -= 1
            if used.num_users == 0:
                self._rest(address)

    async def close(self) -> None:
        """Close every channel; calls on them end."""
        self._is_closed = True
        channels = [*self._idle.values(), *(used.channel for used in self._used.values())]
        self._idle.clear()
        await asyncio.gather(*(channel.close() for channel in channels), *self._closing)

    def _rest(self, address: str) -> None:
        self._idle[address] = self._used.pop(address).channel
        if len(self._idle) > _MAX_IDLE:
            _address, oldest = self._idle.popitem(last=False)
            task = asyncio.create_task(oldest.close(), name="close-channel")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


@dataclass
class _UsedChannel:
    channel: grpc.aio.Channel
    num_users: int = 0
