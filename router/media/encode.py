"""A request's media at an encode worker, and at another one where that fails."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from quartet.discovery.base import Rank
from quartet.errors import ServingError, WorkerUnavailableError
from quartet.kvcache.layout import HandOff
from quartet.media.items import MediaItem, MediaSize
from quartet.media.media_id import media_hash
from quartet.streams.client import FINAL, pause_s
from quartet.streams.messages import EncodeStart, MediaInput, RequestContext
from router.book import Booking, numbering
from router.fleet import Hops, KeptHandOff
from router.kv_index.index import PrefixIndex
from router.workers import PoolKey, WorkerTable, choose_encode

# How long a worker that was sent an item is taken to have it, until it says so itself.
_PREDICTION_LIFE_S = 30.0

_ITEM = re.compile(r"(?:items|media)\[(\d+)\]")


# How many tokens media fill, as workers told it.

# A router that knows the size of a picture needs not wait for a worker to tell it; each takes some 200 bytes.
_MAX_KNOWN_SIZES = 65_536


class KnownSizes:
    """Sizes of those items that were told last.

    By media id alone: in it is the preprocessing fingerprint, which covers ``config.json`` and the processor's files:
    items of models that count otherwise have other ids. Where workers disagree, whoever spoke last is believed.
    """

    def __init__(self, max_known: int = _MAX_KNOWN_SIZES) -> None:
        """Know of none, and of ``max_known`` at most."""
        self._max_known = max_known
        self._sizes: OrderedDict[bytes, MediaSize] = OrderedDict()

    def find(self, items: Sequence[MediaItem]) -> Sequence[MediaSize] | None:
        """Of all ``items``; ``None`` where any is unknown."""
        sizes = [self._sizes.get(item.media_id) for item in items]
        for item in items:
            if item.media_id in self._sizes:
                self._sizes.move_to_end(item.media_id)
        return None if None in sizes else [size for size in sizes if size is not None]

    def learn(self, sizes: Sequence[MediaSize]) -> None:
        """A worker told these: what was known of them otherwise is forgotten."""
        for size in sizes:
            self._sizes[size.media_id] = size
            self._sizes.move_to_end(size.media_id)
        while len(self._sizes) > self._max_known:
            self._sizes.popitem(last=False)

    def forget(self, items: Sequence[MediaItem]) -> None:
        """What is known of ``items`` may be wrong."""
        for item in items:
            self._sizes.pop(item.media_id, None)

    def learn_total(self, items: Sequence[MediaItem], num_tokens: int) -> None:
        """A worker told how many tokens ``items`` fill together: where all but one are known, its size follows.

        Where what is known can't be so, it is forgotten.
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


@dataclass(frozen=True, kw_only=True)
class EncodeTools:
    """What media are encoded with; the same for all requests of a router.

    Attributes:
        timeout_s: longest encode, the worker's queue included.
        max_attempts: workers that are asked for one, in all.
        sleep: pauses between attempts, in seconds.
    """

    table: WorkerTable
    index: PrefixIndex
    hops: Hops
    rng: random.Random
    timeout_s: float
    max_attempts: int
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    sizes: KnownSizes = field(default_factory=KnownSizes)


@dataclass(frozen=True, kw_only=True)
class EncodeOrder:
    """What one request wants encoded.

    Attributes:
        fields: what the client calls each item.
        context: of the request; attempt, time and numbers are filled in.
        numbers: of its encodes, each of which has another as its attempt.
        deadline: of the request, monotonic seconds.
        avoid: ids of workers that failed it, which are added here.
    """

    pool: PoolKey
    items: Sequence[MediaItem]
    fields: Sequence[str]
    context: Callable[..., RequestContext]
    numbers: Iterator[int]
    deadline: float
    avoid: set[str] = field(default_factory=set)


class Encoding:
    """Runs from the moment it is made. Whoever made it closes it; what nobody took by then is let go of.

    Attributes:
        rank: where it is encoded now, or was last.
        duration_s: how long it took; 0 before its end.
        told_sizes: of the items, as the worker that encodes them says; that may be other than ``sizes`` gave. Empty:
            it has said nothing yet.
    """

    def __init__(
        self,
        order: EncodeOrder,
        tools: EncodeTools,
        sizes: Sequence[MediaSize] | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """``sizes`` of the items, where they are known; ``on_end`` is told when it has ended, well or badly."""
        self.rank: Rank | None = None
        self.duration_s = 0.0
        self.told_sizes: Sequence[MediaSize] = ()
        self._order = order
        self._tools = tools
        self._hashes = [media_hash(item.media_id) for item in order.items]
        self._sizes: asyncio.Future[Sequence[MediaSize]] = asyncio.get_running_loop().create_future()
        if sizes is not None:
            self._sizes.set_result(sizes)
        self._hand_offs: Sequence[HandOff] = ()
        self._kept: list[KeptHandOff] = []
        self._work = asyncio.create_task(self._run(), name="encode")
        self._work.add_done_callback(self._settle)
        self._on_end = on_end

    async def sizes(self) -> Sequence[MediaSize]:
        """Wait until the size of each item is known, in order. Raises ``ServingError``, with the client's field."""
        return await asyncio.shield(self._sizes)

    async def ended(self) -> None:
        """Wait until all is encoded. Raises ``ServingError``: the last attempt's error, with the client's field."""
        await asyncio.wait([self._work])
        if self._work.cancelled():
            raise WorkerUnavailableError("the encoding was ended")
        self._work.result()

    def take(self) -> Sequence[HandOff]:
        """The hand-off of each item, in order, of one that has ended well; they are the caller's then."""
        self._stop_keeping()
        hand_offs, self._hand_offs = self._hand_offs, ()
        return hand_offs

    def close(self) -> None:
        """End it, and let go of what nobody took. May be called twice."""
        self._work.cancel()
        self._stop_keeping()
        for hand_off in self._hand_offs:
            self._tools.hops.drop(hand_off)
        self._hand_offs = ()

    async def _run(self) -> None:
        num_failures, began = 0, time.monotonic()
        while True:
            try:
                await self._attempt()
                self.duration_s = time.monotonic() - began
                return
            except ServingError as error:
                num_failures += 1
                if isinstance(error, FINAL) or num_failures >= self._tools.max_attempts:
                    raise client_error(error, self._order.fields) from error
                pause = pause_s(error, num_failures)
            await self._tools.sleep(pause)

    async def _attempt(self) -> None:
        rank = self._choose()
        tools, order = self._tools, self._order
        booking = tools.table.book_encode(rank, len(order.items))
        kept: list[KeptHandOff] = []
        call, self.rank = None, rank
        try:
            async with asyncio.timeout(tools.timeout_s):
                call = tools.hops.encode(
                    rank, self._start(booking), lambda hand_off: kept.append(tools.hops.keep(hand_off))
                )
                for item_hash in self._hashes:
                    tools.index.predict(rank, (item_hash,), time.monotonic() + _PREDICTION_LIFE_S)
                self._tell(await call.sizes())
                self._hand_offs = await call.hand_offs()
                self._kept, kept = kept, []
        except TimeoutError as error:
            order.avoid.add(rank.worker_id)
            raise WorkerUnavailableError(f"worker {rank.worker_id} did not encode in time") from error
        except ServingError:
            order.avoid.add(rank.worker_id)
            raise
        finally:
            booking.release()
            if call is not None:
                call.cancel()
            for one in kept:
                one.stop()

    def _choose(self) -> Rank:
        order, tools = self._order, self._tools
        kinds = frozenset(item.file.kind.value for item in order.items)
        candidates = tools.table.encode_candidates(order.pool, kinds, time.monotonic())
        num_cached = Counter(rank for item_hash in self._hashes for rank in tools.index.match((item_hash,)))
        rank = choose_encode(candidates, num_cached, frozenset(order.avoid), tools.rng)
        if rank is None:
            raise WorkerUnavailableError("no encode worker of this model is ready")
        return rank

    def _start(self, booking: Booking) -> EncodeStart:
        order = self._order
        context = order.context(
            attempt=next(order.numbers),
            timeout_s=max(order.deadline - time.monotonic(), 0.0),
            router_id=numbering(self._tools.table.router_id, booking.epoch),
            router_request_number=booking.send(),
        )
        return EncodeStart(context=context, items=tuple(order.items))

    def _tell(self, sizes: Sequence[MediaSize]) -> None:
        if [size.media_id for size in sizes] != [item.media_id for item in self._order.items]:
            raise WorkerUnavailableError("an encode worker named the items otherwise than they are called")
        if not self._sizes.done():
            self._sizes.set_result(sizes)
        self.told_sizes = sizes
        self._tools.sizes.learn(sizes)

    def _settle(self, work: asyncio.Task[None]) -> None:
        error = WorkerUnavailableError("the encoding was ended") if work.cancelled() else work.exception()
        if not self._sizes.done() and error is not None:
            self._sizes.set_exception(error)
            self._sizes.exception()  # that nobody may ask for it is no mistake
        self._on_end()

    def _stop_keeping(self) -> None:
        for kept in self._kept:
            kept.stop()
        self._kept = []


class ReadyInputs:
    """A request's media as one prefill is given them. Made by ``RequestMedia.ready``.

    Attributes:
        sizes: of hand-offs, as they are; of files, as far as they are known; empty: they are not.
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
        """Files, or hand-offs, which are the caller's from now on. Once."""
        self._on_taken()
        if self._encoding is None:
            return [MediaInput(item.media_id, item.file) for item in self._items]
        ids = (item.media_id for item in self._items)
        return list(map(MediaInput, ids, self._encoding.take()))


def client_error(error: ServingError, fields: Sequence[str]) -> ServingError:
    """``error`` of a worker, with what the client calls the item that is at fault."""
    match = _ITEM.match(error.field or "")
    if match is None or int(match[1]) >= len(fields):
        return error
    return type(error)(error.message, field=fields[int(match[1])], retry_delay_s=error.retry_delay_s)
