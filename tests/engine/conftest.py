"""Engines on fake runners that are closed, and whose thread is gone, when a test ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from quartet.engine.scheduler import SchedulerConfig
from quartet.engine.step_engine import StepEngine, TiersFactory
from quartet.transfer.base import Puller
from tests.engine.consumer import StartEngine
from tests.engine.fakes import FakeRunner


@pytest.fixture
async def start_engine() -> AsyncIterator[StartEngine]:
    """A function that starts an engine on a runner: ``await start_engine(runner, puller=..., max_num_seqs=...)``."""
    engines: list[StepEngine] = []
    tasks_before = asyncio.all_tasks()

    async def start(
        runner: FakeRunner,
        *,
        puller: Puller | None = None,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        tiers: TiersFactory | None = None,
    ) -> StepEngine:
        config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        engine = StepEngine(lambda: runner, config, puller=puller, tiers=tiers)
        engines.append(engine)
        await engine.start()
        return engine

    yield start
    for engine in engines:
        await engine.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "quartet-engine"]
    async with asyncio.timeout(30):
        while leaked := asyncio.all_tasks() - tasks_before - {asyncio.current_task()}:
            await asyncio.wait(leaked)
