"""What one rank has on each tier, by our names, and what of that is still to be told."""

from __future__ import annotations

from quartet.events.kv import Cleared, KvEvent, Removed, Stored, Tier


class NameLog:
    """Takes note of names that come, go and move; ``quartet.kvcache.event_log`` of a cache with several tiers.

    Two blocks may have one name, as a salted and a plain one with equal tokens do: it is there while either is.
    """

    def __init__(self) -> None:
        self._events: list[KvEvent] = []
        self._tables: dict[Tier, dict[int, int | None]] = {tier: {} for tier in Tier}
        self._num_more: dict[tuple[Tier, int], int] = {}  # blocks beyond the first one with that name
        # What is being added to: hashes of the last event, if it is of that kind, and its tier.
        self._stored: tuple[Tier, list[int]] | None = None
        self._removed: tuple[Tier, list[int]] | None = None

    def num_blocks(self, tier: Tier) -> int:
        """Names that are there."""
        return len(self._tables[tier])

    def store(self, sequence_hash: int, parent_hash: int | None, tier: Tier) -> None:
        """A block came, or came to that tier."""
        table = self._tables[tier]
        if sequence_hash in table:
            self._num_more[tier, sequence_hash] = self._num_more.get((tier, sequence_hash), 0) + 1
            return
        table[sequence_hash] = parent_hash
        if self._stored is not None and self._stored[0] is tier and self._stored[1][-1] == parent_hash:
            self._stored[1].append(sequence_hash)
            return
        self._stored, self._removed = (tier, [sequence_hash]), None
        self._events.append(Stored(parent_hash, self._stored[1], tier))

    def remove(self, sequence_hash: int, tier: Tier) -> None:
        """A block that is there went."""
        num_more = self._num_more.pop((tier, sequence_hash), 0)
        if num_more:
            if num_more > 1:
                self._num_more[tier, sequence_hash] = num_more - 1
            return
        del self._tables[tier][sequence_hash]
        if self._removed is not None and self._removed[0] is tier:
            self._removed[1].append(sequence_hash)
            return
        self._stored, self._removed = None, (tier, [sequence_hash])
        self._events.append(Removed(self._removed[1], tier))

    def move(self, sequence_hash: int, old: Tier, new: Tier) -> None:
        """A block that is there went to another tier; it is never said to be nowhere, as others may follow it."""
        self.store(sequence_hash, self._tables[old][sequence_hash], new)
        self.remove(sequence_hash, old)

    def clear(self) -> None:
        """Nothing is there any more, as far as anybody knows."""
        if not self._events and not any(self._tables.values()):
            return
        for table in self._tables.values():
            table.clear()
        self._num_more.clear()
        # What was still to be told before is of no use to anybody now.
        self._events, self._stored, self._removed = [Cleared()], None, None

    def take(self) -> list[KvEvent]:
        """What changed since the last call, in order."""
        events, self._events = self._events, []
        self._stored = self._removed = None
        return events

    def tables(self) -> dict[Tier, dict[int, int | None]]:
        """Of every name that is there the one before it, by tier; no block comes before its parent."""
        return {tier: _in_order(table) for tier, table in self._tables.items() if table}


def _in_order(table: dict[int, int | None]) -> dict[int, int | None]:
    """``table`` with parents first: chains move to another tier from their end on."""
    ordered: dict[int, int | None] = {}
    for sequence_hash in table:
        chain: list[int] = []
        step: int | None = sequence_hash
        while step is not None and step in table and step not in ordered:
            chain.append(step)
            step = table[step]
        for link in reversed(chain):
            ordered[link] = table[link]
    return ordered
