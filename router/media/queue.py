"""The queue of requests with media, in which they wait before any of their files is fetched or encoded.

Embeddings stay in the encode workers' pools until a prefill has pulled them, and files stay in the router's memory as
long as their request may need them again. Without this queue, a tenant that sends a thousand pictures would fill both,
and all other requests would wait behind these. It is ordered as the router's other queue is: tenants by fair share,
and each tenant's own requests by priority and arrival.

Files that are in a request itself are in memory from its arrival, whether it waits or not. They count from then on
(``MediaQueue.hold``), and a request that brings more than there is room for is refused instead of kept waiting. Only
files that are still to be fetched wait for memory.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from quartet.errors import QueueFullError
from quartet.streams.wakeable import result_if_done
from router.fair_queue import FairQueue, FairShare, Lane, Position, Standing
from router.workers import PoolKey

#: The share of the embeddings that a pool's encode workers have room for that one router's requests may pin.
_PINNED_SHARE = 0.9

# The lane of a tenant's requests that wait for memory. Its others have what they need of it, and may go before these:
# else they would hold memory while they wait behind requests that wait for memory.
_NEEDS_MEMORY = "memory"

# What is held from arrival is not of any pool yet.
_NO_POOL = PoolKey("", "")

# A tenant gets memory for more files, and pins more embeddings, only while it has at most so many times what is free:
# alone it gets four fifths.
# Dynamic thresholds: Choudhury and Hahne, IEEE/ACM Transactions on Networking, 1998.
_MOST_OF_FREE = 4


@dataclass(frozen=True, kw_only=True)
class MediaOrder:
    """The room that one request needs.

    Attributes:
        num_encode_tokens: tokens of embeddings at encode workers, at most; 0: no encode worker encodes for it.
        num_bytes: bytes in the router's memory of its files that are still to be fetched, at most.
    """

    pool: PoolKey
    tenant: str
    priority: int
    num_encode_tokens: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class MediaQueueConfig:
    """Bounds of the queue.

    Attributes:
        max_bytes: of the files of all requests that have them or were admitted to fetch them; of one tenant's, a fifth
            less.
        max_length: requests that wait at most; of more, the last one is refused.
        timeout_s: longest wait.
        retry_delay_s: after how long refused clients should try again.
    """

    max_bytes: int
    max_length: int
    timeout_s: float
    retry_delay_s: float


class MediaRoom:
    """The room that one request has. Who got it from the queue closes it."""

    def __init__(self, order: MediaOrder, queue: MediaQueue) -> None:
        """Made by the queue."""
        self._queue = queue
        self._pool, self._tenant = order.pool, order.tenant
        self.num_encode_tokens, self.num_bytes = order.num_encode_tokens, order.num_bytes

    def fetched(self, num_bytes: int) -> None:
        """Its files are here, and have ``num_bytes`` bytes."""
        self._change(self.num_encode_tokens, min(num_bytes, self.num_bytes))

    def sized(self, num_encode_tokens: int) -> None:
        """Its embeddings are those of ``num_encode_tokens`` tokens."""
        num_encode_tokens = min(num_encode_tokens, self.num_encode_tokens)
        self._queue.charge(self._tenant, num_encode_tokens - self.num_encode_tokens)
        self._change(num_encode_tokens, self.num_bytes)

    def pulled(self) -> None:
        """No encode worker holds its embeddings any more. May be called again."""
        self._change(0, self.num_bytes)

    def close(self) -> None:
        """Give all of its room back. May be called again."""
        self._change(0, 0)

    def _change(self, num_encode_tokens: int, num_bytes: int) -> None:
        tokens, freed = self.num_encode_tokens - num_encode_tokens, self.num_bytes - num_bytes
        self.num_encode_tokens, self.num_bytes = num_encode_tokens, num_bytes
        if tokens or freed:
            self._queue.give_back(self._pool, self._tenant, tokens, freed)


class MediaQueue:
    """Requests with media that wait for room. Runs on the event loop."""

    def __init__(self, config: MediaQueueConfig, share: FairShare, encode_room: Callable[[PoolKey], int]) -> None:
        """No request has room yet.

        Args:
            config: bounds.
            share: orders the tenants; it belongs to this queue alone.
            encode_room: tokens whose embeddings the encode workers of a pool have room for.
        """
        self._config = config
        self._share = share
        self._encode_room = encode_room
        self._queue: FairQueue[_QueuedMedia] = FairQueue(share)
        self._num_arrived = 0
        self._num_bytes = 0
        self._num_bytes_of: Counter[str] = Counter()  # by tenant
        self._num_encode_tokens: dict[PoolKey, int] = {}
        self._num_encode_tokens_of: Counter[tuple[PoolKey, str]] = Counter()  # by pool and tenant

    @property
    def length(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    @property
    def usage(self) -> float:
        """The share of ``max_length`` that is taken. Any thread may read it."""
        return len(self._queue) / self._config.max_length

    @property
    def num_bytes(self) -> int:
        """Bytes of files that are in memory, or may come there at once."""
        return self._num_bytes

    def hold(self, tenant: str, num_bytes: int) -> MediaRoom:
        """Count ``num_bytes`` bytes that came in a request of ``tenant``, until the room is closed.

        Raises:
            QueueFullError: they and the files of other requests are too many.
        """
        if num_bytes and not (self._may_hold_more(tenant) and self._has_memory(num_bytes)):
            raise self._refusal("too many requests have media in them: their files take up the router's memory")
        self._take(tenant, num_bytes)
        order = MediaOrder(pool=_NO_POOL, tenant=tenant, priority=0, num_encode_tokens=0, num_bytes=num_bytes)
        return MediaRoom(order, self)

    async def enter(self, order: MediaOrder) -> MediaRoom:
        """Wait for room. Leaves nothing behind when cancelled.

        Raises:
            QueueFullError: too many requests wait before it, or no room came in time.
        """
        self._num_arrived += 1
        standing = Standing(
            pool=order.pool,
            tenant=order.tenant,
            priority=order.priority,
            number=self._num_arrived,
            num_tokens=max(order.num_encode_tokens, 1),
        )
        queued = _QueuedMedia(order=order, standing=standing, adapter=_NEEDS_MEMORY if order.num_bytes else "")
        self._queue.add(queued)
        try:
            self.poll()
            self._queue.shorten(self._config.max_length, self._full_error)
            async with asyncio.timeout(self._config.timeout_s):
                return await queued.placed
        except BaseException as error:
            # It may have been let in at the very moment when its wait ended for another reason.
            if (room := result_if_done(queued.placed)) is not None:
                room.close()
            if isinstance(error, TimeoutError):
                raise self._refusal("no room for the request's media came up in time") from error
            raise
        finally:
            if self._queue.remove(queued):
                self.poll()

    def poll(self) -> None:
        """Let requests in that there is room for; none overtakes another one of its tenant that waits for the same.

        A request that there is no memory for keeps only its tenant's waiting, and so does one that needs more of the
        pool than there is: other tenants' must not wait until files or embeddings of long requests are gone. A tenant
        whose files take most of the memory waits until they take less. Embeddings stay until their prompt is computed,
        so the same holds for a tenant that pins most of a pool.
        """
        full: set[PoolKey | tuple[str, str] | tuple[PoolKey, str]] = set()

        def is_kept(lane: Lane[_QueuedMedia]) -> bool:
            return lane.pool in full or (lane.tenant, lane.adapter) in full or (lane.pool, lane.tenant) in full

        let_in: list[_QueuedMedia] = []
        for queued in self._queue.in_order(is_kept):
            order = queued.order
            if order.num_bytes and not self._has_room(order):
                full.add((order.tenant, _NEEDS_MEMORY))
                continue
            if self._pins_most(order):
                full.add((order.pool, order.tenant))
                continue
            if not self._has_encode_room(order):
                full.add((order.pool, order.tenant) if self._is_over_large(order) else order.pool)
                continue
            self._take(order.tenant, order.num_bytes)
            if order.num_encode_tokens:
                taken = self._num_encode_tokens.get(order.pool, 0)
                self._num_encode_tokens[order.pool] = taken + order.num_encode_tokens
                self._num_encode_tokens_of[order.pool, order.tenant] += order.num_encode_tokens
            let_in.append(queued)
        for queued in let_in:
            self._queue.serve(queued)
            queued.placed.set_result(MediaRoom(queued.order, self))

    def give_back(self, pool: PoolKey, tenant: str, num_encode_tokens: int, num_bytes: int) -> None:
        """So much of the tenant's room is free again."""
        if num_bytes:
            self._num_bytes -= num_bytes
            self._num_bytes_of[tenant] -= num_bytes
            if not self._num_bytes_of[tenant]:
                del self._num_bytes_of[tenant]
        if num_encode_tokens:
            self._num_encode_tokens[pool] -= num_encode_tokens
            if not self._num_encode_tokens[pool]:
                del self._num_encode_tokens[pool]
            self._num_encode_tokens_of[pool, tenant] -= num_encode_tokens
            if not self._num_encode_tokens_of[pool, tenant]:
                del self._num_encode_tokens_of[pool, tenant]
        if self._queue:
            self.poll()

    def charge(self, tenant: str, num_encode_tokens: int) -> None:
        """A request of the tenant, once let in, takes so many tokens more than was charged, less if negative."""
        self._share.charge(tenant, num_encode_tokens)

    def _pins_most(self, order: MediaOrder) -> bool:
        if not order.num_encode_tokens:
            return False
        num_free = _PINNED_SHARE * self._encode_room(order.pool) - self._num_encode_tokens.get(order.pool, 0)
        pinned = self._num_encode_tokens_of[order.pool, order.tenant]
        return pinned > 0 and pinned > _MOST_OF_FREE * num_free

    def _take(self, tenant: str, num_bytes: int) -> None:
        if num_bytes:
            self._num_bytes += num_bytes
            self._num_bytes_of[tenant] += num_bytes

    def _may_hold_more(self, tenant: str) -> bool:
        return self._num_bytes_of[tenant] <= _MOST_OF_FREE * (self._config.max_bytes - self._num_bytes)

    def _has_memory(self, num_bytes: int) -> bool:
        return self._num_bytes + num_bytes <= self._config.max_bytes

    def _has_room(self, order: MediaOrder) -> bool:
        # A request alone is let in whatever it needs.
        return not self._num_bytes or (self._may_hold_more(order.tenant) and self._has_memory(order.num_bytes))

    def _is_over_large(self, order: MediaOrder) -> bool:
        """Whether it needs more than there is of the pool, also if nothing else took any."""
        return order.num_encode_tokens > _PINNED_SHARE * self._encode_room(order.pool)

    def _has_encode_room(self, order: MediaOrder) -> bool:
        taken = self._num_encode_tokens.get(order.pool, 0)
        # A request alone is let in whatever it needs: the worker refuses it if that is too much.
        return not taken or taken + order.num_encode_tokens <= _PINNED_SHARE * self._encode_room(order.pool)

    def _full_error(self) -> QueueFullError:
        return self._refusal("too many requests with media wait")

    def _refusal(self, message: str) -> QueueFullError:
        return QueueFullError(message, retry_delay_s=self._config.retry_delay_s)


@dataclass(eq=False, kw_only=True)
class _QueuedMedia:
    """An entry of the queue; see ``router.fair_queue.Entry``."""

    order: MediaOrder
    standing: Standing
    adapter: str = ""
    is_retry: bool = False
    placed: asyncio.Future[MediaRoom] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    lane: Lane[_QueuedMedia] | None = None
    position: Position = (0, 0, 0)
