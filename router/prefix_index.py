"""Which place has which KV blocks: the router's copy of what workers tell in KV events.

One flat map a tier, from sequence hash to the bit mask of the places that have the block. A sequence hash names a
block with all before it, so no tree is needed: see ``router.prefix_walk`` for how a prompt is looked up.

Pure code without locks or clock: one thread calls, and times are whatever the caller means by them.
"""

from __future__ import annotations

from collections.abc import Sequence

from quartet.discovery.place import Place
from quartet.kvcache.events import Tier
from router.prefix_masks import MaskMap, Sweep
from router.prefix_match import Kind, Matches, Reach
from router.prefix_places import PlaceNumbers
from router.prefix_predictions import Predictions
from router.prefix_walk import Group, Walker, walk

_MAX_PREDICTED_BLOCKS = 1 << 20


class PrefixIndex:
    """What all places have, as of the last event of each.

    What is said of a place may run behind the truth, as events do, but is exact otherwise, as long as the place never
    lacks a block of whose followers it has some. If it does, each count of its ``Match`` still ends at a block that the
    place has, with the next one missing, and is not less than what it has before the first gap.
    """

    def __init__(self, *, max_predicted_blocks: int = _MAX_PREDICTED_BLOCKS) -> None:
        """Start empty.

        Args:
            max_predicted_blocks: that are kept, over all places; past it the earliest to expire are dropped.
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
        """Different blocks that places have on that tier; those of cleared places count until they are swept."""
        return len(self._tiers[tier].masks)

    @property
    def num_predicted_blocks(self) -> int:
        """Different blocks that are predicted for any place; those of cleared places count until they are swept."""
        return len(self._predicted.masks)

    def store(
        self, place: Place, parent_hash: int | None, sequence_hashes: Sequence[int], tier: Tier = Tier.DEVICE
    ) -> bool:
        """``place`` has these blocks, each of which follows the one before it; the first one follows ``parent_hash``.

        Returns:
            Whether it is known to have that parent, on whatever tier, or there is none. If not, an event was missed,
            or this one came before its time: then the place may be said to have more than it has.
        """
        number = self._numbers.number(place)
        bit = self._numbers.bit(number)
        has_parent = parent_hash is None or any(masks.mask_of(parent_hash, 0) & bit for masks in self._tiers.values())
        self._tiers[tier].add(bit, sequence_hashes)
        if tier is Tier.DEVICE:
            self._predictions.confirm(number, bit, sequence_hashes)
        return has_parent

    def remove(self, place: Place, sequence_hashes: Sequence[int], tier: Tier = Tier.DEVICE) -> None:
        """``place`` no longer has these blocks on that tier; those that it never had there are ignored."""
        number = self._numbers.current.numbers.get(place)
        if number is not None:
            self._tiers[tier].discard(self._numbers.bit(number), sequence_hashes)

    def clear(self, place: Place) -> None:
        """``place`` has nothing any more, and nothing is predicted for it; it may store again at once.

        That takes no time for each block: memory is given back by ``sweep``.
        """
        number = self._numbers.retire(place)
        if number is not None:
            self._predictions.forget(number)

    def sweep(self, max_entries: int) -> bool:
        """Take what places had that are cleared out of at most ``max_entries`` entries.

        The first call after a ``clear`` also copies the list of all hashes: some 15 ms for each million.

        Returns:
            Whether there is more to sweep. Each place that is cleared makes every entry be looked at again, but for
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

    def predict(self, place: Place, sequence_hashes: Sequence[int], expires_at: float) -> None:
        """A request with this chain of blocks was sent to ``place``: it will have them on the device.

        Blocks count as predicted from the first one that the place lacks, each until it is stored or ``expires_at``.
        """
        number = self._numbers.number(place)
        bit = self._numbers.bit(number)
        groups = walk(self._device.mask_of, sequence_hashes, 0, bit) if sequence_hashes else []
        num_held = groups[0][0] if groups else 0
        self._predictions.add(number, bit, sequence_hashes[num_held:], expires_at)

    def expire(self, now: float) -> None:
        """Drop predictions whose ``expires_at`` is not after ``now``."""
        self._predictions.expire(now)

    def match(self, sequence_hashes: Sequence[int]) -> Matches:
        """How many leading blocks of a prompt each place has."""
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
            extended += [((*depths, end), places) for end, places in _go_on(groups, maps, sequence_hashes)]
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
