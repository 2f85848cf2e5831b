"""Tiers below a pool on a real GPU: what comes back from pinned memory and from files is what was computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch

from quartet.engine.base import RequestKind
from quartet.engine.catalog import create_engine
from quartet.engine.sampling import Sampling
from quartet.engine.settings import (
    CacheSettings,
    DiskCacheSettings,
    EncoderSettings,
    EngineSettings,
    EngineSpec,
    HostCacheSettings,
)
from quartet.engine.step_engine import StepEngine
from quartet.engine.tiers import Tiering
from quartet.kvcache.tiers import OffloadPolicy
from quartet.transfer.cuda.driver import cuda_driver
from quartet.transfer.cuda.host_slots import PinnedHostBlocks
from quartet.transfer.cuda.memory import DeviceMemory
from tests.engine.fakes import FakePuller, make_request
from tests.engine.torch.driving import run_all

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("is_ahead", [False, True])
async def test_answers_are_the_same_with_a_pool_that_forgets_and_one_that_does_not(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_ahead: bool
) -> None:
    # All that is found is loaded: a model so small computes sooner.
    monkeypatch.setattr(Tiering, "forecast_by", lambda _self, _step_time, _max_step_tokens: None)
    source = Random(0)
    prompts = [[source.randrange(8, 60) for _ in range(source.randrange(20, 100))] for _ in range(8)]
    order = [source.choice(prompts) for _ in range(60)]
    cache = CacheSettings(
        host=HostCacheSettings(num_blocks=80),
        disk=DiskCacheSettings(num_blocks=400, policy=OffloadPolicy.PRESENCE, path=tmp_path),
    )
    outputs = []
    for num_blocks, tiers in ((2000, CacheSettings()), (40, cache)):
        settings = EngineSettings(
            device="cuda:0",
            dtype="float32",
            num_blocks=num_blocks,
            block_size=4,
            disable_overlap_scheduler=not is_ahead,
            cache=tiers,
        )
        spec = EngineSpec(model_path=str(checkpoint("llama")), engine=settings, encoder=EncoderSettings())
        engine = create_engine(spec, RequestKind.DECODE, FakePuller())
        assert isinstance(engine, StepEngine)
        try:
            await engine.start()
            outcomes = []
            for begin in range(0, len(order), 3):
                requests = [
                    make_request(prompt, sampling=Sampling(max_tokens=6, temperature=0.0))
                    for prompt in order[begin : begin + 3]
                ]
                outcomes += await run_all(engine, requests)
            outputs.append([outcome.token_ids for outcome in outcomes])
            if tiers is cache:
                assert engine.stats()[0].tiers[0].num_loaded > 0
        finally:
            await engine.close()
    assert outputs[0] == outputs[1]


def test_a_step_waits_for_the_copies_that_were_begun_before_it() -> None:
    num_blocks, size = 16, 1 << 20
    memory = DeviceMemory(cuda_driver(), 0, num_blocks, size)
    memory.compute_stream = torch.cuda.current_stream().cuda_stream
    pool = torch.as_tensor(memory, device="cuda:0").view(num_blocks, size)
    host = PinnedHostBlocks(memory, num_blocks)
    for number in range(1, 40):
        pool.fill_(number)
        torch.cuda.current_stream().synchronize()
        saving = host.save(range(num_blocks), range(num_blocks))
        pool.fill_(255)  # on the stream of steps, at once
        saving.wait()
        assert all(set(host.slot(slot)[:: size // 8]) == {number} for slot in range(num_blocks))
    torch.cuda.current_stream().synchronize()
    host.load([3], [5])
    assert pool[5].unique().tolist() == [39]
    assert pool[4].unique().tolist() == [255]
    host.close()
    memory.close()
