"""The torch engine beside ``generate`` of transformers: one checkpoint, one CPU thread, the same greedy tokens.

Rounds of both sides alternate in one process, because a machine's speed drifts. Each round has new prompts, because a
prefix cache remembers old ones. The benchmark compares both outputs, so a wrong engine can't win. Workloads of prompts
alone also run the bare kernels in every round, to show the most that an engine on these kernels could reach.

    python -m benchmarks.engine --json FILE [--short] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from benchmarks.engine_sides import (
    NUM_THREADS,
    WORKLOADS,
    Floor,
    GenerateSide,
    QuartetSide,
    Side,
    Tokens,
    Workload,
    write_checkpoint,
)
from benchmarks.progress import LiveLine
from benchmarks.report import Report, make_parser
from quartet.engine.scheduler import SchedulerConfig

_ROUNDS = 5
# Rounds of the short form. A round of these two takes 24 and 16 s of CPU time, one of all the others together 8 s.
_SHORT_ROUNDS = {"ragged_32": 2, "shared_prefix_32": 2}
# Runs first, so that no workload pays for what is set up on first use.
_WARM_UP = "equal_32"
# Float32 logits of one context differ by this much between two ways to batch it; the best two logits are mostly whole
# units apart. If they are nearer than this, the two sides may choose different tokens.
_TIE = 1e-2


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """One side's measurements of one workload; the median counts."""

    tokens_per_s: float
    tokens_per_cpu_s: float
    rounds: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Both sides on one workload.

    Attributes:
        ratio: median over the rounds of ours over theirs, by the clock.
        cpu_ratio: the same by CPU time of the process, which other processes on the machine disturb less.
        ceiling: median over the rounds of theirs over the bare kernels' (``Floor``), by the clock; ``None``: this
            workload has no ceiling.
        cpu_ceiling: the same by CPU time.
        num_ties: outputs that leave the expected one at a token that ties with it in the logits.
    """

    quartet: Rounds
    generate: Rounds
    ratio: float
    cpu_ratio: float
    ceiling: float | None
    cpu_ceiling: float | None
    num_outputs: int
    num_ties: int


@dataclass(frozen=True, kw_only=True)
class Results:
    """All workloads by name. ``ratio`` has each comparison's main figure, ``num_rounds`` how many rounds it is of."""

    num_parameters: int
    num_threads: int
    num_rounds: Mapping[str, int]
    ratio: Mapping[str, float]
    workloads: Mapping[str, Comparison]


@dataclass(frozen=True)
class _Round:
    """One run of one side."""

    num_tokens: int
    wall_s: float
    cpu_s: float


@dataclass(frozen=True, kw_only=True)
class _Sides:
    """The sides that are measured."""

    quartet: QuartetSide
    generate: GenerateSide
    floor: Floor


def main() -> None:
    """Run the command line."""
    arguments = _parse()
    report = Report("engine", packages=("torch", "transformers"), revision=arguments.commit)
    names = arguments.only or list(WORKLOADS)
    results = asyncio.run(_run({name: rounds_of(name, is_short=arguments.short) for name in names}))
    report.write(results, arguments.json)


def _parse() -> argparse.Namespace:
    parser = make_parser("engine", __doc__)
    parser.add_argument("--short", action="store_true", help=f"fewer than {_ROUNDS} rounds of what takes long")
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, metavar="NAME", help=", ".join(WORKLOADS))
    return parser.parse_args()


def rounds_of(name: str, *, is_short: bool) -> int:
    """How often a workload runs: an odd number, so that the median is a round that was measured."""
    return _SHORT_ROUNDS.get(name, _ROUNDS) if is_short else _ROUNDS


async def _run(num_rounds: Mapping[str, int]) -> Results:
    torch.set_num_threads(NUM_THREADS)
    with LiveLine() as line, tempfile.TemporaryDirectory(prefix="quartet-benchmark-") as directory:
        num_parameters = write_checkpoint(Path(directory))
        sides = _Sides(
            quartet=QuartetSide(Path(directory)),
            generate=GenerateSide(Path(directory)),
            floor=Floor(Path(directory), max_num_batched_tokens=SchedulerConfig().max_num_batched_tokens),
        )
        try:
            await sides.quartet.start()
            workloads: dict[str, Comparison] = {}
            await _compare(_WARM_UP, sides, range(1))
            for name in num_rounds:
                workloads[name] = await _compare(name, sides, line.rounds(name, num_rounds[name]))
                line.say(_describe(name, workloads[name]))
        finally:
            await sides.quartet.close()
    return Results(
        num_parameters=num_parameters,
        num_threads=NUM_THREADS,
        num_rounds=num_rounds,
        ratio={name: comparison.ratio for name, comparison in workloads.items()},
        workloads=workloads,
    )


async def _compare(name: str, sides: _Sides, numbers: Iterable[int]) -> Comparison:
    source = random.Random(name)
    rounds: dict[Side, list[_Round]] = {sides.quartet: [], sides.generate: [], sides.floor: []}
    num_ties = 0
    for number in numbers:
        workload = WORKLOADS[name](source)
        # The sides take turns to go first, so neither gains from what the first one leaves in caches and clocks.
        turns = (sides.generate, sides.quartet) if number % 2 else (sides.quartet, sides.generate)
        outputs: dict[Side, Tokens] = {}
        for side in (*turns, sides.floor) if workload.counts_prompts else turns:
            measured, outputs[side] = await _measure(side, workload)
            rounds[side].append(measured)
        num_ties += count_ties(workload, outputs[sides.quartet], outputs[sides.generate], sides.generate)
    theirs = rounds[sides.generate]
    return Comparison(
        quartet=_summarise(rounds[sides.quartet]),
        generate=_summarise(theirs),
        ratio=_ratio(theirs, rounds[sides.quartet], lambda item: item.wall_s),
        cpu_ratio=_ratio(theirs, rounds[sides.quartet], lambda item: item.cpu_s),
        ceiling=_ratio(theirs, rounds[sides.floor], lambda item: item.wall_s) if rounds[sides.floor] else None,
        cpu_ceiling=_ratio(theirs, rounds[sides.floor], lambda item: item.cpu_s) if rounds[sides.floor] else None,
        num_outputs=len(workload.jobs) * len(theirs),
        num_ties=num_ties,
    )


def _ratio(rounds: Sequence[_Round], others: Sequence[_Round], time_s: Callable[[_Round], float]) -> float:
    return median(time_s(one) / time_s(other) for one, other in zip(rounds, others, strict=True))


async def _measure(side: Side, workload: Workload) -> tuple[_Round, Tokens]:
    gc.collect()  # so that no side pays for the other's garbage
    wall, cpu = time.perf_counter(), time.process_time()
    tokens = await side.run(workload.jobs)
    wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    return _Round(workload.num_useful_tokens, wall_s, cpu_s), tokens


def count_ties(workload: Workload, tokens: Tokens, expected: Tokens, reference: GenerateSide) -> int:
    """How many outputs leave the expected one at a token that ties with it in the reference's logits, within rounding.

    Raises:
        RuntimeError: an output leaves it at another token, or has another length: one side computes wrongly.
    """
    num_ties = 0
    for job, mine, theirs in zip(workload.jobs, tokens, expected, strict=True):
        if len(mine) != job.num_output_tokens or len(theirs) != job.num_output_tokens:
            raise RuntimeError(f"{len(mine)} and {len(theirs)} tokens instead of {job.num_output_tokens}")
        first = next((i for i, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1]), None)
        if first is None:
            continue
        logits = reference.logits_after([*job.prompt, *theirs[:first]])
        distance = abs(float(logits[mine[first]] - logits[theirs[first]]))
        if distance > _TIE:
            raise RuntimeError(f"token {first} is {mine[first]}, not {theirs[first]}: {distance:.3g} apart in logits")
        num_ties += 1
    return num_ties


def _summarise(rounds: Sequence[_Round]) -> Rounds:
    return Rounds(
        tokens_per_s=median(item.num_tokens / item.wall_s for item in rounds),
        tokens_per_cpu_s=median(item.num_tokens / item.cpu_s for item in rounds),
        rounds=[item.num_tokens / item.wall_s for item in rounds],
    )


def _describe(name: str, comparison: Comparison) -> str:
    ours, theirs = comparison.quartet.tokens_per_s, comparison.generate.tokens_per_s
    most = "" if comparison.ceiling is None else f" of {comparison.ceiling:.2f} at most"
    return (
        f"{name}: {ours:.0f} tok/s beside {theirs:.0f}: {comparison.ratio:.2f}{most} "
        f"(by CPU time {comparison.cpu_ratio:.2f}; {comparison.num_ties} of {comparison.num_outputs} outputs tie)"
    )


if __name__ == "__main__":
    main()
