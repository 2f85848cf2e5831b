"""Row ``mixed`` of ``gpu_hand_off``: streams that decode while long prompts arrive, with and without disaggregation.

A closed loop keeps the streams running; prompts arrive by Poisson at a share of what one GPU was measured to prefill.
Only what comes within the window counts. The disaggregated pair of workers is set against the aggregated one with each
of several lengths of a step: the shorter a step, the less a prompt delays the streams, and the longer the prompts take.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.gpu_serving import Fleet, bytes_by_way, serving
from benchmarks.progress import LiveLine
from benchmarks.stack import Stack
from cli.bench.load import Window, poisson_schedule, run_closed_loop, run_open_loop
from cli.bench.measure import DurationHistogram
from cli.bench.workload import BenchRequest, IntRange, WorkloadConfig, make_workload
from quartet.client import Delta, QuartetClient, RequestPath, Sampling
from quartet.errors import ServingError

#: The name of the disaggregated pair in results; that of an aggregated one is ``agg_`` and the tokens of its steps.
DISAGG = "disagg"

_REQUEST_TIMEOUT_S = 300.0
_PAUSE_AFTER_ERROR_S = 1.0
# Ids of prompts: any but the tokenizer's special ones.
_IDS = IntRange(16, 2047)
# Prompts under way while the prefill rate is measured: the worker always has the next one.
_NUM_RATE_CLIENTS = 4
# Seeds of the three workloads.
_RATE, _STREAMS, _PROMPTS = range(3)


@dataclass(frozen=True, kw_only=True)
class MixedPlan:
    """The load, and how long.

    Attributes:
        stream_prompt_tokens, stream_output_tokens: of a stream, which another one follows when it ends.
        num_prompt_tokens, num_output_tokens: of the prompts that arrive.
        load: prompts that arrive for each GPU of the two, as a share of what one GPU prefills: 0.8 a pair is 0.4 each.
        num_rate_prompts: by which that is measured.
        step_tokens: of the aggregated pair, one after the other.
    """

    num_streams: int
    stream_prompt_tokens: int
    stream_output_tokens: IntRange
    num_prompt_tokens: int
    num_output_tokens: int
    load: float
    num_rate_prompts: int
    warm_up_s: float
    window_s: float
    step_tokens: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Waits:
    """Waits in milliseconds; all 0 if there were none."""

    count: int
    p50: float
    p99: float
    max: float


@dataclass(frozen=True, kw_only=True)
class Curve:
    """How long waits are: the share ``longer[i]`` of all is longer than ``ms[i]``, ascending."""

    ms: Sequence[float]
    longer: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class MixedSide:
    """What came within the window.

    Attributes:
        name: ``DISAGG``, or ``agg_`` and the tokens of a step.
        tokens_per_s: output tokens, of streams and prompts.
        finished_per_s: output tokens of requests that ended within the window: the same, but in lumps.
        itl: between two tokens of a request, streams and prompts; tokens of one message count alike.
        stream_itl: of the streams alone.
        curve: of ``itl``.
        prompt_ttft: from when a prompt was due until its first token.
        num_prompts: that were due within the window.
        num_waiting: prompts without a first token when the window closed.
        failed: requests by error.
        transfer_bytes: of blocks that were pulled since the workers began, by the way that they took.
    """

    name: str
    tokens_per_s: float
    finished_per_s: float
    itl: Waits
    stream_itl: Waits
    curve: Curve
    prompt_ttft: Waits
    num_prompts: int
    num_waiting: int
    failed: Mapping[str, int]
    transfer_bytes: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class MixedRow:
    """The row ``mixed``.

    Attributes:
        prefill_tokens_per_s: measured of the Prefill worker alone.
        prompts_per_s: that arrive, on average.
        sides: in the order in which they ran; a run that was cut has only some.
        best: of the aggregated ones, that with the lowest p99 between tokens; ``None``: none was measured.
        itl_ratio: that p99 of the disaggregated pair over the best aggregated one's.
        tokens_ratio: ``tokens_per_s`` likewise.
    """

    num_streams: int
    num_prompt_tokens: int
    prefill_tokens_per_s: float
    prompts_per_s: float
    sides: Sequence[MixedSide]
    best: str | None = None
    itl_ratio: float | None = None
    tokens_ratio: float | None = None


async def measure_mixed(
    plan: MixedPlan,
    disagg: Fleet,
    agg: Callable[[int], Fleet],
    model_path: Path,
    line: LiveLine,
    on_side: Callable[[MixedRow], None],
) -> MixedRow:
    """Run the load on the disaggregated fleet, and on ``agg`` with each length of a step.

    ``on_side`` is called with all that was measured whenever a side was.
    """
    num_workers = len(disagg.workers)
    num_gpus = len({device for _, device in disagg.workers})
    async with serving(disagg, model_path, line) as stack:
        tokens_per_s = await _prefill_rate(plan, stack.router_address, line)
        prompts_per_s = plan.load * num_gpus / num_workers * tokens_per_s / plan.num_prompt_tokens
        line.say(f"one GPU prefills {tokens_per_s:.0f} tokens/s: {prompts_per_s:.2f} prompts arrive a second")
        sides = [await _run_side(DISAGG, plan, prompts_per_s, stack, line)]
    make_row = partial(
        compare,
        num_streams=plan.num_streams,
        num_prompt_tokens=plan.num_prompt_tokens,
        prefill_tokens_per_s=tokens_per_s,
        prompts_per_s=prompts_per_s,
    )
    on_side(make_row(sides))
    for num_tokens in plan.step_tokens:
        async with serving(agg(num_tokens), model_path, line) as stack:
            sides.append(await _run_side(f"agg_{num_tokens}", plan, prompts_per_s, stack, line))
        on_side(make_row(sides))
    return make_row(sides)


def compare(
    sides: Sequence[MixedSide],
    *,
    num_streams: int,
    num_prompt_tokens: int,
    prefill_tokens_per_s: float,
    prompts_per_s: float,
) -> MixedRow:
    """The row of ``sides``; the first one is disaggregated."""
    disagg, *others = sides
    best = min(others, key=lambda side: side.itl.p99, default=None)
    return MixedRow(
        num_streams=num_streams,
        num_prompt_tokens=num_prompt_tokens,
        prefill_tokens_per_s=prefill_tokens_per_s,
        prompts_per_s=prompts_per_s,
        sides=tuple(sides),
        best=None if best is None else best.name,
        itl_ratio=None if best is None else disagg.itl.p99 / best.itl.p99,
        tokens_ratio=None if best is None else disagg.tokens_per_s / best.tokens_per_s,
    )


def waits_of(histogram: DurationHistogram) -> Waits:
    """The figures of a histogram."""
    return Waits(
        count=histogram.count,
        p50=1e3 * histogram.quantile_s(0.5),
        p99=1e3 * histogram.quantile_s(0.99),
        max=1e3 * histogram.max_s,
    )


def curve_of(histogram: DurationHistogram) -> Curve:
    """How the durations of a histogram are distributed."""
    values_s, not_longer = histogram.distribution()
    return Curve(ms=(1e3 * values_s).tolist(), longer=(1.0 - not_longer).tolist())


@dataclass
class Seen:
    """What clients see while a window is open."""

    window: Window
    gaps: DurationHistogram = field(default_factory=DurationHistogram)
    stream_gaps: DurationHistogram = field(default_factory=DurationHistogram)
    prompt_ttft: DurationHistogram = field(default_factory=DurationHistogram)
    num_tokens: int = 0
    num_finished_tokens: int = 0
    num_prompts: int = 0
    num_waiting: int = 0
    failed: Counter[str] = field(default_factory=Counter)

    async def send(self, client: QuartetClient, is_stream: bool, request: BenchRequest, due_at: float) -> float:
        """Send ``request``, due at ``due_at`` by ``time.perf_counter``; as ``cli.bench.load.Send``."""
        if not is_stream:
            self.num_prompts += self.window.is_open
            self.num_waiting += 1
        last_at: float | None = None
        sampling = Sampling(max_tokens=request.num_output_tokens, ignore_eos=True, temperature=0.0)
        try:
            async with client.generate(
                token_ids=request.token_ids,
                path=RequestPath.SESSION,  # with a call for each request, client and router take half a core each
                sampling=sampling,
                timeout_s=_REQUEST_TIMEOUT_S,
            ) as stream:
                async for part in stream:
                    if type(part) is Delta and part.token_ids:
                        now = time.perf_counter()
                        self._tokens(len(part.token_ids), now, last_at, due_at, is_stream=is_stream)
                        last_at = now
        except ServingError as error:
            self.failed[type(error).__name__] += 1
            return _PAUSE_AFTER_ERROR_S
        finally:
            if last_at is None and not is_stream:
                self.num_waiting -= 1
        if self.window.is_open:
            self.num_finished_tokens += request.num_output_tokens
        return 0.0

    def _tokens(self, count: int, now: float, last_at: float | None, due_at: float, *, is_stream: bool) -> None:
        if last_at is None and not is_stream:
            self.num_waiting -= 1
        if not self.window.is_open:
            return
        self.num_tokens += count
        if last_at is not None:
            self.gaps.add((now - last_at) / count, count)
            if is_stream:
                self.stream_gaps.add((now - last_at) / count, count)
        elif not is_stream:
            self.prompt_ttft.add(now - due_at)

    def side(self, name: str, window_s: float, num_waiting: int, transfer_bytes: Mapping[str, float]) -> MixedSide:
        """The figures of a window of this length, which is closed."""
        return MixedSide(
            name=name,
            tokens_per_s=self.num_tokens / window_s,
            finished_per_s=self.num_finished_tokens / window_s,
            itl=waits_of(self.gaps),
            stream_itl=waits_of(self.stream_gaps),
            curve=curve_of(self.gaps),
            prompt_ttft=waits_of(self.prompt_ttft),
            num_prompts=self.num_prompts,
            num_waiting=num_waiting,
            failed=dict(self.failed),
            transfer_bytes=transfer_bytes,
        )


async def _run_side(name: str, plan: MixedPlan, prompts_per_s: float, stack: Stack, line: LiveLine) -> MixedSide:
    window = Window(None)
    seen = Seen(window)
    # What was imported stays: a walk over it would be a wait between tokens of all requests, which no server made.
    gc.collect()
    gc.freeze()
    async with QuartetClient(stack.router_address) as client:
        loops = [
            run_closed_loop(
                partial(seen.send, client, True),
                _workload(plan.stream_prompt_tokens, plan.stream_output_tokens, _STREAMS),
                window,
                plan.num_streams,
            ),
            run_open_loop(
                partial(seen.send, client, False),
                _workload(plan.num_prompt_tokens, IntRange(plan.num_output_tokens, plan.num_output_tokens), _PROMPTS),
                window,
                poisson_schedule(prompts_per_s, (0, _PROMPTS)),
            ),
        ]
        with line.showing(lambda elapsed, _: f"{name}: {elapsed:.0f} s, {seen.num_tokens} tokens"):
            window_s, num_waiting = await _run_loops(loops, seen, plan)
    side = seen.side(name, window_s, num_waiting, await bytes_by_way(stack))
    if name == DISAGG and not side.transfer_bytes:
        raise RuntimeError("no prompt was handed off")
    line.say(describe(side))
    return side


async def _run_loops(loops: Sequence[Coroutine[None, None, None]], seen: Seen, plan: MixedPlan) -> tuple[float, int]:
    """Run ``loops`` through warm-up and window, and give up what they have under way.

    Returns the window's length and the prompts that waited at its end.
    """
    tasks = [asyncio.create_task(loop) for loop in loops]
    try:
        await asyncio.wait(tasks, timeout=plan.warm_up_s, return_when=asyncio.FIRST_COMPLETED)
        seen.window.open()
        began = time.perf_counter()
        await asyncio.wait(tasks, timeout=plan.window_s, return_when=asyncio.FIRST_COMPLETED)
        window_s, num_waiting = time.perf_counter() - began, seen.num_waiting
        for task in tasks:
            if task.done():
                task.result()
        return window_s, num_waiting
    finally:
        seen.window.close()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _prefill_rate(plan: MixedPlan, address: str, line: LiveLine) -> float:
    """Tokens a second of prompts that want one token each, once as many clients as prompts at a time are warm."""
    requests = _workload(plan.num_prompt_tokens, IntRange(1, 1), _RATE)
    async with QuartetClient(address) as client:

        async def run_client(count: int) -> None:
            for _ in range(count):
                sampling = Sampling(max_tokens=1, ignore_eos=True)
                await client.complete(
                    token_ids=next(requests).token_ids, sampling=sampling, timeout_s=_REQUEST_TIMEOUT_S
                )

        num_each = max(1, plan.num_rate_prompts // _NUM_RATE_CLIENTS)
        with line.showing(lambda elapsed, _: f"rate of one GPU's prefill: {elapsed:.0f} s"):
            await asyncio.gather(*(run_client(1) for _ in range(_NUM_RATE_CLIENTS)))
            began = time.perf_counter()
            await asyncio.gather(*(run_client(num_each) for _ in range(_NUM_RATE_CLIENTS)))
    num_tokens = _NUM_RATE_CLIENTS * num_each * plan.num_prompt_tokens
    return num_tokens / (time.perf_counter() - began)


def describe(side: MixedSide) -> str:
    """One line for people."""
    failed, itl = f", failed: {dict(side.failed)}" if side.failed else "", side.itl
    return (
        f"{side.name}: {side.tokens_per_s:.0f} tok/s; between tokens p50 {itl.p50:.1f} ms, p99 {itl.p99:.1f}, "
        f"max {itl.max:.0f}; first token of prompts p50 {side.prompt_ttft.p50:.0f} ms, "
        f"p99 {side.prompt_ttft.p99:.0f}; {side.num_prompts} prompts, {side.num_waiting} waiting at the end{failed}"
    )


def _workload(num_prompt_tokens: int, output_tokens: IntRange, seed: int) -> Iterator[BenchRequest]:
    config = WorkloadConfig(
        prompt_tokens=IntRange(num_prompt_tokens, num_prompt_tokens), output_tokens=output_tokens, ids=_IDS
    )
    return make_workload(config, (0, seed))
