"""When reports go out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from quartet.events.load import WorkerLoad
from quartet.events.publisher import LoadPacer
from tests.events.loads import make_load

_TIMEOUT_S = 10.0


class Reports:
    """Collects reports, and holds what is sampled next."""

    def __init__(self) -> None:
        self.now = make_load()
        self.num_samples = 0
        self.sent: asyncio.Queue[WorkerLoad] = asyncio.Queue()

    def sample(self) -> WorkerLoad:
        self.num_samples += 1
        return self.now

    async def next(self) -> WorkerLoad:
        async with asyncio.timeout(_TIMEOUT_S):
            return await self.sent.get()


@asynccontextmanager
async def pacing(*, min_interval_s: float, heartbeat_s: float) -> AsyncIterator[tuple[LoadPacer, Reports]]:
    reports = Reports()
    pacer = LoadPacer(
        reports.sample,
        reports.sent.put_nowait,
        lambda: reports.now.num_queued_prefill_tokens,
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


async def test_an_emptied_prefill_queue_is_told_at_once() -> None:
    async with pacing(min_interval_s=0.05, heartbeat_s=60) as (pacer, reports):
        reports.now = make_load(queued=100)
        pacer.poke()
        assert (await reports.next()).num_queued_prefill_tokens == 100
        began = time.monotonic()
        reports.now = make_load(queued=0, steps=1)
        pacer.poke()
        assert (await reports.next()).num_queued_prefill_tokens == 0
        assert time.monotonic() - began < 0.05


async def test_pokes_take_no_samples_while_prefill_tokens_are_queued() -> None:
    async with pacing(min_interval_s=0.001, heartbeat_s=60) as (pacer, reports):
        reports.now = make_load(queued=100)
        pacer.poke()
        await reports.next()
        num_samples = reports.num_samples
        for _ in range(100):
            pacer.poke()
        assert reports.num_samples == num_samples
