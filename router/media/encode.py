"""Encodes a request's media at an encode worker, and at another one if that fails.

``Encoding`` is the encoding of one request's items, from the choice of a worker to the hand-offs that a prefill pulls.
``ReadyInputs`` is what one prefill gets of it, or the plain files. ``KnownSizes`` remembers how many tokens items fill.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from quartet.discovery.base import Rank, Role, WorkerKey
from quartet.errors import QueueFullError, ServingError, WorkerUnavailableError
from quartet.kvcache.layout import HandOff
from quartet.media.items import MediaItem, MediaSize
from quartet.media.media_id import media_hash
from quartet.streams.client import FINAL, pause_s
from quartet.streams.messages import EncodeStart, MediaInput, RequestContext
from router.book import Booking, numbering
from router.config import AttemptConfig
from router.fleet import Hops, RenewedHandOff
from router.kv_index.index import PrefixIndex
from router.lost_workers import LostWorkers
from router.media.encode_queue import EncodeNeed, EncodePlaces, EncodeQueue
from router.request_trace import RequestTrace
from router.workers import PoolKey, WorkerTable

# For how long a worker that was sent an item counts as having it, until its KV events say so.
_PREDICTION_LIFE_S = 30.0

_ITEM = re.compile(r"(?:items|media)\[(\d+)\]")

# A router that knows the size of a picture need not wait for a worker to report it; each takes some 200 bytes.
_MAX_KNOWN_SIZES = 65_536


class KnownSizes:
    """How many tokens items fill, as workers reported it last; the most recent items are kept.

    The media id is the only key. It contains the preprocessing fingerprint, which covers ``config.json`` and the
    processor's files, so an item has another id for a model that counts differently. It contains the trust domain too.
    If workers disagree, the last report counts.
    """

    def __init__(self, max_known: int = _MAX_KNOWN_SIZES) -> None:
        """No size is known; at most ``max_known`` are kept."""
        self._max_known = max_known
        self._sizes: OrderedDict[bytes, MediaSize] = OrderedDict()

    def find(self, items: Sequence[MediaItem]) -> Sequence[MediaSize] | None:
        """The sizes of all ``items``; ``None``: some are unknown."""
        sizes = [self._sizes.get(item.media_id) for item in items]
        for item in items:
            if item.media_id in self._sizes:
                self._sizes.move_to_end(item.media_id)
        return None if None in sizes else [size for size in sizes if size is not None]

    def learn(self, sizes: Sequence[MediaSize]) -> None:
        """A worker reported these sizes; they replace what was known."""
        for size in sizes:
            self._sizes[size.media_id] = size
            self._sizes.move_to_end(size.media_id)
        while len(self._sizes) > self._max_known:
            self._sizes.popitem(last=False)

    def forget(self, items: Sequence[MediaItem]) -> None:
        """Forget the sizes of ``items``, which may be wrong."""
        for item in items:
            self._sizes.pop(item.media_id, None)

    def learn_total(self, items: Sequence[MediaItem], num_tokens: int) -> None:
        """A worker reported how many tokens ``items`` fill together. If all sizes but one are known, that one follows.

        Known sizes that contradict the report are forgotten.
        """
        counts = Counter(item.media_id for item in items)
        known = {name: self._sizes[name].num_tokens for name in counts if name in self._sizes}
        rest = num_tokens - sum(size * counts[name] for name, size in known.items())
        unknown = [name for name in counts if name not in known]
        if rest < sum(counts[name] for name in unknown) or (rest and not unknown):
            for name in known:
                del self._sizes[name]
            unknown, rest = list(counts), num_tokens
        if len(unknown) == 1 and rest > 0 and rest % counts[unknown[0]] == 0:
            self.learn([MediaSize(media_id=unknown[0], num_tokens=rest // counts[unknown[0]])])


class EncodeWaits:
    """Where requests wait before their media are fetched while the encode workers that take them are away.

    Nothing is held for them. If too many wait, the last one of the tenant with the most of them is refused. Runs on the
    event loop.
    """

    def __init__(self, table: WorkerTable, *, max_length: int, retry_delay_s: float) -> None:
        """No request waits yet; at most ``max_length`` may. Those refused should try again after ``retry_delay_s``."""
        self._table = table
        self._max_length = max_length
        self._retry_delay_s = retry_delay_s
        self._waits: dict[_Away, list[_Wait]] = {}
        table.listen(self._look)

    @property
    def length(self) -> int:
        """Requests that wait."""
        return sum(map(len, tuple(self._waits.values())))

    @property
    def usage(self) -> float:
        """The share of ``max_length`` that is taken. Any thread may read it."""
        return self.length / self._max_length

    async def way(self, pool: PoolKey, kinds: frozenset[str], tenant: str) -> None:
        """Wait until files of ``kinds`` can get into a prompt, as long as only an encode worker lacks for that.

        The caller bounds the wait. Raises ``QueueFullError``: too many requests wait.
        """
        await self._wait(_Away(pool, kinds), tenant)

    async def _wait(self, away: _Away, tenant: str) -> None:
        while away.is_so(self._table):
            wait = _Wait(tenant)
            self._waits.setdefault(away, []).append(wait)
            self._bound()
            try:
                await wait.ended
            finally:
                self._leave(away, wait)

    def _look(self) -> None:
        """The table has changed: wake those whose workers are back. All that lack the same share one look."""
        for away, waits in self._waits.items():
            if not away.is_so(self._table):
                for wait in waits:
                    if not wait.ended.done():
                        wait.ended.set_result(None)

    def _bound(self) -> None:
        if self.length <= self._max_length:
            return
        waiting = [wait for waits in self._waits.values() for wait in waits if not wait.ended.done()]
        tenant, _ = Counter(wait.tenant for wait in waiting).most_common(1)[0]
        last = max((wait for wait in waiting if wait.tenant == tenant), key=attrgetter("since"))
        message = "too many requests wait for an encode worker"
        last.ended.set_exception(QueueFullError(message, retry_delay_s=self._retry_delay_s))

    def _leave(self, away: _Away, wait: _Wait) -> None:
        self._waits[away].remove(wait)
        if not self._waits[away]:
            del self._waits[away]


@dataclass(frozen=True)
class _Away:
    """What some requests lack: an encode worker of ``pool`` for files of ``kinds``."""

    pool: PoolKey
    kinds: frozenset[str]

    def is_so(self, table: WorkerTable) -> bool:
        """Whether it is lacking now."""
        media = table.media(self.pool, time.monotonic())
        return media is not None and media.awaits(self.kinds)


@dataclass(eq=False)
class _Wait:
    tenant: str
    since: float = field(default_factory=time.monotonic)
    ended: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


@dataclass(frozen=True, kw_only=True)
class EncodeTools:
    """What media are encoded with; the same for all requests of a router.

    Attributes:
        waits: where requests wait while all encode workers are away.
        queue: where requests with fetched media wait for places at a worker.
        timeout_s: longest encode, the worker's queue included.
        max_attempts: failed attempts for one request, in all.
        max_lost_workers: so many workers may be lost while they encode one request's items.
        sleep: pauses between attempts, in seconds.
    """

    table: WorkerTable
    index: PrefixIndex
    hops: Hops
    waits: EncodeWaits
    queue: EncodeQueue
    timeout_s: float
    max_attempts: int
    max_lost_workers: int = AttemptConfig.max_lost_workers
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    sizes: KnownSizes = field(default_factory=KnownSizes)


@dataclass(frozen=True, kw_only=True)
class EncodeOrder:
    """The items of one request to encode.

    Attributes:
        fields: the client's name for each item.
        context: makes the request's context, given attempt, time and numbers.
        numbers: attempt numbers, one for each encode.
        tenant, priority: of the request.
        deadline: of the request, monotonic seconds.
        avoid: ids of workers that failed it; each failure adds one.
        trace: of the request; ``None``: it makes no spans.
    """

    pool: PoolKey
    items: Sequence[MediaItem]
    fields: Sequence[str]
    context: Callable[..., RequestContext]
    numbers: Iterator[int]
    tenant: str
    deadline: float
    priority: int = 0
    avoid: set[str] = field(default_factory=set)
    trace: RequestTrace | None = None

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of its files."""
        return frozenset(item.file.kind.value for item in self.items)


class Encoding:
    """The encoding of one request's items. It starts when it is made; its maker closes it.

    Attributes:
        rank: where the items are encoded now, or were last.
        duration_s: how long it took; 0 before its end.
        reported_sizes: of the items, as reported by the worker that encodes them; they may differ from what ``sizes``
            returned. Empty: it has reported none yet.
    """

    def __init__(
        self,
        order: EncodeOrder,
        tools: EncodeTools,
        sizes: Sequence[MediaSize] | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """``sizes`` of the items, if they are known; ``on_end`` is called when it has ended, well or badly."""
        self.rank: Rank | None = None
        self.duration_s = 0.0
        self.reported_sizes: Sequence[MediaSize] = ()
        self._order = order
        self._tools = tools
        self._hashes = [media_hash(item.media_id) for item in order.items]
        self._sizes: asyncio.Future[Sequence[MediaSize]] = asyncio.get_running_loop().create_future()
        if sizes is not None:
            self._sizes.set_result(sizes)
        self._hand_offs: Sequence[HandOff] = ()
        self._renewed: list[RenewedHandOff] = []
        self._work = asyncio.create_task(self._run(), name="encode")
        self._work.add_done_callback(self._settle)
        self._on_end = on_end

    async def sizes(self) -> Sequence[MediaSize]:
        """Wait until the size of each item is known; in order. Raises ``ServingError``, with the client's field."""
        return await asyncio.shield(self._sizes)

    async def ended(self) -> None:
        """Wait until all is encoded. Raises ``ServingError``: the last attempt's error, with the client's field."""
        await asyncio.wait([self._work])
        if self._work.cancelled():
            raise WorkerUnavailableError("the encoding was ended")
        self._work.result()

    def take(self) -> Sequence[HandOff]:
        """The hand-off of each item, in order, after it has ended well. The caller owns them from then on."""
        self._stop_keeping()
        hand_offs, self._hand_offs = self._hand_offs, ()
        return hand_offs

    def close(self) -> None:
        """End it, and drop the hand-offs that were not taken. May be called twice."""
        self._work.cancel()
        self._stop_keeping()
        for hand_off in self._hand_offs:
            self._tools.hops.drop(hand_off)
        self._hand_offs = ()

    async def _run(self) -> None:
        num_failures, began, places = 0, time.monotonic(), None
        lost = LostWorkers(self._tools.table, self._tools.max_lost_workers)
        while True:
            places = await self._tools.queue.enter(self._need(), after=places)
            try:
                await self._attempt(places)
                self.duration_s = time.monotonic() - began
                return
            except QueueFullError as error:
                # It has no room after all, as when several routers send at the same moment: nothing has failed.
                pause = pause_s(error, 1)
            except ServingError as error:
                self._order.avoid.add(places.rank.worker_id)
                num_failures += 1
                if isinstance(error, FINAL) or num_failures >= self._tools.max_attempts:
                    raise client_error(error, self._order.fields) from error
                lost.note(error, WorkerKey(Role.ENCODE, places.rank.worker_id), places.booking.epoch)
                pause = pause_s(error, num_failures)
            finally:
                places.release()
            await self._tools.sleep(pause)

    async def _attempt(self, places: EncodePlaces) -> None:
        tools, rank = self._tools, places.rank
        renewed: list[RenewedHandOff] = []
        call, self.rank = None, rank
        start = self._start(places.booking)
        hop = None if self._order.trace is None else self._order.trace.begin_encode(start.context, rank.worker_id)

        def keep(hand_off: HandOff) -> None:
            renewed.append(tools.hops.renew(hand_off))
            places.leave_one()

        try:
            async with asyncio.timeout(tools.timeout_s):
                call = tools.hops.encode(rank, start, keep)
                for item_hash in self._hashes:
                    tools.index.predict(rank, (item_hash,), time.monotonic() + _PREDICTION_LIFE_S)
                self._learn(sizes := await call.sizes())
                places.sized(sum(size.num_tokens for size in sizes if not size.is_cached))
                self._hand_offs = await call.hand_offs()
                self._renewed, renewed = renewed, []
        except TimeoutError as error:
            raise WorkerUnavailableError(f"worker {rank.worker_id} did not encode in time") from error
        finally:
            if hop is not None:
                hop.stop(sys.exception())
            if call is not None:
                call.cancel()
            for one in renewed:
                one.stop()

    def _need(self) -> EncodeNeed:
        order, tools = self._order, self._tools
        sizes = tools.sizes.find(order.items)
        media = None if sizes is not None else tools.table.media(order.pool, time.monotonic())
        max_tokens = 1 if media is None else max(media.max_tokens, 1)
        return EncodeNeed(
            pool=order.pool,
            tenant=order.tenant,
            priority=order.priority,
            kinds=order.kinds,
            hashes=self._hashes,
            num_tokens=len(order.items) * max_tokens if sizes is None else sum(size.num_tokens for size in sizes),
            avoid=order.avoid,
        )

    def _start(self, booking: Booking) -> EncodeStart:
        order = self._order
        context = order.context(
            attempt=next(order.numbers),
            timeout_s=max(order.deadline - time.monotonic(), 0.0),
            router_id=numbering(self._tools.table.router_id, booking.epoch),
            router_request_number=booking.send(),
        )
        return EncodeStart(context=context, items=tuple(order.items))

    def _learn(self, sizes: Sequence[MediaSize]) -> None:
        if [size.media_id for size in sizes] != [item.media_id for item in self._order.items]:
            raise WorkerUnavailableError("an encode worker reported sizes of other items")
        if not self._sizes.done():
            self._sizes.set_result(sizes)
        self.reported_sizes = sizes
        self._tools.sizes.learn(sizes)

    def _settle(self, work: asyncio.Task[None]) -> None:
        error = WorkerUnavailableError("the encoding was ended") if work.cancelled() else work.exception()
        if not self._sizes.done() and error is not None:
            self._sizes.set_exception(error)
            self._sizes.exception()  # it may never be awaited, which is no mistake
        self._on_end()

    def _stop_keeping(self) -> None:
        for renewed in self._renewed:
            renewed.stop()
        self._renewed = []


class ReadyInputs:
    """A request's media in the form that one prefill gets. Made by ``RequestMedia.ready``.

    Attributes:
        sizes: of the items; for files, as far as they are known; empty: they are unknown.
    """

    def __init__(
        self,
        items: Sequence[MediaItem],
        sizes: Sequence[MediaSize],
        encoding: Encoding | None,
        on_taken: Callable[[], None],
    ) -> None:
        self.sizes = sizes
        self._items = items
        self._encoding = encoding
        self._on_taken = on_taken

    @property
    def encode_s(self) -> float:
        """Seconds that it took to encode them."""
        return 0.0 if self._encoding is None else self._encoding.duration_s

    def take(self) -> Sequence[MediaInput]:
        """Files, or hand-offs, which the caller owns from now on. To be called once."""
        self._on_taken()
        if self._encoding is None:
            return [MediaInput(item.media_id, item.file) for item in self._items]
        ids = (item.media_id for item in self._items)
        return list(map(MediaInput, ids, self._encoding.take()))


def client_error(error: ServingError, fields: Sequence[str]) -> ServingError:
    """``error`` of a worker, with the client's name for the item that caused it."""
    match = _ITEM.match(error.field or "")
    if match is None or int(match[1]) >= len(fields):
        return error
    return type(error)(error.message, field=fields[int(match[1])], retry_delay_s=error.retry_delay_s)
