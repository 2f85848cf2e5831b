"""The queue in which requests wait for their turn: tenants by fair share, and each tenant's own requests by priority.

``router.admission`` holds requests that wait for room on ranks, ``router.media.queue`` those that wait for room for
their media, and ``router.media.encode_queue`` those that wait for places at encode workers.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from itertools import takewhile
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from quartet.errors import ServingError
from router.tenants import Tenants
from router.workers import PoolKey

#: What a choice of a request, or an item of its media, is charged besides its tokens: however short it is, it takes as
#: much of the router and of a rank as so many tokens of a prompt do.
FIXED_TOKENS = 128

# Above this many tenants, forget those whose next request would begin at the present anyway, and above twice as many
# others, too.
_MAX_TENANTS = 4096

# A tenant that enters starts so much of its first request after the present.
_ENTRY_PART = 0.5

# Tenants that have nothing in a queue have this.
_NOTHING = (0.0, 0.0)

# So many places in the order of what tenants have, for each tenant, may be out of date before it is made anew.
_MAX_STALE = 8

# The start of what was served before: it precedes all others.
_AT_ONCE = -1.0


class FairShare:
    """Which tenant comes next: start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996), in tokens.

    It is a clock that counts work, not time. Each tenant has an end on it, up to which it was served. Its next request
    starts there, or at the present if that is later; the present moves to the start of each request that is served.
    Serving the tenant whose next start is lowest gives each busy tenant a share of the work: its weight over the
    weights of all busy tenants. A tenant alone gets everything, and an idle tenant saves nothing up.

    A tenant whose end lies before the present, or that was never served, enters a little after the present if others
    wait: by half of its first request. If it entered at the present, a client that names another tenant in each request
    would keep the present where it is, and tenants that were served before would wait for ever. As it is, the present
    moves on with what such tenants take. (The scheduler of Linux does the same with new tasks.)

    What a request takes is known only once it has ended. It is served with a guess, and ``charge`` corrects that. What
    each takes whatever its length is charged besides, and never corrected: if tokens alone counted, 65 requests of 2
    tokens would be served for one of 130.
    """

    def __init__(self, tenants: Tenants | None = None, *, num_fixed_tokens: int = 0) -> None:
        """``tenants`` have the weights; each request takes ``num_fixed_tokens`` tokens besides those that it names."""
        self._tenants = tenants or Tenants()
        self._num_fixed_tokens = num_fixed_tokens
        self._now = 0.0
        self._ends: dict[str, float] = {}
        self._max_ends = _MAX_TENANTS
        self._num_queues: dict[str, int] = {}  # in which the tenant waits
        # Of tenants that enter after the present: where they would have started, and where they do.
        self._entries: dict[str, tuple[float, float]] = {}

    def start(self, tenant: str) -> float:
        """Where the tenant's next request starts."""
        entry = self._entries.get(tenant)
        return max(self._now, self._ends.get(tenant, 0.0)) if entry is None else entry[1]

    def charged_from(self, tenant: str) -> float:
        """From where the tenant pays for its next request: it does not pay for a late entry."""
        entry = self._entries.get(tenant)
        return self.start(tenant) if entry is None else entry[0]

    def length(self, tenant: str, num_tokens: int) -> float:
        """How long ``num_tokens`` tokens of the tenant's work are on the clock."""
        return num_tokens / self._tenants.config(tenant).weight

    def request_length(self, tenant: str, num_tokens: int) -> float:
        """How long a request of ``num_tokens`` tokens is on the clock."""
        return self.length(tenant, self._num_fixed_tokens + num_tokens)

    def waits(self, tenant: str, num_tokens: int) -> None:
        """The tenant had nothing in a queue, and has now a request that will probably take ``num_tokens`` tokens."""
        num_before = self._num_queues.get(tenant, 0)
        if not num_before and self._num_queues and self._ends.get(tenant, -1.0) < self._now:
            self._entries[tenant] = self._now, self._now + _ENTRY_PART * self.request_length(tenant, num_tokens)
        self._num_queues[tenant] = num_before + 1

    def waits_no_more(self, tenant: str) -> None:
        """The tenant has nothing in that queue any more; its last request was served before, or left."""
        self._num_queues[tenant] -= 1
        if not self._num_queues[tenant]:
            del self._num_queues[tenant]
            self._entries.pop(tenant, None)

    def serve(self, tenant: str, num_tokens: int) -> None:
        """A request of the tenant is served now, and will probably take ``num_tokens`` tokens of work."""
        end = self._ends.pop(tenant, 0.0)  # so their order is that of the last service
        base = start = end if end > self._now else self._now
        if self._entries and (entry := self._entries.pop(tenant, None)) is not None:
            base, start = entry
        self._now = max(self._now, start)
        self._ends[tenant] = base + (self._num_fixed_tokens + num_tokens) / self._tenants.config(tenant).weight
        if len(self._ends) > self._max_ends:
            self._forget()

    def _forget(self) -> None:
        """Forget the tenants that enter anyway, and of the others those that were served longest ago."""
        owing = [(name, end) for name, end in self._ends.items() if end > self._now]
        self._ends = dict(owing[-2 * _MAX_TENANTS :])
        self._max_ends = max(_MAX_TENANTS, 2 * len(self._ends))

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Requests served before take ``num_tokens`` tokens more, or less if negative, than was charged so far."""
        if tenant in self._ends:
            self._ends[tenant] += num_tokens / self._tenants.config(tenant).weight


@dataclass(slots=True, kw_only=True)
class Standing:
    """A request's standing in a queue; all its choices and their retries share it.

    Not frozen: each request makes one, and freezing triples its price.

    Attributes:
        tenant: the tenant that the request is accounted to.
        priority: among its tenant's requests, higher first.
        number: arrival at this queue; among its tenant's requests of one priority, lower first.
        num_tokens: tokens of work in each of its choices, as far as can be known before.
        deadline: when the request ends at the latest, in monotonic seconds.
        num_coming: choices that count as queued, but have not come yet.
    """

    pool: PoolKey
    tenant: str = ""
    priority: int = 0
    number: int = 0
    num_tokens: int = 1
    deadline: float = float("inf")
    num_coming: int = 0


#: Orders one tenant's entries; lower comes first. Priority, number of the request, and number of the entry.
Position: TypeAlias = tuple[int, int, int]


class Entry(Protocol):
    """What waits in a queue. The queue sets ``lane`` and ``position``.

    Attributes:
        standing: of its request.
        adapter: entries of one lane need the same adapter; empty: none.
        is_retry: it was served before: it goes before other tenants' entries, is never refused and takes no share.
        placed: done once it no longer waits, even if it is still in the queue.
        lane: the lane in which it waits; ``None``: it is not queued.
        position: its position in the lane.
    """

    standing: Standing
    adapter: str
    is_retry: bool
    placed: asyncio.Future[Any]
    lane: Lane[Any] | None
    position: Position


@dataclass(eq=False, slots=True, kw_only=True)
class Turn:
    """An ``Entry`` that waits for nothing but its turn: ``placed`` is done when that has come, or it is refused."""

    standing: Standing
    placed: asyncio.Future[None]
    adapter: str = ""
    is_retry: bool = False
    lane: Lane[Turn] | None = None
    position: Position = (0, 0, 0)


EntryT = TypeVar("EntryT", bound=Entry)


class Lane(Generic[EntryT]):
    """Entries of one pool and tenant that need the same adapter, in the order in which they are served."""

    __slots__ = ("_siblings", "adapter", "entries", "pool", "tenant")

    def __init__(self, siblings: dict[tuple[str, str], Lane[EntryT]], pool: PoolKey, tenant: str, adapter: str) -> None:
        """Start without entries, as one of ``siblings``, the lanes of the pool."""
        self._siblings = siblings
        self.pool = pool
        self.tenant = tenant
        self.adapter = adapter
        siblings[tenant, adapter] = self
        self.entries: list[EntryT] = []

    def first(self, begin: int = 0) -> int | None:
        """The index of the first entry from ``begin`` on that still waits."""
        entries = self.entries
        for index in range(begin, len(entries)):
            if not entries[index].placed.done():
                return index
        return None

    def close(self) -> None:
        """It has no entries any more."""
        del self._siblings[self.tenant, self.adapter]

    def last(self) -> EntryT | None:
        """The last entry that still waits and was not served before."""
        return next((one for one in reversed(self.entries) if not (one.is_retry or one.placed.done())), None)


@dataclass(eq=False, slots=True)
class _Held(Generic[EntryT]):
    """What one tenant has in a queue.

    Attributes:
        num_choices: entries that were not served before, and those still to come.
        num_tokens: work of these.
        lanes: the tenant's, in all pools, as an ordered set.
    """

    num_choices: int = 0
    num_tokens: int = 0
    lanes: dict[Lane[EntryT], None] = field(default_factory=dict)


# Orders tenants by what they have in a queue, the one that has most first: choices, then tokens, over its weight, less
# than nothing each.
_Most: TypeAlias = tuple[float, float]

# Start, number of the request, number of the entry, its index in its lane.
_NextOf: TypeAlias = tuple[float, int, int, int, Lane[EntryT]]


class FairQueue(Generic[EntryT]):
    """Entries that wait. Finding the next ones takes time for each tenant that waits, not for each entry.

    Finding the ones to refuse takes the logarithm of that.

    An entry whose wait has ended, because its task was cancelled, stays until its task takes it out; it is not shown.

    Attributes:
        num_new: entries that were not served before, and those still to come.
    """

    def __init__(self, share: FairShare) -> None:
        """``share`` orders the tenants."""
        self._share = share
        # By pool, then by tenant and adapter. Pools are few: they stay.
        self._pools: dict[PoolKey, dict[tuple[str, str], Lane[EntryT]]] = {}
        self._held: dict[str, _Held[EntryT]] = {}
        # Tenants, the one that has most first, since there was once too much in here. One that has less by now is at
        # its old place still, one that has more is at its new place too.
        self._most: list[tuple[_Most, str]] | None = None
        self._num_added = 0
        self._length = self.num_new = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[EntryT]:
        """All entries, those of a pool in no particular order."""
        for lane in self._lanes():
            yield from lane.entries

    def pools(self) -> list[PoolKey]:
        """The pools for which entries wait."""
        return [pool for pool, lanes in self._pools.items() if lanes]

    def num_waiting(self, pool: PoolKey) -> int:
        """Entries that wait for ``pool``. Any thread may ask."""
        return sum(len(lane.entries) for lane in tuple(self._pools.get(pool, {}).values()))

    def adapters(self) -> set[str]:
        """The adapters that entries need. Any thread may ask."""
        lanes = [lane for lanes in tuple(self._pools.values()) for lane in tuple(lanes.values())]
        return {lane.adapter for lane in lanes if lane.adapter and lane.entries}

    def add(self, entry: EntryT) -> None:
        """Insert ``entry`` at its position."""
        standing = entry.standing
        lanes = self._pools.get(standing.pool)
        if lanes is None:
            lanes = self._pools[standing.pool] = {}
        lane, held = lanes.get((standing.tenant, entry.adapter)), self._held_by(standing.tenant)
        if lane is None:
            lane = Lane(lanes, standing.pool, standing.tenant, entry.adapter)
            if not held.lanes:
                self._share.waits(standing.tenant, standing.num_tokens)
            held.lanes[lane] = None
        self._num_added += 1
        entry.lane, entry.position = lane, (-standing.priority, standing.number, self._num_added)
        insort(lane.entries, entry, key=_by_position)
        self._length += 1
        if not entry.is_retry:
            self._count(held, standing, 1)

    def remove(self, entry: EntryT) -> bool:
        """Take ``entry`` out; return whether it was in there."""
        lane = entry.lane
        if lane is None:
            return False
        entry.lane = None
        del lane.entries[bisect_left(lane.entries, entry.position, key=_by_position)]
        self._length -= 1
        held = self._held[lane.tenant]
        if not lane.entries:
            lane.close()
            del held.lanes[lane]
            if not held.lanes:
                self._share.waits_no_more(lane.tenant)
        self._count(held, entry.standing, 0 if entry.is_retry else -1)
        return True

    def serve(self, entry: EntryT) -> None:
        """Take ``entry`` out: its turn has come. Its tenant is charged, unless it was served before."""
        if not entry.is_retry:
            self._share.serve(entry.standing.tenant, entry.standing.num_tokens)
        self.remove(entry)

    def expect(self, standing: Standing, num_choices: int) -> None:
        """So many choices more are still to come, less if negative: they count as if they were here."""
        self._count(self._held_by(standing.tenant), standing, num_choices)

    def _count(self, held: _Held[EntryT], standing: Standing, num_choices: int) -> None:
        """The tenant, which has ``held``, has so many choices more that were not served before."""
        tenant = standing.tenant
        held.num_choices += num_choices
        held.num_tokens += num_choices * standing.num_tokens
        self.num_new += num_choices
        if not held.num_choices and not held.lanes:
            del self._held[tenant]
            if not self._held:
                self._most = None
        elif self._most is not None and num_choices > 0:
            heappush(self._most, (self._amount(tenant), tenant))
            if len(self._most) > _MAX_STALE * len(self._held) + _MAX_STALE:
                self._most = None

    def _held_by(self, tenant: str) -> _Held[EntryT]:
        held = self._held.get(tenant)
        if held is None:
            held = self._held[tenant] = _Held()
        return held

    def in_order(self, is_kept: Callable[[Lane[EntryT]], bool], pool: PoolKey | None = None) -> Iterator[EntryT]:
        """Those that still wait, in the order in which they are to be served if each is served at once.

        If there is a ``pool``, only those that wait for it.

        Nothing may be added or removed meanwhile. Before each entry, ``is_kept`` says of its lane whether it is kept
        waiting; its other entries are left out then, too.
        """
        lanes = self._lanes() if pool is None else list(self._pools.get(pool, {}).values())
        return _of_one(lanes[0], is_kept) if len(lanes) == 1 else self._in_turns(lanes, is_kept)

    def _in_turns(self, lanes: Sequence[Lane[EntryT]], is_kept: Callable[[Lane[EntryT]], bool]) -> Iterator[EntryT]:
        turns: list[_NextOf[EntryT]] = []
        starts: dict[str, float] = {}
        bases: dict[str, float] = {}  # of tenants with no entry shown so far
        for lane in lanes:
            if is_kept(lane) or (index := lane.first()) is None:
                continue
            if lane.tenant not in starts:
                starts[lane.tenant] = self._share.start(lane.tenant)
                bases[lane.tenant] = self._share.charged_from(lane.tenant)
            turns.append(_turn(lane, index, starts))
        heapify(turns)
        while turns:
            start, _, _, index, lane = turns[0]
            if is_kept(lane):
                heappop(turns)
                continue
            entry = lane.entries[index]
            # Entries of the tenant's other lanes may have been served since.
            if start < starts[lane.tenant] and not entry.is_retry:
                heapreplace(turns, _turn(lane, index, starts))
                continue
            yield entry
            if not entry.is_retry:
                length = self._share.request_length(lane.tenant, entry.standing.num_tokens)
                end = bases.pop(lane.tenant, start) + length
                starts[lane.tenant] = max(start, end)
            if (following := lane.first(index + 1)) is None:
                heappop(turns)
            else:
                heapreplace(turns, _turn(lane, following, starts))

    def shorten(
        self,
        max_new: int,
        refusal: Callable[[], ServingError],
        newcomer: Standing | None = None,
        num_choices: int = 0,
    ) -> bool:
        """Refuse the last entries, with an error of ``refusal``, until at most ``max_new`` are left that are new.

        If there is a ``newcomer``, its ``num_choices`` choices, which are not queued yet, count too.

        Returns:
            Whether so few are left; if not, it is the newcomer that comes last.
        """
        max_new -= num_choices
        while self.num_new > max_new:
            num_before = self.num_new
            last = self._last(newcomer, num_choices, drops_ended=True)
            if self.num_new < num_before:
                continue
            if last is None:
                return False
            self.remove(last)
            last.placed.set_exception(refusal())
        return True

    def last(self, newcomer: Standing | None = None, num_choices: int = 0) -> EntryT | None:
        """The entry to refuse if there are too many: the last one of the tenant that has most choices in here.

        That is over its weight. Of tenants that have as many, it is one that has most tokens.

        ``None`` if there is none, or if a request that is not queued yet would come after it: ``newcomer``, with
        ``num_choices`` choices.
        """
        last = self._last(newcomer, num_choices, drops_ended=False)
        self._most = None  # it may have passed over tenants whose ended entries can still be dropped
        return last

    def _last(self, newcomer: Standing | None, num_choices: int, *, drops_ended: bool) -> EntryT | None:
        """As ``last``; ``drops_ended``: take out, of the tenants looked at, last entries whose wait has ended."""
        amount, last = self._fullest(drops_ended)
        if newcomer is not None and self._amount(newcomer.tenant, newcomer, num_choices) <= amount:
            last = self._last_of(newcomer.tenant)
            if last is None or last.position < (-newcomer.priority, newcomer.number, 0):
                return None
        return last

    def _fullest(self, drops_ended: bool) -> tuple[_Most, EntryT | None]:
        """The last entry of the tenant that has most, of those that have any to refuse, and how much it has."""
        if self._most is None:
            self._most = [(self._amount(tenant), tenant) for tenant in self._held]
            heapify(self._most)
        most = self._most
        while most:
            before, tenant = most[0]
            amount = self._amount(tenant)
            if amount > before and amount < _NOTHING:
                heapreplace(most, (amount, tenant))
            elif drops_ended and self._drop_ended(tenant):
                continue
            elif (last := self._last_of(tenant)) is not None:
                return amount, last
            else:
                heappop(most)
        return _NOTHING, None

    def _amount(self, tenant: str, newcomer: Standing | None = None, num_choices: int = 0) -> _Most:
        """What the tenant has here, with so many choices of a ``newcomer``."""
        num_tokens = 0 if newcomer is None else num_choices * newcomer.num_tokens
        if (held := self._held.get(tenant)) is not None:
            num_choices, num_tokens = num_choices + held.num_choices, num_tokens + held.num_tokens
        length = self._share.length
        return -length(tenant, num_choices), -length(tenant, num_tokens)

    def _drop_ended(self, tenant: str) -> bool:
        """Take out the tenant's last entries whose wait has ended; return whether there were any."""
        ended: list[EntryT] = []
        for lane in self._lanes_of(tenant):
            behind = takewhile(lambda entry: entry.is_retry or entry.placed.done(), reversed(lane.entries))
            ended += [entry for entry in behind if entry.placed.done()]
        for entry in ended:
            self.remove(entry)
        return bool(ended)

    def _last_of(self, tenant: str) -> EntryT | None:
        """The tenant's last entry that can be refused."""
        lasts = [last for lane in self._lanes_of(tenant) if (last := lane.last()) is not None]
        return max(lasts, key=_by_position, default=None)

    def _lanes_of(self, tenant: str) -> Iterable[Lane[EntryT]]:
        held = self._held.get(tenant)
        return () if held is None else held.lanes

    def _lanes(self) -> list[Lane[EntryT]]:
        return [lane for lanes in self._pools.values() for lane in lanes.values()]


_by_position: Callable[[Entry], Position] = attrgetter("position")


def _of_one(lane: Lane[EntryT], is_kept: Callable[[Lane[EntryT]], bool]) -> Iterator[EntryT]:
    """As ``FairQueue.in_order`` if there is only one lane, as there mostly is."""
    for entry in lane.entries:
        if is_kept(lane):
            return
        if not entry.placed.done():
            yield entry


def _turn(lane: Lane[EntryT], index: int, starts: dict[str, float]) -> _NextOf[EntryT]:
    """When the entry of ``lane`` at ``index`` is served. Among tenants that start together the first to come is first.

    Not the one of the highest priority: that is only for its tenant to say.
    """
    entry = lane.entries[index]
    _, number, entry_number = entry.position
    return _AT_ONCE if entry.is_retry else starts[lane.tenant], number, entry_number, index, lane
