"""The benchmark of short prompts on a GPU runs at small size, and its table shows the figures."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from benchmarks.random_model import TINY
from benchmarks.table import gpu_short_tables

pytest.importorskip("quartet.engine.torch.kernel_forward", reason="Triton is not installed")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
async def test_all_cases_are_measured(device: str) -> None:
    from benchmarks import gpu_short

    results = await gpu_short.measure(device, TINY, (0, 64), (3, 7), 2)
    assert [(case.context, case.num_tokens) for case in results.cases] == [(0, 3), (0, 7), (64, 3), (64, 7)]
    assert all(min(case.graph_s, case.launched_s) > 0 and case.is_graph for case in results.cases)
    table = gpu_short_tables(json.loads(json.dumps(asdict(results))))
    assert table.count("| the graph |") == 4
