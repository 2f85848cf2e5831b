"""A flat map from sequence hash to the bit mask of the places that have the block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

#: Mask of the places that have a block; 0 where nobody does.
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
        """The places of ``bits`` do not have these blocks, or no longer."""
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
