"""When reports go out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from quartet.events.load import WorkerLoad
from quartet.events.publisher import LoadPacer, PromptQueue
from tests.events.loads import make_load
from tests.stopwatch import Stopwatch

_TIMEOUT_S = 30.0


class Reports:
    """Collects reports, and holds what is sampled next."""

    def __init__(self) -> None:
        self.now = make_load()
        self.queues = [PromptQueue(0, 0, 0)]
        self.num_samples = 0
        self.sent: asyncio.Queue[WorkerLoad] = asyncio.Queue()

    def sample(self) -> WorkerLoad:
        self.num_samples += 1
        return self.now

    def change(self, *queues: PromptQueue) -> None:
        """The next sample has ``queues``, and differs from all before."""
        self.queues = list(queues)
        steps = self.now.ranks[0].num_steps + 1
        self.now = make_load(queued=sum(queue.num_queued_tokens for queue in queues), steps=steps)

    async def next(self) -> WorkerLoad:
        async with asyncio.timeout(_TIMEOUT_S):
            return await self.sent.get()


@asynccontextmanager
async def pacing(*, min_interval_s: float, heartbeat_s: float) -> AsyncIterator[tuple[LoadPacer, Reports]]:
    reports = Reports()
    pacer = LoadPacer(
        reports.sample,
        reports.sent.put_nowait,
        lambda: reports.queues,
        min_interval_s=min_interval_s,
        heartbeat_interval_s=heartbeat_s,
    )
    task = asyncio.create_task(pacer.run())
    try:
        await reports.next()
        yield pacer, reports
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_an_idle_worker_sends_heartbeats() -> None:
    async with pacing(min_interval_s=0.001, heartbeat_s=0.02) as (_pacer, reports):
        began = time.monotonic()
        for _ in range(3):
            await reports.next()
        assert time.monotonic() - began >= 0.05


async def test_a_change_goes_out_before_the_heartbeat() -> None:
    async with pacing(min_interval_s=0.01, heartbeat_s=60) as (pacer, reports):
        reports.now = make_load(steps=1)
        pacer.poke()
        assert await reports.next() == make_load(steps=1)


async def test_many_changes_go_out_as_few_reports() -> None:
    async with pacing(min_interval_s=0.2, heartbeat_s=60) as (pacer, reports):
        began = time.monotonic()
        num_steps = 0
        while reports.sent.empty() and time.monotonic() - began < _TIMEOUT_S:
            num_steps += 1
            reports.now = make_load(steps=num_steps)
            pacer.poke()
            await asyncio.sleep(0)
        assert time.monotonic() - began >= 0.19
        assert num_steps > 10


async def test_a_poke_without_a_change_sends_nothing() -> None:
    async with pacing(min_interval_s=0.001, heartbeat_s=60) as (pacer, reports):
        pacer.poke()
        for _ in range(10):
            await asyncio.sleep(0)
        assert reports.sent.empty()
        reports.now = make_load(steps=5)
        pacer.poke()
        assert await reports.next() == make_load(steps=5)


@pytest.mark.parametrize(
    ("told", "now"),
    [
        (PromptQueue(100, 100, 3), PromptQueue(0, 0, 4)),  # all is computed
        (PromptQueue(100, 100, 3), PromptQueue(100, 0, 4)),  # the last of it is begun
        (PromptQueue(60, 0, 3), PromptQueue(80, 0, 4)),  # a later step has begun what has come meanwhile
        (PromptQueue(0, 0, 3), PromptQueue(100, 0, 4)),  # an idle place has begun
        (PromptQueue(0, 0, 3), PromptQueue(9000, 808, 4)),  # and has more than a step's work
    ],
)
async def test_changes_that_routers_may_wait_for_are_sent_at_once(told: PromptQueue, now: PromptQueue) -> None:
    async with pacing(min_interval_s=0.2, heartbeat_s=60) as (pacer, reports):
        idle = PromptQueue(0, 0, 0)
        reports.change(told, idle)
        pacer.poke()
        assert await reports.next() == reports.now
        began, stopwatch = time.monotonic(), Stopwatch()
        reports.change(now, idle)
        pacer.poke()
        assert await reports.next() == reports.now
        assert stopwatch.seconds < 0.2
        reports.change(now, idle)
        pacer.poke()
        assert await reports.next() == reports.now
        assert time.monotonic() - began >= 0.15, "it is news once"


@pytest.mark.parametrize(
    "now",
    [
        PromptQueue(200, 100, 3),  # more has come
        PromptQueue(100, 50, 4),  # a step has begun that leaves some
        PromptQueue(50, 50, 3),  # and has ended
    ],
)
async def test_other_changes_keep_the_pace(now: PromptQueue) -> None:
    async with pacing(min_interval_s=0.05, heartbeat_s=60) as (pacer, reports):
        reports.change(PromptQueue(100, 100, 3))
        pacer.poke()
        await reports.next()
        num_samples, began = reports.num_samples, time.monotonic()
        reports.change(now)
        for _ in range(100):
            pacer.poke()
        assert reports.num_samples == num_samples, "pokes take no samples"
        assert await reports.next() == reports.now
        assert time.monotonic() - began >= 0.04
