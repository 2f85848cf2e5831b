"""An open loop: requests are sent when they are due, whatever has become of those before.

Durations count from when a request was *due*. A client that is late, or a server that makes it late, shows in the
figures; counted from the sending, the wait would be left out just where it is longest (coordinated omission).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import numpy as np

from cli.bench.sender import Send
from cli.bench.window import Window
from cli.bench.workload import BenchRequest, Workload

# The loop's timers are good for a millisecond, which is much of a quick first token: the last bit is waited for by
# asking again and again, but for no more than this share of the time.
_MAX_SPIN_S = 1e-3
_MAX_SPIN_SHARE = 0.05

#: When a request is due, in seconds from the begin; asked once for each, in order.
Schedule = Callable[[BenchRequest], float]


def poisson_schedule(rate: float, seed: Sequence[int]) -> Schedule:
    """Arrivals of a Poisson process: ``rate`` a second on average, with exponential gaps."""
    rng = np.random.default_rng(seed)
    due_s = 0.0

    def next_due(_: BenchRequest) -> float:
        nonlocal due_s
        due_s += rng.exponential(1.0 / rate)
        return due_s

    return next_due


def replay_schedule(speed: float) -> Schedule:
    """The trace's own times, ``speed`` times as fast; every request must have one."""

    def next_due(request: BenchRequest) -> float:
        assert request.at_s is not None, "only a trace is replayed"
        return request.at_s / speed

    return next_due


class OpenLoop:
    """Sends on schedule."""

    def __init__(self, send: Send, workload: Workload, window: Window, schedule: Schedule) -> None:
        self._send = send
        self._workload = workload
        self._window = window
        self._schedule = schedule

    async def run(self) -> None:
        """Return when the window lets nothing more be sent, or the workload is used up, and all has ended."""
        began = time.perf_counter()
        async with asyncio.TaskGroup() as requests:
            # Made before it is due: making a long prompt takes milliseconds.
            while (request := self._workload.next()) is not None:
                due_at = began + self._schedule(request)
                await self._wait_until(due_at)
                if not self._window.admit():
                    return
                requests.create_task(self._send(request, due_at))

    async def _wait_until(self, due_at: float) -> None:
        # Once at least, also when late: what was sent must get its turn.
        await asyncio.sleep(0)
        wait_s = due_at - time.perf_counter()
        if wait_s > 0:
            await self._window.pause(wait_s - min(_MAX_SPIN_S, _MAX_SPIN_SHARE * wait_s))
        while time.perf_counter() < due_at and not self._window.is_closed:  # noqa: ASYNC110 - a time is waited for
            await asyncio.sleep(0)
