"""Which requests are measured: those that are sent after the warm-up and before the end."""

from __future__ import annotations

import asyncio
from enum import StrEnum


class Phase(StrEnum):
    """Where a run is."""

    WARM_UP = "warm-up"
    MEASURING = "measuring"
    DRAINING = "draining"  # nothing new is sent; the last requests end


class Window:
    """Opens and closes once; whoever sends asks it before each request."""

    def __init__(self, max_requests: int | None) -> None:
        """``max_requests``: of those sent while it is open; ``None``: any number."""
        self.phase = Phase.WARM_UP
        self._num_left = max_requests
        self._closed = asyncio.Event()

    def open(self) -> None:
        """End the warm-up."""
        self.phase = Phase.MEASURING

    def close(self) -> None:
        """Let nothing new be sent."""
        self.phase = Phase.DRAINING
        self._closed.set()

    @property
    def is_open(self) -> bool:
        """Whether a request that is sent now is measured."""
        return self.phase is Phase.MEASURING

    @property
    def is_closed(self) -> bool:
        """Whether nothing new is to be sent."""
        return self.phase is Phase.DRAINING

    def admit(self) -> bool:
        """Whether another request may be sent now; it is then counted as sent."""
        if self.is_closed or (self.is_open and self._num_left == 0):
            return False
        if self.is_open and self._num_left is not None:
            self._num_left -= 1
        return True

    async def pause(self, duration_s: float) -> None:
        """Return after ``duration_s``, or when the window is closed."""
        try:
            async with asyncio.timeout(duration_s):
                await self._closed.wait()
        except TimeoutError:
            return
