"""What a receiver of a pool's events knows, from these events alone."""

from __future__ import annotations

from collections.abc import Iterable

from quartet.events.kv import Cleared, KvEvent, Removed, Stored, Tier


class Replica:
    """Applies events strictly: what is stored is new, what is removed is there, a parent stands before its child."""

    def __init__(self, *, checks_parents: bool = True) -> None:
        self.parents: dict[int, int | None] = {}
        self._checks_parents = checks_parents

    def apply(self, events: Iterable[KvEvent]) -> None:
        for event in events:
            match event:
                case Stored(parent_hash, sequence_hashes):
                    assert sequence_hashes
                    for parent, child in zip((parent_hash, *sequence_hashes), sequence_hashes, strict=False):
                        assert child not in self.parents
                        assert not self._checks_parents or parent is None or parent in self.parents
                        self.parents[child] = parent
                case Removed(sequence_hashes):
                    assert sequence_hashes
                    for sequence_hash in sequence_hashes:
                        del self.parents[sequence_hash]
                case Cleared():
                    self.parents.clear()


class TierReplica:
    """The same of every tier: what comes to a lower one comes from another, which has it until then."""

    def __init__(self) -> None:
        self.tables: dict[Tier, dict[int, int | None]] = {tier: {} for tier in Tier}

    def apply(self, events: Iterable[KvEvent], *, is_start: bool = False) -> None:
        """``is_start``: files of an earlier process may be there at once."""
        for event in events:
            match event:
                case Stored(parent, sequence_hashes, tier):
                    for child in sequence_hashes:
                        assert child not in self.tables[tier]
                        others = [table for other, table in self.tables.items() if other is not tier]
                        assert tier is Tier.DEVICE or is_start or any(child in table for table in others)
                        self.tables[tier][child] = parent
                        parent = child
                case Removed(sequence_hashes, tier):
                    for sequence_hash in sequence_hashes:
                        del self.tables[tier][sequence_hash]
                case Cleared():
                    for table in self.tables.values():
                        table.clear()
