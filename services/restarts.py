"""When a process that ended is started again: later each time, until it is given up."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from quartet.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RestartConfig:
    """How long to wait, and how often to try.

    Attributes:
        first_delay_s: before the first restart; it doubles with each further one.
        max_delay_s: at most.
        reset_after_s: a process that has served for so long begins with ``first_delay_s`` again.
        max_restarts: within ``window_s``; who ends once more is given up.
    """

    first_delay_s: float = 1.0
    max_delay_s: float = 30.0
    reset_after_s: float = 60.0
    max_restarts: int = 10
    window_s: float = 600.0

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        for name in ("first_delay_s", "max_delay_s", "reset_after_s", "window_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: must be above 0")
        if self.max_restarts < 0:
            raise ConfigError("max_restarts: must not be negative")


class Backoff:
    """Of one process. Pure: it is told the time."""

    def __init__(self, config: RestartConfig) -> None:
        self._config = config
        self._num_in_row = 0
        self._restarted_at_s: deque[float] = deque()

    def next_delay_s(self, now_s: float, served_s: float) -> float | None:
        """How long to wait before it is started again; ``None``: not any more.

        Args:
            now_s: when it ended.
            served_s: how long it had served by then.
        """
        config, restarts = self._config, self._restarted_at_s
        while restarts and restarts[0] <= now_s - config.window_s:
            restarts.popleft()
        if len(restarts) >= config.max_restarts:
            return None
        if served_s >= config.reset_after_s:
            self._num_in_row = 0
        # Bounded before it is used: two to the power of many restarts is no float.
        doublings = min(self._num_in_row, 32)
        self._num_in_row += 1
        restarts.append(now_s)
        return min(config.first_delay_s * 2.0**doublings, config.max_delay_s)
