"""``quartet grid``: the cheapest pool that meets each cell, in a file that a global router reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quartet.config import build
from router.global_router.config import GlobalRouterConfig
from router.global_router.grid import Axis
from router.global_router.grid_builder import MeasuredPool, length_grid, priorities
from tests.cli.conftest import RunCli

FAST = MeasuredPool(namespace="fast", cost=8, latency_ms={"ttft": {0: 10, 1000: 110}})
CHEAP = MeasuredPool(namespace="cheap", cost=1, latency_ms={"ttft": {0: 100, 1000: 500}})
DISAGG = """
percentile: p50
prefill:
  isl: {min: 0, max: 2000, resolution: 2}
  ttft: {min: 0, max: 600, resolution: 3}
  pools:
    - {namespace: fast, cost: 8, points: [{length: 0, ttft_ms: 10}, {length: 1000, ttft_ms: 110}]}
    - {namespace: cheap, cost: 1, points: [{length: 0, ttft_ms: 100}, {length: 1000, file: replay.json}]}
decode:
  context_length: {min: 0, max: 8000, resolution: 1}
  itl: {min: 0, max: 40, resolution: 2}
  pools:
    - {namespace: swift, cost: 8, points: [{length: 4000, file: bench.json}]}
    - {namespace: thrifty, cost: 1, points: [{length: 4000, itl_ms: 30}]}
"""


def test_a_latency_is_on_the_line_through_the_two_nearest_points() -> None:
    pool = MeasuredPool(namespace="p", cost=1, latency_ms={"ttft": {100: 10, 200: 20, 400: 80}, "itl": {5: 3}})
    assert [pool.predict_ms("ttft", at) for at in (100, 150, 200, 300, 400, 500)] == [10, 15, 20, 50, 80, 110]
    assert pool.predict_ms("ttft", 0) == 0
    assert pool.predict_ms("itl", 9999) == 3


def test_a_cell_has_the_cheapest_pool_that_meets_it_or_else_the_fastest() -> None:
    # In the middle of the rows, at 500 and 1500 tokens, fast takes 60 and 160 ms, cheap 300 and 700.
    mapping = length_grid([FAST, CHEAP], "ttft", Axis(0, 2000, 2), Axis(0, 600, 3))
    assert mapping == [[0, 1, 1], [0, 0, 0]]
    assert length_grid([CHEAP, FAST], "ttft", Axis(0, 2000, 1), Axis(0, 10, 1)) == [[1]]
    assert priorities([CHEAP, FAST], ["ttft"], 500) == [1, 0]


async def test_a_global_router_reads_what_is_made_of_measurements_and_replays(tmp_path: Path, run_cli: RunCli) -> None:
    (tmp_path / "pools.yaml").write_text(DISAGG)
    (tmp_path / "replay.json").write_text(json.dumps({"policies": {"kv_aware": {"ttft_ms": {"p50": 500, "p90": 9}}}}))
    (tmp_path / "bench.json").write_text(json.dumps({"points": [{"itl_ms": {"p50": 5, "p90": 9}}]}))
    result = await run_cli("grid", str(tmp_path / "pools.yaml"))
    assert result.exit_code == 0, result.output
    made = json.loads(result.stdout)
    routers = {name: ["127.0.0.1:1"] for name in ("fast", "cheap", "swift", "thrifty")}
    config = build(GlobalRouterConfig, {**made, "pool_routers": routers})
    assert config.group("prefill").grid.mapping == ((0, 1, 1), (0, 0, 0))
    assert config.group("decode").grid.mapping == ((0, 1),)
    assert (config.group("prefill").priorities, config.group("decode").priorities) == ((0, 1), (0, 1))


async def test_pools_that_do_both_are_chosen_by_both_targets(tmp_path: Path, run_cli: RunCli) -> None:
    pools = [
        {"namespace": "fast", "cost": 8, "points": [{"length": 500, "ttft_ms": 100, "itl_ms": 5}]},
        {"namespace": "slow", "cost": 1, "points": [{"length": 500, "ttft_ms": 400, "itl_ms": 30}]},
    ]
    axes = {"ttft": {"min": 0, "max": 1000, "resolution": 2}, "itl": {"min": 0, "max": 40, "resolution": 2}}
    (tmp_path / "pools.json").write_text(json.dumps({"agg": {**axes, "length": 500, "pools": pools}}))
    made = json.loads((await run_cli("grid", str(tmp_path / "pools.json"))).stdout)
    assert made["agg_pool_selection_strategy"]["agg_pool_mapping"] == [[0, 1], [0, 1]]
    build(GlobalRouterConfig, {**made, "pool_routers": {"fast": ["127.0.0.1:1"], "slow": ["127.0.0.1:1"]}})


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("ttft_ms: 10}", "itl_ms: 10}", "fast, length 0: needs ttft_ms, or a file"),
        ("file: replay.json", "file: none.json", "cheap, length 1000: none.json is no JSON"),
        ("max: 600, resolution: 3", "max: 600, resolution: 0", "prefill.ttft.resolution: must be at least 1"),
        ("length: 1000, ttft_ms: 110", "length: 0, ttft_ms: 110", "points: a length stands twice"),
        ("decode:", "decoding:", "decoding: unknown"),
    ],
)
async def test_a_mistake_is_told_by_its_name(tmp_path: Path, run_cli: RunCli, old: str, new: str, message: str) -> None:
    assert old in DISAGG
    (tmp_path / "pools.yaml").write_text(DISAGG.replace(old, new))
    result = await run_cli("grid", str(tmp_path / "pools.yaml"))
    assert result.exit_code == 1
    assert message in " ".join(result.output.split())
