"""Runs loads one after the other: sends requests through the warm-up and the window, waits for the last to end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from dataclasses import dataclass

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
        rounds: so many requests for each client of a closed loop; ``None``: no limit.
    """

    warmup_s: float
    duration_s: float | None
    max_requests: int | None
    rounds: int | None = None

    def num_requests(self, load: Load) -> int | None:
        """How many ``load`` may send within its window; ``None``: any number."""
        return self.max_requests if self.rounds is None else self.rounds * int(load.value)


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

    @property
    def settles(self) -> bool:
        """Whether the requests of the warm-up must have ended before the window opens.

        Where time ends the window, those that end within it stand for those that run on after it. Where the end of the
        last request may, nothing runs on, and they would be too many. A trace may end before the time is over.
        """
        limits = self.limits
        return limits.max_requests is not None or limits.rounds is not None or self.workload.trace is not None


@dataclass(frozen=True)
class Point:
    """One load's figures, and the distributions that they come from."""

    result: PointResult
    measured: Measured


class RunObserver:
    """Follows what runs; this one ignores it."""

    def began(self, load: Load, number: int, recorder: Recorder, window: Window) -> None:
        """Load ``number``, from 0, begins. Only read ``recorder`` and ``window``."""

    def ended(self, point: Point) -> None:
        """It has ended."""


class Observers(RunObserver):
    """Tells several of them, in this order."""

    def __init__(self, *observers: RunObserver) -> None:
        self._observers = observers

    def began(self, load: Load, number: int, recorder: Recorder, window: Window) -> None:
        """Tell each."""
        for observer in self._observers:
            observer.began(load, number, recorder, window)

    def ended(self, point: Point) -> None:
        """Tell each."""
        for observer in self._observers:
            observer.ended(point)


async def run_plan(client: QuartetClient, plan: BenchPlan, observer: RunObserver) -> list[Point]:
    """Run every load. If the task is cancelled (Ctrl-C), return the figures so far; the last load is interrupted."""
    points: list[Point] = []
    for number, load in enumerate(plan.loads):
        window = Window(plan.limits.num_requests(load))
        recorder = Recorder(window)
        loop = _make_loop(Sender(client, plan.sender, recorder).send, plan, number, window)
        observer.began(load, number, recorder, window)
        is_interrupted = await _run_load(loop, window, recorder, plan)
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
            assert finished is not None, "a stream that ends well ends with ChoiceFinished"
        except ServingError as error:
            record.failed(error)
            return _PAUSE_AFTER_ERROR_S if error.retry_delay_s is None else error.retry_delay_s
        except BaseException:
            # A bug ends the request too: the warm-up settles once no request runs.
            record.cut_off()
            raise
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
            "session_key": request.session_key,
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


async def _run_load(loop: Coroutine[None, None, None], window: Window, recorder: Recorder, plan: BenchPlan) -> bool:
    """Run ``loop`` in a task of its own; open and close the window meanwhile. Returns whether it was interrupted.

    A cancellation stops here: the user wants the figures, not a traceback. What the loop fails with is raised, since it
    is a bug: requests that fail are recorded.
    """
    limits = plan.limits
    if not limits.warmup_s:
        recorder.open()
    task = asyncio.create_task(loop)
    drain_timeout_s = plan.sender.timeout_s or _DRAIN_TIMEOUT_S
    try:
        if limits.warmup_s:
            await asyncio.wait({task}, timeout=limits.warmup_s)
            if plan.settles:
                window.settle()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(drain_timeout_s):
                        await recorder.idle()
            recorder.open()
        await asyncio.wait({task}, timeout=limits.duration_s)
        recorder.close()
        await asyncio.wait({task}, timeout=drain_timeout_s)
    except asyncio.CancelledError:
        this = asyncio.current_task()
        assert this is not None
        this.uncancel()
        return True
    finally:
        recorder.close()
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.result()
    return False
