"""What one life of a worker holds, as far as its KV events tell: a state machine that always comes to the truth.

Batches are numbered without gaps, and load reports name the last number, so whatever is lost shows. Then a snapshot is
wanted; batches wait meanwhile, and those above its number are applied to it. Pure: no I/O, clock or task.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import Protocol

from quartet.discovery.place import Place
from quartet.events.kv import Cleared, KvBatch, KvEvent, KvSnapshotPart, Removed, Stored, Tier

#: When more batches wait for a snapshot they are dropped, and another snapshot is taken after it.
MAX_WAITING_BATCHES = 4096


class KvIndex(Protocol):
    """Which place has which blocks (``router.prefix_index.PrefixIndex``)."""

    def store(self, place: Place, parent_hash: int | None, sequence_hashes: Sequence[int], tier: Tier) -> object:
        """``place`` has these blocks on ``tier``, each after the one before it, the first after ``parent_hash``."""
        ...

    def remove(self, place: Place, sequence_hashes: Sequence[int], tier: Tier) -> None:
        """``place`` has these blocks on ``tier`` no more."""
        ...

    def clear(self, place: Place) -> None:
        """``place`` has nothing any more."""
        ...


class FeedState(Enum):
    """How much is known of a worker's blocks."""

    LISTENING = auto()  # nothing was heard: a snapshot taken now might miss what comes before the first batch heard
    JOINING = auto()  # a snapshot is wanted, or under way
    LIVE = auto()  # everything up to the last number heard


class KvFeed:
    """Brings the batches and snapshots of one life of a worker to an index, of which it alone changes those places."""

    def __init__(
        self,
        worker_id: str,
        epoch: int,
        data_parallel_size: int,
        index: KvIndex,
        *,
        max_waiting_batches: int = MAX_WAITING_BATCHES,
    ) -> None:
        """Know nothing yet; ``index`` has nothing of the worker's places."""
        self.epoch = epoch
        self._places = [Place(worker_id, rank) for rank in range(data_parallel_size)]
        self._index = index
        self._max_waiting_batches = max_waiting_batches
        self._state = FeedState.LISTENING
        self._number = 0  # LIVE: of the last batch that is applied
        # JOINING: a snapshot has to be as of this number at least, and what waits goes on from there without a gap.
        self._least_number = 0
        self._waiting: deque[KvBatch] = deque()
        self._loading: int | None = None  # number of the snapshot whose parts come

    @property
    def state(self) -> FeedState:
        """How much is known."""
        return self._state

    @property
    def number(self) -> int:
        """While LIVE: of the last batch that the index knows of."""
        return self._number

    def take_batch(self, batch: KvBatch) -> None:
        """A batch of this life was heard."""
        if self._state is FeedState.LIVE and batch.number == self._number + 1:
            self._apply(batch)
        elif batch.number > self._last_number():
            if self._state is not FeedState.JOINING or batch.number != self._last_number() + 1:
                self._join_from(batch.number - 1)
            self._wait(batch)

    def take_number(self, number: int) -> None:
        """A load report said that ``number`` is the last batch that was sent before it."""
        if number > self._last_number():
            self._join_from(number)

    def take_part(self, part: KvSnapshotPart) -> bool:
        """A part of a snapshot came: the first one, unless another one of the same snapshot did since ``abandon``.

        Returns:
            Whether the snapshot is of use. If not, it is older than what was heard, or of another life.
        """
        if part.epoch != self.epoch or part.number < self._least_number or self._loading not in (None, part.number):
            return False
        if self._loading is None:
            self._loading = part.number
            self._clear()
        if part.data_parallel_rank < len(self._places):
            self._tell(self._places[part.data_parallel_rank], part.stored)
        return True

    def finish(self) -> bool:
        """The snapshot is whole: go on from it.

        Returns:
            Whether everything is known now. If not, too much was missed meanwhile: another snapshot is needed.
        """
        number, self._loading = self._loading, None
        if number is None or number < self._least_number or self._state is not FeedState.JOINING:
            return False
        self._state, self._number = FeedState.LIVE, number
        waiting, self._waiting = self._waiting, deque()
        for batch in waiting:
            if batch.number > number:
                self._apply(batch)
        return True

    def abandon(self) -> None:
        """What came of the snapshot is all that comes of it."""
        self._loading = None

    def close(self) -> None:
        """The life is over: its places have nothing any more."""
        self._state = FeedState.LISTENING
        self._waiting.clear()
        self._clear()

    def _last_number(self) -> int:
        """Of the last batch that is known of; while nothing was heard, less than any."""
        if self._state is FeedState.LIVE:
            return self._number
        if self._state is FeedState.LISTENING:
            return -1
        return self._waiting[-1].number if self._waiting else self._least_number

    def _join_from(self, number: int) -> None:
        """Nothing helps but a snapshot as of ``number``, or a later one."""
        self._state = FeedState.JOINING
        self._least_number = number
        self._waiting.clear()

    def _wait(self, batch: KvBatch) -> None:
        self._waiting.append(batch)
        if len(self._waiting) > self._max_waiting_batches:
            self._join_from(batch.number)

    def _apply(self, batch: KvBatch) -> None:
        self._number = batch.number
        if batch.data_parallel_rank < len(self._places):
            self._tell(self._places[batch.data_parallel_rank], batch.events)

    def _tell(self, place: Place, events: Iterable[KvEvent]) -> None:
        for event in events:
            match event:
                case Stored(parent_hash, sequence_hashes, tier):
                    self._index.store(place, parent_hash, sequence_hashes, tier)
                case Removed(sequence_hashes, tier):
                    self._index.remove(place, sequence_hashes, tier)
                case Cleared():
                    self._index.clear(place)

    def _clear(self) -> None:
        for place in self._places:
            self._index.clear(place)
