"""What the mock engine is told about its model, its speed and its block pool."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from quartet.engine.mock.timing import StepTiming
from quartet.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class MockSettings:
    """How fast the mock engine is.

    Attributes:
        timing: of a step.
        speed_up: steps take so many times less than ``timing`` says; below 1 they take longer.
    """

    timing: StepTiming = field(default_factory=StepTiming)
    speed_up: float = 1.0

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        if not (self.speed_up > 0 and math.isfinite(self.speed_up)):
            raise ConfigError(f"speed_up: must be above 0, not {self.speed_up:g}")


@dataclass(frozen=True, kw_only=True)
class MockEngineConfig:
    """One model that is not there.

    Attributes:
        model_path: directory with tokenizer.json; config.json and the other files that ``quartet.text`` reads may be
            missing, and weights are not looked at.
        num_blocks: blocks of each rank's pool.
        data_parallel_size: ranks, each with a scheduler, a pool and steps of its own.
        block_size: tokens of a block.
        max_model_len: tokens of prompt and output together, also more than the model was made for; ``None``: what
            config.json says.
        settings: how fast it is.

    Raises:
        ConfigError: a value out of range; begins with the field's name.
    """

    model_path: str
    num_blocks: int
    data_parallel_size: int = 1
    block_size: int = 32
    max_model_len: int | None = None
    settings: MockSettings = field(default_factory=MockSettings)

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        for name in ("num_blocks", "data_parallel_size", "block_size", "max_model_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}: must be at least 1, not {value}")
