"""What routing costs, measured on a small index."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from benchmarks import routing_cost
from benchmarks.table import routing_cost_tables


async def test_every_policy_routes_every_request_and_its_parts_make_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing_cost, "_NUM_REQUESTS", 20)
    results = await routing_cost.measure(5_000)
    assert set(results.policies) == {"kv_aware", "least_loaded", "round_robin"}
    for name, cost in results.policies.items():
        assert cost.snapshot_us > 0
        assert cost.assign_us > 0
        assert cost.total_us + results.hash_us == results.routing_us[name]
    assert routing_cost_tables(asdict(results)).count("\n| `") == 3
