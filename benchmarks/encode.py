"""What images cost: encoding them, waiting for the first token of prompts with them, and moving their embeddings.

Real processes with the tiny model (Encode, Prefill, Decode, Router), which is so small that what is around the model
counts as much as the model. The pulls are of embeddings as LLaVA-1.6 of 7 B makes them of its largest image, by the
processes of ``benchmarks.transfer``.

    python -m benchmarks.encode --json FILE
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvloop

from benchmarks.encode_rate import RateFigures, measure_rate
from benchmarks.encode_stack import make_stack
from benchmarks.encode_ttft import Quantiles, measure_ttft
from benchmarks.progress import LiveLine
from benchmarks.report import Report, add_report_argument
from benchmarks.transfer import Plan, Run, measure_transfer
from benchmarks.transfer_source import PoolShape
from quartet.telemetry.provenance import write_report

_NUM_RATE_ROUNDS = 7
_NUM_TTFT_ROUNDS = 31
# 2,880 tokens of width 4096 in bfloat16, 32 of them a piece.
_PULLS = Plan(PoolShape(90, 256 << 10, holds_embeddings=True), 15)


@dataclass(frozen=True, kw_only=True)
class Results:
    """All that was measured.

    Attributes:
        num_rate_rounds, num_ttft_rounds: that were counted.
        images_per_s: by ``benchmarks.encode_rate.Load``.
        worker: the same, with what else was seen.
        ttft_ms, parts_ms: by ``benchmarks.encode_ttft.Prompt``.
        pulls: of one image's embeddings.
    """

    num_rate_rounds: int
    num_ttft_rounds: int
    images_per_s: Mapping[str, float]
    worker: Mapping[str, RateFigures]
    ttft_ms: Mapping[str, Quantiles]
    parts_ms: Mapping[str, Mapping[str, float]]
    pulls: Run


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.encode", description=__doc__.partition("\n")[0])
    add_report_argument(parser)
    arguments = parser.parse_args()
    report = Report("encode", packages=("torch", "transformers", "pillow"))
    write_report(report.finish(uvloop.run(_run())), arguments.json)


async def _run() -> Results:
    with LiveLine() as line, tempfile.TemporaryDirectory() as directory:
        pulls = await measure_transfer(_PULLS, line)
        async with make_stack(Path(directory), line.say) as stack:
            with _shown("images a second", _NUM_RATE_ROUNDS, line) as on_round:
                worker = await measure_rate(stack, _NUM_RATE_ROUNDS, on_round)
            line.say(
                "images a second: " + _describe({load: f"{item.images_per_s:.0f}" for load, item in worker.items()})
            )
            with _shown("time to the first token", _NUM_TTFT_ROUNDS, line) as on_round:
                ttft = await measure_ttft(stack, _NUM_TTFT_ROUNDS, on_round)
            line.say("TTFT, p50 ms: " + _describe({prompt: f"{item.p50:.1f}" for prompt, item in ttft.ttft_ms.items()}))
    return Results(
        num_rate_rounds=_NUM_RATE_ROUNDS,
        num_ttft_rounds=_NUM_TTFT_ROUNDS,
        images_per_s={load: figures.images_per_s for load, figures in worker.items()},
        worker=worker,
        ttft_ms=ttft.ttft_ms,
        parts_ms=ttft.parts_ms,
        pulls=pulls,
    )


@contextmanager
def _shown(name: str, num_rounds: int, line: LiveLine) -> Iterator[Callable[[int], None]]:
    """Takes the numbers of rounds, and shows the latest."""
    latest = 0

    def on_round(number: int) -> None:
        nonlocal latest
        latest = number

    showing = asyncio.create_task(
        line.follow(lambda elapsed, _: f"{name}: round {latest} of {num_rounds}, {elapsed:.0f} s")
    )
    try:
        yield on_round
    finally:
        showing.cancel()


def _describe(values: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


if __name__ == "__main__":
    main()
