"""The block events of an engine, step by step, against its snapshots."""

from __future__ import annotations

import asyncio
import random

from quartet.engine.step_engine import StepEngine
from tests.engine.consumer import StartEngine
from tests.engine.fakes import WAIT_S, FakePuller, FakeRunner, make_request
from tests.kvcache.replica import Replica


async def listen(engine: StepEngine, num_requests: int, num_snapshots: int) -> Replica:
    """Replay the events until so many requests ended, and so many snapshots, one after another, equal the replay."""
    replica = Replica()
    engine.request_kv_snapshot()
    async with asyncio.timeout(WAIT_S):
        async for output in engine.outputs():
            for changed in output.kv_events:
                assert changed.data_parallel_rank == 0
                assert changed.events
                replica.apply(changed.events)
            if output.kv_snapshot is not None:
                [blocks] = output.kv_snapshot
                assert blocks.parent_hashes == replica.parents
                num_snapshots -= 1
                engine.request_kv_snapshot()
            num_requests -= len(output.finished) + len(output.failed)
            if num_requests <= 0 and num_snapshots <= 0:
                return replica
    raise AssertionError("the engine ended")


async def test_events_and_snapshots_agree_while_requests_come_go_and_are_preempted(start_engine: StartEngine) -> None:
    draw = random.Random(3)
    puller = FakePuller()
    engine = await start_engine(FakeRunner(num_blocks=24), puller=puller, max_num_seqs=8)
    listening = asyncio.create_task(listen(engine, num_requests=80, num_snapshots=20))
    for number in range(80):
        prompt = draw.choices([1, 2], k=draw.randint(2, 30))
        # Blocks of a hand-off are named between two steps, when it has come.
        hand_off = puller.offer_prefix(prompt) if number % 4 == 0 else None
        request = make_request(prompt, max_tokens=draw.randint(1, 30), hand_off=hand_off)
        engine.submit(request)
        if number % 7 == 0:
            engine.cancel(request.id)
    replica = await listening
    [stats] = engine.stats()
    assert stats.num_preemptions > 0
    assert len(replica.parents) == stats.num_cached_blocks


async def test_an_idle_engine_answers_at_once_and_has_nothing(start_engine: StartEngine) -> None:
    engine = await start_engine(FakeRunner())
    assert not (await listen(engine, num_requests=0, num_snapshots=1)).parents
