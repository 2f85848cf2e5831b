"""One snapshot of what all data-parallel ranks could share, of snapshots that come rank by rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quartet.events.kv import Cleared, KvEvent, RankEvents, Removed, Stored, StoredBlocks


class RankSnapshots:
    """Keeps what a rank has said up to date until the last one has: then all parts are of one moment."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._is_wanted = False
        self._parts: dict[int, dict[int, int | None]] = {}

    def want(self) -> None:
        """Every rank is being asked."""
        self._is_wanted = True

    def take(
        self, kv_events: Iterable[RankEvents], kv_snapshot: Sequence[StoredBlocks] | None
    ) -> Sequence[StoredBlocks] | None:
        """Take what one output says, events first; the outputs of each rank come in their order.

        Returns:
            All ranks' blocks once this output's events are applied, where it is the last one that was waited for.
        """
        for changed in kv_events:
            if changed.data_parallel_rank in self._parts:
                _apply(self._parts[changed.data_parallel_rank], changed.events)
        if kv_snapshot is None or not self._is_wanted:
            return None
        for blocks in kv_snapshot:
            self._parts[blocks.data_parallel_rank] = dict(blocks.parent_hashes)
        if len(self._parts) < self._num_ranks:
            return None
        self._is_wanted, parts, self._parts = False, self._parts, {}
        return [StoredBlocks(rank, parts[rank]) for rank in sorted(parts)]


def _apply(parent_hashes: dict[int, int | None], events: Iterable[KvEvent]) -> None:
    for event in events:
        match event:
            case Stored(parent, sequence_hashes):
                for sequence_hash in sequence_hashes:
                    parent_hashes[sequence_hash] = parent
                    parent = sequence_hash
            case Removed(sequence_hashes):
                for sequence_hash in sequence_hashes:
                    parent_hashes.pop(sequence_hash, None)
            case Cleared():
                parent_hashes.clear()
