"""The queue of requests whose media are fetched, and wait for a free place at an encode worker.

An encode worker reports how many items it takes at a time (``max_running`` of its load), and gets no more. The other
requests wait here, where tenants have their shares: a worker's own queue knows none. While no encode worker is there,
all of them wait.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from quartet.discovery.base import Rank
from quartet.errors import QueueFullError
from quartet.streams.wakeable import result_if_done
from router.book import ItemsBooking
from router.fair_queue import FIXED_TOKENS, FairQueue, FairShare, Lane, Position, Standing
from router.kv_index.index import PrefixIndex
from router.workers import EncodeCandidate, PoolKey, WorkerTable


@dataclass(frozen=True, kw_only=True)
class EncodeNeed:
    """What one request's items need.

    Attributes:
        kinds: the kinds of the files.
        hashes: names the items in the index, in order.
        num_tokens: of all items, at most.
        avoid: ids of workers that failed the request; it may grow.
    """

    pool: PoolKey
    tenant: str
    priority: int
    kinds: frozenset[str]
    hashes: Sequence[int]
    num_tokens: int
    avoid: AbstractSet[str]


class EncodePlaces:
    """The places that one request's items have at an encode worker. The caller of ``enter`` releases them.

    Attributes:
        rank: the worker.
        booking: counts the items there.
        standing: the request's standing in the queue.
    """

    def __init__(
        self,
        queue: EncodeQueue,
        rank: Rank,
        booking: ItemsBooking,
        standing: Standing,
        num_guessed_tokens: int,
        *,
        is_new: bool,
    ) -> None:
        """Made by ``EncodeQueue.enter``; ``is_new``: its tenant was charged for these places, and so many tokens."""
        self.rank = rank
        self.booking = booking
        self.standing = standing
        self._queue = queue
        self._num_guessed_tokens = num_guessed_tokens
        self._is_guess = is_new

    def sized(self, num_tokens: int) -> None:
        """The vision tower computes ``num_tokens`` tokens for them."""
        if self._is_guess:
            self._is_guess = False
            self._queue.charge(self.standing.tenant, num_tokens - self._num_guessed_tokens)

    def leave_one(self) -> None:
        """An item is encoded: its place is free."""
        self.booking.leave_one()
        self._queue.poll()

    def release(self) -> None:
        """The request has left the worker. May be called twice."""
        self.booking.release()
        self._queue.poll()


class EncodeQueue:
    """Requests that wait for places at encode workers. Runs on the event loop."""

    def __init__(
        self,
        table: WorkerTable,
        index: PrefixIndex,
        share: FairShare,
        rng: random.Random,
        *,
        max_length: int,
        retry_delay_s: float,
    ) -> None:
        """No request waits yet.

        Args:
            table: knows the encode workers.
            index: knows what each of them has cached.
            share: orders the tenants; it belongs to this queue alone.
            rng: breaks ties between workers.
            max_length: requests that wait at most, except those that had places before; of more, the last one is
                refused.
            retry_delay_s: after how long refused clients should try again.
        """
        self._table = table
        self._index = index
        self._share = share
        self._rng = rng
        self._max_length = max_length
        self._retry_delay_s = retry_delay_s
        self._queue: FairQueue[_QueuedEncode] = FairQueue(share)
        self._num_arrived = 0
        table.listen(self.poll)

    @property
    def length(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    @property
    def usage(self) -> float:
        """The share of ``max_length`` that is taken. Any thread may read it."""
        return len(self._queue) / self._max_length

    async def enter(self, need: EncodeNeed, after: EncodePlaces | None = None) -> EncodePlaces:
        """Wait for places for all items at one worker. The caller bounds the wait. Leaves nothing when cancelled.

        A request that had places before, and comes ``after`` these, goes first, and is not charged again.

        Raises:
            QueueFullError: too many requests wait before it.
        """
        standing = self._standing(need) if after is None else after.standing
        adapter = " ".join(sorted(need.kinds))
        queued = _QueuedEncode(need=need, standing=standing, adapter=adapter, is_retry=after is not None)
        self._queue.add(queued)
        try:
            self.poll()
            self._queue.shorten(self._max_length, self._full_error)
            return await queued.placed
        except BaseException:
            # It may have got its places at the very moment when its wait ended.
            if (places := result_if_done(queued.placed)) is not None:
                places.release()
            raise
        finally:
            if self._queue.remove(queued):
                self.poll()

    def poll(self) -> None:
        """Give places to those for which there are some.

        A worker that has too few for a request keeps what it has: requests behind that one don't get them, so a
        request of many items waits for no longer than those that run there.
        """
        if not self._queue:
            return
        kept: set[Rank] = set()
        full: set[tuple[PoolKey, str]] = set()
        held: set[int] = set()  # lanes, by their ids

        def is_kept(lane: Lane[_QueuedEncode]) -> bool:
            return (lane.pool, lane.adapter) in full or id(lane) in held

        placed: list[tuple[_QueuedEncode, Rank, ItemsBooking]] = []
        for queued in self._queue.in_order(is_kept):
            need, now = queued.need, time.monotonic()
            candidates = self._table.encode_candidates(need.pool, need.kinds, now)
            able = not_avoided(candidates, need.avoid)
            free = [one for one in able if one.rank not in kept]
            rank = choose_encode(free, self._num_cached(need), frozenset(), self._rng, num_items=len(need.hashes))
            if rank is not None:
                placed.append((queued, rank, self._table.reserve_encode(rank, len(need.hashes))))
                continue
            held.add(id(queued.lane))
            kept.update(one.rank for one in able)
            if all(one.rank in kept for one in candidates):
                full.add((need.pool, queued.adapter))
        for queued, rank, booking in placed:
            self._queue.serve(queued)
            num_tokens = queued.need.num_tokens
            places = EncodePlaces(self, rank, booking, queued.standing, num_tokens, is_new=not queued.is_retry)
            queued.placed.set_result(places)

    def charge(self, tenant: str, num_tokens: int) -> None:
        """A request of the tenant, once it had places, takes so many tokens more than was charged, less if negative."""
        self._share.charge(tenant, num_tokens)

    def _standing(self, need: EncodeNeed) -> Standing:
        self._num_arrived += 1
        return Standing(
            pool=need.pool,
            tenant=need.tenant,
            priority=need.priority,
            number=self._num_arrived,
            # Each item takes a place, however small it is, and even if a worker has it cached.
            num_tokens=need.num_tokens + FIXED_TOKENS * len(need.hashes),
        )

    def _num_cached(self, need: EncodeNeed) -> Mapping[Rank, int]:
        return Counter(rank for item_hash in need.hashes for rank in self._index.match((item_hash,)))

    def _full_error(self) -> QueueFullError:
        return QueueFullError("too many requests wait for an encode worker", retry_delay_s=self._retry_delay_s)


@dataclass(eq=False, kw_only=True)
class _QueuedEncode:
    """An entry of the queue; see ``router.fair_queue.Entry``. Files of other kinds may need other workers."""

    need: EncodeNeed
    standing: Standing
    adapter: str
    is_retry: bool
    placed: asyncio.Future[EncodePlaces] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    lane: Lane[_QueuedEncode] | None = None
    position: Position = (0, 0, 0)


def not_avoided(candidates: Sequence[EncodeCandidate], avoid: AbstractSet[str]) -> Sequence[EncodeCandidate]:
    """The candidates that did not just fail the request; all of them if no other is left."""
    return [candidate for candidate in candidates if candidate.rank.worker_id not in avoid] or candidates


def choose_encode(
    candidates: Sequence[EncodeCandidate],
    num_cached: Mapping[Rank, int],
    avoid: AbstractSet[str],
    rng: random.Random,
    *,
    num_items: int = 1,
) -> Rank | None:
    """The encode worker for a request's media: the one that has most of the items cached, then the least busy one.

    Args:
        candidates: workers that can encode the items.
        num_cached: how many of the items each has cached.
        avoid: ids of workers that just failed the request; chosen only if no other is left.
        rng: breaks ties, so that several routers with the same picture don't all send to the same worker.
        num_items: how many items there are.

    Returns:
        ``None``: there are no candidates, or none that is not avoided has places for all items.
    """
    able = [candidate for candidate in not_avoided(candidates, avoid) if candidate.has_room(num_items)]
    if not able:
        return None
    keys = [(-num_cached.get(candidate.rank, 0), candidate.num_items) for candidate in able]
    best = min(keys)
    return rng.choice([candidate.rank for candidate, key in zip(able, keys, strict=True) if key == best])
