"""The benchmark of shared prefixes, on real processes and for a moment."""

from __future__ import annotations

import sys
from dataclasses import asdict

import pytest

from benchmarks import prefixes
from benchmarks.table import prefixes_tables
from tests.e2e.fork_server import ForkServer

pytestmark = pytest.mark.usefixtures("etcd_binary")


async def test_both_policies_answer_everything_and_are_compared(
    monkeypatch: pytest.MonkeyPatch, fork_server: ForkServer
) -> None:
    monkeypatch.setattr(sys, "executable", str(fork_server.python))
    workload = prefixes.Workload(prefix_tokens=512, rate=20.0, warm_up_s=0.5, seconds=1.5)
    results = await prefixes.measure(workload, ["round_robin", "kv_aware"])
    for found in results.policies.values():
        assert found.requests_failed == 0
        assert found.requests_finished > 5
        assert found.ttft_ms.p50 <= found.e2e_ms.p50
    assert results.mean_ttft_ratio["round_robin"] == 1.0
    report = asdict(results)
    assert prefixes_tables(report).count("| `") == 2
