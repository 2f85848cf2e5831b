"""Both clients are measured under the same load."""

from __future__ import annotations

import pytest

from benchmarks import clients

NUM_STREAMS = 32


@pytest.mark.bench
@pytest.mark.usefixtures("go")
async def test_both_clients_get_the_tokens_that_are_made() -> None:
    found = await clients.measure([NUM_STREAMS], num_rounds=1, window_s=2.0)
    [load] = found.loads
    assert load.num_streams == NUM_STREAMS and load.windows.keys() == {"python", "go"}
    for [window] in load.windows.values():
        assert 0 < window.tokens_per_s < 1.5 * window.made_tokens_per_s
        assert window.client_cpu_us_per_token > 0 and window.router_cpu_us_per_token > 0
    assert load.times > 0
