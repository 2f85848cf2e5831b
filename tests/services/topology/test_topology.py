"""Topology files: what they mean for each process, and where they are wrong."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from quartet.config import build, override
from quartet.discovery.base import Role
from quartet.errors import ConfigError
from quartet.rpc.channels import TlsConfig
from quartet.transfer.base import TransferWay
from router.config import RouterConfig
from router.global_router.config import GlobalRouterConfig
from services.topology.certificates import issue_run_certificates
from services.topology.topology import (
    ModelNeed,
    RouterGroup,
    Topology,
    WorkerGroup,
    load_topology,
    merge,
    plan_pool_routers,
    plan_router,
    plan_workers,
    to_settings,
    with_certificates,
    with_http_identity,
)
from services.workers.config import WorkerConfig

CONFIGS = Path(__file__).parents[3] / "configs"


def write(directory: Path, text: str) -> Path:
    file = directory / "topology.yaml"
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("name", "worker_ids"),
    [
        ("agg", ["decode-0"]),
        ("disagg", ["prefill-0", "decode-0"]),
        ("global", ["prefill-0", "prefill-1", "decode-0", "decode-1"]),
        ("mock_fleet", ["prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2", "decode-3"]),
    ],
)
def test_the_topologies_that_come_along_can_be_read(name: str, worker_ids: list[str]) -> None:
    topology = load_topology(CONFIGS / f"{name}.yaml")
    assert [plan.name for plan in plan_workers(topology, num_cores=2)] == worker_ids
    assert topology.router.port == 50050


ELEVEN = (
    "agg",
    "agg_multimodal",
    "agg_router",
    "disagg",
    "disagg_multimodal",
    "disagg_router",
    "e_pd",
    "epd_disagg",
    "epd_multimodal_image",
    "epd_multimodal_image_and_embeddings",
    "gpt_oss_disagg",
)


@pytest.mark.parametrize("name", ELEVEN)
def test_each_of_the_eleven_comes_for_a_laptop_and_for_gpus_with_the_same_workers(name: str) -> None:
    laptop, host = (
        plan_workers(load_topology(CONFIGS / part / f"{name}.yaml"), num_cores=4) for part in ("", "trtllm")
    )
    # Llama 4 takes no ready embeddings, and its pictures are encoded by Prefill.
    only_laptop = {"encode-0"} if name == "epd_disagg" else set()
    assert [plan.name for plan in laptop if plan.name not in only_laptop] == [plan.name for plan in host]
    kinds = [[build(WorkerConfig, plan.settings).engine.kind.value for plan in plans] for plans in (laptop, host)]
    assert kinds == [["torch"] * len(laptop), ["trtllm"] * len(host)]
    assert not any(plan.gpus for plan in laptop)
    assert all(plan.gpus for plan in host)


ON_GPUS = {
    "agg": {"decode-0": (0,)},
    "disagg": {"prefill-0": (0,), "decode-0": (1,)},
    "disagg_2p2d": {"prefill-0": (0,), "prefill-1": (1,), "decode-0": (2,), "decode-1": (3,)},
}


def test_each_topology_of_the_folder_for_gpus_is_known() -> None:
    assert {file.stem for file in (CONFIGS / "gpu").iterdir()} == set(ON_GPUS)


@pytest.mark.parametrize("weights", ["auto", "random"])
@pytest.mark.parametrize("name", ON_GPUS)
def test_workers_of_the_embedded_engine_have_a_gpu_each_and_a_way_between_them(name: str, weights: str) -> None:
    topology = load_topology(CONFIGS / "gpu" / f"{name}.yaml", [f"engine.load_format={weights}"])
    plans = plan_workers(topology, num_cores=4)
    assert {plan.name: plan.gpus for plan in plans} == ON_GPUS[name]
    assert [plan.environment for plan in plans] == [{"CUDA_VISIBLE_DEVICES": f"{plan.gpus[0]}"} for plan in plans]
    assert [plan.after for plan in plans] == [()] * len(plans)
    assert {plan.model for plan in plans} == {ModelNeed("Qwen/Qwen3-8B", has_weights=weights == "auto")}
    for plan in plans:
        config = build(WorkerConfig, plan.settings)
        assert (config.engine.kind.value, config.engine.device, config.engine.dtype) == ("torch", "cuda:0", "auto")
        assert config.transfer.ways[0] is TransferWay.CUDA_IPC
        assert config.engine.free_gpu_memory_fraction
    assert plan_router(topology).settings["server"] == {"address": "127.0.0.1:50050", "namespace": topology.namespace}


def after(topology: Topology) -> list[tuple[str, ...]]:
    return [plan.after for plan in plan_workers(topology, num_cores=1)]


def test_workers_that_take_shares_of_one_gpu_s_memory_start_one_after_the_other() -> None:
    disagg = CONFIGS / "disagg.yaml"
    assert after(load_topology(disagg)) == [(), ()]
    on_a_gpu = "engine.device=cuda:0"
    assert after(load_topology(disagg, [on_a_gpu])) == [(), ()]  # 512 blocks each, whatever is free
    shares = [on_a_gpu, "engine.num_blocks=null", "engine.free_gpu_memory_fraction=0.4"]
    assert after(load_topology(disagg, shares)) == [(), ("prefill-0",)]
    pictures = load_topology(CONFIGS / "epd_multimodal_image.yaml", shares)
    assert after(pictures) == [(), ("encode-0",), ("encode-0", "prefill-0")]


@pytest.mark.parametrize(
    ("first", "second", "waits"),
    [
        ({"device": "cuda:0", "free_gpu_memory_fraction": 0.5}, {"device": "cuda:1"}, False),
        ({"device": "cuda:0", "free_gpu_memory_fraction": 0.5}, {"device": "cuda:0", "num_blocks": 4}, True),
        ({"device": "cuda:0", "num_blocks": 4}, {"device": "cuda:0", "free_gpu_memory_fraction": 0.5}, True),
        ({"device": "cpu"}, {"device": "cuda:0", "free_gpu_memory_fraction": 0.5}, False),
    ],
)
def test_only_workers_of_one_gpu_wait(first: dict[str, object], second: dict[str, object], *, waits: bool) -> None:
    roles = [{"role": "decode", "overrides": {"engine": engine}} for engine in (first, second)]
    assert after(build(Topology, {"workers": roles})) == [(), ("decode-0",) if waits else ()]


def test_a_gpu_is_the_same_by_whatever_setting_a_worker_gets_it() -> None:
    share = {"engine": {"device": "cuda:0", "free_gpu_memory_fraction": 0.5}}
    hidden = {"CUDA_VISIBLE_DEVICES": "2, 1"}
    roles = [
        {"role": "decode", "gpus": [[1]], "overrides": share},
        {"role": "decode", "environment": hidden, "overrides": share},
        {"role": "decode", "environment": hidden, "overrides": {"engine": {**share["engine"], "device": "cuda:1"}}},
        {"role": "decode", "overrides": {"engine": {**share["engine"], "device": "cuda:2"}}},
    ]
    assert after(build(Topology, {"workers": roles})) == [(), (), ("decode-0",), ("decode-1",)]


def test_the_namespaces_of_topologies_are_their_own() -> None:
    files = [*CONFIGS.glob("*.yaml"), *CONFIGS.glob("trtllm/*.yaml"), *CONFIGS.glob("gpu/*.yaml")]
    assert len({load_topology(file).namespace for file in files}) == len(files)


def test_gpus_and_variables_go_to_each_process(tmp_path: Path) -> None:
    text = """
        environment: {A: all, B: all}
        router: {environment: {B: router}}
        workers:
          - {role: decode, replicas: 2, gpus: [[0, 1], [2, 3]], environment: {A: decode}}
          - {role: prefill}
    """
    topology = load_topology(write(tmp_path, text))
    plans = [*plan_workers(topology, num_cores=1), plan_router(topology)]
    assert [plan.gpus for plan in plans] == [(0, 1), (2, 3), (), ()]
    assert [plan.environment for plan in plans] == [
        {"A": "decode", "B": "all", "CUDA_VISIBLE_DEVICES": "0,1"},
        {"A": "decode", "B": "all", "CUDA_VISIBLE_DEVICES": "2,3"},
        {"A": "all", "B": "all"},
        {"A": "all", "B": "router"},
    ]


def test_groups_name_their_processes_and_no_two_have_one_name(tmp_path: Path) -> None:
    text = """
        workers:
          - {role: decode, name: writer, replicas: 2}
          - {role: decode}
          - {role: prefill, name: decode}
          - {role: prefill, name: writer}
    """
    plans = plan_workers(load_topology(write(tmp_path, text)), num_cores=1)
    assert [plan.name for plan in plans] == ["writer-0", "writer-1", "decode-0", "decode-1", "writer-2"]
    assert [plan.settings["worker_id"] for plan in plans] == [plan.name for plan in plans]
    assert [plan.module.partition(".")[2] for plan in plans] == ["decode", "decode", "decode", "prefill", "prefill"]


def test_two_workers_may_have_one_gpu_where_that_is_meant(tmp_path: Path) -> None:
    text = "share_gpus: true\nworkers: [{role: decode, gpus: [[0]]}, {role: prefill, gpus: [[0]]}]"
    assert [plan.gpus for plan in plan_workers(load_topology(write(tmp_path, text)), num_cores=1)] == [(0,), (0,)]


def test_encode_workers_share_cores_with_the_others_and_have_the_settings_of_all() -> None:
    roles = [{"role": "encode", "replicas": 2}, {"role": "decode", "overrides": {"engine": {"modality": "multimodal"}}}]
    topology = build(Topology, {"workers": roles, "engine": {"num_embedding_blocks": 7}})
    plans = plan_workers(topology, num_cores=6)
    assert [plan.name for plan in plans] == ["encode-0", "encode-1", "decode-0"]
    assert [plan.module for plan in plans] == ["services.encode", "services.encode", "services.decode"]
    assert [plan.num_threads for plan in plans] == [2, 2, 2]
    configs = [build(WorkerConfig, plan.settings) for plan in plans]
    assert [config.engine.num_embedding_blocks for config in configs] == [7, 7, 7]
    assert [config.engine.encodes_media for config in configs] == [False, False, True]


def test_the_mock_engine_encodes_nothing() -> None:
    workers = [{"role": "decode"}, {"role": "encode", "overrides": {"engine": {"kind": "mock"}}}]
    with pytest.raises(ConfigError, match=r"workers\[1\].role: the engine mock encodes no media"):
        plan_workers(build(Topology, {"workers": workers}), num_cores=2)
    with pytest.raises(ConfigError, match=r"engine.modality: the engine mock takes text only"):
        build(Topology, {"workers": [{"role": "decode"}], "engine": {"kind": "mock", "modality": "multimodal"}})


_ON_A_GPU = {"engine": {"device": "cuda:0"}}


@pytest.mark.parametrize(
    ("engine", "prefill", "decode"),
    [
        ({"device": "cuda:0"}, {"transfer": {"ways": ["grpc"]}}, {}),
        ({"device": "cuda:0"}, {}, {"transfer": {"ways": ["grpc"]}}),
        ({}, _ON_A_GPU, {}),
        ({}, {}, _ON_A_GPU),
        ({"device": "cuda:0"}, {"engine": {"device": "cpu"}}, {}),
    ],
)
def test_prefill_and_decode_may_be_on_gpus_and_cpus_by_any_ways(
    engine: dict[str, object], prefill: dict[str, object], decode: dict[str, object]
) -> None:
    workers = [{"role": "decode", "overrides": decode}, {"role": "prefill", "overrides": prefill}]
    assert len(plan_workers(build(Topology, {"engine": engine, "workers": workers}), num_cores=2)) == 2


def test_workers_that_need_no_hand_offs_may_be_on_any_device() -> None:
    on_a_gpu: dict[str, Any] = {"role": "decode", "overrides": _ON_A_GPU}
    other = {"role": "decode", "overrides": {**_ON_A_GPU, "model_path": "another"}}
    encode = {"role": "encode", "overrides": _ON_A_GPU}
    for workers in (
        [on_a_gpu],
        [on_a_gpu, encode],
        [on_a_gpu, {"role": "prefill"}, {"role": "decode"}],  # one of them takes hand-offs
        [on_a_gpu, {"role": "prefill", "overrides": _ON_A_GPU}],
        [other, {"role": "prefill"}, {"role": "decode"}],
    ):
        assert len(plan_workers(build(Topology, {"workers": workers}), num_cores=2)) == len(workers)


def test_every_process_gets_the_whole_of_its_settings(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        """
        namespace: here
        model: {path: /models/tiny, name: tiny}
        engine: {num_blocks: 64}
        discovery: {kind: etcd, etcd: {endpoints: ["10.0.0.1:2379"], lease_ttl_s: 9}}
        router: {port: 6000, overrides: {policy: {name: round_robin}, server: {reflection: false}}}
        workers:
          - role: decode
            replicas: 2
          - role: prefill
            overrides: {engine: {num_blocks: 32}, stall_timeout_s: 5}
          - role: decode
        drain_timeout_s: 2
        """,
    )
    topology = load_topology(file)
    plans = plan_workers(topology, num_cores=8)
    assert [plan.name for plan in plans] == ["decode-0", "decode-1", "prefill-0", "decode-2"]
    assert [plan.module for plan in plans[1:3]] == ["services.decode", "services.prefill"]

    configs = [build(WorkerConfig, plan.settings) for plan in plans]
    assert [config.worker_id for config in configs] == [plan.name for plan in plans]
    assert [config.engine.num_blocks for config in configs] == [64, 64, 32, 64]
    prefill = configs[2]
    assert (prefill.model_path, prefill.model_name) == ("/models/tiny", "tiny")
    assert (prefill.stall_timeout_s, prefill.drain_timeout_s) == (5.0, 2.0)
    assert prefill.server.namespace == "here"
    etcd = prefill.discovery.etcd
    assert (etcd.endpoints, etcd.namespace, etcd.lease_ttl_s) == (("10.0.0.1:2379",), "here", 9)

    settings = plan_router(topology).settings
    assert settings["policy"] == {"name": "round_robin"}
    assert settings["server"] == {"address": "127.0.0.1:6000", "namespace": "here", "reflection": False}


def test_keys_go_to_the_router_and_to_decode_workers(tmp_path: Path) -> None:
    text = """
        router: {overrides: {signing_keys_file: own/keys}}
        workers: [{role: decode}, {role: prefill}, {role: decode, overrides: {signing_keys_file: other/keys}}]
    """
    topology = replace(load_topology(write(tmp_path, text)), signing_keys_file=Path("drawn/keys"))
    files = [plan.settings["signing_keys_file"] for plan in plan_workers(topology, num_cores=1)]
    assert files == ["drawn/keys", None, "other/keys"]
    assert plan_router(topology).settings["signing_keys_file"] == "own/keys"
    without = replace(load_topology(write(tmp_path, "workers: [{role: decode}]")), signing_keys_file=Path("drawn/keys"))
    assert plan_router(without).settings["signing_keys_file"] == "drawn/keys"


def test_torch_workers_share_the_cores(tmp_path: Path) -> None:
    text = "workers: [{role: decode, replicas: 3}, {role: prefill, overrides: {engine: {num_threads: 7}}}]"
    topology = load_topology(write(tmp_path, text))
    assert [plan.num_threads for plan in plan_workers(topology, num_cores=16)] == [4, 4, 4, 7]
    assert [plan.num_threads for plan in plan_workers(topology, num_cores=2)] == [1, 1, 1, 7]


def test_a_limited_worker_has_no_more_threads_than_cpus_and_tensorrt_llm_leaves_it_there(tmp_path: Path) -> None:
    limits = "limits: {cpus: 2, memory_gb: 1.5}"
    text = f"""
        workers:
          - {{role: decode, {limits}}}
          - {{role: decode, {limits}, overrides: {{engine: {{kind: trtllm}}}}}}
          - {{role: decode, {limits}, overrides: {{engine: {{kind: trtllm}}}},
             environment: {{TLLM_NUMA_AWARE_WORKER_AFFINITY: "1"}}}}
          - {{role: decode, overrides: {{engine: {{kind: trtllm}}}}}}
    """
    plans = plan_workers(load_topology(write(tmp_path, text)), num_cores=16)
    assert [plan.num_threads for plan in plans] == [2, None, None, None]
    assert [plan.limits.memory_bytes for plan in plans] == [1_500_000_000] * 3 + [None]
    numa = [plan.environment.get("TLLM_NUMA_AWARE_WORKER_AFFINITY") for plan in plans]
    assert numa == [None, "0", "1", None]


def test_mock_workers_take_no_share_of_the_cores_and_need_no_weights(tmp_path: Path) -> None:
    text = "model: {path: m}\nworkers: [{role: decode, overrides: {engine: {kind: mock}}}, {role: prefill}]"
    plans = plan_workers(load_topology(write(tmp_path, text)), num_cores=4)
    assert [plan.num_threads for plan in plans] == [1, 4]
    assert [plan.model for plan in plans] == [ModelNeed("m", has_weights=False), ModelNeed("m", has_weights=True)]


def test_assignments_lie_over_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "router: {port: 1}\nworkers: [{role: decode}]\n")
    topology = load_topology(file, ["router.port=0", "engine.scheduler.max_num_seqs=3", "namespace=other"])
    assert topology.router.port == 0
    assert topology.engine.scheduler.max_num_seqs == 3
    assert topology.discovery_of("").etcd.namespace == "other"


def test_a_file_registry_needs_no_etcd(tmp_path: Path) -> None:
    text = f"namespace: ns\ndiscovery: {{kind: file, file: {{directory: {tmp_path}}}}}\nworkers: [{{role: decode}}]"
    topology = load_topology(write(tmp_path, text))
    directory = topology.discovery_of("").file
    assert directory is not None
    assert (directory.directory, directory.namespace) == (tmp_path, "ns")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "workers: is missing"),
        ("workers: []", "workers: at least one must have the role decode"),
        ("workers: [{role: prefill}]", "workers: at least one must have the role decode"),
        ("workers: [{role: router}]", r"workers\[0\].role: must be one of encode, prefill, decode"),
        ("workers: [{role: decode, replicas: 0}]", r"workers\[0\].replicas: must be at least 1"),
        ("workers: [{role: decode}]\nnamspace: x", "namspace: unknown; did you mean namespace"),
        ("workers: [{role: decode}]\nnamespace: a b", "namespace must be"),
        ("workers: [{role: decode}]\nrouter: {port: 70000}", "router.port: must be in"),
        ("workers: [{role: decode}]\nrouter: {policy: x}", "router.policy: unknown"),
        ("workers: [{role: decode}]\nengine: {num_blocs: 1}", "engine.num_blocs: unknown"),
        ("workers: [{role: decode}]\nmodel: {reasoning_parser: x}", "model.reasoning_parser: no parser is called x"),
        (
            "workers: [{role: decode}]\nmodel: {reasoning_parser: gpt_oss, tool_call_parser: hermes}",
            "model.tool_call_parser: the parsers gpt_oss and hermes don't go together",
        ),
        ("workers: [{role: decode, overrides: {tool_call_parser: x}}]", r"workers\[0\].overrides.tool_call_parser: no"),
        ("workers: [{role: decode}]\nengine: {kind: abacus}", "engine.kind: must be one of"),
        ("workers: [{role: decode}]\nengine: {mock: {speed_up: 0}}", "engine.mock.speed_up: must be above 0"),
        (
            "workers: [{role: decode}]\nengine: {mock: {timing: {decode_base: -1}}}",
            "engine.mock.timing.decode_base: must not be negative",
        ),
        (
            "workers: [{role: decode, gpus: [[0], [1]]}]",
            r"workers\[0\].gpus: must be a list for each of 1 replicas, not 2",
        ),
        ("workers: [{role: decode, gpus: [[]]}]", r"workers\[0\].gpus\[0\]: must hold different numbers"),
        ("workers: [{role: decode, gpus: [[1, 1]]}]", r"workers\[0\].gpus\[0\]: must hold different numbers"),
        ("workers: [{role: decode, gpus: [[-1]]}]", r"workers\[0\].gpus\[0\]: must hold different numbers"),
        ("workers: [{role: decode, gpus: [0]}]", r"workers\[0\].gpus\[0\]: must be a list"),
        (
            "workers: [{role: decode, replicas: 2, gpus: [[0], [1, 0]]}]",
            "workers: several have GPU 0; if that is meant, say share_gpus: true",
        ),
        ("workers: [{role: decode, environment: {A: 1}}]", r"workers\[0\].environment.A: must be text"),
        (
            "workers: [{role: decode, gpus: [[0]], environment: {CUDA_VISIBLE_DEVICES: '1'}}]",
            r"workers\[0\].environment.CUDA_VISIBLE_DEVICES: gpus says it already",
        ),
        (
            "environment: {CUDA_VISIBLE_DEVICES: '1'}\nworkers: [{role: decode, gpus: [[0]]}]",
            "environment.CUDA_VISIBLE_DEVICES: the workers' gpus say it already",
        ),
        ("workers: [{role: decode, name: a b}]", r"workers\[0\].*name must be"),
        ("workers: [{role: decode, limits: {cpus: 0}}]", r"workers\[0\].limits.cpus: must be at least 1"),
        ("workers: [{role: decode, limits: {cpus: 0.5}}]", r"workers\[0\].limits.cpus: must be a whole number"),
        ("workers: [{role: decode, limits: {memory_gb: 0}}]", r"workers\[0\].limits.memory_gb: must be above 0"),
        ("workers: [{role: decode, limits: {memory: 1}}]", r"workers\[0\].limits.memory: unknown; did you mean mem"),
        ("workers: [{role: decode}]\ntrtllm_start_interval_s: -1", "trtllm_start_interval_s: must not be negative"),
        ("workers: [{role: decode}]\ndrain_timeout_s: 0", "drain_timeout_s: must be above 0"),
        ("workers: [{role: decode, overrides: {engine: {num_blocs: 1}}}]", r"workers\[0\].overrides.engine.num_blocs:"),
        ("workers: [{role: decode, overrides: {stall_timeout_s: 0}}]", r"workers\[0\].overrides.stall_timeout_s"),
    ],
)
def test_a_mistake_is_named_by_its_path(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_workers(load_topology(write(tmp_path, text)), num_cores=1)


def test_settings_are_what_build_reads() -> None:
    topology = build(Topology, {"workers": [{"role": "decode", "overrides": {"a": [1]}}]})
    settings = to_settings(topology)
    assert isinstance(settings, dict)
    assert build(Topology, settings) == topology
    group = {"role": Role.DECODE.value, "pool": "", "host": "", "name": "", "replicas": 1, "gpus": []}
    group |= {"environment": {}, "limits": {"cpus": None, "memory_gb": None}}
    assert settings["workers"] == [{**group, "overrides": {"a": [1]}}]


def test_merging_goes_down_into_mappings_only() -> None:
    base = {"a": {"x": 1, "y": [1, 2]}, "b": 1}
    assert merge(base, {"a": {"y": [3]}, "b": {"z": 0}}) == {"a": {"x": 1, "y": [3]}, "b": {"z": 0}}
    assert base == {"a": {"x": 1, "y": [1, 2]}, "b": 1}


@pytest.mark.parametrize("setting", ["server.tls", "events_key_file"])
@pytest.mark.parametrize("where", ["router", "workers[1]"])
def test_certificates_of_a_run_and_certificates_of_ones_own_exclude_each_other(where: str, setting: str) -> None:
    files = {"ca_file": "ca.pem", "cert_file": "c.pem", "key_file": "k.pem"}
    value: object = files if setting == "server.tls" else "key"
    own = override({}, f"{setting}={yaml.safe_dump(value, default_flow_style=True).splitlines()[0]}")
    decode = WorkerGroup(role=Role.DECODE)
    settings: dict[str, Any] = {"workers": (decode, decode), "router": RouterGroup()}
    if where == "router":
        settings["router"] = RouterGroup(overrides=own)
    else:
        settings["workers"] = (decode, replace(decode, overrides=own))
    Topology(**settings)
    with pytest.raises(ConfigError, match=rf"^{re.escape(where)}\.overrides\.{re.escape(setting)}: tls makes its own"):
        Topology(**settings, tls=True)


@pytest.mark.parametrize(
    ("file", "where"), [("disagg.yaml", "router.overrides"), ("global.yaml", "global_router.router")]
)
def test_a_port_of_http_that_up_would_not_print_is_refused(file: str, where: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{re.escape(where)}\.http\.port: .*router\.http_port"):
        load_topology(CONFIGS / file, [f"{where}.http.port=28000"])
    assert load_topology(CONFIGS / file, ["router.http_port=28000"]).router.http_port == 28000


def test_every_process_gets_its_own_certificate_and_all_of_them_one_key_for_events(tmp_path: Path) -> None:
    topology = load_topology(CONFIGS / "epd_multimodal_image.yaml", ["tls=true"])
    plans = [*plan_workers(topology, num_cores=2), plan_router(topology)]
    run = issue_run_certificates(tmp_path / "run", topology.namespace, {plan.name: plan.role for plan in plans})
    assert run.processes.keys() == {"encode-0", "prefill-0", "decode-0", "router"}
    for plan in plans:
        secured = with_certificates(plan, run.processes[plan.name], tmp_path / "events_key")
        if plan.name == "router":
            secured = with_http_identity(secured, run.processes[plan.name], tmp_path / "http_keys")
        config = build(RouterConfig if plan.name == "router" else WorkerConfig, secured.settings)
        assert config.server.tls == run.processes[plan.name]
        assert config.events_key_file == tmp_path / "events_key"
    assert isinstance(config, RouterConfig) and config.http.tls is not None
    assert (config.http.port, config.http.keys_file) == (8000, tmp_path / "http_keys")
    assert config.http.tls.cert_file == run.processes["router"].cert_file


def test_each_pool_is_a_namespace_with_a_router_and_trusts_the_others() -> None:
    topology = replace(load_topology(CONFIGS / "global.yaml"), tls=True)
    ports = {"prefill-fast": 1, "prefill-slow": 2, "decode-fast": 3, "decode-slow": 4}
    topology = replace(topology, router=replace(topology.router, pool_ports=ports))
    workers = [build(WorkerConfig, plan.settings) for plan in plan_workers(topology, num_cores=2)]
    assert [one.discovery.etcd.namespace for one in workers] == list(ports)
    assert [one.server.namespace for one in workers] == list(ports)
    assert set(workers[0].server.trusted_namespaces) == {"global", "prefill-slow", "decode-fast", "decode-slow"}
    routers = {plan.pool: plan for plan in plan_pool_routers(topology)}
    assert list(routers) == list(ports)
    prefill, decode = (build(RouterConfig, routers[pool].settings) for pool in ("prefill-fast", "decode-slow"))
    assert (prefill.required_roles, prefill.prefill_pools) == ((Role.PREFILL,), {})
    prefill_pools = {"prefill-fast": ("127.0.0.1:1",), "prefill-slow": ("127.0.0.1:2",)}
    assert (decode.required_roles, decode.prefill_pools) == ((Role.DECODE,), prefill_pools)
    assert (decode.server.address, decode.trusted_gateways) == ("127.0.0.1:4", ("global/router",))
    plan = plan_router(topology)
    config = build(GlobalRouterConfig, plan.settings)
    assert (plan.module, config.pool_routers["decode-fast"]) == ("router.global_router", ("127.0.0.1:3",))
    assert (config.router.server.address, config.router.http.port) == ("127.0.0.1:50050", 8000)
    tls = TlsConfig(ca_file=Path("ca"), cert_file=Path("cert"), key_file=Path("key"))
    served = with_http_identity(with_certificates(plan, tls, Path("events")), tls, Path("keys"))
    assert build(GlobalRouterConfig, served.settings).router.http.keys_file == Path("keys")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workers": [{"role": "decode"}], "global_router": {}}, r"workers\[0\].pool: is missing"),
        ({"workers": [{"role": "decode", "pool": "a"}]}, r"workers\[0\].pool: is for topologies with global_router"),
        (
            {"namespace": "a", "workers": [{"role": "decode", "pool": "a"}], "global_router": {}},
            r"workers\[0\].pool: is the namespace of the global router",
        ),
    ],
)
def test_pools_and_a_global_router_go_together(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(Topology, settings)
