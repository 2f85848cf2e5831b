"""The benchmark of images on real servers: each of its parts, for as few rounds as it can have."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.encode_rate import Load, measure_rate
from benchmarks.encode_stack import ENCODE, make_stack
from benchmarks.encode_ttft import Prompt, measure_ttft
from benchmarks.scrape import Metrics
from benchmarks.stack import Stack


async def encode_metrics(stack: Stack) -> Metrics:
    return (await stack.metrics())[ENCODE]


async def assert_nothing_stays_held(stack: Stack) -> None:
    """Every item is handed off, and taken or let go."""
    num_items = (await encode_metrics(stack)).total("quartet_encode_items_total")
    assert num_items > 0
    async with asyncio.timeout(10):
        outcomes: Mapping[str, float] = {}
        while sum(outcomes.values()) < num_items:
            outcomes = (await encode_metrics(stack)).by_label("quartet_worker_hand_offs_total", "outcome")
    assert not outcomes.get("expired")
    assert sum(outcomes.values()) == num_items


@pytest.mark.e2e
@pytest.mark.timeout(180)
async def test_images_are_measured_on_real_servers_and_none_stays_held(tmp_path: Path) -> None:
    rounds: list[int] = []
    async with make_stack(tmp_path / "workers", lambda _: None, log=tmp_path / "log") as stack:
        rates = await measure_rate(stack, 1, rounds.append)
        assert rates.keys() == set(Load)
        assert all(figures.images_per_s > 0 < figures.cpu_ms_per_image for figures in rates.values())
        assert all(figures.before_tower_ms > 0 < figures.tower_ms for figures in rates.values())
        assert rates[Load.BATCH_1].mean_batch_size == 1 < rates[Load.BATCH_8].mean_batch_size <= 8
        ttft = await measure_ttft(stack, 2, rounds.append)
        assert ttft.ttft_ms.keys() == set(Prompt)
        assert all(0 < quantiles.p50 <= quantiles.p90 for quantiles in ttft.ttft_ms.values())
        assert {prompt for prompt, parts in ttft.parts_ms.items() if not parts["media"]} == {Prompt.TEXT}
        await assert_nothing_stays_held(stack)
    assert rounds == [0, 1, 0, 1, 2, 3]
