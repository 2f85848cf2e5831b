"""The variables that the launch scripts of TensorRT-LLM's users set work with the topologies that come along."""

from __future__ import annotations

from pathlib import Path

import pytest

from quartet.config import build
from quartet.discovery.base import Role
from quartet.engine.settings import Modality
from quartet.errors import ConfigError
from router.config import RouterConfig
from services.topology.topology import load_topology, plan_router, plan_workers
from services.workers.config import WorkerConfig

FILES = sorted((Path(__file__).parents[3] / "configs" / "trtllm").glob("*.yaml"))

#: Of one worker a role.
ONE_EACH = {
    "MODEL_PATH": "/models/mine",
    "SERVED_MODEL_NAME": "mine",
    "AGG_ENGINE_ARGS": "a.yaml",
    "PREFILL_ENGINE_ARGS": "p.yaml",
    "DECODE_ENGINE_ARGS": "d.yaml",
    "ENCODE_ENGINE_ARGS": "e.yaml",
    "PD_ENGINE_ARGS": "pd.yaml",
    "AGG_CUDA_VISIBLE_DEVICES": "7",
    "PREFILL_CUDA_VISIBLE_DEVICES": "4,5",
    "DECODE_CUDA_VISIBLE_DEVICES": "6,7",
    "ENCODE_CUDA_VISIBLE_DEVICES": "3",
    "PD_CUDA_VISIBLE_DEVICES": "8",
    "NUM_WORKERS": "1",
    "NUM_PREFILL_WORKERS": "1",
    "NUM_DECODE_WORKERS": "1",
    "DYN_HTTP_PORT": "8080",
}
#: GPUs and engine file of each role, by the roles that there are: without Prefill, Decode computes prompts, too.
ENCODE = {Role.ENCODE: ("3", Path("e.yaml"))}
EXPECTED = {
    frozenset({Role.DECODE}): {Role.DECODE: ("7", Path("a.yaml"))},
    frozenset({Role.ENCODE, Role.DECODE}): {**ENCODE, Role.DECODE: ("8", Path("pd.yaml"))},
}
APART = {**ENCODE, Role.PREFILL: ("4,5", Path("p.yaml")), Role.DECODE: ("6,7", Path("d.yaml"))}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_topology_takes_model_engine_files_and_gpus_from_them(file: Path) -> None:
    topology = load_topology(file, variables=ONE_EACH)
    plans = plan_workers(topology, num_cores=4)
    expected = EXPECTED.get(frozenset(plan.role for plan in plans), APART)
    assert len(plans) == len({plan.role for plan in plans}), "one worker a role"
    for plan in plans:
        config = build(WorkerConfig, plan.settings)
        assert (config.model_path, config.model_name) == ("/models/mine", "mine")
        gpus, engine_file = expected[plan.role]
        assert config.engine.extra_engine_args == engine_file
        assert plan.environment.get("CUDA_VISIBLE_DEVICES") == gpus
    assert build(RouterConfig, plan_router(topology).settings).http.port == 8080


@pytest.mark.parametrize("modality", ["text", "multimodal"])
@pytest.mark.parametrize("name", ["agg", "agg_multimodal", "disagg", "disagg_multimodal"])
def test_the_modality_is_that_of_the_workers_that_compute_prompts(name: str, modality: str) -> None:
    [file] = [file for file in FILES if file.stem == name]
    [first, *others] = plan_workers(load_topology(file, variables={"MODALITY": modality}), num_cores=4)
    assert build(WorkerConfig, first.settings).engine.modality is Modality(modality)
    assert {build(WorkerConfig, plan.settings).engine.modality for plan in others} <= {None}


@pytest.mark.parametrize("name", ["disagg_multimodal", "epd_multimodal_image"])
def test_a_chat_template_is_that_of_all_workers(name: str) -> None:
    [file] = [file for file in FILES if file.stem == name]
    plans = plan_workers(load_topology(file, variables={"CUSTOM_TEMPLATE": "/t/mine.jinja"}), num_cores=4)
    assert {build(WorkerConfig, plan.settings).custom_jinja_template for plan in plans} == {Path("/t/mine.jinja")}


@pytest.mark.parametrize("name", ["epd_disagg", "epd_multimodal_image_and_embeddings"])
def test_a_bound_of_media_files_is_that_of_the_router_and_of_the_workers_that_take_them(name: str) -> None:
    [file] = [file for file in FILES if file.stem == name]
    for variables, expected in (({}, 50.0), ({"MAX_FILE_SIZE_MB": "7.5"}, 7.5)):
        topology = load_topology(file, variables=variables)
        takers = [plan for plan in plan_workers(topology, num_cores=4) if plan.role is not Role.DECODE]
        assert {build(WorkerConfig, plan.settings).max_file_size_mb for plan in takers} == {expected}
        assert build(RouterConfig, plan_router(topology).settings).media.max_file_size_mb == expected


def test_gpus_of_several_workers_are_shared_out_or_refused_by_field() -> None:
    [file] = [file for file in FILES if file.stem == "disagg_router"]
    variables = {
        "NUM_PREFILL_WORKERS": "1",
        "PREFILL_CUDA_VISIBLE_DEVICES": "0-3",
        "DECODE_CUDA_VISIBLE_DEVICES": "4-7",
    }
    plans = plan_workers(load_topology(file, variables=variables), num_cores=4)
    assert [plan.environment["CUDA_VISIBLE_DEVICES"] for plan in plans] == ["0,1,2,3", "4,5", "6,7"]
    with pytest.raises(ConfigError, match=r"^workers\[0\]\.gpus: 1 GPUs can't be shared out evenly to 2 workers"):
        load_topology(file, variables={"PREFILL_CUDA_VISIBLE_DEVICES": "0"})
    with pytest.raises(ConfigError, match=r"^workers\[1\]\.replicas: must be a whole number, not 'many'"):
        load_topology(file, variables={"NUM_DECODE_WORKERS": "many"})
