"""Keeps the starts of processes apart that must not begin at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Time:
    """A clock, and a sleep by the same clock."""

    now_s: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


class StartPacer:
    """Gives each start its time, in the order in which they are asked for."""

    def __init__(self, clock: Time) -> None:
        self._clock = clock
        self._last_at_s: float | None = None

    def reserve(self, interval_s: float) -> float:
        """How many seconds to wait before a start that is ``interval_s`` after the last one, at the earliest."""
        now_s = self._clock.now_s()
        at_s = now_s if self._last_at_s is None else max(now_s, self._last_at_s + interval_s)
        self._last_at_s = at_s
        return at_s - now_s

    async def sleep(self, delay_s: float) -> None:
        """Wait until a reserved start may be."""
        await self._clock.sleep(delay_s)
