"""Runs loads one after the other: sends requests through the warm-up and the window, waits for the last to end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Protocol

from cli.bench.load import (
    Load,
    LoadKind,
    Send,
    Window,
    poisson_schedule,
    replay_schedule,
    run_closed_loop,
    run_open_loop,
)
from cli.bench.measure import Measured, Recorder
from cli.bench.result import PointResult, make_result
from cli.bench.workload import BenchRequest, WorkloadConfig, make_workload
from quartet.client import ChoiceFinished, Delta, GenerateFields, QuartetClient, RequestPath, Sampling
from quartet.errors import ServingError

# Longer than a router lets a request take by default. The figures count the requests that have not ended by then.
_DRAIN_TIMEOUT_S = 120.0
# A client that was refused without a retry delay waits before it sends again: else refusals would be measured.
_PAUSE_AFTER_ERROR_S = 1.0


@dataclass(frozen=True, kw_only=True)
class SenderConfig:
    """What all requests have in common.

    Attributes:
        model: empty: the only one.
        temperature: ``None``: the default.
        timeout_s: for each request; ``None``: the router's limit.
    """

    path: RequestPath = RequestPath.GENERATE
    model: str = ""
    temperature: float | None = None
    timeout_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long a load runs: the first limit that is reached ends it, or the end of the trace.

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
    """One load's figures, and the distributions that they come from."""

    result: PointResult
    measured: Measured


class RunObserver(Protocol):
    """Follows what runs."""

    def began(self, load: Load, number: int, recorder: Recorder, window: Window) -> None:
        """Load ``number``, from 0, begins. Only read ``recorder`` and ``window``."""

    def ended(self, point: Point) -> None:
        """It has ended."""


async def run_plan(client: QuartetClient, plan: BenchPlan, observer: RunObserver) -> list[Point]:
    """Run every load. If the task is cancelled (Ctrl-C), return the figures so far; the last load is interrupted."""
    points: list[Point] = []
    for number, load in enumerate(plan.loads):
        window = Window(plan.limits.max_requests)
        recorder = Recorder(window)
        loop = _make_loop(Sender(client, plan.sender, recorder).send, plan, number, window)
        observer.began(load, number, recorder, window)
        is_interrupted = await _run_interruptibly(_Run(loop, recorder, plan))
        points.append(Point(make_result(load, recorder, is_interrupted=is_interrupted), recorder.measured))
        observer.ended(points[-1])
        if is_interrupted:
            break
    return points


class Sender:
    """Sends requests with one client, and records what becomes of them."""

    def __init__(self, client: QuartetClient, config: SenderConfig, recorder: Recorder) -> None:
        self._client = client
        self._config = config
        self._recorder = recorder

    async def send(self, request: BenchRequest, due_at: float) -> float:
        """Send ``request``, due at ``due_at`` by ``time.perf_counter``, and wait for its end.

        Returns:
            Seconds to wait before sending the next request in its place: 0 unless it failed.
        """
        record = self._recorder.begin(due_at)
        try:
            finished: ChoiceFinished | None = None
            async with self._client.generate(request.text, path=self._config.path, **self._fields(request)) as stream:
                async for part in stream:
                    if type(part) is Delta:
                        if part.token_ids:
                            record.tokens(len(part.token_ids))
                    elif type(part) is ChoiceFinished:
                        finished = part
        except ServingError as error:
            record.failed(error)
            return _PAUSE_AFTER_ERROR_S if error.retry_delay_s is None else error.retry_delay_s
        except asyncio.CancelledError:
            record.cut_off()
            raise
        assert finished is not None, "a stream that ends well ends with ChoiceFinished"
        record.finished(finished)
        return 0.0

    def _fields(self, request: BenchRequest) -> GenerateFields:
        config = self._config
        temperature = Sampling().temperature if config.temperature is None else config.temperature
        sampling = Sampling(max_tokens=request.num_output_tokens, ignore_eos=True, temperature=temperature)
        return {
            "token_ids": request.token_ids,
            "model": config.model,
            "sampling": sampling,
            "timeout_s": config.timeout_s,
        }


def _make_loop(send: Send, plan: BenchPlan, number: int, window: Window) -> Coroutine[None, None, None]:
    load = plan.loads[number]
    # Each load has other prompts: the workers have cached those of the last one.
    workload = make_workload(plan.workload, (plan.seed, number))
    match load.kind:
        case LoadKind.CONCURRENCY:
            return run_closed_loop(send, workload, window, int(load.value))
        case LoadKind.RATE:
            schedule = poisson_schedule(load.value, (plan.seed, number, 1))
        case LoadKind.REPLAY:
            schedule = replay_schedule(load.value)
    return run_open_loop(send, workload, window, schedule)


class _Run:
    """One load: its loop runs in a task of its own; this class opens and closes the window."""

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
        """Cancel what runs. Raises what the loop failed with, which is a bug: requests that fail are recorded."""
        self._recorder.close()
        self._task.cancel()
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.result()

    async def _wait(self, timeout_s: float | None) -> None:
        await asyncio.wait({self._task}, timeout=timeout_s)


async def _run_interruptibly(run: _Run) -> bool:
    """Return whether it was interrupted. The cancellation stops here: the user wants the figures, not a traceback."""
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
