"""Overload: at twice the load of the peak, the system must not do work twice, nor finish less of it.

A closed loop of clients loads one Prefill, one Decode with a small block pool, and the Router; every prompt is
prefilled remotely. First a sweep finds the concurrency at which finished tokens/s peak. Then three phases run in a row,
because a shared machine's speed drifts: that load, twice that load, and that load again. The ratio is taken against the
mean of the two peaks. Each phase begins and ends with an idle stack, and reports what the clients saw, what the
processes counted and what it cost.

    python -m benchmarks.overload --json FILE [--plot FILE.png] [--seconds 120] [--short]
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

import uvloop

from benchmarks.processes import CpuMeter, CpuUse, Evidence, collect_evidence
from benchmarks.progress import LiveLine
from benchmarks.report import Report, make_parser
from benchmarks.stack import Stack
from cli.bench.load import Load, LoadKind, Window
from cli.bench.measure import Recorder, Totals
from cli.bench.result import PointResult
from cli.bench.run import BenchPlan, Limits, Point, RunObserver, SenderConfig, run_plan
from cli.bench.workload import IntRange, WorkloadConfig
from quartet.client import QuartetClient
from quartet.config import build
from services.topology.topology import Topology

_BLOCK_SIZE = 32
# Room for about five of the requests below, so that the router must hold back the others at any real load.
_NUM_DECODE_BLOCKS = 64
_LOG = Path(".run/benchmark-overload.log")
# The sweep has passed the peak when two doublings in a row each gained less than this over the best so far.
_GAIN, _MAX_LEVELS_WITHOUT_GAIN = 1.02, 2
_ROUTER, _PREFILL, _DECODE, _CLIENT = "router", "prefill-0", "decode-0", "client"
# Workers refresh their engines' figures once a second.
_SETTLE_S = 2.5
_SAMPLE_INTERVAL_S = 2.0
# Longer than any request should take; a request that takes longer has failed.
_REQUEST_TIMEOUT_S = 120.0
_REFUSED, _NOT_ENDED = "RESOURCE_EXHAUSTED", "NOT_ENDED"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What clients ask for: prompts of random token ids, so that no two share a prefix.

    Attributes:
        min_prompt_tokens, max_prompt_tokens: bounds of a prompt's length, drawn evenly.
        num_output_tokens: output tokens of each request; end-of-sequence is ignored.
        first_token_id, end_token_id: ids are drawn from this range.
        seed: of prompts and lengths. The same seed gives the same prompts, which are cached the second time.
    """

    min_prompt_tokens: int
    max_prompt_tokens: int
    num_output_tokens: int
    first_token_id: int
    end_token_id: int
    seed: int = 0

    def config(self) -> WorkloadConfig:
        """The same workload for the load generator of ``quartet bench``."""
        return WorkloadConfig(
            prompt_tokens=IntRange(self.min_prompt_tokens, self.max_prompt_tokens),
            output_tokens=IntRange(self.num_output_tokens, self.num_output_tokens),
            ids=IntRange(self.first_token_id, self.end_token_id - 1),
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long each phase is, in seconds, and how far the sweep goes.

    Attributes:
        ramp_s: load before each window, until it is steady.
    """

    ramp_s: float = 3.0
    sweep_s: float = 12.0
    peak_s: float = 45.0
    overload_s: float = 120.0
    max_concurrency: int = 128


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The stack that was loaded.

    Attributes:
        num_decode_blocks, block_size: the decode worker's pool.
        max_requests_in_pool: most requests, of the shortest kind, that fit in the pool, by the router's accounting.
    """

    num_decode_blocks: int
    block_size: int
    max_requests_in_pool: int
    workload: Workload


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The load with the most finished tokens/s in the sweep, measured again before and after the overload.

    Attributes:
        tokens_per_s: mean of these two measurements.
    """

    concurrency: int
    tokens_per_s: float
    before: Phase
    after: Phase


@dataclass(frozen=True, kw_only=True)
class Overload:
    """Twice the load of the peak.

    Attributes:
        ratio: tokens/s over the peak's mean.
        ratio_to_sweep: tokens/s over the sweep's best window. This is stricter: that window is the best of several.
        phase: the whole phase; the fields beside it are copied from there.
    """

    concurrency: int
    tokens_per_s: float
    ratio: float
    ratio_to_sweep: float
    hand_offs_expired: int
    preemptions: int
    prompts_prefilled_twice: int
    requests_finished: int
    requests_failed: int
    requests_refused: int
    requests_waited: int
    phase: Phase


@dataclass(frozen=True, kw_only=True)
class Results:
    """All that was measured, in this order."""

    setting: Setting
    sweep: tuple[Phase, ...]
    peak: Peak
    overload: Overload


def main() -> None:
    """Run the command line."""
    arguments = _parse()
    plan = _SHORT if arguments.short else Plan()
    if arguments.seconds is not None:
        plan = replace(plan, overload_s=arguments.seconds)
    report = Report("overload", packages=("torch", "transformers"), revision=arguments.commit)
    results = uvloop.run(_run(plan))
    report.write(results, arguments.json)
    if arguments.plot is not None:
        _plot(results, arguments.plot)


def next_level(plan: Plan, sweep: Mapping[int, float]) -> int | None:
    """The concurrency to try after those in ``sweep`` (tokens/s by concurrency); ``None``: the peak is known."""
    best, num_without_gain = 0.0, 0
    for _, tokens_per_s in sorted(sweep.items()):
        num_without_gain = 0 if tokens_per_s > best * _GAIN else num_without_gain + 1
        best = max(best, tokens_per_s)
    level = 2 * max(sweep) if sweep else 1
    return None if num_without_gain >= _MAX_LEVELS_WITHOUT_GAIN or level > plan.max_concurrency else level


@dataclass(frozen=True, kw_only=True)
class LoadFigures:
    """What the clients saw. Requests count from the ramp until the last has ended; rates are of the window only.

    Attributes:
        concurrency: number of clients.
        duration_s: length of the window, which begins after the ramp and ends when the clients send no new requests.
        tokens_per_s: output tokens of requests that ended well within the window, over its length.
        requests_per_s: requests that ended well within the window, over its length.
        requests_finished: requests that ended well.
        requests_failed: requests that failed, without those that were refused.
        requests_refused: requests that got RESOURCE_EXHAUSTED.
        errors: requests by status, refused ones included.
        prompt_tokens_sent: of requests that ended well, as the router reported them.
        ttft_ms_p50, ttft_ms_p99: from a request's start to its first token; 0 if there was none.
        duration_ms_p50, duration_ms_p99: the same to its end, of requests that ended well.
    """

    concurrency: int
    duration_s: float
    tokens_per_s: float
    requests_per_s: float
    requests_finished: int
    requests_failed: int
    requests_refused: int
    errors: Mapping[str, int]
    prompt_tokens_sent: int
    ttft_ms_p50: float
    ttft_ms_p99: float
    duration_ms_p50: float
    duration_ms_p99: float


@dataclass(frozen=True, kw_only=True)
class Extremes:
    """The largest values seen at the samples taken every two seconds.

    Attributes:
        queued_requests: requests queued in the router.
        decode_blocks: blocks in use at the decode worker.
        prefill_held_blocks: blocks that the prefill worker held for hand-offs.
    """

    queued_requests: int = 0
    decode_blocks: int = 0
    prefill_held_blocks: int = 0


@dataclass(frozen=True, kw_only=True)
class Phase:
    """The figures of one phase."""

    load: LoadFigures
    evidence: Evidence
    extremes: Extremes
    cpu: CpuUse


class ClosedLoop(RunObserver):
    """Clients against one router, made by the load generator of ``quartet bench``, which it observes.

    Only finished work counts: tokens of requests that ended within the window. Tokens that arrived in it do not count,
    because some belong to requests that fail later. The loop follows requests from the ramp until the last has ended,
    because the processes' counters include all of them.
    """

    def __init__(self, router_address: str, workload: Workload) -> None:
        self._router_address = router_address
        self._workload = workload
        self._recorder = Recorder(Window(None))
        self._ramp_s = 0.0
        self._ramping: asyncio.Task[None] | None = None
        self._in_ramp = Totals()
        self._num_shown_tokens = 0

    async def run(self, num_clients: int, *, ramp_s: float, duration_s: float) -> LoadFigures:
        """Run ``num_clients`` for ``ramp_s`` and then for the window of ``duration_s``; wait for the last to end.

        Raises:
            RuntimeError: an answer ended normally, but before its length.
        """
        self._ramp_s = ramp_s
        plan = BenchPlan(
            loads=(Load(LoadKind.CONCURRENCY, num_clients),),
            limits=Limits(warmup_s=0.0, duration_s=ramp_s + duration_s, max_requests=None),
            workload=self._workload.config(),
            sender=SenderConfig(timeout_s=_REQUEST_TIMEOUT_S),
            seed=self._workload.seed,
        )
        async with QuartetClient(self._router_address) as client:
            [point] = await run_plan(client, plan, self)
        if point.result.is_interrupted:
            raise asyncio.CancelledError
        return self._figures(num_clients, point.result)

    def began(self, load: Load, number: int, recorder: Recorder, window: Window) -> None:
        """Follow ``recorder`` (``cli.bench.run.RunObserver``)."""
        self._recorder = recorder
        self._ramping = asyncio.create_task(self._ramp(recorder.totals()))

    def ended(self, point: Point) -> None:
        """End a ramp that the load did not outlast (``cli.bench.run.RunObserver``)."""
        if self._ramping is not None:
            self._ramping.cancel()

    def describe(self, elapsed_s: float, interval_s: float) -> str:
        """The figures of the last ``interval_s``, for people."""
        num_tokens = self._recorder.totals().output_tokens
        rate = (num_tokens - self._num_shown_tokens) / interval_s
        self._num_shown_tokens = num_tokens
        found = self._recorder.measured.errors.items()
        errors = ", ".join(f"{count} {kind.status}" for kind, count in found) or "none"
        return f"{elapsed_s:5.1f} s  {rate:7.1f} tok/s  {self._recorder.num_running} in flight  errors: {errors}"

    async def _ramp(self, began: Totals) -> None:
        await asyncio.sleep(self._ramp_s)
        self._in_ramp = self._recorder.totals().minus(began)

    def _figures(self, num_clients: int, result: PointResult) -> LoadFigures:
        requests, num_tokens_each = result.requests, self._workload.num_output_tokens
        if result.output_tokens != requests.finished * num_tokens_each:
            raise RuntimeError(f"{requests.finished} answers have {result.output_tokens} tokens: some were cut short")
        window = self._recorder.in_window.minus(self._in_ramp)
        errors = Counter({_NOT_ENDED: requests.cut_off})
        for error in result.errors:
            errors[error.status] += error.count
        return LoadFigures(
            concurrency=num_clients,
            duration_s=window.at_s,
            tokens_per_s=window.finished * num_tokens_each / window.at_s,
            requests_per_s=window.finished / window.at_s,
            requests_finished=requests.finished,
            requests_failed=errors.total() - errors[_REFUSED],
            requests_refused=errors[_REFUSED],
            errors=dict(+errors),
            prompt_tokens_sent=result.prompt_tokens,
            ttft_ms_p50=result.ttft_ms.p50 or 0.0,
            ttft_ms_p99=result.ttft_ms.p99 or 0.0,
            duration_ms_p50=result.e2e_ms.p50 or 0.0,
            duration_ms_p99=result.e2e_ms.p99 or 0.0,
        )


class PhaseRunner:
    """Runs phases one after the other; each begins and ends with an idle stack."""

    def __init__(self, stack: Stack, line: LiveLine, workload: Workload, *, ramp_s: float) -> None:
        """The first phase uses ``workload``'s seed; each later one uses a new seed."""
        self._stack = stack
        self._line = line
        self._workload = workload
        self._ramp_s = ramp_s

    async def run(self, name: str, concurrency: int, duration_s: float) -> Phase:
        """Load the stack with ``concurrency`` clients for the ramp and ``duration_s``."""
        self._workload = replace(self._workload, seed=self._workload.seed + 1)
        loop = ClosedLoop(self._stack.router_address, self._workload)
        before = await self._stack.metrics()
        meter = CpuMeter({**self._stack.pids, _CLIENT: os.getpid()})
        sampler = _Sampler(self._stack)
        sampling = asyncio.create_task(sampler.run())
        try:
            with self._line.showing(lambda *times: f"{name}, {concurrency} clients: {loop.describe(*times)}"):
                load = await loop.run(concurrency, ramp_s=self._ramp_s, duration_s=duration_s)
                cpu = meter.read()
        finally:
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)
        await asyncio.sleep(_SETTLE_S)
        after = await self._stack.metrics()
        grown = {process: after[process].since(before[process]) for process in before}
        evidence = collect_evidence(
            grown[_ROUTER], grown[_PREFILL], grown[_DECODE], prompt_tokens_sent=load.prompt_tokens_sent
        )
        self._line.say(_summary(name, load, evidence))
        return Phase(load=load, evidence=evidence, extremes=sampler.extremes, cpu=cpu)


def _parse() -> argparse.Namespace:
    parser = make_parser("overload", __doc__)
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw tokens/s against concurrency")
    parser.add_argument("--seconds", type=float, help="length of the overload (120)")
    parser.add_argument("--short", action="store_true", help="a few seconds a phase: shows that it works, not how well")
    return parser.parse_args()


def _plot(results: Results, path: Path) -> None:
    """Draw finished tokens/s against concurrency: the sweep, both peaks and the overload."""
    from matplotlib.figure import Figure  # takes a second to import

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    sweep, peak, over = [phase.load for phase in results.sweep], results.peak, results.overload
    levels = [load.concurrency for load in sweep]
    axes.plot(levels, [load.tokens_per_s for load in sweep], "o-", label="sweep")
    peaks = [phase.load.tokens_per_s for phase in (peak.before, peak.after)]
    axes.plot([peak.concurrency] * len(peaks), peaks, "^", label="peak, before and after the overload")
    label = f"twice the peak's load, for {over.phase.load.duration_s:.0f} s: {over.ratio:.2f} of the peak"
    axes.plot([over.concurrency], [over.tokens_per_s], "s", label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({*levels, over.concurrency}))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("clients in a closed loop")
    axes.set_ylabel("finished tokens/s")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


async def _run(plan: Plan) -> Results:
    with LiveLine() as line:
        async with Stack(_topology(), _LOG, line.say) as stack:
            runner = PhaseRunner(stack, line, _WORKLOAD, ramp_s=plan.ramp_s)
            sweep = await _sweep(runner, plan)
            best = max(sweep, key=lambda phase: phase.load.tokens_per_s).load
            if not best.tokens_per_s:
                raise RuntimeError(f"no request ended well: {dict(best.errors)}; {_LOG} has the processes' output")
            before = await runner.run("peak", best.concurrency, plan.peak_s)
            over = await runner.run("overload", 2 * best.concurrency, plan.overload_s)
            after = await runner.run("peak again", best.concurrency, plan.peak_s)
    tokens_per_s = (before.load.tokens_per_s + after.load.tokens_per_s) / 2
    return Results(
        setting=_setting(),
        sweep=tuple(sweep),
        peak=Peak(concurrency=best.concurrency, tokens_per_s=tokens_per_s, before=before, after=after),
        overload=_overload(over, tokens_per_s, best.tokens_per_s),
    )


async def _sweep(runner: PhaseRunner, plan: Plan) -> list[Phase]:
    phases: list[Phase] = []
    while (level := next_level(plan, {item.load.concurrency: item.load.tokens_per_s for item in phases})) is not None:
        phases.append(await runner.run("sweep", level, plan.sweep_s))
    return phases


def _overload(phase: Phase, peak_tokens_per_s: float, sweep_tokens_per_s: float) -> Overload:
    names = {item.name for item in fields(Overload)}
    copied = {name: value for name, value in (vars(phase.load) | vars(phase.evidence)).items() if name in names}
    tokens_per_s = phase.load.tokens_per_s
    return Overload(
        ratio=_ratio(tokens_per_s, peak_tokens_per_s),
        ratio_to_sweep=_ratio(tokens_per_s, sweep_tokens_per_s),
        phase=phase,
        **copied,
    )


def _ratio(value: float, base: float) -> float:
    return value / base if base else 0.0


def _setting() -> Setting:
    num_tokens = _WORKLOAD.min_prompt_tokens + _WORKLOAD.num_output_tokens
    return Setting(
        num_decode_blocks=_NUM_DECODE_BLOCKS,
        block_size=_BLOCK_SIZE,
        max_requests_in_pool=_NUM_DECODE_BLOCKS // -(-num_tokens // _BLOCK_SIZE),
        workload=_WORKLOAD,
    )


def _topology() -> Topology:
    quiet = {"log": {"level": "warning"}}
    settings = {
        # If an etcd answers, the stack uses it; it must not take the workers of another stack for its own.
        "namespace": f"benchmark-overload-{os.getpid()}",
        "engine": {"num_threads": 1, "block_size": _BLOCK_SIZE, "dtype": "float32"},
        "router": {"overrides": {**quiet, "policy": {"local_prefill_max_tokens": 0}}},
        "workers": [
            {"role": "prefill", "overrides": quiet},
            {"role": "decode", "overrides": {**quiet, "engine": {"num_blocks": _NUM_DECODE_BLOCKS}}},
        ],
    }
    return build(Topology, settings)


class _Sampler:
    def __init__(self, stack: Stack) -> None:
        self.extremes = Extremes()
        self._stack = stack

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_SAMPLE_INTERVAL_S)
            found = await self._stack.metrics()
            blocks = "quartet_worker_blocks"
            now = Extremes(
                queued_requests=round(found[_ROUTER].total("quartet_router_queued_requests")),
                decode_blocks=round(found[_DECODE].total(blocks, state="used")),
                prefill_held_blocks=round(found[_PREFILL].total(blocks, state="held")),
            )
            before = vars(self.extremes)
            self.extremes = Extremes(**{name: max(before[name], value) for name, value in vars(now).items()})


def _summary(name: str, load: LoadFigures, evidence: Evidence) -> str:
    return (
        f"{name}: {load.concurrency} clients, {load.tokens_per_s:.1f} tok/s, {load.requests_finished} finished, "
        f"errors {dict(load.errors) or 'none'}, {evidence.requests_waited} waited, "
        f"{evidence.preemptions} preemptions, {evidence.hand_offs_expired} expired, "
        f"{evidence.prompts_prefilled_twice} prefilled twice"
    )


# The tiny model's special tokens have the ids below ``first_token_id``.
_WORKLOAD = Workload(
    min_prompt_tokens=200, max_prompt_tokens=400, num_output_tokens=64, first_token_id=16, end_token_id=2048
)
_SHORT = Plan(ramp_s=0.5, sweep_s=2.0, peak_s=3.0, overload_s=5.0, max_concurrency=4)


if __name__ == "__main__":
    main()
