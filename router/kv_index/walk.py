"""How far down a prompt's chain of blocks which ranks have them, with a few probes instead of one a block.

A rank that has a block of a chain normally has all before it: they are computed in order, and evicted last one first.
So masks only lose bits along the chain. Walking jumps ahead and, where the mask has lost bits, bisects for where it
lost which. The structure is that of the jumping search of ai-dynamo/dynamo's router (``lib/kv-router``).

Where a rank has holes in its chain, each probe still tells the truth about its block. What comes out for a rank is
then a depth ``n`` such that it has block ``n - 1`` and not block ``n``: never less than its blocks before the first
hole, and possibly more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

#: Places, as a mask, whose first ``depth`` blocks are there and whose next one is not: (depth, mask).
Group: TypeAlias = tuple[int, int]

#: A block that was looked at: (position, mask of all ranks, who of those that are followed counts as there).
_Probe: TypeAlias = tuple[int, int, int]

# Of 16 to 256, measured: longer ones save probes where much matches, shorter ones where little does.
_JUMP = 64


# Beginnings remembered.
_MAX_FORKS = 1 << 12


class Walker:
    """Walks from the first block on, and remembers where places first dropped out.

    Prompts that begin alike mostly part at the same block again, the end of a system prompt, which two probes confirm.
    What is remembered decides only where is looked first, never what is found.
    """

    def __init__(self, mask_of: MaskOf) -> None:
        self._mask_of = mask_of
        self._forks: dict[int, int] = {}  # by first block: the first one that some places lacked

    def walk(self, sequence_hashes: Sequence[int], ranks: int) -> list[Group]:
        """As ``walk`` from block 0, of at least one."""
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
    """Groups of those of ``ranks`` that have block ``start``, by ascending depth; masks are disjoint, not zero.

    ``ranks`` are known, or taken, to have the blocks before ``start``, which is less than the number of blocks.
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
        # Sharing makes most equal masks one object, and `is` spares arithmetic on long integers.
        if high_mask is not low_mask:
            left = high_mask & alive
            if left != alive:
                _split(groups, mask_of, sequence_hashes, (low, low_mask, alive), (high, high_mask, left))
                alive = left
            low_mask = high_mask
        low = high
    return groups


def _split(groups: list[Group], mask_of: MaskOf, sequence_hashes: Sequence[int], above: _Probe, below: _Probe) -> None:
    """Add the groups that end between two blocks: of those who have the one above without those left below."""
    low, low_mask, alive = above
    high, high_mask, left = below
    ahead: list[_Probe] = []  # further down, put off
    while True:
        while high - low > 1:
            middle = (low + high) >> 1
            mask = mask_of(sequence_hashes[middle], 0)
            if mask is low_mask:
                low = middle
            elif mask is high_mask:
                high = middle
            # Who is left further down counts as there, whatever a gap in between says.
            elif (there := mask & alive | left) == alive:
                low, low_mask = middle, mask
            elif there == left:
                high, high_mask = middle, mask
            else:
                ahead.append((high, high_mask, left))
                high, high_mask, left = middle, mask, there
        groups.append((high, alive ^ left))
        if not ahead:
            return
        low, low_mask, alive = high, high_mask, left
        high, high_mask, left = ahead.pop()


# A flat map from sequence hash to the bit mask of the ranks that have the block.

#: Mask of the ranks that have a block; 0 where nobody does.
MaskOf: TypeAlias = Callable[[int, int], int]

# Masks remembered for sharing: at 1000 places some 15 MB.
_MAX_SHARED = 1 << 16


class MaskMap:
    """Blocks and who has them. No mask in it is zero.

    Mask objects are shared: what one event stores or removes mostly had one and the same mask before, and so has one
    after. That saves their memory, and lets ``is`` tell equal masks.
    """

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}
        #: The map, to be read only.
        self.masks: Mapping[int, int] = self._masks
        self._shared: dict[int, int] = {}
        #: ``mask_of(sequence_hash, 0)``; the dict's own method, since a call of ours would cost as much again.
        self.mask_of: MaskOf = self._masks.get

    def add(self, bit: int, sequence_hashes: Iterable[int]) -> None:
        """The place of ``bit`` has these blocks."""
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
    """Takes bits out of every mask of some maps, a piece at a time; meanwhile nobody may add these bits."""

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
