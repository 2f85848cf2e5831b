"""Worker processes with TensorRT-LLM, over gRPC: prefills are handed off and pulled, and a dead engine is an end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quartet.discovery.base import SALTED_BLOCKS, Role
from quartet.engine.sampling import Sampling
from quartet.errors import EngineError, HandOffStateError, ServingError
from quartet.streams.client import DecodeClient, PrefillClient
from quartet.streams.messages import WorkerStart
from quartet.streams.worker_client import WorkerClient
from tests.engine.trtllm.engines import stand_in
from tests.fakes.driving import STORY, greedy, token_ids_of
from tests.services.stream_workers import WAIT_S, collect, make_start, until
from tests.services.worker_processes import RunningWorker, worker_process
from tests.streams.pulled import PullingDecodeClient


@pytest.fixture(autouse=True)
def _stand_in() -> Iterator[None]:
    with stand_in():
        yield


@asynccontextmanager
async def serving(directory: Path, role: Role) -> AsyncIterator[RunningWorker]:
    async with worker_process(directory, role, engine={"kind": "trtllm", "dtype": "float32"}) as worker:
        yield worker


def decodes(worker: RunningWorker) -> PullingDecodeClient:
    return PullingDecodeClient(DecodeClient(worker.record.worker_id, worker.channel, lambda _error: None))


def prefills(worker: RunningWorker) -> PrefillClient:
    return PrefillClient(worker.record.worker_id, worker.channel, lambda _error: None, lambda _hand_off: None)


def greedy_start(max_tokens: int = 12) -> WorkerStart:
    start = make_start(tuple(token_ids_of(STORY)))
    sampling = Sampling(temperature=0.0, max_tokens=max_tokens)
    return replace(start, generation=replace(start.generation, sampling=sampling))


def control_of(number: int) -> Any:
    from tensorrt_llm._stand_in.control import control

    return control.engines[number]


async def test_a_prefill_is_pulled_and_released(tmp_path: Path) -> None:
    expected = greedy(STORY, 12)
    async with serving(tmp_path, Role.PREFILL) as prefill, serving(tmp_path, Role.DECODE) as decode:
        assert SALTED_BLOCKS in prefill.record.unannounced_blocks
        start = greedy_start()
        assert await collect(decodes(decode).start(start)) == expected
        prefilled = await prefills(prefill).start(greedy_start()).outcome()
        assert prefilled.token_id == expected[0]
        generation = replace(start.generation, generated_token_ids=(prefilled.token_id,))
        going_on = replace(greedy_start(), generation=generation, hand_off=prefilled.hand_off)
        assert await collect(decodes(decode).start(going_on)) == expected[1:]

        async def num_held() -> int:
            report = await WorkerClient(prefill.channel).info(WAIT_S)
            return sum(rank.num_held_blocks for rank in report.load.ranks)

        async with asyncio.timeout(WAIT_S):
            while await num_held():
                pass  # each look is a call that takes its time
        again = replace(greedy_start(), generation=generation, hand_off=prefilled.hand_off)
        with pytest.raises(HandOffStateError):
            await collect(decodes(decode).start(again))


@pytest.mark.parametrize("way", ["die", "lose_rank"])
async def test_a_dead_engine_ends_its_worker(tmp_path: Path, way: str) -> None:
    with pytest.raises(EngineError):
        async with serving(tmp_path, Role.DECODE) as decode:
            control_of(0).steps.close()
            call = decodes(decode).start(greedy_start(64))
            await until(lambda: control_of(0).num_running == 1)
            getattr(control_of(0), way)()
            if way == "die":
                control_of(0).steps.open()
            with pytest.raises(ServingError):
                await collect(call)
            await until(decode.running.done)
