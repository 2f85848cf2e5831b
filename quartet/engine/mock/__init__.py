"""An engine that takes a real one's time and computes nothing: scheduler, block pool and events are the real ones."""

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
