"""Where requests with media wait before anything of theirs is fetched or encoded, best rank first.

What is encoded stays in the encode workers' pools until a prefill has pulled it, and files stay in the router's memory
as long as their request may need them again. Without this line a tenant that sends a thousand pictures would fill both,
and everybody else's would wait behind them. It has the order of the router's queue: priority, fair share, arrival.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import attrgetter

from quartet.errors import QueueFullError
from router.fair_share import FairShare
from router.workers import PoolKey

#: Of the embeddings that a pool's encode workers have room for, what one router's requests may pin.
_PINNED_SHARE = 0.9


@dataclass(frozen=True, kw_only=True)
class MediaOrder:
    """What one request will take up.

    Attributes:
        num_encode_tokens: of embeddings at encode workers, at most; 0: none encodes for it.
        num_bytes: of its files in the router's memory, at most.
    """

    pool: PoolKey
    tenant: str
    priority: int
    num_encode_tokens: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class MediaLineConfig:
    """Bounds of the line.

    Attributes:
        max_bytes: of the files of all requests that are in, together.
        max_length: requests that wait at most; of more, who stands last is refused.
        timeout_s: longest wait.
        retry_delay_s: what refused clients are told to wait.
    """

    max_bytes: int
    max_length: int
    timeout_s: float
    retry_delay_s: float


class MediaRoom:
    """What one request has taken up. Whoever got it closes it."""

    def __init__(self, order: MediaOrder, line: MediaLine) -> None:
        """Made by ``MediaLine.enter``."""
        self._line = line
        self._pool = order.pool
        self.num_encode_tokens, self.num_bytes = order.num_encode_tokens, order.num_bytes

    def fetched(self, num_bytes: int) -> None:
        """Its files are here, and so large."""
        self._change(self.num_encode_tokens, min(num_bytes, self.num_bytes))

    def sized(self, num_encode_tokens: int) -> None:
        """Its embeddings are so many."""
        self._change(min(num_encode_tokens, self.num_encode_tokens), self.num_bytes)

    def pulled(self) -> None:
        """Its embeddings are pinned nowhere any more. May be called again."""
        self._change(0, self.num_bytes)

    def close(self) -> None:
        """Nothing of it is held any more. May be called again."""
        self._change(0, 0)

    def _change(self, num_encode_tokens: int, num_bytes: int) -> None:
        tokens, freed = self.num_encode_tokens - num_encode_tokens, self.num_bytes - num_bytes
        self.num_encode_tokens, self.num_bytes = num_encode_tokens, num_bytes
        if tokens or freed:
            self._line.give_back(self._pool, tokens, freed)


@dataclass(eq=False, kw_only=True)
class _Waiting:
    order: MediaOrder
    rank: tuple[int, float, int]
    start: float
    let_in: asyncio.Future[MediaRoom] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class MediaLine:
    """Lives on the event loop. ``encode_room`` tells the tokens that the encode workers of a pool have room for."""

    def __init__(self, config: MediaLineConfig, share: FairShare, encode_room: Callable[[PoolKey], int]) -> None:
        """Nobody is in; ``share`` is this line's own."""
        self._config = config
        self._share = share
        self._encode_room = encode_room
        self._line: list[_Waiting] = []
        self._num_arrived = 0
        self._num_bytes = 0
        self._num_encode_tokens: dict[PoolKey, int] = {}

    @property
    def length(self) -> int:
        """Requests that wait."""
        return len(self._line)

    async def enter(self, order: MediaOrder) -> MediaRoom:
        """Wait for the request's turn. Leaves nothing behind when cancelled.

        Raises:
            QueueFullError: too many wait that come first, or its turn did not come in time.
        """
        self._num_arrived += 1
        start = self._share.start(order.tenant, max(order.num_encode_tokens, 1))
        waiting = _Waiting(order=order, rank=(-order.priority, start, self._num_arrived), start=start)
        insort(self._line, waiting, key=attrgetter("rank"))
        self.look()
        if len(self._line) > self._config.max_length:
            last = self._line.pop()
            last.let_in.set_exception(self._refusal("too many requests with media wait"))
        try:
            async with asyncio.timeout(self._config.timeout_s):
                return await waiting.let_in
        except TimeoutError as error:
            self._leave(waiting)
            raise self._refusal("no room for the request's media came up in time") from error
        except BaseException:
            self._leave(waiting)
            raise

    def look_in(self, order: MediaOrder) -> MediaRoom:
        """For a request that only asks, and takes up nothing for long: at once, and it counts for nothing."""
        return MediaRoom(replace(order, num_encode_tokens=0, num_bytes=0), self)

    def look(self) -> None:
        """Let in whom there is room for: nobody goes before one of the same pool that stands ahead."""
        full: set[PoolKey] = set()
        for waiting in tuple(self._line):
            order = waiting.order
            if waiting.let_in.done():  # cancelled in this very moment: it leaves by itself
                continue
            if self._num_bytes and self._num_bytes + order.num_bytes > self._config.max_bytes:
                return
            if order.pool in full:
                continue
            if not self._has_encode_room(order):
                full.add(order.pool)
                continue
            self._line.remove(waiting)
            self._share.served(waiting.start)
            self._num_bytes += order.num_bytes
            if order.num_encode_tokens:
                taken = self._num_encode_tokens.get(order.pool, 0)
                self._num_encode_tokens[order.pool] = taken + order.num_encode_tokens
            waiting.let_in.set_result(MediaRoom(order, self))

    def give_back(self, pool: PoolKey, num_encode_tokens: int, num_bytes: int) -> None:
        """So much of what is in is free again."""
        self._num_bytes -= num_bytes
        if num_encode_tokens:
            self._num_encode_tokens[pool] -= num_encode_tokens
            if not self._num_encode_tokens[pool]:
                del self._num_encode_tokens[pool]
        if self._line:
            self.look()

    def _leave(self, waiting: _Waiting) -> None:
        """It wants nothing any more, and may have been let in, or refused, in this very moment."""
        let_in = waiting.let_in
        if waiting in self._line:
            self._line.remove(waiting)
            self.look()
        elif let_in.done() and not let_in.cancelled() and let_in.exception() is None:
            let_in.result().close()
            return
        self._share.give_back(waiting.order.tenant, max(waiting.order.num_encode_tokens, 1))

    def _has_encode_room(self, order: MediaOrder) -> bool:
        taken = self._num_encode_tokens.get(order.pool, 0)
        # One alone is let in whatever it takes: the worker says whether that can be.
        return not taken or taken + order.num_encode_tokens <= _PINNED_SHARE * self._encode_room(order.pool)

    def _refusal(self, message: str) -> QueueFullError:
        return QueueFullError(message, retry_delay_s=self._config.retry_delay_s)
