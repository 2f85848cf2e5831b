"""Takes note of the names that come and go in a block pool: in few events, and as one table."""

from __future__ import annotations

from quartet.kvcache.events import KvEvent, Removed, Stored


class EventLog:
    """What changed since somebody last asked, and what is there now.

    Names are told by their hashes. Should two names that differ have one hash (XXH3 collisions can be crafted), it is
    there while either is.
    """

    def __init__(self) -> None:
        self._events: list[KvEvent] = []
        self._parents: dict[int, int | None] = {}
        self._num_more: dict[int, int] = {}  # of a hash that several names have: names beyond the first
        # What is being added to: hashes of the last event, if it is of this kind, and the last of a chain.
        self._stored: list[int] | None = None
        self._removed: list[int] | None = None

    def store(self, sequence_hash: int, parent_hash: int | None) -> None:
        """A name came, whose block follows the one with ``parent_hash``."""
        if sequence_hash in self._parents:
            self._num_more[sequence_hash] = self._num_more.get(sequence_hash, 0) + 1
            return
        self._parents[sequence_hash] = parent_hash
        if self._stored is not None and self._stored[-1] == parent_hash:
            self._stored.append(sequence_hash)
            return
        self._stored, self._removed = [sequence_hash], None
        self._events.append(Stored(parent_hash, self._stored))

    def remove(self, sequence_hash: int) -> None:
        """A name went."""
        if sequence_hash in self._num_more:
            self._forget_one_of_several(sequence_hash)
            return
        del self._parents[sequence_hash]
        if self._removed is not None:
            self._removed.append(sequence_hash)
            return
        self._stored, self._removed = None, [sequence_hash]
        self._events.append(Removed(self._removed))

    def take(self) -> list[KvEvent]:
        """What changed since the last call, in order."""
        if not self._events:
            return []
        events, self._events = self._events, []
        self._stored = self._removed = None
        return events

    def parent_hashes(self) -> dict[int, int | None]:
        """Of every hash that is there the one before it, in an order in which no block comes before its parent."""
        return self._parents.copy()

    def _forget_one_of_several(self, sequence_hash: int) -> None:
        self._num_more[sequence_hash] -= 1
        if not self._num_more[sequence_hash]:
            del self._num_more[sequence_hash]
