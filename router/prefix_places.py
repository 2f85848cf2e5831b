"""Which bit of a mask stands for which place, and which places are gone but not swept yet."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from quartet.discovery.place import Place


@dataclass(frozen=True)
class Numbering:
    """The living places and their numbers at one time: place ``n`` is bit ``1 << n`` of every mask.

    Attributes:
        alive: the bits of all of them.
    """

    numbers: Mapping[Place, int]
    places: Mapping[int, Place]
    alive: int


class PlaceNumbers:
    """Gives out numbers, the smallest first, so that masks stay short; takes them back when masks are swept.

    A change makes a new ``Numbering``: whoever keeps an old one can still read the masks that he has with it.
    """

    def __init__(self) -> None:
        self.current = Numbering({}, {}, 0)
        #: Bits of places that are gone and may still be in masks.
        self.dead = 0
        self._bits: list[int] = []
        self._free: list[int] = []  # a heap

    def bit(self, number: int) -> int:
        """``1 << number``, always the same object: a mask of one place then needs no memory of its own."""
        return self._bits[number]

    def number(self, place: Place) -> int:
        """The number of ``place``, which gets one if it has none."""
        known = self.current.numbers.get(place)
        if known is not None:
            return known
        if self._free:
            number = heapq.heappop(self._free)
        else:
            number = len(self._bits)
            self._bits.append(1 << number)
        self.current = Numbering(
            {**self.current.numbers, place: number},
            {**self.current.places, number: place},
            self.current.alive | self._bits[number],
        )
        return number

    def retire(self, place: Place) -> int | None:
        """``place`` is gone: its bit counts no more. Returns its number; ``None`` where it has none."""
        number = self.current.numbers.get(place)
        if number is not None:
            numbers, places = dict(self.current.numbers), dict(self.current.places)
            del numbers[place], places[number]
            self.current = Numbering(numbers, places, self.current.alive ^ self._bits[number])
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
