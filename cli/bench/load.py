"""When requests are sent: the kinds of load, the window in which requests count, and a loop for each kind.

A closed loop keeps a number of clients busy. An open loop sends requests when they are due, even if earlier ones
still run; durations then count from when a request was *due*. So a late client, or a server that makes it late,
shows in the figures; counted from the sending, the wait would be missing just where it is longest (coordinated
omission).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

import numpy as np

from cli.bench.workload import BenchRequest

# asyncio's timers are accurate to a millisecond, which is much of a quick first token. The open loop polls the clock
# for the last bit of each wait, but for at most this share of it.
_MAX_SPIN_S = 1e-3
_MAX_SPIN_SHARE = 0.05

#: Sends a request that is due at a time by ``time.perf_counter``, and waits for its end; returns the seconds to wait
#: before sending the next request in its place.
Send: TypeAlias = Callable[[BenchRequest, float], Coroutine[None, None, float]]
#: When a request is due, in seconds from the start; called once for each request, in order.
Schedule: TypeAlias = Callable[[BenchRequest], float]


class LoadKind(StrEnum):
    """What a load's value means."""

    CONCURRENCY = "concurrency"  # clients; each sends its next request when its last one has ended
    RATE = "rate"  # requests a second on average, at the times of a Poisson process, however many run
    REPLAY = "replay"  # the trace's times, this many times as fast


@dataclass(frozen=True)
class Load:
    """One load; the value of ``CONCURRENCY`` is a whole number."""

    kind: LoadKind
    value: float

    def __str__(self) -> str:
        match self.kind:
            case LoadKind.CONCURRENCY:
                return f"concurrency {self.value:g}"
            case LoadKind.RATE:
                return f"rate {self.value:g}/s"
            case LoadKind.REPLAY:
                return f"replay at {self.value:g}x"


class Phase(StrEnum):
    """Where a run is."""

    WARM_UP = "warm-up"
    SETTLING = "settling"  # nothing is sent; the requests of the warm-up end before the window opens
    MEASURING = "measuring"
    DRAINING = "draining"  # nothing new is sent; the last requests end


class Window:
    """The time in which requests are measured: opens once, after the warm-up, and closes once, at the end."""

    def __init__(self, max_requests: int | None) -> None:
        """``max_requests``: how many may be sent while it is open; ``None``: any number."""
        self.phase = Phase.WARM_UP
        self._num_left = max_requests
        self._closed = asyncio.Event()
        self._settled = asyncio.Event()

    def settle(self) -> None:
        """Hold new requests back until it opens, so that those of the warm-up can end."""
        self.phase = Phase.SETTLING

    def open(self) -> None:
        """End the warm-up."""
        self.phase = Phase.MEASURING
        self._settled.set()

    def close(self) -> None:
        """Stop the sending of new requests."""
        self.phase = Phase.DRAINING
        self._settled.set()
        self._closed.set()

    @property
    def is_open(self) -> bool:
        """Whether a request that is sent now is measured."""
        return self.phase is Phase.MEASURING

    @property
    def is_closed(self) -> bool:
        """Whether no new request may be sent."""
        return self.phase is Phase.DRAINING

    async def settled(self) -> None:
        """Return at once, or where requests are held back when they no longer are."""
        if self.phase is Phase.SETTLING:
            await self._settled.wait()

    def admit(self) -> bool:
        """Return whether another request may be sent now, and count it as sent."""
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


async def run_closed_loop(send: Send, workload: Iterator[BenchRequest], window: Window, num_clients: int) -> None:
    """Keep ``num_clients`` requests running until the window closes or the workload is used up; wait for the last.

    The clients share ``workload``: whichever is free first takes the next request.
    """

    async def run_client() -> None:
        while window.admit() and (request := next(workload, None)) is not None:
            if pause_s := await send(request, time.perf_counter()):
                await window.pause(pause_s)
            await window.settled()

    async with asyncio.TaskGroup() as clients:
        for _ in range(num_clients):
            clients.create_task(run_client())


async def run_open_loop(send: Send, workload: Iterator[BenchRequest], window: Window, schedule: Schedule) -> None:
    """Send on ``schedule`` until the window closes or the workload is used up; wait for the last.

    Where the window holds back a request that is due, the schedule goes on from there once it opens.
    """
    began = time.perf_counter()
    async with asyncio.TaskGroup() as requests:
        # Make each request before it is due: a long prompt takes milliseconds.
        for request in workload:
            due_at = began + schedule(request)
            await _wait_until(due_at, window)
            if window.phase is Phase.SETTLING:
                await window.settled()
                held_s = time.perf_counter() - due_at
                began, due_at = began + held_s, due_at + held_s
            if not window.admit():
                return
            requests.create_task(send(request, due_at))


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
    """The trace's own times, ``speed`` times as fast; every request must have a time."""

    def next_due(request: BenchRequest) -> float:
        assert request.at_s is not None, "only requests of a trace are replayed"
        return request.at_s / speed

    return next_due


async def _wait_until(due_at: float, window: Window) -> None:
    # At least once, also when late: requests already sent must get their turn.
    await asyncio.sleep(0)
    wait_s = due_at - time.perf_counter()
    if wait_s > 0:
        await window.pause(wait_s - min(_MAX_SPIN_S, _MAX_SPIN_SHARE * wait_s))
    while time.perf_counter() < due_at and not window.is_closed:  # noqa: ASYNC110 - a time is waited for
        await asyncio.sleep(0)
