"""The prefix index drops expired predictions and ranks that are gone."""

from __future__ import annotations

import asyncio

import pytest

from quartet.discovery.base import Rank
from quartet.events.kv import Tier
from router.kv_index import index as index_upkeep
from router.kv_index.index import PrefixIndex, keep_up

_TIMEOUT_S = 30.0


async def test_predictions_end_and_gone_workers_are_swept_out_a_little_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(index_upkeep, "_SWEPT_AT_ONCE", 10)
    index = PrefixIndex()
    index.store(Rank("gone"), None, range(1, 101))
    index.store(Rank("here"), None, range(1000, 1010))
    index.predict(Rank("here"), [7, 8], 0.0)
    index.clear(Rank("gone"))
    assert (index.num_blocks(Tier.DEVICE), index.num_predicted_blocks) == (110, 2)
    task = asyncio.create_task(keep_up(index))
    async with asyncio.timeout(_TIMEOUT_S):
        while index.num_blocks(Tier.DEVICE) > 10:  # noqa: ASYNC110 - the index has no event to wait on
            await asyncio.sleep(0.001)
    assert index.num_predicted_blocks == 0
    task.cancel()
    await asyncio.wait([task])
