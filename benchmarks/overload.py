"""Overload: twice the load at which finished tokens/s peak must not make the system do work twice, or less of it.

A closed loop of clients against one Prefill, one Decode with a small block pool, and the Router, all prompts prefilled
remotely. First the concurrency at which finished tokens/s peak is looked for; then that load, twice that load, and that
load again are measured in one go, because a shared machine's speed drifts: the ratio is taken against the mean of the
two peaks.

    python -m benchmarks.overload --json FILE [--plot FILE.png] [--seconds 120] [--short]
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import uvloop

from benchmarks.closed_loop import Workload
from benchmarks.overload_phase import Phase, PhaseRunner
from benchmarks.progress import LiveLine
from benchmarks.report import Report, add_report_argument
from benchmarks.stack import Stack
from quartet.config import build
from quartet.telemetry.provenance import write_report
from services.topology.topology import Topology

_BLOCK_SIZE = 32
# About five of the requests below: the router has to hold the others back at any load worth the name.
_NUM_DECODE_BLOCKS = 64
# The tiny model's ids below the first are special tokens.
_WORKLOAD = Workload(
    min_prompt_tokens=200, max_prompt_tokens=400, num_output_tokens=64, first_token_id=16, end_token_id=2048
)
_LOG = Path(".run/benchmark-overload.log")
# The peak is behind us when two doublings in a row brought less than this over the best so far.
_GAIN, _MAX_LEVELS_WITHOUT_GAIN = 1.02, 2


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long each phase is, in seconds, and how far the sweep goes.

    Attributes:
        ramp_s: before each window, for the load to become steady.
    """

    ramp_s: float = 3.0
    sweep_s: float = 12.0
    peak_s: float = 45.0
    overload_s: float = 120.0
    max_concurrency: int = 128


_SHORT = Plan(ramp_s=0.5, sweep_s=2.0, peak_s=3.0, overload_s=5.0, max_concurrency=4)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What was loaded.

    Attributes:
        num_decode_blocks, block_size: the decode worker's pool.
        max_requests_in_pool: of the shortest kind, counted as the router books them, that it has room for at once.
    """

    num_decode_blocks: int
    block_size: int
    max_requests_in_pool: int
    workload: Workload


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The load at which finished tokens/s were highest in the sweep, measured again before and after the overload.

    Attributes:
        tokens_per_s: mean of the two.
    """

    concurrency: int
    tokens_per_s: float
    before: Phase
    after: Phase


@dataclass(frozen=True, kw_only=True)
class Overload:
    """Twice that load.

    Attributes:
        ratio: tokens/s over the peak's mean.
        ratio_to_sweep: tokens/s over the sweep's best window: the stricter of the two, as that is the best of several.
        phase: the whole of it; the fields beside it are taken from there.
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
    """All that was measured, in the order in which it was."""

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
    report = Report("overload", packages=("torch", "transformers"))
    written = report.finish(uvloop.run(_run(plan)))
    write_report(written, arguments.json)
    if arguments.plot is not None:
        from benchmarks.plot import plot_overload  # matplotlib takes a second to import

        plot_overload(written, arguments.plot)


def next_level(plan: Plan, sweep: Mapping[int, float]) -> int | None:
    """The concurrency to try after those in ``sweep`` (tokens/s by concurrency); ``None``: the peak is known."""
    best, num_without_gain = 0.0, 0
    for _, tokens_per_s in sorted(sweep.items()):
        num_without_gain = 0 if tokens_per_s > best * _GAIN else num_without_gain + 1
        best = max(best, tokens_per_s)
    level = 2 * max(sweep) if sweep else 1
    return None if num_without_gain >= _MAX_LEVELS_WITHOUT_GAIN or level > plan.max_concurrency else level


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overload", description=__doc__.partition("\n")[0])
    add_report_argument(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw tokens/s against concurrency")
    parser.add_argument("--seconds", type=float, help="length of the overload (120)")
    parser.add_argument("--short", action="store_true", help="a few seconds a phase: shows that it works, not how well")
    return parser.parse_args()


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
    load, evidence = phase.load, phase.evidence
    return Overload(
        concurrency=load.concurrency,
        tokens_per_s=load.tokens_per_s,
        ratio=_ratio(load.tokens_per_s, peak_tokens_per_s),
        ratio_to_sweep=_ratio(load.tokens_per_s, sweep_tokens_per_s),
        hand_offs_expired=evidence.hand_offs_expired,
        preemptions=evidence.preemptions,
        prompts_prefilled_twice=evidence.prompts_prefilled_twice,
        requests_finished=load.requests_finished,
        requests_failed=load.requests_failed,
        requests_refused=load.requests_refused,
        requests_waited=evidence.requests_waited,
        phase=phase,
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
        # An etcd that answers is used; nobody else's workers may be taken for ours.
        "namespace": f"benchmark-overload-{os.getpid()}",
        "engine": {"num_threads": 1, "block_size": _BLOCK_SIZE, "dtype": "float32"},
        "router": {"overrides": {**quiet, "policy": {"local_prefill_max_tokens": 0}}},
        "workers": [
            {"role": "prefill", "overrides": quiet},
            {"role": "decode", "overrides": {**quiet, "engine": {"num_blocks": _NUM_DECODE_BLOCKS}}},
        ],
    }
    return build(Topology, settings)


if __name__ == "__main__":
    main()
