"""The global router's file: Dynamo's names, and an error for each mistake that names the setting."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from quartet.config import build
from quartet.errors import ConfigError
from router.global_router.config import GlobalRouterConfig, load_config, without_units

DISAGG: dict[str, Any] = {
    "num_prefill_pools": 2,
    "num_decode_pools": 2,
    "prefill_pool_dynamo_namespaces": ["p0", "p1"],
    "decode_pool_dynamo_namespaces": ["d0", "d1"],
    "prefill_pool_selection_strategy": {
        "ttft_min": 10,
        "ttft_max": 1000,
        "ttft_resolution": 2,
        "isl_min": 0,
        "isl_max": 4000,
        "isl_resolution": 2,
        "prefill_pool_mapping": [[0, 1], [0, 0]],
    },
    "decode_pool_selection_strategy": {
        "itl_min": 5,
        "itl_max": 50,
        "itl_resolution": 2,
        "context_length_min": 0,
        "context_length_max": 4000,
        "context_length_resolution": 1,
        "decode_pool_mapping": [[0, 1]],
    },
    "pool_routers": {name: [f"127.0.0.1:{port}"] for port, name in enumerate(("p0", "p1", "d0", "d1"), 5000)},
}

AGG: dict[str, Any] = {
    "mode": "agg",
    "num_agg_pools": 2,
    "agg_pool_dynamo_namespaces": ["fast", "slow"],
    "agg_pool_selection_strategy": {
        "ttft_min_ms": 10,
        "ttft_max_ms": 1000,
        "ttft_resolution": 1,
        "itl_min_ms": 5,
        "itl_max_ms": 50,
        "itl_resolution": 2,
        "agg_pool_mapping": [[0, 1]],
    },
    "pool_routers": {"fast": ["127.0.0.1:5000"], "slow": ["127.0.0.1:5001"]},
}


def changed(path: str, value: object, settings: dict[str, Any] = DISAGG) -> dict[str, Any]:
    """``settings`` with another value at ``path``."""
    result = copy.deepcopy(settings)
    *names, last = path.split(".")
    holder = result
    for name in names:
        holder = holder[name]
    holder[last] = value
    return result


def test_a_json_file_with_dynamos_names_is_read(tmp_path: Path) -> None:
    path = tmp_path / "global.json"
    path.write_text(json.dumps(DISAGG), encoding="utf-8")
    config = load_config(path, ["enable_priority_retry=true"])
    prefill, decode = config.group("prefill"), config.group("decode")
    assert (prefill.namespaces, prefill.priorities) == (("p0", "p1"), (0, 1))
    assert [prefill.grid.select(100, target).pool for target in (10, 900)] == [0, 1]
    assert prefill.grid.select(3000, 900).pool == 0
    assert decode.grid.select(100, None).pool == 1
    assert config.enable_priority_retry


def test_names_of_times_may_have_their_unit() -> None:
    config = build(GlobalRouterConfig, without_units(AGG))
    assert config.group("agg").grid.select(None, 40).pool == 1
    both = changed("agg_pool_selection_strategy.itl_min", 5, AGG)
    with pytest.raises(ConfigError, match="itl_min: stands twice"):
        without_units(both)


_PREFILL, _DECODE = "prefill_pool_selection_strategy", "decode_pool_selection_strategy"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("mode", "both", "mode: must be one of"),
        ("num_decode_pools", 0, "num_decode_pools: must be at least 1"),
        ("num_decode_pools", 3, "decode_pool_dynamo_namespaces: has 2 names, and num_decode_pools is 3"),
        ("num_prefill_pools", None, "num_prefill_pools: is missing"),
        ("prefill_pool_dynamo_namespaces", ["p0", "p0"], "prefill_pool_dynamo_namespaces: has a namespace twice"),
        ("prefill_pool_priorities", [1], "prefill_pool_priorities: has 1 numbers"),
        (f"{_PREFILL}.isl_resolution", 0, f"{_PREFILL}.isl_resolution: must be at least 1"),
        (f"{_PREFILL}.ttft_max", 10, f"{_PREFILL}.ttft_min: must be below ttft_max"),
        (f"{_PREFILL}.prefill_pool_mapping", [[0, 1]], f"{_PREFILL}.prefill_pool_mapping: must have 2 rows, not 1"),
        (f"{_DECODE}.decode_pool_mapping", [[0]], r"decode_pool_mapping\[0\]: must have 2 pools, not 1"),
        (f"{_DECODE}.decode_pool_mapping", [[0, 2]], r"decode_pool_mapping\[0\]\[1\]: must be a pool in \[0, 1\]"),
        (f"{_DECODE}.decode_pool_mapping", [[-1, 0]], r"decode_pool_mapping\[0\]\[0\]: must be a pool"),
        (
            f"{_DECODE}.priority_overrides",
            [{"min_priority": 2, "max_priority": 1, "target_pool": 0}],
            r"priority_overrides\[0\].min_priority: must not be above",
        ),
        (
            f"{_DECODE}.priority_overrides",
            [{"min_priority": 1, "max_priority": 1, "target_pool": 2}],
            r"priority_overrides\[0\].target_pool: must be a pool",
        ),
        ("pool_routers.d1", [], "pool_routers.d1: is missing"),
        ("pool_routers.other", ["127.0.0.1:1"], "pool_routers.other: no pool has this namespace"),
        ("pool_routers.d1", ["10.0.0.1"], r"pool_routers.d1\[0\]: must be host:port"),
        ("pool_routers.d1", ["10.0.0.1:1", "10.0.0.1:1"], "pool_routers.d1: has an address twice"),
        ("default_itl_target_ms", -1, "default_itl_target_ms: must not be negative"),
    ],
)
def test_a_mistake_is_refused_by_its_name(path: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(GlobalRouterConfig, changed(path, value))


def test_pools_that_are_not_listed_are_found_in_discovery() -> None:
    settings = changed("pool_routers", {"p0": ["127.0.0.1:5000"], "p1": []})
    with pytest.raises(ConfigError, match=r"pool_routers\.p1: is missing"):
        build(GlobalRouterConfig, settings)
    config = build(GlobalRouterConfig, {**settings, "discovery": {"etcd": {"endpoints": ["10.0.0.1:2379"]}}})
    assert config.discovered == ("p1", "d0", "d1")
    etcd = config.discovery_of("d1").etcd
    assert (etcd.endpoints, etcd.namespace) == (("10.0.0.1:2379",), "d1")
    in_files = build(GlobalRouterConfig, {**settings, "discovery": {"kind": "file", "file": {"directory": "/a"}}})
    files = in_files.discovery_of("p1").file
    assert files is not None and files.namespace_directory == Path("/a/p1")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"discovery": {"etcd": {"namespace": "p0"}}}, "discovery.etcd.namespace: is each pool's own"),
        (
            {"discovery": {"kind": "file", "file": {"directory": "/a", "namespace": "p0"}}},
            "discovery.file.namespace: is each pool's own",
        ),
        ({"discovery": {"kind": "file"}}, "discovery: file must name a directory"),
        (
            {"discovery": {}, "router": {"server": {"namespace": "d0"}}},
            "router.server.namespace: is that of a pool",
        ),
    ],
)
def test_a_mistake_in_discovery_is_refused_by_its_name(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(GlobalRouterConfig, {**DISAGG, **more})
