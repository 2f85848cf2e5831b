"""Measures how late the event loop is: the first sign that something blocks it."""

from __future__ import annotations

import asyncio

from quartet.telemetry.metrics import ProcessMetrics

_INTERVAL_S = 0.1


async def monitor_event_loop_lag(metrics: ProcessMetrics, interval_s: float = _INTERVAL_S) -> None:
    """Observe the running loop's lag every ``interval_s`` seconds, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + interval_s
        await asyncio.sleep(interval_s)
        metrics.observe_event_loop_lag(max(0.0, loop.time() - due))
