"""Finds how many leading blocks of a prompt each rank has, with a few probes instead of one a block.

``MaskMap`` maps a block's hash to the bit mask of the ranks that have it. A rank that has a block of a chain normally
has all blocks before it: they are computed in order, and evicted last one first. So masks only lose bits along the
chain. ``walk`` jumps ahead. Where a mask has lost bits, it bisects to find where each bit was lost. The structure is
that of the jumping search of ai-dynamo/dynamo's router (``lib/kv-router``). ``Sweep`` clears bits out of maps.

If a rank has holes in its chain, each probe is still right about its block. The depth ``n`` found for that rank is then
one such that it has block ``n - 1`` and not block ``n``: never less than its blocks before the first hole, and possibly
more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

#: (depth, mask): the ranks of ``mask`` have the first ``depth`` blocks, and not the next one.
Group: TypeAlias = tuple[int, int]

#: ``mask_of(sequence_hash, 0)`` is the mask of the ranks that have a block; 0: no rank has it.
MaskOf: TypeAlias = Callable[[int, int], int]

#: A block that was probed: (position, mask of all ranks, mask of those of the walk that count as having it).
_Probe: TypeAlias = tuple[int, int, int]

# The best of 16 to 256 measured: longer jumps save probes if much matches, shorter ones if little does.
_JUMP = 64

# Prompt beginnings that ``Walker`` remembers.
_MAX_FORKS = 1 << 12

# Masks remembered for sharing: with 1000 ranks, some 15 MB.
_MAX_SHARED = 1 << 16


class Walker:
    """Walks from the first block on, and remembers where some ranks first lacked a block.

    Prompts that begin alike mostly part at the same block again, the end of a system prompt; two probes confirm it.
    What is remembered only decides which block is probed first, never the result.
    """

    def __init__(self, mask_of: MaskOf) -> None:
        self._mask_of = mask_of
        self._forks: dict[int, int] = {}  # by first block: the first block that some ranks lacked

    def walk(self, sequence_hashes: Sequence[int], ranks: int) -> list[Group]:
        """As ``walk`` from block 0; there is at least one block."""
        first = sequence_hashes[0]
        fork = self._forks.get(first)
        if fork is not None and fork < len(sequence_hashes):
            first_mask = self._mask_of(first, 0)
            alive = first_mask & ranks
            mask = self._mask_of(sequence_hashes[fork - 1], 0)
            if alive and (mask is first_mask or mask & alive == alive):
                left = self._mask_of(sequence_hashes[fork], 0) & alive
                if left != alive:
                    group = (fork, alive ^ left)
                    return [group, *walk(self._mask_of, sequence_hashes, fork, left)] if left else [group]
        groups = walk(self._mask_of, sequence_hashes, 0, ranks)
        if len(groups) > 1:
            if len(self._forks) >= _MAX_FORKS:
                self._forks.clear()
            self._forks[first] = groups[0][0]
        return groups


def walk(mask_of: MaskOf, sequence_hashes: Sequence[int], start: int, ranks: int) -> list[Group]:
    """Groups of those of ``ranks``, a mask, that have block ``start``, by ascending depth.

    Masks are disjoint and not zero. ``ranks`` count as having the blocks before ``start``, which is less than the
    number of blocks.
    """
    groups: list[Group] = []
    low, last = start, len(sequence_hashes) - 1
    low_mask = mask_of(sequence_hashes[low], 0)
    alive = low_mask & ranks
    while alive:
        if low == last:
            groups.append((last + 1, alive))
            break
        high = low + _JUMP if low + _JUMP < last else last  # a call of min() costs as much as half a probe
        high_mask = mask_of(sequence_hashes[high], 0)
        # Most equal masks are one shared object, and `is` saves arithmetic on long integers.
        if high_mask is not low_mask:
            left = high_mask & alive
            if left != alive:
                _split(groups, mask_of, sequence_hashes, (low, low_mask, alive), (high, high_mask, left))
                alive = left
            low_mask = high_mask
        low = high
    return groups


def _split(groups: list[Group], mask_of: MaskOf, sequence_hashes: Sequence[int], above: _Probe, below: _Probe) -> None:
    """Add the groups that end between two blocks: the ranks that have the one above and not the one below."""
    low, low_mask, alive = above
    high, high_mask, left = below
    ahead: list[tuple[int, int, int, int, int, int]] = []  # for later, further down: two probes, in one flat tuple
    while True:
        while high - low > 1:
            middle = (low + high) >> 1
            mask = mask_of(sequence_hashes[middle], 0)
            if mask is low_mask:
                low = middle
            elif mask is high_mask:
                high = middle
            # A rank that has the block below counts as having this one too, even if there is a gap.
            elif (there := mask & alive | left) == alive:
                low, low_mask = middle, mask
            elif there == left:
                high, high_mask = middle, mask
            else:
                ahead.append((middle, mask, there, high, high_mask, left))
                high, high_mask, left = middle, mask, there
        groups.append((high, alive ^ left))
        if not ahead:
            return
        # Not from the last `high`: it may have come up to a gap of ranks that end further down.
        low, low_mask, alive, high, high_mask, left = ahead.pop()


class MaskMap:
    """A flat map from sequence hash to the bit mask of the ranks that have the block. No mask in it is zero.

    Mask objects are shared: the blocks of one event mostly have the same mask before it, and so the same one after it.
    That saves memory, and ``is`` finds equal masks.
    """

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}
        #: The map, to be read only.
        self.masks: Mapping[int, int] = self._masks
        self._shared: dict[int, int] = {}
        #: The dict's own method, since a method of ours would cost as much again.
        self.mask_of: MaskOf = self._masks.get

    def add(self, bit: int, sequence_hashes: Iterable[int]) -> None:
        """The rank of ``bit`` has these blocks."""
        masks = self._masks
        get = masks.get
        before, after = 0, 0
        for sequence_hash in sequence_hashes:
            mask = get(sequence_hash)
            if mask is None:
                masks[sequence_hash] = bit
            elif mask is before:
                masks[sequence_hash] = after
            else:
                before = mask
                after = masks[sequence_hash] = self._share(mask | bit)

    def discard(self, bits: int, sequence_hashes: Iterable[int]) -> None:
        """The ranks of ``bits`` do not have these blocks, or no longer."""
        masks = self._masks
        get = masks.get
        before, after = bits, 0
        for sequence_hash in sequence_hashes:
            mask = get(sequence_hash)
            if mask is not before:
                if mask is None:
                    continue
                before, after = mask, self._share(mask & ~bits)
            if after:
                masks[sequence_hash] = after
            else:
                del masks[sequence_hash]

    def _share(self, mask: int) -> int:
        if len(self._shared) >= _MAX_SHARED:
            self._shared.clear()
        return self._shared.setdefault(mask, mask)


class Sweep:
    """Takes bits out of every mask of some maps, a piece at a time; until it is done, these bits must not be added."""

    def __init__(self, bits: int, maps: Sequence[MaskMap]) -> None:
        self.bits = bits
        self._maps = list(maps)
        self._map: MaskMap | None = None
        self._sequence_hashes: list[int] = []  # of `_map`, not swept yet

    def advance(self, max_entries: int) -> bool:
        """Sweep at most that many entries. Returns whether some are left.

        The first piece of each map copies the list of its hashes, which takes some 15 ms for a million of them.
        """
        while self._sequence_hashes or self._maps:
            if self._map is None or not self._sequence_hashes:
                self._map = self._maps.pop()
                self._sequence_hashes = list(self._map.masks)
            piece = self._sequence_hashes[-max_entries:]
            del self._sequence_hashes[-max_entries:]
            self._map.discard(self.bits, piece)
            max_entries -= len(piece)
            if not max_entries:
                break
        return bool(self._sequence_hashes or any(each.masks for each in self._maps))
