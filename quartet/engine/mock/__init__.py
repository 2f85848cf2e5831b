"""An engine whose steps take a real model's time and compute nothing; scheduler, block pool and events are real."""

from __future__ import annotations

from quartet.engine.mock.model import MockEngineConfig, MockSettings, StepTiming
from quartet.engine.mock.runner import SAMPLING_FIELDS, MockRunner, SharedByRanks, rank_loader

__all__ = [
    "SAMPLING_FIELDS",
    "MockEngineConfig",
    "MockRunner",
    "MockSettings",
    "SharedByRanks",
    "StepTiming",
    "rank_loader",
]
