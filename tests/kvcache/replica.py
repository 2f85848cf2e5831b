"""What a receiver of a pool's events knows, from these events alone."""

from __future__ import annotations

from collections.abc import Iterable

from quartet.events.kv import Cleared, KvEvent, Removed, Stored


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
