"""The topologies for GPUs are such as TensorRT-LLM 1.2 takes: each worker in its role, on the GPUs that it is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quartet.config import build
from quartet.discovery.base import Role
from quartet.engine.settings import EngineKind
from quartet.engine.trtllm.arguments import LlmArguments, Use, llm_arguments
from router.config import RouterConfig
from router.policy.create import PolicyName
from services.topology.topology import (
    ProcessPlan,
    Topology,
    load_topology,
    plan_pool_routers,
    plan_router,
    plan_workers,
)
from services.workers.config import WorkerConfig

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "configs/trtllm").glob("*.yaml"))


@pytest.fixture(params=FILES, ids=lambda file: file.stem)
def topology(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Topology:
    """Read where its paths begin."""
    monkeypatch.chdir(ROOT)
    return load_topology(request.param)


def arguments_of(plan: ProcessPlan) -> LlmArguments:
    return llm_arguments(build(WorkerConfig, plan.settings).engine_spec, Use(str(plan.role)))


def test_there_are_eleven_topologies() -> None:
    assert len(FILES) == 11


def test_each_worker_has_as_many_gpus_as_its_model_takes(topology: Topology) -> None:
    for plan in plan_workers(topology, num_cores=8):
        values = arguments_of(plan).values
        assert len(plan.gpus) == values.get("tensor_parallel_size", 1), plan.name


def test_prefill_and_decode_hand_over_by_the_same_way_the_same_blocks(topology: Topology) -> None:
    by_role = {
        role: [arguments_of(plan) for plan in plan_workers(topology, num_cores=8) if plan.role is role]
        for role in (Role.PREFILL, Role.DECODE)
    }
    both = [*by_role[Role.PREFILL], *by_role[Role.DECODE]]
    if by_role[Role.PREFILL]:
        assert all(arguments.has_transceiver for arguments in both)
        [_transceiver] = {str(arguments.values["cache_transceiver_config"]["backend"]) for arguments in both}  # type: ignore[index]
    assert len({(arguments.kv_dtype, arguments.block_size) for arguments in both}) == 1


def test_only_workers_under_kv_aware_routing_publish_events(topology: Topology) -> None:
    is_aware = routes_by_cache(topology)
    workers = [plan for plan in plan_workers(topology, num_cores=8) if plan.role is not Role.ENCODE]
    for plan in workers:
        arguments = arguments_of(plan)
        assert (arguments.has_events, arguments.has_stats) == (is_aware, is_aware)
    assert is_aware or len(workers) == len({plan.role for plan in workers})


def test_wherever_routing_goes_by_caches_workers_say_what_is_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    aware = []
    for file in sorted((ROOT / "configs").rglob("*.yaml")):
        if "engines" in file.parts or not routes_by_cache(load_topology(file)):
            continue
        aware.append(file.stem)
        for plan in plan_workers(load_topology(file), num_cores=8):
            engine = build(WorkerConfig, plan.settings).engine
            # The other engines always publish them.
            if engine.kind is EngineKind.TRTLLM and plan.role is not Role.ENCODE:
                assert arguments_of(plan).has_events, (file, plan.name)
    assert {"agg_multimodal", "agg_router", "disagg_router", "mock_fleet"} <= set(aware)


def routes_by_cache(topology: Topology) -> bool:
    routers = [plan_router(topology)] if topology.global_router is None else plan_pool_routers(topology)
    return any(build(RouterConfig, plan.settings).policy.name is PolicyName.KV_AWARE for plan in routers)


def test_gpt_oss_has_the_bounds_and_the_memory_of_its_two_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    plans = plan_workers(load_topology(ROOT / "configs/trtllm/gpt_oss_disagg.yaml"), num_cores=8)
    assert [plan.gpus for plan in plans] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    prefill, decode = (arguments_of(plan) for plan in plans)
    for made, bounds in ((prefill, (32, 20000)), (decode, (128, 16384))):
        assert (made.max_batch_size, made.max_num_tokens) == bounds
        values: Any = made.values
        assert values["kv_cache_config"]["free_gpu_memory_fraction"] == 0.9
        assert values["tensor_parallel_size"] == values["moe_expert_parallel_size"] == 4
    assert (prefill.num_ranks, decode.num_ranks) == (1, 4)


def test_encode_comes_before_the_workers_that_share_its_gpu(topology: Topology) -> None:
    plans = plan_workers(topology, num_cores=8)
    for number, plan in enumerate(plans):
        beside = [other for other in plans[:number] if set(other.gpus) & set(plan.gpus)]
        assert all(other.role is Role.ENCODE for other in beside)


def test_chat_templates_of_one_topology_are_there_and_the_same(topology: Topology) -> None:
    files = {build(WorkerConfig, plan.settings).custom_jinja_template for plan in plan_workers(topology, num_cores=8)}
    assert len(files) == 1
    assert all(file is None or (ROOT / file).is_file() for file in files)
