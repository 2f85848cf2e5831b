"""Runs loads, one after the other: warm-up, window, the last requests' ends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Protocol

from cli.bench.closed_loop import ClosedLoop
from cli.bench.load import Load, LoadKind
from cli.bench.measure import Measured, Recorder
from cli.bench.open_loop import OpenLoop, poisson_schedule, replay_schedule
from cli.bench.result import PointResult, make_result
from cli.bench.sender import Send, Sender, SenderConfig
from cli.bench.window import Window
from cli.bench.workload import WorkloadConfig, make_workload
from quartet.client import QuartetClient

# Longer than any router lets a request take by default; then the figures say how many did not end.
_DRAIN_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long a load runs; whatever comes first ends it, or the end of the trace.

    Attributes:
        warmup_s: load before the window opens.
        duration_s: length of the window; ``None``: no limit.
        max_requests: sent within the window; ``None``: no limit.
    """

    warmup_s: float
    duration_s: float | None
    max_requests: int | None


@dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """All that is to be run.

    Attributes:
        loads: one after the other; each has prompts of its own.
        seed: of prompts, lengths and arrivals.
    """

    loads: tuple[Load, ...]
    limits: Limits
    workload: WorkloadConfig
    sender: SenderConfig
    seed: int


@dataclass(frozen=True)
class Point:
    """One load's figures, and the distributions that they were read off."""

    result: PointResult
    measured: Measured


class RunObserver(Protocol):
    """Is told what runs."""

    def began(self, load: Load, number: int, recorder: Recorder, window: Window) -> None:
        """Load ``number``, from 0, begins; recorder and window are to be looked at only."""

    def ended(self, point: Point) -> None:
        """It has ended."""


async def run_plan(client: QuartetClient, plan: BenchPlan, observer: RunObserver) -> list[Point]:
    """Run every load; where the task is cancelled (Ctrl-C), return what there is, the last one interrupted."""
    points: list[Point] = []
    for number, load in enumerate(plan.loads):
        window = Window(plan.limits.max_requests)
        recorder = Recorder(window)
        loop = _make_loop(Sender(client, plan.sender, recorder).send, plan, number, window)
        observer.began(load, number, recorder, window)
        is_interrupted = await _run_interruptibly(_Run(loop.run(), recorder, plan))
        points.append(Point(make_result(load, recorder, is_interrupted=is_interrupted), recorder.measured))
        observer.ended(points[-1])
        if is_interrupted:
            break
    return points


def _make_loop(send: Send, plan: BenchPlan, number: int, window: Window) -> ClosedLoop | OpenLoop:
    load = plan.loads[number]
    # Other prompts for each load: those of the last one are cached.
    workload = make_workload(plan.workload, (plan.seed, number))
    match load.kind:
        case LoadKind.CONCURRENCY:
            return ClosedLoop(send, workload, window, int(load.value))
        case LoadKind.RATE:
            schedule = poisson_schedule(load.value, (plan.seed, number, 1))
        case LoadKind.REPLAY:
            schedule = replay_schedule(load.value)
    return OpenLoop(send, workload, window, schedule)


class _Run:
    """One load: its loop in a task of its own, and the window over it."""

    def __init__(self, loop: Coroutine[None, None, None], recorder: Recorder, plan: BenchPlan) -> None:
        self._recorder = recorder
        self._limits = plan.limits
        self._drain_s = plan.sender.timeout_s or _DRAIN_TIMEOUT_S
        if not plan.limits.warmup_s:
            recorder.open()
        self._task = asyncio.create_task(loop)

    async def run(self) -> None:
        if self._limits.warmup_s:
            await self._wait(self._limits.warmup_s)
            self._recorder.open()
        await self._wait(self._limits.duration_s)
        self._recorder.close()
        await self._wait(self._drain_s)

    async def end(self) -> None:
        """Cancel what runs. Raises what the loop failed with: no failure of a request, but a bug."""
        self._recorder.close()
        self._task.cancel()
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.result()

    async def _wait(self, timeout_s: float | None) -> None:
        await asyncio.wait({self._task}, timeout=timeout_s)


async def _run_interruptibly(run: _Run) -> bool:
    """Whether it was interrupted. The cancellation ends here: its cause wanted the figures, not a traceback."""
    try:
        await run.run()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()
        return True
    finally:
        await run.end()
    return False
