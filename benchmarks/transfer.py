"""How fast blocks move from worker to worker, in each way, beside a plain copy in memory.

The source and the puller are processes of their own. They run the transfer plane as workers do: hand-off, claim, fetch,
finish. They use their pools' blocks in scattered order. In every round the puller also copies a pool of its own process
into the one that it fetches into (memcpy): that is the most that the machine could do at that moment.

    python -m benchmarks.transfer --json FILE [--long]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.children import start_child
from benchmarks.progress import LiveLine
from benchmarks.report import Report, add_report_argument
from benchmarks.transfer_puller import Mover, Sample, Temperature
from benchmarks.transfer_source import PoolShape
from quartet.config import build
from quartet.telemetry.provenance import write_report

_MIB = 1 << 20
_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class CpuPerGb:
    """CPU seconds for each gigabyte moved, by side."""

    puller: float
    source: float


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Medians over all rounds, by the mover of the bytes.

    Attributes:
        gb_per_s: 1e9 bytes a second, from the claim until the source has released the blocks.
        share_of_memcpy: the same over the memcpy of the same round.
        cpu_s_per_gb: of both processes.
    """

    gb_per_s: Mapping[str, float]
    share_of_memcpy: Mapping[str, float]
    cpu_s_per_gb: Mapping[str, CpuPerGb]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One pool, moved again and again."""

    size_bytes: int
    piece_size_bytes: int
    num_rounds: int
    warm: Figures
    cold: Figures


@dataclass(frozen=True, kw_only=True)
class Results(Run):
    """The main run, and ``others`` with other sizes; none in the short form."""

    others: Sequence[Run]


@dataclass(frozen=True)
class Plan:
    """What to move, and how often."""

    shape: PoolShape
    num_rounds: int


_MAIN = Plan(PoolShape(64, _MIB), 9)
_OTHERS = (
    Plan(PoolShape(1024, _MIB // 16), 9),
    Plan(PoolShape(256, _MIB // 4), 9),
    Plan(PoolShape(16, 4 * _MIB), 9),
    Plan(PoolShape(1024, _MIB), 5),
)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transfer", description=__doc__.partition("\n")[0])
    add_report_argument(parser)
    parser.add_argument("--long", action="store_true", help="also pieces of other lengths, and 1 GiB of blocks")
    arguments = parser.parse_args()
    report = Report("transfer", packages=("numpy",))
    write_report(report.finish(asyncio.run(_run(_OTHERS if arguments.long else ()))), arguments.json)


def summarize(samples: Sequence[Sample], temperature: Temperature) -> Figures:
    """Medians of the samples with ``temperature``. They have each mover once a round, in the order of the rounds."""
    by_mover = {mover: [s for s in samples if (s.temperature, s.mover) == (temperature, mover)] for mover in Mover}
    rounds = list(zip(*by_mover.values(), strict=True))
    return Figures(
        gb_per_s={
            mover: statistics.median(sample.size_bytes / sample.duration_s / 1e9 for sample in of_mover)
            for mover, of_mover in by_mover.items()
        },
        share_of_memcpy={
            mover: statistics.median(_share(samples, mover) for samples in rounds)
            for mover in Mover
            if mover is not Mover.MEMCPY
        },
        cpu_s_per_gb={
            mover: CpuPerGb(
                puller=statistics.median(sample.cpu_s / sample.size_bytes * 1e9 for sample in of_mover),
                source=statistics.median(sample.source_cpu_s / sample.size_bytes * 1e9 for sample in of_mover),
            )
            for mover, of_mover in by_mover.items()
        },
    )


async def measure_transfer(plan: Plan, line: LiveLine) -> Run:
    """Move the pool in processes of their own. Raises ``RuntimeError``: a process failed."""
    name = f"{plan.shape.size_bytes // _MIB} MiB in pieces of {plan.shape.piece_size_bytes // 1024} KiB"
    samples: list[Sample] = []
    showing = asyncio.create_task(line.follow(lambda elapsed, _: f"{name}: {elapsed:.0f} s, {_last(samples)}"))
    try:
        async with (
            asyncio.timeout(_TIMEOUT_S),
            start_child("benchmarks.transfer_puller", plan.shape, plan.num_rounds) as puller,
        ):
            while (measured := await puller.read(_TIMEOUT_S)) is not None:
                samples += [build(Sample, sample) for sample in measured]
    finally:
        showing.cancel()
    warm, cold = (summarize(samples, temperature) for temperature in Temperature)
    speeds = ", ".join(f"{mover} {speed:.2f}" for mover, speed in warm.gb_per_s.items())
    line.say(f"{name}: warm GB/s: {speeds}; shm {warm.share_of_memcpy[Mover.SHM]:.2f} of memcpy")
    return Run(
        size_bytes=plan.shape.size_bytes,
        piece_size_bytes=plan.shape.piece_size_bytes,
        num_rounds=plan.num_rounds,
        warm=warm,
        cold=cold,
    )


def _share(samples: Sequence[Sample], mover: Mover) -> float:
    """A mover's speed over memcpy's in one round."""
    duration_s = {sample.mover: sample.duration_s for sample in samples}
    return duration_s[Mover.MEMCPY] / duration_s[mover]


async def _run(others: Sequence[Plan]) -> Results:
    with LiveLine() as line:
        main_run = await measure_transfer(_MAIN, line)
        other_runs = [await measure_transfer(plan, line) for plan in others]
    return Results(**vars(main_run), others=other_runs)


def _last(samples: Sequence[Sample]) -> str:
    if not samples:
        return "starting"
    last = samples[-1]
    return f"{last.temperature} {last.mover} {last.size_bytes / last.duration_s / 1e9:.2f} GB/s"


if __name__ == "__main__":
    main()
