"""Keeps the prefix index equal to what workers hold: KV batches and snapshots, applied to it in order.

``KvFeed`` follows one epoch of one worker. It is pure: no I/O, clock or task. Batches are numbered without gaps, and
load reports name the last number, so a lost batch is always noticed. Then the feed needs a snapshot. Batches wait for
it, and those with a higher number than the snapshot are applied after it.

``KvJoins`` has the feeds of all workers. It gives each batch and report to the right feed, and takes the snapshots.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from quartet.discovery.base import Rank, WorkerRecord
from quartet.errors import ServingError
from quartet.events.kv import Cleared, KvBatch, KvEvent, KvSnapshotPart, Removed, Stored, Tier
from quartet.events.load import NumberedLoad
from quartet.limited_log import LimitedLog
from quartet.supervision import report_failure
from quartet.telemetry.metrics import SnapshotOutcome

logger = logging.getLogger(__name__)

#: If more batches wait for a snapshot, they are dropped, and another snapshot is taken after it.
MAX_WAITING_BATCHES = 4096

# After a restart of the router, all workers are joined. More at a time are no quicker, and keep the event loop longer
# with their parts: with 2.2 million blocks, the worst lag grew from 0.2 s with 4 to 0.7 s with 16.
_MAX_SNAPSHOTS = 4


class KvIndex(Protocol):
    """Which rank has which blocks (``router.kv_index.index.PrefixIndex``)."""

    def store(self, rank: Rank, parent_hash: int | None, sequence_hashes: Sequence[int], tier: Tier) -> object:
        """``rank`` has these blocks on ``tier``, each after the one before it, the first after ``parent_hash``."""
        ...

    def remove(self, rank: Rank, sequence_hashes: Sequence[int], tier: Tier) -> None:
        """``rank`` no longer has these blocks on ``tier``."""
        ...

    def clear(self, rank: Rank) -> None:
        """``rank`` has no blocks any more."""
        ...


class FeedState(Enum):
    """How much is known of a worker's blocks."""

    LISTENING = auto()  # nothing came yet: a snapshot taken now might miss what comes before the first batch
    JOINING = auto()  # a snapshot is needed, or under way
    LIVE = auto()  # everything up to the last number that came


class KvFeed:
    """Applies the batches and snapshots of one epoch of a worker to an index. Only it changes that worker's ranks.

    Attributes:
        state: how much is known.
        number: while LIVE: of the last batch that the index knows of.
    """

    def __init__(
        self,
        worker_id: str,
        epoch: int,
        data_parallel_size: int,
        index: KvIndex,
        *,
        max_waiting_batches: int = MAX_WAITING_BATCHES,
        on_gap: Callable[[], None] = lambda: None,
    ) -> None:
        """Nothing is known yet; ``index`` has no blocks of the worker's ranks.

        ``on_gap`` is called when batches were lost although all was known before.
        """
        self.epoch = epoch
        self._ranks = [Rank(worker_id, number) for number in range(data_parallel_size)]
        self._index = index
        self._max_waiting_batches = max_waiting_batches
        self._on_gap = on_gap
        self.state = FeedState.LISTENING
        self.number = 0
        # JOINING: the snapshot needs this number at least; the batches that wait follow from there without a gap.
        self._least_number = 0
        self._waiting: deque[KvBatch] = deque()
        self._loading: int | None = None  # number of the snapshot whose parts come

    def take_batch(self, batch: KvBatch) -> None:
        """A batch of this epoch came."""
        if self.state is FeedState.LIVE and batch.number == self.number + 1:
            self._apply(batch)
        elif batch.number > self._last_number():
            if self.state is not FeedState.JOINING or batch.number != self._last_number() + 1:
                self._join_from(batch.number - 1)
            self._wait(batch)

    def take_number(self, number: int) -> None:
        """A load report came: ``number`` is that of the last batch that was sent before it."""
        if number > self._last_number():
            self._join_from(number)

    def take_part(self, part: KvSnapshotPart) -> bool:
        """A part of a snapshot came; it begins a snapshot unless one has begun since ``abandon``.

        Returns:
            Whether the snapshot is of use. If not, it is too old, or of another epoch.
        """
        if part.epoch != self.epoch or part.number < self._least_number or self._loading not in (None, part.number):
            return False
        if self._loading is None:
            self._loading = part.number
            self._clear()
        if part.data_parallel_rank < len(self._ranks):
            apply_events(self._index, self._ranks[part.data_parallel_rank], part.stored)
        return True

    def finish(self) -> bool:
        """The snapshot is complete: go on from it.

        Returns:
            Whether everything is known now. If not, batches were lost meanwhile: another snapshot is needed.
        """
        number, self._loading = self._loading, None
        if number is None or number < self._least_number or self.state is not FeedState.JOINING:
            return False
        self.state, self.number = FeedState.LIVE, number
        waiting, self._waiting = self._waiting, deque()
        for batch in waiting:
            if batch.number > number:
                self._apply(batch)
        return True

    def abandon(self) -> None:
        """No more parts of the snapshot come."""
        self._loading = None

    def close(self) -> None:
        """The epoch is over: its ranks have no blocks any more."""
        self.state = FeedState.LISTENING
        self._waiting.clear()
        self._clear()

    def _last_number(self) -> int:
        """The number of the last batch that is known of; before the first one, less than any."""
        if self.state is FeedState.LIVE:
            return self.number
        if self.state is FeedState.LISTENING:
            return -1
        return self._waiting[-1].number if self._waiting else self._least_number

    def _join_from(self, number: int) -> None:
        """From now on a snapshot as of ``number``, or a later one, is needed."""
        if self.state is FeedState.LIVE:
            self._on_gap()
        self.state = FeedState.JOINING
        self._least_number = number
        self._waiting.clear()

    def _wait(self, batch: KvBatch) -> None:
        self._waiting.append(batch)
        if len(self._waiting) > self._max_waiting_batches:
            self._join_from(batch.number)

    def _apply(self, batch: KvBatch) -> None:
        self.number = batch.number
        if batch.data_parallel_rank < len(self._ranks):
            apply_events(self._index, self._ranks[batch.data_parallel_rank], batch.events)

    def _clear(self) -> None:
        for rank in self._ranks:
            self._index.clear(rank)


def apply_events(index: KvIndex, rank: Rank, events: Iterable[KvEvent]) -> None:
    """Let ``index`` follow what happened to the blocks of ``rank``."""
    for event in events:
        match event:
            case Stored(parent_hash, sequence_hashes, tier):
                index.store(rank, parent_hash, sequence_hashes, tier)
            case Removed(sequence_hashes, tier):
                index.remove(rank, sequence_hashes, tier)
            case Cleared():
                index.clear(rank)


class SnapshotClient(Protocol):
    """The part of a worker's client that is used here (``quartet.streams.worker_client.WorkerClient``)."""

    def kv_snapshot(self, timeout_s: float) -> AsyncGenerator[KvSnapshotPart, None]:
        """All blocks that the worker could share, in parts. Raises ``ServingError``."""
        ...


@dataclass(frozen=True, kw_only=True)
class JoinTimes:
    """How long snapshots may take, and how often they are taken.

    Attributes:
        timeout_s: of one snapshot.
        min_pause_s: between two of one worker; doubled after each useless one in a row, up to ``max_pause_s``.
    """

    timeout_s: float = 15.0
    min_pause_s: float = 0.2
    max_pause_s: float = 5.0


class KvJoins:
    """Keeps a ``KvIndex`` equal to what the workers that entered hold. Runs on the event loop."""

    def __init__(
        self,
        index: KvIndex,
        times: JoinTimes | None = None,
        *,
        count: Callable[[SnapshotOutcome], None] = lambda _outcome: None,
        on_gap: Callable[[], None] = lambda: None,
    ) -> None:
        """No worker is known yet; only this object changes ``index`` for the ranks of workers that enter.

        ``count`` is called with what became of each snapshot, ``on_gap`` as in ``KvFeed``.
        """
        self._index = index
        self._count = count
        self._on_gap = on_gap
        self._times = times or JoinTimes()
        self._members: dict[str, _Member] = {}
        self._turns = asyncio.Semaphore(_MAX_SNAPSHOTS)

    @property
    def num_live(self) -> int:
        """Workers whose blocks are all known, as far as batches came. Safe in any thread."""
        return sum(member.feed.state is FeedState.LIVE for member in list(self._members.values()))

    def enter(self, record: WorkerRecord, client: SnapshotClient) -> None:
        """Follow this epoch of a worker, which ``client`` reaches, from now on; another epoch of it is forgotten."""
        self._forget(record.worker_id)
        feed = KvFeed(record.worker_id, record.epoch, record.data_parallel_size, self._index, on_gap=self._on_gap)
        self._members[record.worker_id] = _Member(feed, client)

    def leave(self, record: WorkerRecord) -> None:
        """Forget this epoch of a worker; unknown ones are ignored."""
        member = self._members.get(record.worker_id)
        if member is not None and member.feed.epoch == record.epoch:
            self._forget(record.worker_id)

    def take_batch(self, batch: KvBatch) -> None:
        """A batch came; ignored if it is from an unknown worker or epoch."""
        member = self._member(batch.worker_id, batch.epoch)
        if member is not None:
            member.feed.take_batch(batch)
            self._join_if_needed(batch.worker_id, member)

    def take_load(self, report: NumberedLoad) -> None:
        """A load report came; ignored if it is from an unknown worker or epoch."""
        member = self._member(report.load.worker_id, report.load.epoch)
        if member is not None:
            member.feed.take_number(report.kv_number)
            self._join_if_needed(report.load.worker_id, member)

    async def close(self) -> None:
        """Forget all workers and take no more snapshots."""
        tasks = [member.joining for member in self._members.values() if member.joining is not None]
        for worker_id in list(self._members):
            self._forget(worker_id)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _member(self, worker_id: str, epoch: int) -> _Member | None:
        member = self._members.get(worker_id)
        return member if member is not None and member.feed.epoch == epoch else None

    def _join_if_needed(self, worker_id: str, member: _Member) -> None:
        if member.feed.state is FeedState.JOINING and member.joining is None:
            member.joining = asyncio.create_task(self._join(worker_id, member), name=f"join-{worker_id}")
            member.joining.add_done_callback(report_failure)  # the next report of the worker joins it again

    def _forget(self, worker_id: str) -> None:
        member = self._members.pop(worker_id, None)
        if member is None:
            return
        if member.joining is not None:
            member.joining.cancel()
        member.feed.close()

    async def _join(self, worker_id: str, member: _Member) -> None:
        """Take snapshots until one is of use."""
        now = asyncio.get_running_loop().time
        try:
            pause_s = self._times.min_pause_s
            await asyncio.sleep(member.not_before - now())
            while not await self._take_snapshot(worker_id, member):
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, self._times.max_pause_s)
            logger.info("worker %s: its blocks are known as of batch %d", worker_id, member.feed.number)
        finally:
            # If batches are lost again and again, there must be a pause between snapshots.
            member.not_before = now() + self._times.min_pause_s
            member.joining = None

    async def _take_snapshot(self, worker_id: str, member: _Member) -> bool:
        outcome = SnapshotOutcome.FAILED
        try:
            async with self._turns, aclosing(member.client.kv_snapshot(self._times.timeout_s)) as parts:
                async for part in parts:
                    if not member.feed.take_part(part):
                        logger.debug("worker %s: a snapshot as of batch %d is of no use", worker_id, part.number)
                        outcome = SnapshotOutcome.OUTDATED
                        return False
                is_whole = member.feed.finish()
                outcome = SnapshotOutcome.USED if is_whole else SnapshotOutcome.OUTDATED
                return is_whole
        except ServingError as error:
            member.log.warning("worker %s gives no snapshot of its blocks: %s", worker_id, error)
            return False
        finally:
            member.feed.abandon()
            self._count(outcome)


@dataclass
class _Member:
    """One epoch of one worker.

    Attributes:
        joining: the task that takes snapshots.
        not_before: when the next one may be taken, by the loop's clock.
        log: a worker that gives none is asked every few seconds.
    """

    feed: KvFeed
    client: SnapshotClient
    joining: asyncio.Task[None] | None = None
    not_before: float = 0.0
    log: LimitedLog = field(default_factory=lambda: LimitedLog(logger))
