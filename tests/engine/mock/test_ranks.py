"""A mock engine of several data-parallel ranks: each serves what is sent to it, and shows by itself."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from quartet.engine.base import Engine, EngineRequest, Failed, Finished, FinishReason, Prefilled, RequestKind
from quartet.engine.data_parallel import DataParallelEngine
from quartet.engine.mock import MockEngineConfig, MockSettings, rank_loader
from quartet.engine.scheduler import SchedulerConfig
from quartet.engine.step_engine import StepEngine
from quartet.errors import EngineError, ModelFilesError, UnsupportedFieldError, WorkerUnavailableError
from quartet.transfer.base import Puller
from tests.engine.consumer import Consumer
from tests.engine.fakes import WAIT_S, FakePuller, make_request
from tests.kvcache.replica import Replica

NUM_RANKS = 3
NUM_BLOCKS = 24
PROMPT = list(range(300, 330))  # seven blocks of four, and two tokens
SCHEDULER = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)


def make_engine(text_dir: Path, puller: FakePuller | None = None, speed_up: float = 1000.0) -> DataParallelEngine:
    load = rank_loader(
        MockEngineConfig(
            model_path=str(text_dir),
            num_blocks=NUM_BLOCKS,
            data_parallel_size=NUM_RANKS,
            block_size=4,
            settings=MockSettings(speed_up=speed_up),
        )
    )

    def make_rank(rank: int, puller: Puller) -> StepEngine:
        return StepEngine(lambda: load(rank), SCHEDULER, puller=puller)

    return DataParallelEngine(NUM_RANKS, make_rank, puller or FakePuller())


@asynccontextmanager
async def serving(
    text_dir: Path, puller: FakePuller | None = None, speed_up: float = 1000.0
) -> AsyncIterator[DataParallelEngine]:
    engine = make_engine(text_dir, puller, speed_up)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "quartet-engine"]


def at_rank(rank: int, request: EngineRequest) -> EngineRequest:
    return replace(request, generation=replace(request.generation, data_parallel_rank=rank))


async def listen(engine: Engine, num_requests: int, num_snapshots: int) -> list[Replica]:
    """Replay all ranks' events until so many requests ended, and so many snapshots equal the replay."""
    replicas = [Replica() for _ in range(NUM_RANKS)]
    engine.request_kv_snapshot()
    async with asyncio.timeout(WAIT_S):
        async for output in engine.outputs():
            for changed in output.kv_events:
                replicas[changed.data_parallel_rank].apply(changed.events)
            if output.kv_snapshot is not None:
                assert [blocks.data_parallel_rank for blocks in output.kv_snapshot] == list(range(NUM_RANKS))
                assert [blocks.parent_hashes for blocks in output.kv_snapshot] == [each.parents for each in replicas]
                num_snapshots -= 1
                engine.request_kv_snapshot()
            num_requests -= len(output.finished) + len(output.failed)
            if num_requests <= 0 and num_snapshots <= 0:
                return replicas
    raise AssertionError("the engine ended")


async def test_each_rank_runs_what_is_sent_to_it_and_keeps_its_own_prefixes(text_dir: Path) -> None:
    async with serving(text_dir) as engine:
        consumer = Consumer(engine)
        assert engine.capabilities.data_parallel_size == NUM_RANKS
        assert engine.capabilities.num_blocks == NUM_BLOCKS
        requests = [at_rank(rank, make_request(PROMPT, max_tokens=5)) for rank in (1, 1, 2)]
        for request in requests:
            engine.submit(request)
            assert await consumer.wait_terminal(request) == Finished(request.id, FinishReason.LENGTH, 5)
        assert len({tuple(consumer.tokens[request.id]) for request in requests}) == 1
        assert [consumer.started[request.id].num_cached_tokens for request in requests] == [0, 28, 0]
        stats = engine.stats()
        assert [rank.num_output_tokens for rank in stats] == [0, 10, 5]
        assert [rank.num_total_blocks for rank in stats] == [NUM_BLOCKS] * NUM_RANKS
        assert [rank.max_running for rank in stats] == [SCHEDULER.max_num_seqs] * NUM_RANKS


async def test_events_and_snapshots_name_the_rank_and_agree(text_dir: Path) -> None:
    draw = random.Random(5)
    async with serving(text_dir) as engine:
        listening = asyncio.create_task(listen(engine, num_requests=60, num_snapshots=8))
        for number in range(60):
            prompt = draw.choices([300, 301], k=draw.randint(2, 30))
            request = make_request(prompt, max_tokens=draw.randint(1, 30))
            engine.submit(at_rank(draw.randrange(NUM_RANKS), request))
            if number % 7 == 0:
                engine.cancel(request.id)
        replicas = await listening
        assert [len(each.parents) for each in replicas] == [stats.num_cached_blocks for stats in engine.stats()]
        assert all(each.parents for each in replicas)


async def test_a_rank_that_is_not_there_is_refused_by_name(text_dir: Path) -> None:
    async with serving(text_dir) as engine:
        consumer = Consumer(engine)
        request = at_rank(NUM_RANKS, make_request(PROMPT))
        engine.submit(request)
        failed = await consumer.wait_terminal(request)
        assert isinstance(failed, Failed)
        assert isinstance(failed.error, UnsupportedFieldError)
        assert failed.error.field == "data_parallel_rank"
        assert "ranks 0 to 2" in failed.error.message


@pytest.mark.parametrize(("from_rank", "to_rank"), [(0, 2), (2, 0), (1, 1)])
async def test_a_hand_off_goes_from_any_rank_to_any(text_dir: Path, from_rank: int, to_rank: int) -> None:
    puller = FakePuller()
    async with serving(text_dir) as source, serving(text_dir, puller) as there:
        sending, receiving = Consumer(source), Consumer(there)
        whole = at_rank(to_rank, make_request(PROMPT, max_tokens=9))
        source.submit(whole)
        await sending.wait_terminal(whole)
        # Something else lies at the other ranks, under the same numbers.
        for rank in range(NUM_RANKS):
            for engine, consumer in ((source, sending), (there, receiving)):
                other = at_rank(rank, make_request(range(400, 440), max_tokens=1))
                engine.submit(other)
                await consumer.wait_terminal(other)
        prefill = at_rank(from_rank, make_request(PROMPT, kind=RequestKind.PREFILL, max_tokens=9))
        source.submit(prefill)
        prefilled = await sending.wait_terminal(prefill)
        assert isinstance(prefilled, Prefilled)
        assert all(block_id // NUM_BLOCKS == from_rank for block_id in prefilled.block_ids)
        assert [stats.num_held_blocks for stats in source.stats()] == [8 * (rank == from_rank) for rank in range(3)]
        assert source.memory is not None
        assert source.capabilities.layout is not None
        offer = puller.offer_prefilled(source.memory, source.capabilities.layout, prefilled)
        decode = make_request(PROMPT, generated=[prefilled.token_id], max_tokens=9, hand_off=offer)
        there.submit(at_rank(to_rank, decode))
        # The engine checks what came: blocks of another rank would end it.
        assert await receiving.wait_terminal(decode) == Finished(decode.id, FinishReason.LENGTH, 9)
        assert [prefilled.token_id, *receiving.tokens[decode.id]] == sending.tokens[whole.id]
        source.release(prefill.id)
        await at_all_ranks(source, sending)
        assert not any(stats.num_held_blocks for stats in source.stats())


async def at_all_ranks(engine: Engine, consumer: Consumer) -> None:
    """Until a step of every rank has seen all that was asked before."""
    for rank in range(NUM_RANKS):
        request = at_rank(rank, make_request([300], max_tokens=1))
        engine.submit(request)
        await consumer.wait_terminal(request)


async def test_a_rank_that_is_lost_ends_the_engine_and_what_runs_at_the_others(text_dir: Path) -> None:
    puller = FakePuller()
    async with serving(text_dir, puller, speed_up=1.0) as engine, serving(text_dir) as source:
        assert engine.capabilities.layout is not None
        assert source.memory is not None
        consumer = Consumer(engine)
        running = at_rank(2, make_request(PROMPT, max_tokens=60))
        engine.submit(running)
        await consumer.wait_tokens(running, 1)
        # Blocks that were never written.
        offer = puller.offer(source.memory, engine.capabilities.layout, tuple(range(8)), len(PROMPT))
        lost = at_rank(1, make_request(PROMPT, generated=[300], hand_off=offer))
        engine.submit(lost)
        for request, error in ((lost, EngineError), (running, WorkerUnavailableError)):
            failed = await consumer.wait_terminal(request)
            assert isinstance(failed, Failed)
            assert type(failed.error) is error
        with pytest.raises(EngineError, match="hold something else"):
            await consumer.wait_end()
        assert not engine.is_alive
        with pytest.raises(EngineError, match="hold something else"):
            engine.submit(at_rank(0, make_request(PROMPT)))


async def test_close_fails_what_runs_at_every_rank(text_dir: Path) -> None:
    async with serving(text_dir) as engine:
        consumer = Consumer(engine)
        requests = [at_rank(rank, make_request(PROMPT, max_tokens=60)) for rank in range(NUM_RANKS)]
        for request in requests:
            engine.submit(request)
        await engine.close()
        await consumer.wait_end()
        for request in requests:
            assert request.id in consumer.terminal
        assert not engine.is_alive


async def test_a_model_that_is_not_there_fails_the_start(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    with pytest.raises(ModelFilesError):
        await engine.start()
    await engine.close()
    assert [output async for output in engine.outputs()] == []
