"""The feeds of all workers: what is heard goes to the right one, and each gets its snapshots when it wants them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from quartet.discovery.base import WorkerRecord
from quartet.errors import ServingError
from quartet.events.kv import KvBatch, KvSnapshotPart
from quartet.events.load import NumberedLoad
from quartet.telemetry.routing_metrics import SnapshotOutcome
from router.kv_feed import FeedState, KvFeed, KvIndex

logger = logging.getLogger(__name__)

# After a restart of the router all workers are joined. More at a time are no quicker, and leave the event loop longer
# to their parts: of 2.2 million blocks the worst lag grew from 0.2 s with 4 to 0.7 s with 16.
_MAX_SNAPSHOTS = 4


class SnapshotClient(Protocol):
    """One worker, as far as it is asked here (``quartet.rpc.worker_client.WorkerClient``)."""

    def kv_snapshot(self, timeout_s: float) -> AsyncGenerator[KvSnapshotPart, None]:
        """All that it could share, in parts. Raises ``ServingError``."""
        ...


@dataclass(frozen=True, kw_only=True)
class JoinTimes:
    """How long snapshots may take, and how often they are taken.

    Attributes:
        timeout_s: of one snapshot.
        min_pause_s: between two of one worker; doubled after each in a row that was of no use, up to ``max_pause_s``.
    """

    timeout_s: float = 15.0
    min_pause_s: float = 0.2
    max_pause_s: float = 5.0


class KvJoins:
    """Keeps a ``KvIndex`` equal to what the workers that entered hold. Lives on the event loop."""

    def __init__(
        self,
        index: KvIndex,
        times: JoinTimes | None = None,
        *,
        count: Callable[[SnapshotOutcome], None] = lambda _outcome: None,
    ) -> None:
        """Know of nobody yet; nobody else changes ``index`` for the places of those that enter.

        ``count`` hears what became of each snapshot.
        """
        self._index = index
        self._count = count
        self._times = times or JoinTimes()
        self._members: dict[str, _Member] = {}
        self._turns = asyncio.Semaphore(_MAX_SNAPSHOTS)

    @property
    def num_live(self) -> int:
        """Workers of which everything is known that was heard of. May be asked from any thread."""
        return sum(member.feed.state is FeedState.LIVE for member in list(self._members.values()))

    def enter(self, record: WorkerRecord, client: SnapshotClient) -> None:
        """Follow this life of a worker from now on, which ``client`` asks; another life of it is forgotten."""
        self._forget(record.worker_id)
        feed = KvFeed(record.worker_id, record.epoch, record.data_parallel_size, self._index)
        self._members[record.worker_id] = _Member(feed, client)

    def leave(self, record: WorkerRecord) -> None:
        """Forget this life of a worker; unknown ones are ignored."""
        member = self._members.get(record.worker_id)
        if member is not None and member.feed.epoch == record.epoch:
            self._forget(record.worker_id)

    def take_batch(self, batch: KvBatch) -> None:
        """A batch was heard; ignored when it is from an unknown worker or life."""
        member = self._life(batch.worker_id, batch.epoch)
        if member is not None:
            member.feed.take_batch(batch)
            self._look(batch.worker_id, member)

    def take_load(self, report: NumberedLoad) -> None:
        """A load report was heard; ignored when it is from an unknown worker or life."""
        member = self._life(report.load.worker_id, report.load.epoch)
        if member is not None:
            member.feed.take_number(report.kv_number)
            self._look(report.load.worker_id, member)

    async def close(self) -> None:
        """Forget everybody and take no more snapshots."""
        tasks = [member.joining for member in self._members.values() if member.joining is not None]
        for worker_id in list(self._members):
            self._forget(worker_id)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _life(self, worker_id: str, epoch: int) -> _Member | None:
        member = self._members.get(worker_id)
        return member if member is not None and member.feed.epoch == epoch else None

    def _look(self, worker_id: str, member: _Member) -> None:
        if member.feed.state is FeedState.JOINING and member.joining is None:
            member.joining = asyncio.create_task(self._join(worker_id, member), name=f"join-{worker_id}")

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
            # Where batches are lost again and again, snapshots must not follow one another without a pause.
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
            logger.warning("worker %s gives no snapshot of its blocks: %s", worker_id, error)
            return False
        finally:
            member.feed.abandon()
            self._count(outcome)


@dataclass
class _Member:
    """One life of one worker.

    Attributes:
        joining: takes snapshots.
        not_before: by the loop's clock, when the next one may be taken.
    """

    feed: KvFeed
    client: SnapshotClient
    joining: asyncio.Task[None] | None = None
    not_before: float = 0.0
