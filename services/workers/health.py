"""Whether a worker makes progress: health that tells the truth."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ProgressWatch:
    """Work in flight and no step for ``stall_timeout_s`` seconds means that the worker is stuck.

    Pure: the caller brings the clock's reading.
    """

    stall_timeout_s: float
    _num_steps: int = -1
    _moved_at: float = 0.0

    def is_moving(self, *, num_steps: int, num_in_flight: int, now: float) -> bool:
        """Look once: False while work is in flight and no step was done for too long."""
        if num_steps != self._num_steps or num_in_flight == 0:
            self._num_steps = num_steps
            self._moved_at = now
        return now - self._moved_at <= self.stall_timeout_s
