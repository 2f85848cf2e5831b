"""The batches of one source in order: numbers that jump are noticed, and what was lost is asked for.

Pure: no I/O, clock or task. ``VllmListener`` drives it.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from quartet.events.vllm import VllmBatch

#: Batches that wait for a replay, and their bytes; of more, the oldest are dropped.
MAX_WAITING_BATCHES, MAX_WAITING_BYTES = 4096, 64 << 20


class FeedSink(Protocol):
    """Takes what a source says, and asks it for what was lost."""

    def apply(self, batch: VllmBatch) -> None:
        """The next batch."""
        ...

    def drop(self) -> None:
        """Nothing that was applied may be relied on any more."""
        ...

    def ask(self, first_number: int) -> None:
        """Have the source replay its batches from this one on; an earlier replay is given up."""
        ...


class OrderedFeed:
    """Gives a sink every batch of a source once and in order, or has it drop all that it had from the source.

    A source that can replay is asked at first for all that it has kept, and later for what was lost. Batches that come
    meanwhile wait. If the replay does not fill the gap, the sink drops what it had, and goes on with what there is.

    Attributes:
        num_gaps: times that numbers jumped.
        num_restarts: times that they went back.
        num_drops: times that the sink had to drop something.
    """

    def __init__(
        self,
        sink: FeedSink,
        *,
        can_replay: bool,
        max_waiting_batches: int = MAX_WAITING_BATCHES,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
    ) -> None:
        """Nothing is known of the source."""
        self.num_gaps = self.num_restarts = self.num_drops = 0
        self._sink = sink
        self._can_replay = can_replay
        self._max_waiting_batches = max_waiting_batches
        self._max_waiting_bytes = max_waiting_bytes
        self._next: int | None = None  # number of the next batch; ``None``: any may come
        self._has_any = False  # the sink has something
        self._is_asking = False
        self._waiting: deque[tuple[int, VllmBatch, int]] = deque()
        self._waiting_bytes = 0

    @property
    def is_asking(self) -> bool:
        """Whether a replay is awaited."""
        return self._is_asking

    def begin(self) -> None:
        """The source was reached, for the first time or again after ``lose``."""
        if self._can_replay and self._next is None and not self._is_asking:
            self._ask(0)

    def lose(self) -> None:
        """The source is gone, and all that it had."""
        self._drop()
        self._next, self._is_asking = None, False
        self._forget_waiting()

    def take(self, number: int, batch: VllmBatch, size_bytes: int) -> None:
        """The source has sent a batch of so many bytes."""
        if self._has_restarted(number):
            self.num_restarts += 1
            self.lose()
        if self._is_asking:
            self._wait(number, batch, size_bytes)
        elif self._next is None and self._can_replay:
            self._ask(0)
            self._wait(number, batch, size_bytes)
        elif self._next is None or number == self._next:
            self._apply(number, batch)
        else:
            self.num_gaps += 1
            if self._can_replay:
                self._ask(self._next)
                self._wait(number, batch, size_bytes)
            else:
                self._drop()
                self._apply(number, batch)

    def take_replayed(self, number: int, batch: VllmBatch) -> None:
        """A batch of the replay has come; after the end of the replay it is ignored."""
        if self._is_asking and self._next is not None and number >= self._next:
            self._go_on(number, batch)

    def end_replay(self) -> None:
        """No more comes of the replay: it is complete, or it failed."""
        if not self._is_asking:
            return
        self._is_asking = False
        waiting = list(self._waiting)
        self._forget_waiting()
        missing = [each for each in waiting if self._next is None or each[0] >= self._next]
        for index, (number, batch, size_bytes) in enumerate(missing):
            if index:
                self.take(number, batch, size_bytes)  # a gap after this one was not asked for yet
            else:
                self._go_on(number, batch)

    def _has_restarted(self, number: int) -> bool:
        if self._waiting:
            return number <= self._waiting[-1][0]
        return not self._is_asking and self._next is not None and number < self._next

    def _go_on(self, number: int, batch: VllmBatch) -> None:
        """Apply a batch that may come after a gap."""
        if number != self._next:
            self._drop()
        self._apply(number, batch)

    def _apply(self, number: int, batch: VllmBatch) -> None:
        self._next, self._has_any = number + 1, True
        self._sink.apply(batch)

    def _drop(self) -> None:
        if self._has_any:
            self._has_any = False
            self.num_drops += 1
            self._sink.drop()

    def _ask(self, first_number: int) -> None:
        self._next, self._is_asking = first_number, True
        self._sink.ask(first_number)

    def _wait(self, number: int, batch: VllmBatch, size_bytes: int) -> None:
        self._waiting.append((number, batch, size_bytes))
        self._waiting_bytes += size_bytes
        while len(self._waiting) > self._max_waiting_batches or self._waiting_bytes > self._max_waiting_bytes:
            self._waiting_bytes -= self._waiting.popleft()[2]

    def _forget_waiting(self) -> None:
        self._waiting.clear()
        self._waiting_bytes = 0
