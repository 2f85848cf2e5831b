"""Snapshots that fail, hang, or come too late, and workers that leave meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from quartet.discovery.base import WorkerRecord
from quartet.errors import WorkerUnavailableError
from quartet.events.kv import KvBatch, KvSnapshotPart
from quartet.events.load import NumberedLoad
from quartet.telemetry.metrics import SnapshotOutcome
from router.kv_index.feed import JoinTimes, KvJoins
from tests.router.kv_truth import SetIndex, TruthfulWorker
from tests.router.records import make_load, make_record
from tests.services.stream_workers import until

TIMES = JoinTimes(timeout_s=5.0, min_pause_s=0.001, max_pause_s=0.002)


@dataclass
class FakeClient:
    """Gives a worker's snapshots; ``troubles`` come first, one a call.

    Attributes:
        num_calls: calls begun.
        num_open: calls that have not ended.
        hold: cleared, calls wait after their first part.
    """

    worker: TruthfulWorker
    troubles: list[Exception | Callable[[], None]] = field(default_factory=list)
    num_calls: int = 0
    num_open: int = 0
    hold: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.hold.set()

    async def kv_snapshot(self, timeout_s: float) -> AsyncGenerator[KvSnapshotPart, None]:
        assert timeout_s == TIMES.timeout_s
        self.num_calls += 1
        self.num_open += 1
        try:
            trouble = self.troubles.pop(0) if self.troubles else None
            for number, part in enumerate(self.worker.snapshot()):
                yield part
                if number == 0:
                    await self.hold.wait()
                    if isinstance(trouble, Exception):
                        raise trouble
                    if trouble is not None:
                        trouble()
        finally:
            self.num_open -= 1


@dataclass
class Joining:
    """A worker that entered, and what the router knows of it."""

    worker: TruthfulWorker
    client: FakeClient
    joins: KvJoins
    index: SetIndex
    record: WorkerRecord
    outcomes: list[SnapshotOutcome]

    def batch(self) -> KvBatch:
        batch = self.worker.change()
        self.joins.take_batch(batch)
        return batch

    def heartbeat(self) -> None:
        self.joins.take_load(NumberedLoad(make_load(self.record), self.worker.number))

    async def wait_exact(self) -> None:
        await until(lambda: self.joins.num_live == 1 and self.index.held == self.worker.held)


@asynccontextmanager
async def joining(times: JoinTimes = TIMES) -> AsyncIterator[Joining]:
    worker, index, outcomes = TruthfulWorker("decode-0", 1, seed=5), SetIndex(), list[SnapshotOutcome]()
    joins = KvJoins(index, times, count=outcomes.append)
    client, record = FakeClient(worker), make_record(data_parallel_size=2)
    for _ in range(20):
        worker.change()
    joins.enter(record, client)
    yield Joining(worker, client, joins, index, record, outcomes)
    client.hold.set()
    await joins.close()
    assert not client.num_open
    assert not index.held


async def test_one_snapshot_is_taken_after_the_workers_first_message_and_none_before() -> None:
    async with joining() as it:
        await asyncio.sleep(0)
        assert it.client.num_calls == 0
        it.heartbeat()
        await it.wait_exact()
        it.batch()
        it.heartbeat()
        assert it.index.held == it.worker.held
        assert it.client.num_calls == 1


async def test_a_snapshot_that_breaks_off_is_taken_again() -> None:
    async with joining() as it:
        it.client.troubles += [WorkerUnavailableError("broken")] * 3
        it.heartbeat()
        await it.wait_exact()
        assert it.client.num_calls == 4
        assert it.outcomes == [SnapshotOutcome.FAILED] * 3 + [SnapshotOutcome.USED]


async def test_a_loss_while_a_snapshot_is_under_way_takes_another_one() -> None:
    async with joining() as it:

        def lose() -> None:
            it.worker.change()
            it.heartbeat()

        it.client.troubles += [lose, lose]
        it.heartbeat()
        await it.wait_exact()
        assert it.client.num_calls == 3


async def test_a_batch_that_comes_during_a_snapshot_is_not_lost() -> None:
    async with joining() as it:
        it.client.hold.clear()
        it.heartbeat()
        await until(lambda: it.client.num_calls == 1)
        for _ in range(50):
            it.batch()
        it.client.hold.set()
        await it.wait_exact()
        assert it.client.num_calls == 1


async def test_a_worker_with_another_epoch_is_not_mistaken_for_this_one() -> None:
    async with joining() as it:
        reborn = TruthfulWorker("decode-0", 2, seed=6)
        it.client.worker = reborn  # as a worker that came back at the same address, before discovery knows
        it.heartbeat()
        await until(lambda: it.client.num_calls > 2)
        it.joins.take_batch(reborn.change())
        assert not it.index.held
        it.worker = reborn
        it.record = make_record(data_parallel_size=2, epoch=2)
        it.joins.enter(it.record, it.client)
        it.heartbeat()
        await it.wait_exact()


async def test_a_worker_that_leaves_is_forgotten_at_once_with_its_snapshot() -> None:
    async with joining() as it:
        it.client.hold.clear()
        it.heartbeat()
        await until(lambda: it.client.num_open == 1 and bool(it.index.held))
        it.joins.leave(make_record(epoch=99))  # another epoch: not this one
        assert it.index.held
        it.joins.leave(it.record)
        assert not it.index.held
        await until(lambda: not it.client.num_open)
        it.heartbeat()
        it.batch()
        assert it.joins.num_live == 0
        assert not it.index.held


async def test_losses_without_end_do_not_make_snapshots_without_a_pause() -> None:
    async with joining(JoinTimes(timeout_s=5.0, min_pause_s=3600.0, max_pause_s=3600.0)) as it:
        it.heartbeat()
        await it.wait_exact()
        for _ in range(20):
            it.worker.change()
            it.heartbeat()
            await asyncio.sleep(0)
        assert it.client.num_calls == 1
