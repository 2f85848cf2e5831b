"""Choices of a command line over a topology file: what is left of the file, and what the notes say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quartet.config import build
from quartet.discovery.base import Role
from quartet.engine.settings import EngineKind
from quartet.errors import ConfigError
from router.config import RouterConfig
from services.topology.topology import Choices, Chosen, choose, plan_router, plan_workers, read_settings
from services.workers.config import WorkerConfig

CONFIGS = Path(__file__).parents[3] / "configs"
TINY = Path("models/tiny")

ON_GPUS = {
    "model": {"path": "Qwen/Qwen3-0.6B", "name": "qwen3"},
    "engine": {"kind": "trtllm", "publish_events_and_metrics": False, "max_num_tokens": 512},
    "environment": {"CUDA_VISIBLE_DEVICES": "7", "OTHER": "1"},
    "router": {"overrides": {"policy": {"name": "round_robin"}}},
    "workers": [
        {
            "role": "decode",
            "environment": {"CUDA_VISIBLE_DEVICES": "3"},
            "overrides": {"engine": {"extra_engine_args": "e.yaml", "free_gpu_memory_fraction": 0.5}},
        },
        {"role": "prefill", "overrides": {"engine": {"kind": "torch"}}},
    ],
}


def worker_configs(chosen: Chosen) -> list[WorkerConfig]:
    return [build(WorkerConfig, plan.settings) for plan in plan_workers(chosen.topology, num_cores=2)]


def test_nothing_chosen_is_the_file() -> None:
    settings = read_settings(CONFIGS / "disagg.yaml", [])
    chosen = choose(settings, Choices())
    assert chosen.notes == []
    assert chosen.topology.model.path == Path("models/tiny/checkpoint")


@pytest.mark.parametrize("kind", [EngineKind.TORCH, EngineKind.MOCK])
def test_settings_that_the_chosen_engine_lacks_are_dropped_with_a_line_each(kind: EngineKind) -> None:
    chosen = choose(ON_GPUS, Choices(engine=kind))
    for config in worker_configs(chosen):
        assert config.engine.kind is kind
        assert config.engine.max_num_tokens == 512
        assert config.engine.extra_engine_args is None
    assert all("CUDA_VISIBLE_DEVICES" not in plan.environment for plan in plan_workers(chosen.topology, num_cores=1))
    assert chosen.topology.environment == {"OTHER": "1"}
    left_out = [note.partition(":")[0] for note in chosen.notes if "left out" in note]
    assert left_out == [
        "engine.publish_events_and_metrics",
        "workers[0].overrides.engine.extra_engine_args",
        "workers[0].overrides.engine.free_gpu_memory_fraction",
        "workers[0].environment.CUDA_VISIBLE_DEVICES",
        "environment.CUDA_VISIBLE_DEVICES",
    ]
    # Of weights in bfloat16, which mock does not read.
    assert ("engine.dtype: float32" in chosen.notes[-1]) is (kind is EngineKind.TORCH)
    assert ON_GPUS["engine"] == {"kind": "trtllm", "publish_events_and_metrics": False, "max_num_tokens": 512}


def test_torch_on_a_gpu_keeps_its_gpus_and_the_checkpoints_dtype() -> None:
    settings = {
        "engine": {"kind": "trtllm", "device": "cuda:0"},
        "workers": [{"role": "decode", "gpus": [[2]], "overrides": {"engine": {"free_gpu_memory_fraction": 0.5}}}],
    }
    chosen = choose(settings, Choices(engine=EngineKind.TORCH))
    [plan] = plan_workers(chosen.topology, num_cores=1)
    assert plan.environment == {"CUDA_VISIBLE_DEVICES": "2"}
    assert build(WorkerConfig, plan.settings).engine.dtype == "auto"


def test_trtllm_takes_the_settings_for_a_cpu_without_the_device() -> None:
    settings = {"engine": {"kind": "torch", "device": "cpu", "dtype": "float32"}, "workers": [{"role": "decode"}]}
    chosen = choose(settings, Choices(engine=EngineKind.TRTLLM))
    [config] = worker_configs(chosen)
    assert (config.engine.kind, config.engine.dtype) == (EngineKind.TRTLLM, "float32")
    assert chosen.notes == ["engine.device: left out, as the engine trtllm does not have it"]


def test_the_engine_of_the_file_chosen_changes_nothing() -> None:
    chosen = choose({"workers": [{"role": "decode"}]}, Choices(engine=EngineKind.TORCH))
    assert (chosen.notes, chosen.topology.engine.dtype) == ([], "auto")


MEDIA = sorted(
    path for path in CONFIGS.rglob("*.yaml") if "multimodal" in path.stem or path.stem in ("e_pd", "epd_disagg")
)


@pytest.mark.parametrize("path", MEDIA, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_an_engine_that_computes_no_media_gets_none(path: Path) -> None:
    settings = read_settings(path, [])
    chosen = choose(settings, Choices(engine=EngineKind.MOCK, model=TINY))
    roles = {plan.role for plan in plan_workers(chosen.topology, num_cores=1)}
    assert roles
    assert Role.ENCODE not in roles
    groups: Any = settings["workers"]
    for number, group in enumerate(groups):
        is_noted = f"workers[{number}]: left out, as the engine mock encodes no media" in chosen.notes
        assert is_noted is (group["role"] == "encode")


def test_a_modality_that_an_engine_does_not_have_is_left_out() -> None:
    engine = {"engine": {"modality": "multimodal"}}
    settings = {**engine, "workers": [{"role": "decode", "overrides": engine}, {"role": "prefill"}]}
    chosen = choose(settings, Choices(engine=EngineKind.MOCK))
    assert all(config.engine.modality is None for config in worker_configs(chosen))
    assert chosen.notes == [
        "engine.modality: left out, as the engine mock does not have it",
        "workers[0].overrides.engine.modality: left out, as the engine mock does not have it",
    ]
    settings = {"engine": {"modality": "text"}, "workers": [{"role": "decode"}]}
    assert choose(settings, Choices(engine=EngineKind.MOCK)).notes == []


@pytest.mark.parametrize("path", sorted((CONFIGS / "trtllm").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_topology_for_gpus_becomes_one_for_a_laptop(path: Path) -> None:
    chosen = choose(read_settings(path, []), Choices(engine=EngineKind.TORCH, model=TINY))
    plans = plan_workers(chosen.topology, num_cores=2)
    assert all(not plan.gpus and "CUDA_VISIBLE_DEVICES" not in plan.environment for plan in plans)
    assert {plan.settings["model_path"] for plan in plans} == {"models/tiny/checkpoint"}
    assert any(".gpus: left out" in note for note in chosen.notes)


def test_the_files_for_gpt_oss_name_both_of_its_parsers() -> None:
    files = sorted(CONFIGS.rglob("gpt_oss_*.yaml"))
    assert {file.parent.name for file in files} == {"configs", "trtllm"}
    for file in files:
        configs = worker_configs(choose(read_settings(file, ()), Choices()))
        assert {(config.reasoning_parser, config.tool_call_parser) for config in configs} == {("gpt_oss", "harmony")}


@pytest.mark.parametrize(
    ("model", "path", "name"),
    [
        ("models/tiny", "models/tiny/checkpoint", "tiny"),
        ("models/tiny/checkpoint", "models/tiny/checkpoint", "tiny"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", ""),
        ("/no/such/folder", "/no/such/folder", ""),
    ],
)
def test_a_model_is_that_of_all_workers(model: str, path: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CONFIGS.parent)
    own = {"model_path": "own", "model_name": "mine", "custom_jinja_template": "t.jinja", "stall_timeout_s": 7}
    settings = {
        "model": {"name": "n", "reasoning_parser": "gpt_oss", "tool_call_parser": "none"},
        "router": {"overrides": {"custom_chat_template": "t.jinja"}},
        "workers": [{"role": "decode"}, {"role": "prefill", "overrides": own}],
    }
    [before, _] = worker_configs(choose(settings, Choices()))
    assert (before.reasoning_parser, before.tool_call_parser) == ("gpt_oss", "none")
    chosen = choose(settings, Choices(model=Path(model)))
    assert {config.reasoning_parser + config.tool_call_parser for config in worker_configs(chosen)} == {""}
    assert (chosen.topology.model.path, chosen.topology.model.name) == (Path(path), name)
    assert {config.model_path for config in worker_configs(chosen)} == {path}
    assert [note.partition(":")[0] for note in chosen.notes] == [
        "model.reasoning_parser",
        "model.tool_call_parser",
        "router.overrides.custom_chat_template",
        "workers[1].overrides.model_path",
        "workers[1].overrides.model_name",
        "workers[1].overrides.custom_jinja_template",
    ]
    assert worker_configs(chosen)[1].stall_timeout_s == 7


def test_a_served_name_goes_with_a_model_or_without() -> None:
    assert choose(ON_GPUS, Choices(served_model_name="n")).topology.model.name == "n"
    assert choose(ON_GPUS, Choices(served_model_name="n", model=Path("a/b"))).topology.model.name == "n"


def test_directories_of_media_and_the_port_are_the_routers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    choices = Choices(media_paths=[Path("pictures"), Path("/srv/media")], router_port=0)
    router = build(RouterConfig, plan_router(choose(ON_GPUS, choices).topology).settings)
    assert router.media.allowed_local_paths == (tmp_path / "pictures", Path("/srv/media"))
    assert router.policy.name == "round_robin"
    assert router.server.address == "127.0.0.1:0"


def test_settings_that_are_no_mapping_are_refused_as_without_choices() -> None:
    choices = Choices(engine=EngineKind.MOCK, model=Path("m"))
    for settings, message in [
        ({"workers": 3}, "workers: must be a list"),
        ({"workers": [{"role": "decode", "overrides": 3}]}, r"workers\[0\].overrides: must be a mapping"),
        ({"workers": [{"role": "decode"}], "engine": 3}, "engine: must be a mapping"),
        ({"workers": [{"role": "decode"}], "environment": 3}, "environment: must be a mapping"),
    ]:
        with pytest.raises(ConfigError, match=message):
            choose(settings, choices)


@pytest.mark.parametrize(
    ("choices", "endpoint"),
    [
        (Choices(otel=""), ""),
        (Choices(enable_otel=True), ""),
        (Choices(otel="http://collector:4317"), "http://collector:4317"),
    ],
)
def test_tracing_names_services_by_role_and_makes_logs_json(choices: Choices, endpoint: str) -> None:
    chosen = choose(read_settings(CONFIGS / "disagg.yaml", []), choices)
    router = build(RouterConfig, plan_router(chosen.topology).settings)
    configs = [router, *worker_configs(chosen)]
    assert [config.tracing.service_name for config in configs] == [
        "quartet-router",
        "quartet-prefill",
        "quartet-decode",
    ]
    for config in configs:
        assert config.tracing.enabled and config.tracing.endpoint == endpoint
        assert config.log.json


def test_without_it_nothing_is_traced() -> None:
    chosen = choose(read_settings(CONFIGS / "disagg.yaml", []), Choices())
    router = build(RouterConfig, plan_router(chosen.topology).settings)
    assert not any(config.tracing.enabled or config.log.json for config in (router, *worker_configs(chosen)))
