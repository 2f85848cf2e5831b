"""The book of a pool of media embeddings: which item lies in which blocks, and which items are held.

A block is *free* (empty), *being written* (of an item that cannot be found yet), *held* (of an item with holders) or
*cached* (of an item without); the four always add up to the pool. Items are named by their media id, a SHA-256
(``quartet.media.media_id``), and are there whole or not at all. Where room is short, cached items are evicted, the
least recently held one first.

Pure code without locks: all calls come from one thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from quartet.errors import OutOfBlocksError
from quartet.events.kv import KvEvent
from quartet.kvcache.block_pool import BlockCounts, EventLog
from quartet.media.media_id import media_hash


@dataclass(frozen=True)
class PooledItem:
    """Where an item's embeddings lie: token ``i`` in ``block_ids[i // block_size]``."""

    block_ids: tuple[int, ...]
    num_tokens: int


class EmbeddingPool:
    """Hands out the blocks of one pool to items, and evicts the least recently held ones."""

    def __init__(self, num_blocks: int, block_size: int, *, has_events: bool = False) -> None:
        """Keep the book of blocks ``0 .. num_blocks - 1`` of ``block_size`` tokens each, all free.

        ``has_events``: take note of what can be found, for ``take_events`` and ``stored_items``.
        """
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._items: dict[bytes, PooledItem] = {}  # those that can be found
        self._written: dict[bytes, PooledItem] = {}
        self._num_holds: dict[bytes, int] = {}
        self._cached: OrderedDict[bytes, None] = OrderedDict()  # least recently held first
        self._num_cached = 0
        self._num_in_use = 0
        self._log = EventLog() if has_events else None

    @property
    def counts(self) -> BlockCounts:
        """How many blocks are in which state, now; those being written are in use."""
        num_held = self.num_blocks - len(self._free) - self._num_cached - self._num_in_use
        return BlockCounts(len(self._free), self._num_cached, num_held, self._num_in_use, self.num_blocks)

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out: free and cached ones."""
        return len(self._free) + self._num_cached

    def num_blocks_of(self, num_tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-num_tokens // self.block_size)

    def find(self, media_id: bytes) -> PooledItem | None:
        """Where the item lies; ``None``: it is not here, or not wholly written yet. Hold it at once to use it."""
        return self._items.get(media_id)

    def allocate(self, media_id: bytes, num_tokens: int) -> tuple[int, ...]:
        """Give an item that is not here blocks to be written, until ``commit`` or ``discard``.

        Raises:
            OutOfBlocksError: too few available blocks; nothing was changed.
        """
        assert media_id not in self._items and media_id not in self._written, "an item is here once"
        assert num_tokens > 0, "an item has at least one token"
        num_wanted = self.num_blocks_of(num_tokens)
        if num_wanted > self.num_available:
            message = (
                f"need {num_wanted} blocks for embeddings, {self.num_available} of {self.num_blocks} are available"
            )
            raise OutOfBlocksError(message)
        while len(self._free) < num_wanted:
            self._evict()
        block_ids = tuple(self._free.pop() for _ in range(num_wanted))
        self._written[media_id] = PooledItem(block_ids, num_tokens)
        self._num_in_use += num_wanted
        return block_ids

    def commit(self, media_id: bytes) -> None:
        """Its embeddings are written: from now on it can be found. It has no holder yet."""
        item = self._items[media_id] = self._written.pop(media_id)
        self._num_in_use -= len(item.block_ids)
        self._retire(media_id, item)
        if self._log is not None:
            self._log.store(media_hash(media_id), None)

    def discard(self, media_id: bytes) -> None:
        """It could not be written, and nothing writes to its blocks any more: they are free again."""
        item = self._written.pop(media_id)
        self._num_in_use -= len(item.block_ids)
        self._free += reversed(item.block_ids)

    def hold(self, media_id: bytes) -> None:
        """Keep an item that can be found here until as many ``release``s. There may be any number of holders."""
        num_holds = self._num_holds.get(media_id, 0)
        if not num_holds:
            del self._cached[media_id]
            self._num_cached -= len(self._items[media_id].block_ids)
        self._num_holds[media_id] = num_holds + 1

    def release(self, media_id: bytes) -> None:
        """One holder releases it; an item without holders stays cached."""
        self._num_holds[media_id] -= 1
        if not self._num_holds[media_id]:
            del self._num_holds[media_id]
            self._retire(media_id, self._items[media_id])

    def take_events(self) -> list[KvEvent]:
        """What became or ceased to be findable since the last call, in order; nothing without ``has_events``.

        Each item is a first block, named by its ``media_hash``; where several have one, it is there while any is.
        """
        return self._log.take() if self._log is not None else []

    def stored_items(self) -> Mapping[int, int | None]:
        """The public name of every item that can be found, with ``None`` before it. Empty without ``has_events``."""
        return self._log.parent_hashes() if self._log is not None else {}

    def _retire(self, media_id: bytes, item: PooledItem) -> None:
        self._cached[media_id] = None
        self._num_cached += len(item.block_ids)

    def _evict(self) -> None:
        media_id, _ = self._cached.popitem(last=False)
        item = self._items.pop(media_id)
        self._num_cached -= len(item.block_ids)
        self._free += reversed(item.block_ids)
        if self._log is not None:
            self._log.remove(media_hash(media_id))
