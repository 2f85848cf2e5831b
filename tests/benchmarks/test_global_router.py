"""What relaying costs a global router is measured on real processes."""

from __future__ import annotations

import pytest

from benchmarks import global_router


@pytest.mark.bench
async def test_a_global_router_and_its_pools_relay_the_same_tokens() -> None:
    found = await global_router.measure(16, 2, 0.5)
    for figures in found.loads.values():
        assert len(figures.windows) == 2
        assert all(window.tokens_per_s > 0 and window.pool_cpu_us_per_token > 0 for window in figures.windows)
        assert figures.ratio > 0
