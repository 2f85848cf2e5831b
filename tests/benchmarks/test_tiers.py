"""The benchmark of tiers loads what it says it loads; its table shows the figures."""

from __future__ import annotations

import random

from benchmarks.table import tiers_tables
from benchmarks.tiers import Client, measure_hit
from quartet.engine.settings import CacheSettings, HostCacheSettings
from quartet.events.kv import Tier


async def test_a_hit_is_loaded_and_gives_the_token_that_was_computed() -> None:
    client = Client(8, CacheSettings(host=HostCacheSettings(num_blocks=16)))
    try:
        await client.start()
        hit = await measure_hit(client, random.Random(0), Tier.HOST, num_tokens=200)
    finally:
        await client.close()
    assert hit.num_loaded_tokens == 192
    assert 0 < hit.load_s < hit.loaded_s
    assert hit.computed_s > 0


def test_the_table_shows_ratios_beside_what_is_wanted() -> None:
    tier = {"ratio": 0.031, "computed_s": 5.835, "loaded_s": 0.1648, "gb_per_s": 3.53, "hits": [{}] * 5}
    cost = {"ratio": 0.991, "without": [100.0, 300.0, 200.0], "with_tiers": [198.0] * 3}
    lines = tiers_tables({"host": tier, "disk": {**tier, "ratio": 0.2}, "cost": cost}).splitlines()
    assert lines[2] == "| host | 164.8 | 5835 | 0.031 | <= 1/6 | 3.53 | 5 |"
    assert lines[3] == "| disk | 164.8 | 5835 | 0.200 |  | 3.53 | 5 |"
    assert lines[-1] == "|  | 200 | 198 | 0.991 | >= 0.97 | 3 |"
