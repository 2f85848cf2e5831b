"""The benchmark of tiers loads what it says it loads, also in the shape of a model; its table shows the figures."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace

import pytest

from benchmarks.random_model import TINY
from benchmarks.table import tiers_tables
from benchmarks.tiers import PLANS, Client, CostPlan, Plan, measure, measure_hit
from quartet.engine.settings import CacheSettings, EngineSettings, HostCacheSettings
from quartet.events.kv import Tier


async def test_a_hit_is_loaded_and_gives_the_token_of_the_blocks_that_the_pool_had() -> None:
    cache = CacheSettings(host=HostCacheSettings(num_blocks=16))
    client = Client(EngineSettings(num_blocks=8, num_threads=1, cache=cache))
    try:
        await client.start()
        hit = await measure_hit(client, random.Random(0), Tier.HOST, num_tokens=200, block_size=32)
    finally:
        await client.close()
    assert hit.num_loaded_tokens == 192
    assert 0 < hit.load_s < hit.loaded_s
    assert min(hit.computed_s, hit.cached_s) > 0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
async def test_a_model_with_random_weights_is_measured_as_on_a_gpu(device: str) -> None:
    plan = replace(
        PLANS["cuda"],
        device=device,
        model=TINY,
        prompt_tokens=208,
        max_step_tokens=256,
        num_rounds=2,
        must_load=frozenset(),  # a model so small computes as soon as it loads
        cost=CostPlan(num_requests=4, num_prompt_tokens=8, num_output_tokens=4, num_alternations=2),
    )
    report = json.loads(json.dumps(asdict(await measure(plan))))
    assert (report["prompt_tokens"], report["block_size_bytes"]) == (208, TINY.block_size_bytes(32))
    for tier in ("host", "disk"):
        assert len(report[tier]["hits"]) == 2
        assert report[tier]["ratio"] > 0
    assert len(report["cost"]["with_tiers"]) == 2
    assert "| host |" in tiers_tables(report)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_prompt_is_displaced_by_the_next_one_and_found_below(plan: Plan) -> None:
    assert plan.prompt_blocks <= plan.pool_blocks < 2 * (plan.prompt_blocks - 1)
    assert plan.host_blocks(Tier.HOST) >= 2 * plan.prompt_blocks
    assert 4 * plan.prompt_blocks <= plan.host_blocks(Tier.DISK) < 6 * (plan.prompt_blocks - 1)
    assert plan.disk_blocks >= 7 * plan.prompt_blocks
    assert PLANS["cuda"].prefix_tokens == 8_000


def test_the_table_shows_ratios_beside_what_is_wanted() -> None:
    tier = {
        "ratio": 0.031,
        "computed_s": 5.835,
        "cached_s": 0.02,
        "loaded_s": 0.1648,
        "gb_per_s": 3.53,
        "hits": [{"num_loaded_tokens": 1984}] * 5,
    }
    cost = {"ratio": 0.991, "without": [100.0, 300.0, 200.0], "with_tiers": [198.0] * 3}
    report = {
        "device": "cpu",
        "gpus": [],
        "prompt_tokens": 2000,
        "wanted_ratio": 1 / 6,
        "host": tier,
        "disk": {**tier, "ratio": 0.2, "hits": [{"num_loaded_tokens": 0}] * 5},
        "cost": cost,
    }
    lines = tiers_tables(report).splitlines()
    assert lines[2] == "| host | 164.8 | 5835 | 0.031 | <= 1/6 | 20.0 | 3.53 | 5 | 5 |"
    assert lines[3] == "| disk | 164.8 | 5835 | 0.200 |  | 20.0 | 3.53 | 5 | 0 |"
    assert lines[0].startswith("| 2,000 tokens, all but the last block from | first token after, ms |")
    assert lines[-1] == "| the CPU | 200 | 198 | 0.991 | >= 0.97 | 3 |"
    lines = tiers_tables(report | {"device": "cuda:0", "gpus": ["NVIDIA H200"], "wanted_ratio": 0.2}).splitlines()
    assert "<= 1/5" in lines[2]
    assert lines[-1].startswith("| the clock (NVIDIA H200) |")
