"""What a global router keeps of its pools' models."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import cast

from prometheus_client import CollectorRegistry

from quartet.config import build
from quartet.errors import WorkerUnavailableError
from quartet.telemetry.metrics import PoolMetrics
from router.fleet import FetchedTexts, Fleet
from router.global_router.config import GlobalRouterConfig
from router.global_router.pools import Pools
from router.workers import PoolKey, WorkerTable
from tests.router.global_router.test_config import DISAGG

TINY, OTHER = PoolKey("tiny", "ab" * 32), PoolKey("other", "cd" * 32)


async def test_a_text_side_that_nobody_gives_is_asked_for_ever_more_rarely() -> None:
    slept, asked = list[float](), list[PoolKey]()

    async def fetch(model: PoolKey, _names: Collection[str]) -> Mapping[str, bytes]:
        asked.append(model)
        raise WorkerUnavailableError("nobody answers")

    async def sleep(delay_s: float) -> None:
        slept.append(delay_s)
        if len(slept) == 9:
            await asyncio.Event().wait()

    table, metrics = WorkerTable("global", heartbeat_timeout_s=8.0), PoolMetrics(CollectorRegistry())
    pools = Pools(build(GlobalRouterConfig, DISAGG), table, metrics, sleep=sleep)
    texts = FetchedTexts(fetch)
    fleet = cast("Fleet", SimpleNamespace(texts=texts))
    try:
        while len(slept) < 9:
            pools._keep_texts(fleet, {TINY})
            await asyncio.sleep(0)
        pools._keep_texts(fleet, {TINY})
        await asyncio.sleep(0)
        assert slept == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
        assert asked == [TINY] * 9
        pools._keep_texts(fleet, {OTHER})
        while OTHER not in asked:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0)
        assert pools._prefetching.keys() == {OTHER}
    finally:
        await pools.close()
        await texts.close()
