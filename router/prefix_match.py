"""What the places have of one prompt."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

from quartet.discovery.place import Place
from router.prefix_places import Numbering, numbers_in


class Kind(IntEnum):
    """Where a place has a block, in the order of the fields of ``Match``."""

    DEVICE = 0
    PREDICTED = 1
    HOST = 2
    DISK = 3


#: Places, as a mask, and the number of leading blocks that all of them have if more and more kinds count.
Reach: TypeAlias = tuple[tuple[int, ...], int]


@dataclass(frozen=True, slots=True)
class Match:
    """Leading blocks of a prompt that one place has, by the dearest place where one has to look for them.

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


class Matches(Mapping[Place, Match]):
    """The places that have at least the first block of a prompt, those that have most blocks first.

    It stays as it was when it was made. Making it takes no time for each place, going through all of it does.
    """

    __slots__ = ("_kinds", "_numbering", "_reaches")

    def __init__(self, numbering: Numbering, kinds: Sequence[Kind], reaches: Sequence[Reach]) -> None:
        """``reaches`` are of disjoint places, each with a depth for each of ``kinds``, which are in their order."""
        self._numbering = numbering
        self._kinds = kinds
        self._reaches = reaches

    def __getitem__(self, place: Place) -> Match:
        number = self._numbering.numbers[place]
        for depths, mask in self._reaches:
            if mask >> number & 1:
                return self._match(depths)
        raise KeyError(place)

    def __iter__(self) -> Iterator[Place]:
        return (place for place, _ in self._ranked())

    def __len__(self) -> int:
        return sum(mask.bit_count() for _, mask in self._reaches)

    def items(self) -> ItemsView[Place, Match]:
        """Places and what they have, those that have most blocks first."""
        return _Items(self)

    def _ranked(self) -> Iterator[tuple[Place, Match]]:
        for depths, mask in sorted(self._reaches, key=_num_blocks, reverse=True):
            match = self._match(depths)
            for number in numbers_in(mask):
                yield self._numbering.places[number], match

    def _match(self, depths: tuple[int, ...]) -> Match:
        counts = [0] * len(Kind)
        before = 0
        for kind, depth in zip(self._kinds, depths, strict=True):
            counts[kind] = depth - before
            before = depth
        return Match(*counts)


class _Items(ItemsView[Place, Match]):
    """Spares looking up each place again."""

    _mapping: Matches

    def __iter__(self) -> Iterator[tuple[Place, Match]]:
        return self._mapping._ranked()


def _num_blocks(reach: Reach) -> int:
    return reach[0][-1]
