"""Which rank has which KV blocks: the router's copy of what workers tell in KV events.

One flat map a tier, from sequence hash to the bit mask of the ranks that have the block. A sequence hash names a
block with all before it, so no tree is needed: see ``router.kv_index.walk`` for how a prompt is looked up.

Pure code without locks or clock: one thread calls, and times are whatever the caller means by them.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections.abc import ItemsView, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

from quartet.discovery.base import Rank
from quartet.events.kv import Tier
from router.kv_index.walk import Group, MaskMap, Sweep, Walker, walk

_MAX_PREDICTED_BLOCKS = 1 << 20


class PrefixIndex:
    """What all ranks have, as of the last event of each.

    What is said of a rank may run behind the truth, as events do, but is exact otherwise, as long as the rank never
    lacks a block of whose followers it has some. If it does, each count of its ``Match`` still ends at a block that the
    place has, with the next one missing, and is not less than what it has before the first gap.
    """

    def __init__(self, *, max_predicted_blocks: int = _MAX_PREDICTED_BLOCKS) -> None:
        """Start empty.

        Args:
            max_predicted_blocks: that are kept, over all ranks; past it the earliest to expire are dropped.
        """
        self._numbers = PlaceNumbers()
        self._device, self._host, self._disk = MaskMap(), MaskMap(), MaskMap()
        self._tiers = {Tier.DEVICE: self._device, Tier.HOST: self._host, Tier.DISK: self._disk}
        self._walker = Walker(self._device.mask_of)
        self._predictions = Predictions(max_predicted_blocks)
        self._predicted = self._predictions.masks
        self._further_kinds = ((Kind.PREDICTED, self._predicted), (Kind.HOST, self._host), (Kind.DISK, self._disk))
        self._sweep: Sweep | None = None

    def num_blocks(self, tier: Tier) -> int:
        """Different blocks that ranks have on that tier; those of cleared places count until they are swept."""
        return len(self._tiers[tier].masks)

    @property
    def num_predicted_blocks(self) -> int:
        """Different blocks that are predicted for any rank; those of cleared places count until they are swept."""
        return len(self._predicted.masks)

    def store(
        self, rank: Rank, parent_hash: int | None, sequence_hashes: Sequence[int], tier: Tier = Tier.DEVICE
    ) -> bool:
        """``rank`` has these blocks, each of which follows the one before it; the first one follows ``parent_hash``.

        Returns:
            Whether it is known to have that parent, on whatever tier, or there is none. If not, an event was missed,
            or this one came before its time: then the rank may be said to have more than it has.
        """
        number = self._numbers.number(rank)
        bit = self._numbers.bit(number)
        has_parent = parent_hash is None or any(masks.mask_of(parent_hash, 0) & bit for masks in self._tiers.values())
        self._tiers[tier].add(bit, sequence_hashes)
        if tier is Tier.DEVICE:
            self._predictions.confirm(number, bit, sequence_hashes)
        return has_parent

    def remove(self, rank: Rank, sequence_hashes: Sequence[int], tier: Tier = Tier.DEVICE) -> None:
        """``rank`` no longer has these blocks on that tier; those that it never had there are ignored."""
        number = self._numbers.current.numbers.get(rank)
        if number is not None:
            self._tiers[tier].discard(self._numbers.bit(number), sequence_hashes)

    def clear(self, rank: Rank) -> None:
        """``rank`` has nothing any more, and nothing is predicted for it; it may store again at once.

        That takes no time for each block: memory is given back by ``sweep``.
        """
        number = self._numbers.retire(rank)
        if number is not None:
            self._predictions.forget(number)

    def sweep(self, max_entries: int) -> bool:
        """Take what places had that are cleared out of at most ``max_entries`` entries.

        The first call after a ``clear`` also copies the list of all hashes: some 15 ms for each million.

        Returns:
            Whether there is more to sweep. Each rank that is cleared makes every entry be looked at again, but for
            those that are cleared before one sweep begins, which share it.

        Raises:
            ValueError: ``max_entries`` is below 1.
        """
        if max_entries < 1:
            raise ValueError("max_entries must be at least 1")
        if self._sweep is None:
            if not self._numbers.dead:
                return False
            self._sweep = Sweep(self._numbers.dead, [self._predicted, *self._tiers.values()])
        if self._sweep.advance(max_entries):
            return True
        self._numbers.free(self._sweep.bits)
        self._sweep = None
        return bool(self._numbers.dead)

    def predict(self, rank: Rank, sequence_hashes: Sequence[int], expires_at: float) -> None:
        """A request with this chain of blocks was sent to ``rank``: it will have them on the device.

        Blocks count as predicted from the first one that the rank lacks, each until it is stored or ``expires_at``.
        """
        number = self._numbers.number(rank)
        bit = self._numbers.bit(number)
        groups = walk(self._device.mask_of, sequence_hashes, 0, bit) if sequence_hashes else []
        num_held = groups[0][0] if groups else 0
        self._predictions.add(number, bit, sequence_hashes[num_held:], expires_at)

    def expire(self, now: float) -> None:
        """Drop predictions whose ``expires_at`` is not after ``now``."""
        self._predictions.expire(now)

    def match(self, sequence_hashes: Sequence[int]) -> Matches:
        """How many leading blocks of a prompt each rank has."""
        numbering = self._numbers.current
        if not sequence_hashes:
            return Matches(numbering, (), ())
        groups = self._walker.walk(sequence_hashes, numbering.alive)
        reaches: list[Reach] = [((depth,), mask) for depth, mask in groups]
        kinds = [Kind.DEVICE]
        maps = [self._device]
        for kind, more in self._further_kinds:
            if more.masks:
                kinds.append(kind)
                maps.append(more)
                reaches = _extend(reaches, maps, sequence_hashes, numbering.alive)
        return Matches(numbering, kinds, reaches)


def _extend(reaches: list[Reach], maps: Sequence[MaskMap], sequence_hashes: Sequence[int], alive: int) -> list[Reach]:
    """How far places reach if the blocks of the last of ``maps`` count too; ``reaches`` counts those of the others."""
    rest = alive
    for _, mask in reaches:
        rest ^= mask
    extended: list[Reach] = []
    mask_of = maps[-1].mask_of
    for depths, mask in [((0,) * (len(maps) - 1), rest), *reaches]:
        depth = depths[-1]
        # Only who has the very next block gets further, so places that gain nothing cost one probe a group.
        further = mask & mask_of(sequence_hashes[depth], 0) if depth < len(sequence_hashes) else 0
        if further:
            groups = walk(mask_of, sequence_hashes, depth, further)
            extended += [((*depths, end), ranks) for end, ranks in _go_on(groups, maps, sequence_hashes)]
        if depth and mask != further:
            extended.append(((*depths, depth), mask ^ further))
    return extended


def _go_on(groups: list[Group], maps: Sequence[MaskMap], sequence_hashes: Sequence[int]) -> list[Group]:
    """How far the groups get if each next block may be in any of ``maps``."""
    ended: list[Group] = []
    while groups:
        depth, mask = groups.pop()
        for masks in maps if depth < len(sequence_hashes) else ():
            if further := mask & masks.mask_of(sequence_hashes[depth], 0):
                groups += walk(masks.mask_of, sequence_hashes, depth, further)
                mask ^= further
        if mask:
            ended.append((depth, mask))
    return ended


# What the ranks have of one prompt.


class Kind(IntEnum):
    """Where a rank has a block, in the order of the fields of ``Match``."""

    DEVICE = 0
    PREDICTED = 1
    HOST = 2
    DISK = 3


#: Places, as a mask, and the number of leading blocks that all of them have if more and more kinds count.
Reach: TypeAlias = tuple[tuple[int, ...], int]


@dataclass(frozen=True, slots=True)
class Match:
    """Leading blocks of a prompt that one rank has, by the dearest place where one has to look for them.

    Attributes:
        num_device_blocks: from the first on, on the device.
        num_predicted_blocks: that follow these, of which some are not on the device yet, but will be: requests that
            compute them were sent there.
        num_host_blocks: that follow, of which some are in host memory only.
        num_disk_blocks: that follow, of which some are on disk only.
    """

    num_device_blocks: int = 0
    num_predicted_blocks: int = 0
    num_host_blocks: int = 0
    num_disk_blocks: int = 0

    @property
    def num_blocks(self) -> int:
        """All of them."""
        return self.num_device_blocks + self.num_predicted_blocks + self.num_host_blocks + self.num_disk_blocks


class Matches(Mapping[Rank, Match]):
    """The ranks that have at least the first block of a prompt, those that have most blocks first.

    It stays as it was when it was made. Making it takes no time for each rank, going through all of it does.
    """

    __slots__ = ("_kinds", "_numbering", "_reaches")

    def __init__(self, numbering: Numbering, kinds: Sequence[Kind], reaches: Sequence[Reach]) -> None:
        """``reaches`` are of disjoint places, each with a depth for each of ``kinds``, which are in their order."""
        self._numbering = numbering
        self._kinds = kinds
        self._reaches = reaches

    def __getitem__(self, rank: Rank) -> Match:
        number = self._numbering.numbers[rank]
        for depths, mask in self._reaches:
            if mask >> number & 1:
                return self._match(depths)
        raise KeyError(rank)

    def __iter__(self) -> Iterator[Rank]:
        return (rank for rank, _ in self._ranked())

    def __len__(self) -> int:
        return sum(mask.bit_count() for _, mask in self._reaches)

    def items(self) -> ItemsView[Rank, Match]:
        """Places and what they have, those that have most blocks first."""
        return _Items(self)

    def _ranked(self) -> Iterator[tuple[Rank, Match]]:
        for depths, mask in sorted(self._reaches, key=_num_blocks, reverse=True):
            match = self._match(depths)
            for number in numbers_in(mask):
                yield self._numbering.ranks[number], match

    def _match(self, depths: tuple[int, ...]) -> Match:
        counts = [0] * len(Kind)
        before = 0
        for kind, depth in zip(self._kinds, depths, strict=True):
            counts[kind] = depth - before
            before = depth
        return Match(*counts)


class _Items(ItemsView[Rank, Match]):
    """Spares looking up each rank again."""

    _mapping: Matches

    def __iter__(self) -> Iterator[tuple[Rank, Match]]:
        return self._mapping._ranked()


def _num_blocks(reach: Reach) -> int:
    return reach[0][-1]


# Which bit of a mask stands for which rank, and which ranks are gone but not swept yet.


@dataclass(frozen=True)
class Numbering:
    """The living places and their numbers at one time: place ``n`` is bit ``1 << n`` of every mask.

    Attributes:
        alive: the bits of all of them.
    """

    numbers: Mapping[Rank, int]
    ranks: Mapping[int, Rank]
    alive: int


class PlaceNumbers:
    """Gives out numbers, the smallest first, so that masks stay short; takes them back when masks are swept.

    A change makes a new ``Numbering``: whoever keeps an old one can still read the masks that he has with it.
    """

    def __init__(self) -> None:
        self.current = Numbering({}, {}, 0)
        #: Bits of ranks that are gone and may still be in masks.
        self.dead = 0
        self._bits: list[int] = []
        self._free: list[int] = []  # a heap

    def bit(self, number: int) -> int:
        """``1 << number``, always the same object: a mask of one rank then needs no memory of its own."""
        return self._bits[number]

    def number(self, rank: Rank) -> int:
        """The number of ``rank``, which gets one if it has none."""
        known = self.current.numbers.get(rank)
        if known is not None:
            return known
        if self._free:
            number = heapq.heappop(self._free)
        else:
            number = len(self._bits)
            self._bits.append(1 << number)
        self.current = Numbering(
            {**self.current.numbers, rank: number},
            {**self.current.ranks, number: rank},
            self.current.alive | self._bits[number],
        )
        return number

    def retire(self, rank: Rank) -> int | None:
        """``rank`` is gone: its bit counts no more. Returns its number; ``None`` where it has none."""
        number = self.current.numbers.get(rank)
        if number is not None:
            numbers, ranks = dict(self.current.numbers), dict(self.current.ranks)
            del numbers[rank], ranks[number]
            self.current = Numbering(numbers, ranks, self.current.alive ^ self._bits[number])
            self.dead |= self._bits[number]
        return number

    def free(self, swept: int) -> None:
        """The bits ``swept``, all dead, are in no mask any more: their numbers can be given out again."""
        self.dead &= ~swept
        for number in numbers_in(swept):
            heapq.heappush(self._free, number)


def numbers_in(mask: int) -> Iterator[int]:
    """Numbers of the bits that are set, in order."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


# Blocks that ranks will have soon, because requests that compute them were just sent there.


class Predictions:
    """Each holds until its rank stores the block, or until a time; the one that ends first gives way to a new one.

    Places are known by number and bit, as in ``router.kv_index.index``.
    """

    def __init__(self, max_blocks: int) -> None:
        """Keep at most ``max_blocks``, counting a block each time that it is predicted."""
        self.masks = MaskMap()
        self._max_blocks = max_blocks
        self._num_queued_blocks = 0
        self._num_added = 0
        self._last_end = -math.inf  # of all predictions so far
        # Of each rank: when the last prediction of a block ends. In the queue, by that time: what was predicted;
        # of these, what is confirmed or predicted anew for longer is no longer theirs to end.
        self._ends: dict[int, dict[int, float]] = {}
        self._queue: list[tuple[float, int, int, int, Sequence[int]]] = []

    def add(self, number: int, bit: int, sequence_hashes: Sequence[int], expires_at: float) -> None:
        """The rank will have these blocks; of more than fit, the first ones count."""
        sequence_hashes = sequence_hashes[: self._max_blocks]
        if not sequence_hashes:
            return
        while self._num_queued_blocks + len(sequence_hashes) > self._max_blocks:
            self._end_first()
        ends = self._ends.setdefault(number, {})
        if expires_at >= self._last_end:
            ends.update(dict.fromkeys(sequence_hashes, expires_at))
            self._last_end = expires_at
        else:
            ends.update({known: max(expires_at, ends.get(known, expires_at)) for known in sequence_hashes})
        self.masks.add(bit, sequence_hashes)
        self._num_added += 1
        self._num_queued_blocks += len(sequence_hashes)
        heapq.heappush(self._queue, (expires_at, self._num_added, number, bit, sequence_hashes))

    def confirm(self, number: int, bit: int, sequence_hashes: Sequence[int]) -> None:
        """The rank has these blocks: they are predicted no more."""
        if ends := self._ends.get(number):
            self.masks.discard(bit, [known for known in sequence_hashes if ends.pop(known, None) is not None])

    def forget(self, number: int) -> None:
        """The rank is gone. Its bit is still in ``masks``, until it is swept."""
        self._ends.pop(number, None)

    def expire(self, now: float) -> None:
        """End what ends at ``now`` or before."""
        while self._queue and self._queue[0][0] <= now:
            self._end_first()

    def _end_first(self) -> None:
        expires_at, _, number, bit, sequence_hashes = heapq.heappop(self._queue)
        self._num_queued_blocks -= len(sequence_hashes)
        ends = self._ends.get(number, {})
        ended = [known for known in sequence_hashes if known in ends and ends[known] <= expires_at]
        for sequence_hash in ended:
            del ends[sequence_hash]
        self.masks.discard(bit, ended)
        if not ends:
            self._ends.pop(number, None)


# What places have of one prompt, looked up when a policy asks.


class PromptMatches(Mapping[Rank, int]):
    """Leading tokens of a prompt by rank, as of the last ``renew``; places that have none are left out.

    A request that waits is shown to its policy again and again, and most times the policy does not get as far as to
    look at it: so the index is asked at the first look after each ``renew``.
    """

    __slots__ = ("_block_size", "_index", "_num_tokens", "_sequence_hashes")

    def __init__(self, index: PrefixIndex, sequence_hashes: Sequence[int], block_size: int) -> None:
        """``sequence_hashes`` name the prompt's full blocks, of ``block_size`` tokens each."""
        self._index = index
        self._sequence_hashes = sequence_hashes
        self._block_size = block_size
        self._num_tokens: Mapping[Rank, int] | None = None

    def renew(self) -> None:
        """Forget what was looked up."""
        self._num_tokens = None

    def __getitem__(self, rank: Rank) -> int:
        return self._known()[rank]

    def __iter__(self) -> Iterator[Rank]:
        return iter(self._known())

    def __len__(self) -> int:
        return len(self._known())

    def get(self, rank: Rank, default: int = 0) -> int:  # type: ignore[override]
        """As of any mapping, without the exception that the default one catches for each rank that has nothing."""
        return self._known().get(rank, default)

    def _known(self) -> Mapping[Rank, int]:
        if self._num_tokens is None:
            matches = self._index.match(self._sequence_hashes)
            self._num_tokens = {rank: match.num_blocks * self._block_size for rank, match in matches.items()}
        return self._num_tokens


# Keeps the prefix index small: predictions that time has passed over, and what gone workers left behind.

_INTERVAL_S = 0.5

# Some 2 ms of the event loop at a time; a million entries take 50 turns.
_SWEPT_AT_ONCE = 20_000

_PAUSE_S = 0.01


async def keep_up(index: PrefixIndex) -> None:
    """Expire and sweep, little by little. Runs until cancelled."""
    while True:
        index.expire(time.monotonic())
        await asyncio.sleep(_PAUSE_S if index.sweep(_SWEPT_AT_ONCE) else _INTERVAL_S)
