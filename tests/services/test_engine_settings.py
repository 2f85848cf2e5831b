"""Engine settings of a worker, by the names that all engines share, reach the engine."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from quartet.config import build
from quartet.discovery.base import Role
from quartet.engine.base import RequestKind
from quartet.engine.fingerprint import model_fingerprint
from quartet.engine.sampling import Sampling
from quartet.engine.settings import CacheSettings, EngineKind, EngineSettings, HostCacheSettings, LoadFormat
from quartet.errors import ConfigError
from services.workers.config import WorkerConfig
from services.workers.parts import create_engine
from tests import tiny
from tests.engine.fakes import FakePuller, make_request
from tests.services.worker_processes import worker_process

KINDS = ["mock", "torch"]
NUM_REQUESTS = 5


def settings(kind: str, **more: object) -> dict[str, object]:
    own: dict[str, object] = {"mock": {"speed_up": 100}} if kind == "mock" else {"dtype": "float32", "num_threads": 1}
    return {"kind": kind, "num_blocks": 32, **own, **more}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_step_keeps_to_its_bounds(kind: str) -> None:
    engine_settings = settings(kind, max_batch_size=2, max_num_tokens=48, max_model_len=100, block_size=16)
    config = build(WorkerConfig, {"model_path": str(tiny.CHECKPOINT), "engine": engine_settings})
    engine = create_engine(config, RequestKind.DECODE, FakePuller())
    try:
        await engine.start()
        assert (engine.stats()[0].max_step_tokens, engine.stats()[0].max_running) == (48, 2)
        assert (engine.capabilities.max_model_len, engine.capabilities.block_size) == (100, 16)
        for _ in range(NUM_REQUESTS):
            engine.submit(make_request(range(300, 310), sampling=Sampling(max_tokens=6)))
        widest = num_ended = 0
        async for step in engine.outputs():
            widest = max(widest, len(step.ids))
            num_ended += len(step.finished)
            assert not step.failed
            if num_ended == NUM_REQUESTS:
                break
        assert widest == 2
    finally:
        await engine.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_workers_record_has_its_configured_sizes(tmp_path: Path, kind: str) -> None:
    engine = settings(kind, max_model_len=200, block_size=16, num_blocks=20)
    async with worker_process(tmp_path, Role.DECODE, engine=engine) as worker:
        record = worker.record
        assert (record.max_model_len, record.block_size, record.num_blocks) == (200, 16, 20)


async def test_a_torch_worker_of_text_announces_no_media(tmp_path: Path) -> None:
    engine = settings("torch", modality="text")
    async with worker_process(tmp_path, Role.PREFILL, engine=engine) as worker:
        assert worker.record.media == ()
        assert worker.record.max_media_tokens == 0


async def test_an_encode_worker_of_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^engine\.modality: an encode worker takes media"):
        async with worker_process(tmp_path, Role.ENCODE, engine=settings("torch", modality="text")):
            raise AssertionError("it serves")


def test_names_that_all_engines_share_replace_the_schedulers_own() -> None:
    bounds = EngineSettings(max_batch_size=3, max_num_tokens=30).step_bounds
    assert (bounds.max_num_seqs, bounds.max_num_batched_tokens) == (3, 30)
    untold = EngineSettings()
    assert untold.step_bounds == untold.scheduler


def test_a_pool_has_a_number_of_blocks_or_a_share() -> None:
    with pytest.raises(ConfigError, match=r"^num_blocks: free_gpu_memory_fraction says it"):
        EngineSettings(device="cuda:0", num_blocks=4, free_gpu_memory_fraction=0.5)
    with pytest.raises(ConfigError, match=r"^free_gpu_memory_fraction: the device cpu"):
        EngineSettings(free_gpu_memory_fraction=0.5)


def test_only_torch_captures_graphs_and_no_fewer_than_none() -> None:
    with pytest.raises(ConfigError, match=r"^cuda_graph_max_batch_size: must be at least 0, not -1"):
        EngineSettings(cuda_graph_max_batch_size=-1)
    with pytest.raises(ConfigError, match=r"^cuda_graph_padding: the engine trtllm does not have it"):
        EngineSettings(kind=EngineKind.TRTLLM, cuda_graph_padding=False)


def test_only_the_mock_needs_no_weights() -> None:
    assert [kind for kind in EngineKind if not EngineSettings(kind=kind).needs_weights] == [EngineKind.MOCK]


async def test_a_worker_with_random_weights_announces_their_seed_and_needs_no_file_of_weights(tmp_path: Path) -> None:
    model = tmp_path / "shape"
    shutil.copytree(tiny.CHECKPOINT, model, ignore=shutil.ignore_patterns("*.safetensors"))
    engine = settings("torch", load_format="random", load_seed=5)
    async with worker_process(tmp_path, Role.DECODE, engine=engine, model_path=str(model)) as worker:
        assert worker.record.model_fingerprint == model_fingerprint(model, "float32", 5)


@pytest.mark.parametrize("kind", [EngineKind.MOCK, EngineKind.TRTLLM])
def test_only_torch_makes_random_weights(kind: EngineKind) -> None:
    with pytest.raises(ConfigError, match=rf"^load_format: the engine {kind} does not have it"):
        EngineSettings(kind=kind, load_format=LoadFormat.RANDOM)


def test_the_mock_launches_no_steps_ahead_that_could_be_switched_off() -> None:
    with pytest.raises(ConfigError, match=r"^disable_overlap_scheduler: the engine mock does not have it"):
        EngineSettings(kind=EngineKind.MOCK, disable_overlap_scheduler=True)


def test_random_weights_have_a_seed_and_others_none() -> None:
    assert EngineSettings().random_seed is None
    assert EngineSettings(load_format=LoadFormat.RANDOM).random_seed == 0
    drawn = EngineSettings(load_format=LoadFormat.RANDOM, load_seed=2**63 - 1)
    assert (drawn.random_seed, drawn.needs_weights) == (2**63 - 1, False)
    with pytest.raises(ConfigError, match=r"^load_seed: only random weights have one"):
        EngineSettings(load_seed=1)
    for seed in (-1, 2**63):
        with pytest.raises(ConfigError, match=r"^load_seed: must be in"):
            EngineSettings(load_format=LoadFormat.RANDOM, load_seed=seed)


@pytest.mark.parametrize("ttl_s", [0, 60])
async def test_a_session_outlasts_what_would_displace_it_if_it_has_a_time_to_live(ttl_s: float) -> None:
    cache = {"session_ttl_s": ttl_s, "session_share": 0.9}
    engine_settings = settings("mock", num_blocks=24, block_size=16, cache=cache)
    config = build(WorkerConfig, {"model_path": str(tiny.CHECKPOINT), "engine": engine_settings})
    engine = create_engine(config, RequestKind.DECODE, FakePuller())
    try:
        await engine.start()
        num_cached = []
        talk = [300] * 240
        for prompt, key in ((talk, "talk"), *(([301 + number] * 128, "") for number in range(3)), (talk, "talk")):
            request = make_request(prompt, sampling=Sampling(max_tokens=1))
            engine.submit(replace(request, session_key=key))
            async for step in engine.outputs():
                num_cached += [started.num_cached_tokens for started in step.started]
                assert not step.failed
                if step.finished:
                    break
        assert num_cached == [0, 0, 0, 0, 224 if ttl_s else 0]
        assert engine.stats()[0].num_retained_blocks == (15 if ttl_s else 0)
    finally:
        await engine.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_blocks_that_were_evicted_come_back_from_the_host(kind: str, tmp_path: Path) -> None:
    cache = {"host": {"num_blocks": 64}, "disk": {"num_blocks": 64, "path": str(tmp_path)}}
    engine_settings = settings(kind, num_blocks=24, block_size=16, cache=cache)
    config = build(WorkerConfig, {"model_path": str(tiny.CHECKPOINT), "engine": engine_settings})
    engine = create_engine(config, RequestKind.DECODE, FakePuller())
    try:
        await engine.start()
        prompts = [[300 + number] * 320 for number in range(2)]
        outputs, num_cached = [], []
        for prompt in (*prompts, prompts[0]):
            # So few steps that their times are not known yet: what is found is loaded.
            engine.submit(make_request(prompt, sampling=Sampling(max_tokens=2, temperature=0.0)))
            tokens: list[int] = []
            async for step in engine.outputs():
                tokens += step.token_ids
                num_cached += [started.num_cached_tokens for started in step.started]
                assert not step.failed
                if step.finished:
                    break
            outputs.append(tokens)
        assert num_cached == [0, 0, 304]
        assert outputs[2] == outputs[0] != outputs[1]
    finally:
        await engine.close()


@pytest.mark.parametrize(
    ("cache", "complaint"),
    [
        ({"host": {"num_blocks": 0}}, r"engine\.cache\.host\.num_blocks: must be at least 1"),
        ({"host": {"size_gb": -1}}, r"engine\.cache\.host\.size_gb: must be above 0"),
        ({"host": {"num_blocks": 1, "max_batch_size": 0}}, r"engine\.cache\.host\.max_batch_size: must be at least 1"),
        ({"host": {"num_blocks": 1, "min_lfu_count": -1}}, r"engine\.cache\.host\.min_lfu_count: must be at least 0"),
        ({"host": {"num_blocks": 1}, "disk": {"num_blocks": 1}}, r"engine\.cache\.disk\.path: must name"),
        ({"disk": {"num_blocks": 1, "path": "/tmp"}}, r"engine\.cache\.disk: needs host"),
        ({"session_ttl_s": -1}, r"engine\.cache\.session_ttl_s: must be at least 0"),
        ({"session_ttl_s": float("inf")}, r"engine\.cache\.session_ttl_s: must be a number, not inf"),
        ({"session_share": 0}, r"engine\.cache\.session_share: must be in"),
        ({"session_share": 1.5}, r"engine\.cache\.session_share: must be in"),
    ],
)
def test_an_impossible_cache_is_named(cache: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        build(WorkerConfig, {"model_path": "m", "engine": {"cache": cache}})


def test_trtllm_has_tiers_of_its_own() -> None:
    with pytest.raises(ConfigError, match=r"^cache: the engine trtllm does not have it"):
        EngineSettings(kind=EngineKind.TRTLLM, cache=CacheSettings(host=HostCacheSettings(num_blocks=4)))


def test_a_tier_too_small_for_a_block_is_refused_when_the_block_is_known() -> None:
    cache = CacheSettings(host=HostCacheSettings(size_gb=0.001))
    assert cache.plans(1000)[0].num_blocks == 1000
    with pytest.raises(ConfigError, match=r"^cache\.host\.size_gb: 0.001 GB hold no block of 2000000 bytes"):
        cache.plans(2_000_000)
