"""What workers really hold, and an index that is a dict of sets."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from quartet.discovery.base import Rank
from quartet.events.kv import Cleared, KvBatch, KvEvent, KvSnapshotPart, Removed, Stored, Tier

Held: TypeAlias = dict[Rank, set[tuple[Tier, int]]]
TIERS = (Tier.DEVICE, Tier.HOST)


@dataclass
class SetIndex:
    """A ``KvIndex``. ``held`` has no ranks without blocks."""

    _held: Held = field(default_factory=lambda: defaultdict(set))

    @property
    def held(self) -> Held:
        return {rank: blocks for rank, blocks in self._held.items() if blocks}

    def store(self, rank: Rank, parent_hash: int | None, sequence_hashes: Sequence[int], tier: Tier) -> None:
        self._held[rank].update((tier, named) for named in sequence_hashes)

    def remove(self, rank: Rank, sequence_hashes: Sequence[int], tier: Tier) -> None:
        self._held[rank].difference_update((tier, named) for named in sequence_hashes)

    def clear(self, rank: Rank) -> None:
        self._held.pop(rank, None)


class TruthfulWorker:
    """One epoch of a worker: changes what it holds, reports it in numbered batches, and can be asked for all of it."""

    def __init__(self, worker_id: str, epoch: int, *, num_ranks: int = 2, seed: int = 0) -> None:
        self.worker_id = worker_id
        self.epoch = epoch
        self.number = 0
        self.num_ranks = num_ranks
        self._draw = random.Random(seed)
        self._blocks: list[set[tuple[Tier, int]]] = [set() for _ in range(num_ranks)]

    @property
    def held(self) -> Held:
        return {Rank(self.worker_id, rank): set(blocks) for rank, blocks in enumerate(self._blocks) if blocks}

    def change(self) -> KvBatch:
        """Something happens at one rank."""
        rank = self._draw.randrange(self.num_ranks)
        events = [self._change_once(self._blocks[rank]) for _ in range(self._draw.randint(1, 3))]
        self.number += 1
        return KvBatch(
            worker_id=self.worker_id, epoch=self.epoch, number=self.number, data_parallel_rank=rank, events=events
        )

    def snapshot(self, part_size: int = 3) -> list[KvSnapshotPart]:
        """All that is held now, in parts of ``part_size`` blocks, at least one a rank."""
        parts: list[KvSnapshotPart] = []
        for rank, blocks in enumerate(self._blocks):
            left = sorted(blocks)
            for begin in range(0, max(len(left), 1), part_size):
                stored = [Stored(None, [named], tier) for tier, named in left[begin : begin + part_size]]
                parts.append(
                    KvSnapshotPart(number=self.number, epoch=self.epoch, data_parallel_rank=rank, stored=stored)
                )
        return parts

    def _change_once(self, blocks: set[tuple[Tier, int]]) -> KvEvent:
        tier = self._draw.choice(TIERS)
        here = [named for where, named in sorted(blocks) if where is tier]
        kind = self._draw.random()
        if kind < 0.05:
            blocks.clear()
            return Cleared()
        if kind < 0.4 and here:
            removed = self._draw.sample(here, self._draw.randint(1, len(here)))
            blocks.difference_update((tier, named) for named in removed)
            return Removed(removed, tier)
        # Names come back: a lost removal must not hide behind a new name.
        stored = self._draw.sample(range(12), self._draw.randint(1, 4))
        blocks.update((tier, named) for named in stored)
        return Stored(None, stored, tier)
