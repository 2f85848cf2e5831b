"""Tiers below the pool of a fake runner."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from quartet.engine.runner import ModelRunner
from quartet.engine.step_engine import TiersFactory
from quartet.engine.tiers import Tiering, TierMessage, open_tiers, start_timer
from quartet.kvcache.layout import KvLayout
from quartet.kvcache.tiers import OffloadPolicy, TierPlan
from quartet.transfer.base import PoolMemory
from quartet.transfer.disk_blocks import DiskBlocks
from quartet.transfer.host_blocks import PlainHostBlocks


def make_tiers(
    num_host_blocks: int,
    num_disk_blocks: int = 0,
    path: Path | None = None,
    *,
    host: Callable[[PoolMemory, int, int], PlainHostBlocks] = lambda memory, num_slots, num_blocks: PlainHostBlocks(
        memory, num_slots, num_blocks=num_blocks
    ),
    host_plan: TierPlan | None = None,
    disk: Callable[[Path, KvLayout], DiskBlocks] = DiskBlocks,
    timer: Callable[[float, Callable[[], None]], Callable[[], None]] = start_timer,
) -> TiersFactory:
    """What ``StepEngine`` takes. All that is found is loaded: a fake computes in no time."""

    def open_them(runner: ModelRunner, post: Callable[[TierMessage], None]) -> Tiering:
        assert isinstance(runner.memory, PoolMemory)
        files = None if path is None else disk(path, runner.layout)
        plan = host_plan or TierPlan(num_blocks=num_host_blocks)
        tiers = open_tiers(
            plan,
            None if path is None else TierPlan(num_blocks=num_disk_blocks, policy=OffloadPolicy.PRESENCE),
            host(runner.memory, plan.num_blocks, runner.num_blocks),
            files,
            post,
            timer=timer,
        )
        tiers.forecast_by = lambda _step_time, _max_step_tokens: None  # type: ignore[method-assign]
        return tiers

    return open_them
