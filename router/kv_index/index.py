"""Which rank has which KV blocks: the router's copy of what workers publish in KV events.

``PrefixIndex`` has one flat map a tier, from sequence hash to the bit mask of the ranks that have the block. A sequence
hash names a block with all blocks before it, so no tree is needed; ``router.kv_index.walk`` looks a prompt up. A lookup
gives ``Matches``. ``PromptMatches`` is a lookup that is made only if a policy asks; ``keep_up`` keeps the index small.
``Predictions`` are blocks that ranks will have soon, and ``RankNumbers`` says which bit stands for which rank.

Pure but for ``keep_up``: no locks and no clock. One thread calls, and chooses the clock that times are given by.
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
from router.policy.base import LowerTokens

_MAX_PREDICTED_BLOCKS = 1 << 20

# Pauses of ``keep_up``: between sweeps, and between two pieces of one sweep.
_INTERVAL_S = 0.5
_PAUSE_S = 0.01

# Some 2 ms of the event loop at a time; a million entries take 50 turns.
_SWEPT_AT_ONCE = 20_000

_NOTHING_BELOW: dict[Rank, LowerTokens] = {}


class PrefixIndex:
    """What all ranks have, as of the last event of each.

    Events take their time, so a rank may have changed since. Otherwise the counts are exact, as long as a rank that has
    a block also has all blocks before it. If it does not, each count of its ``Match`` still ends at a block that the
    rank has, with the next one missing, and is not less than what it has before the first gap.
    """

    def __init__(self, *, max_predicted_blocks: int = _MAX_PREDICTED_BLOCKS) -> None:
        """Start empty.

        Args:
            max_predicted_blocks: predicted blocks to keep, over all ranks; of more, the earliest to expire are dropped.
        """
        self._numbers = RankNumbers()
        self._device, self._host, self._disk = MaskMap(), MaskMap(), MaskMap()
        self._tiers = {Tier.DEVICE: self._device, Tier.HOST: self._host, Tier.DISK: self._disk}
        self._walker = Walker(self._device.mask_of)
        self._predictions = Predictions(max_predicted_blocks)
        self._predicted = self._predictions.masks
        self._further_kinds = ((Kind.PREDICTED, self._predicted), (Kind.HOST, self._host), (Kind.DISK, self._disk))
        self._sweep: Sweep | None = None

    def num_blocks(self, tier: Tier) -> int:
        """Different blocks that ranks have on that tier; those of cleared ranks count until they are swept."""
        return len(self._tiers[tier].masks)

    @property
    def num_predicted_blocks(self) -> int:
        """Different blocks that are predicted for any rank; those of cleared ranks count until they are swept."""
        return len(self._predicted.masks)

    def store(
        self, rank: Rank, parent_hash: int | None, sequence_hashes: Sequence[int], tier: Tier = Tier.DEVICE
    ) -> bool:
        """``rank`` has these blocks, each of which follows the one before it; the first one follows ``parent_hash``.

        Returns:
            Whether the rank is known to have that parent, on any tier, or there is none. If not, an event was missed or
            came out of order: then the index may count more for the rank than it has.
        """
        number = self._numbers.number(rank)
        bit = self._numbers.bit(number)
        has_parent = parent_hash is None or any(masks.mask_of(parent_hash, 0) & bit for masks in self._tiers.values())
        self._tiers[tier].add(bit, sequence_hashes)
        if tier is Tier.DEVICE:
            self._predictions.confirm(number, bit, sequence_hashes)
        return has_parent

    def remove(self, rank: Rank, sequence_hashes: Sequence[int], tier: Tier = Tier.DEVICE) -> None:
        """``rank`` no longer has these blocks on that tier; blocks that it never had there are ignored."""
        number = self._numbers.current.numbers.get(rank)
        if number is not None:
            self._tiers[tier].discard(self._numbers.bit(number), sequence_hashes)

    def clear(self, rank: Rank) -> None:
        """``rank`` has no blocks any more, and none are predicted for it; it may store again at once.

        The time for this does not grow with the number of blocks: ``sweep`` frees their memory later.
        """
        number = self._numbers.retire(rank)
        if number is not None:
            self._predictions.forget(number)

    def sweep(self, max_entries: int) -> bool:
        """Take cleared ranks out of at most ``max_entries`` entries.

        The first call after a ``clear`` also copies the list of all hashes: some 15 ms for each million.

        Returns:
            Whether there is more to sweep. A sweep goes through all entries; ranks that are cleared before it begins
            share it.

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
        """A request with this chain of blocks was sent to ``rank``, which will have them on the device.

        Blocks are predicted from the first one that the rank lacks, each until it is stored or until ``expires_at``.
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


class Kind(IntEnum):
    """Where a rank has a block, in the order of the fields of ``Match``."""

    DEVICE = 0
    PREDICTED = 1
    HOST = 2
    DISK = 3


#: (depths, mask): the ranks of ``mask`` have so many leading blocks, if more and more kinds count.
Reach: TypeAlias = tuple[tuple[int, ...], int]


@dataclass(frozen=True, slots=True)
class Match:
    """Leading blocks of a prompt that one rank has, by the slowest tier that is needed to reach so far.

    Attributes:
        num_device_blocks: from the first on, all on the device.
        num_predicted_blocks: that follow, some of which are not on the device yet: requests that compute them were sent
            there.
        num_host_blocks: that follow, some of which are in host memory only.
        num_disk_blocks: that follow, some of which are on disk only.
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

    It stays as it was when it was made. Making it takes no time for each rank; going through all of it does.
    """

    __slots__ = ("_kinds", "_numbering", "_reaches")

    def __init__(self, numbering: Numbering, kinds: Sequence[Kind], reaches: Sequence[Reach]) -> None:
        """``reaches`` are of disjoint ranks, each with a depth for each of ``kinds``, which are in their order."""
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
        """Ranks and what they have, those that have most blocks first."""
        return _Items(self)

    def num_tokens(self, block_size: int) -> dict[Rank, int]:
        """Leading tokens that each rank has, in blocks of ``block_size``; those that have most first."""
        by_number = self._numbering.ranks
        return {
            by_number[number]: depths[-1] * block_size
            for depths, mask in self._most_first()
            for number in numbers_in(mask)
        }

    def lower_tokens(self, block_size: int) -> dict[Rank, LowerTokens]:
        """The last of these tokens, of ranks that have them only on tiers below the device."""
        if not self._kinds or self._kinds[-1] < Kind.HOST:
            return _NOTHING_BELOW
        by_number = self._numbering.ranks
        return {
            by_number[number]: LowerTokens(match.num_host_blocks * block_size, match.num_disk_blocks * block_size)
            for match, mask in [(self._match(depths), mask) for depths, mask in self._reaches]
            if match.num_host_blocks or match.num_disk_blocks
            for number in numbers_in(mask)
        }

    def _most_first(self) -> Sequence[Reach]:
        return sorted(self._reaches, key=_num_blocks, reverse=True) if len(self._reaches) > 1 else self._reaches

    def _ranked(self) -> Iterator[tuple[Rank, Match]]:
        for depths, mask in self._most_first():
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
    """Does not look each rank up again."""

    _mapping: Matches

    def __iter__(self) -> Iterator[tuple[Rank, Match]]:
        return self._mapping._ranked()


class PromptMatches(Mapping[Rank, int]):
    """Leading tokens of a prompt that ranks have, as of the last ``renew``; ranks that have none are left out.

    A policy is shown each waiting request again and again, and rarely reads this. So the index is queried lazily, when
    it is first read after a ``renew``.
    """

    __slots__ = ("_block_size", "_index", "_lower_tokens", "_num_tokens", "_sequence_hashes")

    def __init__(self, index: PrefixIndex, sequence_hashes: Sequence[int], block_size: int) -> None:
        """``sequence_hashes`` name the prompt's full blocks, of ``block_size`` tokens each."""
        self._index = index
        self._sequence_hashes = sequence_hashes
        self._block_size = block_size
        self._num_tokens: Mapping[Rank, int] | None = None
        self._lower_tokens = _NOTHING_BELOW

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
        """As of any mapping; the inherited one would raise and catch an exception for each rank that has nothing."""
        known = self._num_tokens
        return (self._known() if known is None else known).get(rank, default)

    def _known(self) -> Mapping[Rank, int]:
        if self._num_tokens is None:
            matches = self._index.match(self._sequence_hashes)
            self._num_tokens = matches.num_tokens(self._block_size)
            self._lower_tokens = matches.lower_tokens(self._block_size)
        return self._num_tokens

    @property
    def lower_tokens(self) -> Mapping[Rank, LowerTokens]:
        """Which of these tokens lie below the device; ranks that have none there are left out."""
        if self._num_tokens is None:
            self._known()
        return self._lower_tokens


class LowerMatches(Mapping[Rank, LowerTokens]):
    """``PromptMatches.lower_tokens``, as of the last ``renew``, looked up when it is first read."""

    __slots__ = ("_matches",)

    def __init__(self, matches: PromptMatches) -> None:
        self._matches = matches

    def __getitem__(self, rank: Rank) -> LowerTokens:
        return self._matches.lower_tokens[rank]

    def get(self, rank: Rank, default: LowerTokens | None = None) -> LowerTokens | None:  # type: ignore[override]
        """As of any mapping; as in ``PromptMatches``, the inherited one would cost more."""
        return self._matches.lower_tokens.get(rank, default)

    def __iter__(self) -> Iterator[Rank]:
        return iter(self._matches.lower_tokens)

    def __len__(self) -> int:
        return len(self._matches.lower_tokens)


async def keep_up(index: PrefixIndex) -> None:
    """Drop expired predictions, and sweep what gone workers left behind, little by little. Runs until cancelled."""
    while True:
        index.expire(time.monotonic())
        await asyncio.sleep(_PAUSE_S if index.sweep(_SWEPT_AT_ONCE) else _INTERVAL_S)


class Predictions:
    """Blocks that ranks will have soon, because requests that compute them were just sent there.

    A prediction ends when its rank stores the block, or at its time. If there are too many, the one that ends first is
    dropped. Ranks are known by number and bit (see ``RankNumbers``).
    """

    def __init__(self, max_blocks: int) -> None:
        """Keep at most ``max_blocks``, counting a block each time that it is predicted."""
        self.masks = MaskMap()
        self._max_blocks = max_blocks
        self._num_queued_blocks = 0
        self._num_added = 0
        self._last_end = -math.inf  # of all predictions so far
        # By rank and block: when its last prediction ends. The queue has each prediction by its time. When that comes,
        # blocks that were confirmed, or predicted again for longer, are left as they are.
        self._ends: dict[int, dict[int, float]] = {}
        self._queue: list[tuple[float, int, int, int, Sequence[int]]] = []

    def add(self, number: int, bit: int, sequence_hashes: Sequence[int], expires_at: float) -> None:
        """The rank will have these blocks; if they are more than fit, only the first ones count."""
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
        """The rank is gone. Its bit is still in ``masks`` until it is swept."""
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


@dataclass(frozen=True)
class Numbering:
    """The ranks that are known at one time, and their numbers: number ``n`` is bit ``1 << n`` of every mask.

    Attributes:
        alive: the bits of all of them.
    """

    numbers: Mapping[Rank, int]
    ranks: Mapping[int, Rank]
    alive: int


class RankNumbers:
    """Numbers ranks, smallest number first, so that masks stay short; numbers are free again when masks are swept.

    A change makes a new ``Numbering``: old masks can still be read with the old one.
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
        """The number of ``rank``; a new rank gets one."""
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
        """``rank`` is gone: its bit counts no more. Returns its number; ``None``: it has none."""
        number = self.current.numbers.get(rank)
        if number is not None:
            numbers, ranks = dict(self.current.numbers), dict(self.current.ranks)
            del numbers[rank], ranks[number]
            self.current = Numbering(numbers, ranks, self.current.alive ^ self._bits[number])
            self.dead |= self._bits[number]
        return number

    def free(self, swept: int) -> None:
        """The bits ``swept``, all dead, are in no mask any more: their numbers can be used again."""
        self.dead &= ~swept
        for number in numbers_in(swept):
            heapq.heappush(self._free, number)


def numbers_in(mask: int) -> Iterator[int]:
    """Numbers of the bits that are set, in order."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _extend(reaches: list[Reach], maps: Sequence[MaskMap], sequence_hashes: Sequence[int], alive: int) -> list[Reach]:
    """How far ranks reach if the blocks of the last of ``maps`` count too; ``reaches`` counts those of the others."""
    rest = alive
    for _, mask in reaches:
        rest ^= mask
    extended: list[Reach] = []
    mask_of = maps[-1].mask_of
    for depths, mask in [((0,) * (len(maps) - 1), rest), *reaches]:
        depth = depths[-1]
        # Only ranks that have the very next block get further, so the others cost one probe a group.
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


def _num_blocks(reach: Reach) -> int:
    return reach[0][-1]
