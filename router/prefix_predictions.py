"""Blocks that places will have soon, because requests that compute them were just sent there."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from router.prefix_masks import MaskMap


class Predictions:
    """Each holds until its place stores the block, or until a time; the one that ends first gives way to a new one.

    Places are known by number and bit, as in ``router.prefix_places``.
    """

    def __init__(self, max_blocks: int) -> None:
        """Keep at most ``max_blocks``, counting a block each time that it is predicted."""
        self.masks = MaskMap()
        self._max_blocks = max_blocks
        self._num_queued_blocks = 0
        self._num_added = 0
        self._last_end = -math.inf  # of all predictions so far
        # Of each place: when the last prediction of a block ends. In the queue, by that time: what was predicted;
        # of these, what is confirmed or predicted anew for longer is no longer theirs to end.
        self._ends: dict[int, dict[int, float]] = {}
        self._queue: list[tuple[float, int, int, int, Sequence[int]]] = []

    def add(self, number: int, bit: int, sequence_hashes: Sequence[int], expires_at: float) -> None:
        """The place will have these blocks; of more than fit, the first ones count."""
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
        """The place has these blocks: they are predicted no more."""
        if ends := self._ends.get(number):
            self.masks.discard(bit, [known for known in sequence_hashes if ends.pop(known, None) is not None])

    def forget(self, number: int) -> None:
        """The place is gone. Its bit is still in ``masks``, until it is swept."""
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
