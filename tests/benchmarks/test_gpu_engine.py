"""The benchmark of the engine on a GPU: all its rows on the CPU, and their table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_engine import PLANS, Row
from benchmarks.table import gpu_engine_tables
from tests.benchmarks.test_gpu_hand_off import REPOSITORY

COMMAND = """
import sys
from benchmarks import gpu_engine
sys.executable = sys.argv.pop(1)
gpu_engine.main()
"""


def test_the_pool_of_the_large_shape_holds_each_batch() -> None:
    plan = PLANS["qwen3-8b"]
    for batch in plan.batches.values():
        num_blocks = -(-(batch.num_prompt_tokens + batch.num_output_tokens) // 16)
        assert batch.num_requests <= plan.max_num_seqs
        assert batch.num_requests * num_blocks <= plan.num_blocks


@pytest.mark.bench
@pytest.mark.e2e
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_all_rows_are_measured(tmp_path: Path, request: pytest.FixtureRequest, device: str) -> None:
    path = tmp_path / "gpu_engine.json"
    # What is forked may not have touched a GPU before.
    python = request.getfixturevalue("fork_server").python if device == "cpu" else sys.executable
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, str(python), "--shape", "tiny", "--device", device, "--json", str(path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    figures = {row["row"]: row["figures"] for row in report["rows"]}
    assert list(figures) == list(Row)
    assert all(run_s > 0 for row in (Row.ONE, Row.MANY, Row.LARGE, Row.PREFILL) for run_s in figures[row]["runs_s"])
    assert len(figures[Row.SAMPLED]["sampled_s"]) == PLANS["tiny"].batches[Row.MANY].num_runs
    assert [case["num_rows"] for case in figures[Row.SAMPLER]["cases"]] == [1, 1, 2, 2, 4, 4]
    assert all(min(case["device_ms"], case["greedy_device_ms"]) > 0 for case in figures[Row.SAMPLER]["cases"])
    chunks = figures[Row.CHUNK]["cases"]
    assert [case["context"] for case in chunks] == list(PLANS["tiny"].chunk.contexts)
    assert all(min(case[name] for name in ("engine_us", "paged_us", "flash_us", "ratio")) > 0 for case in chunks)
    assert all(figures[Row.START][name] > 0 for name in ("cold_s", "warm_s", "share_s"))
    assert figures[Row.GUIDED]["ratio"] > 0 < figures[Row.GUIDED]["half_ratio"]
    assert figures[Row.STACK]["ratio"] > 0
    # As if it had been measured on a GPU: the table finds all that it shows.
    rows = [row | {"shape": "qwen3-8b", "num_gpus": 1, "gpus": ["NVIDIA H100 80GB"]} for row in report["rows"]]
    table = gpu_engine_tables(report | {"rows": rows})
    assert (table.count("not run"), table.count("(H100)")) == (0, 20)
    assert gpu_engine_tables(report).count("not run") == 20
