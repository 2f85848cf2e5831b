"""The stopwatch of the benchmarks, for tests."""

from __future__ import annotations

from benchmarks.stopwatch import Stopwatch

__all__ = ["Stopwatch"]
