"""Hand-offs between workers on GPUs: how fast blocks move, what that costs decoding, and what disaggregation brings.

Four rows, each with two GPUs, or with one that both sides share:

- ``pull``: blocks, while nothing else runs; beside one plain copy between the same pools;
- ``busy``: the same while both sides decode, and how much longer their steps take;
- ``first_step``: from the end of a prompt's prefill to the beginning of its first decode step;
- ``mixed``: streams that decode while long prompts arrive, disaggregated and aggregated.

Weights are random (``engine.load_format``), in the shape of Qwen3-8B; the shape ``tiny`` with ``--device cpu`` shows in
seconds that all of it works. Each row is written to the file as soon as it is measured, with its own command, commit
and machine; the file keeps the last two measurements of each row, and those of other commands.

    python -m benchmarks.gpu_hand_off --json FILE --gpus 1|2 [--only ROW ...] [--plot FILE.png]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeAlias

import uvloop

from benchmarks.gpu_mixed import DISAGG, MixedPlan, MixedRow, measure_mixed
from benchmarks.gpu_pull import OWNER, READER, BusyRow, IdleRow, PullPlan, StreamsPlan, measure_busy, measure_idle
from benchmarks.gpu_rows import Command, Measurements, measure_rows
from benchmarks.gpu_serving import FirstStepPlan, FirstStepRow, Fleet, measure_first_step
from benchmarks.progress import LiveLine
from benchmarks.random_model import QWEN3_8B, TINY, RandomModel
from benchmarks.report import make_parser
from benchmarks.transfer_source import PoolShape
from cli.bench.workload import IntRange
from quartet.discovery.base import Role
from quartet.errors import ConfigError

_NAME = "gpu_hand_off"
_PACKAGES = ("torch", "transformers")
_BLOCK_SIZE = 16
_KIB, _MIB = 1 << 10, 1 << 20
_CPU, _CUDA = "cpu", "cuda"


_Figures: TypeAlias = IdleRow | BusyRow | FirstStepRow | MixedRow


class Row(StrEnum):
    """What can be measured by itself, in this order."""

    PULL = "pull"
    BUSY = "busy"
    FIRST_STEP = "first_step"
    MIXED = "mixed"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured with one shape of model.

    Attributes:
        stream_prompt_tokens, stream_output_tokens, num_stream_blocks: of the streams of ``busy``, and of each pool.
        num_prompt_blocks: of each worker's pool in ``first_step``.
        num_prefill_blocks, num_decode_blocks: of pools in ``mixed``; an aggregated worker's is the latter.
        max_model_len: of workers.
        max_batch_size: of workers: streams and prompts together.
    """

    model: RandomModel
    pulls: PullPlan
    num_streams: int
    stream_prompt_tokens: int
    stream_output_tokens: int
    num_settling_steps: int
    num_stream_blocks: int
    first_step: FirstStepPlan
    num_prompt_blocks: int
    mixed: MixedPlan
    num_prefill_blocks: int
    num_decode_blocks: int
    max_model_len: int
    max_batch_size: int


_QWEN3_8B_BLOCK = QWEN3_8B.block_size_bytes(_BLOCK_SIZE)
_SMALL_PIECES = PoolShape(16384, 64 * _KIB)
_PROMPT_OF_BLOCKS = PoolShape(8000 // _BLOCK_SIZE, _QWEN3_8B_BLOCK)
_4_GIB, _16_GIB = (PoolShape(num * _KIB * _MIB // _QWEN3_8B_BLOCK, _QWEN3_8B_BLOCK) for num in (4, 16))

_FULL = Plan(
    model=QWEN3_8B,
    pulls=PullPlan(
        idle=(_4_GIB, _PROMPT_OF_BLOCKS, _SMALL_PIECES, _16_GIB),
        busy=(_PROMPT_OF_BLOCKS, _SMALL_PIECES, _4_GIB),
        num_pulls=15,
        num_rounds=4,
        window_s=2.0,
    ),
    num_streams=64,
    stream_prompt_tokens=256,
    stream_output_tokens=1000,
    num_settling_steps=200,
    num_stream_blocks=6144,
    first_step=FirstStepPlan(num_prompt_tokens=8000, num_requests=20, num_warm_up=3),
    num_prompt_blocks=2048,
    mixed=MixedPlan(
        num_streams=64,
        stream_prompt_tokens=128,
        stream_output_tokens=IntRange(128, 384),
        num_prompt_tokens=4000,
        num_output_tokens=64,
        load=0.8,
        num_rate_prompts=32,
        warm_up_s=10.0,
        window_s=30.0,
        step_tokens=(512, 1024, 2048),
    ),
    num_prefill_blocks=4096,
    num_decode_blocks=12288,
    max_model_len=8192,
    max_batch_size=128,
)

_TINY_BLOCKS = PoolShape(64, TINY.block_size_bytes(_BLOCK_SIZE))

_SHORT = Plan(
    model=TINY,
    pulls=PullPlan(
        idle=(_TINY_BLOCKS, _TINY_BLOCKS, PoolShape(64, 4 * _KIB), _TINY_BLOCKS),
        busy=(_TINY_BLOCKS, PoolShape(64, 4 * _KIB), _TINY_BLOCKS),
        num_pulls=3,
        num_rounds=1,
        window_s=0.3,
    ),
    num_streams=4,
    stream_prompt_tokens=20,
    stream_output_tokens=40,
    num_settling_steps=3,
    num_stream_blocks=128,
    first_step=FirstStepPlan(num_prompt_tokens=100, num_requests=3, num_warm_up=1),
    num_prompt_blocks=128,
    mixed=MixedPlan(
        num_streams=4,
        stream_prompt_tokens=20,
        stream_output_tokens=IntRange(10, 30),
        num_prompt_tokens=100,
        num_output_tokens=4,
        load=0.1,
        num_rate_prompts=4,
        warm_up_s=0.3,
        window_s=1.0,
        step_tokens=(64,),
    ),
    num_prefill_blocks=256,
    num_decode_blocks=256,
    max_model_len=1024,
    max_batch_size=16,
)

#: By the name of the shape.
PLANS: Mapping[str, Plan] = {"qwen3-8b": _FULL, "tiny": _SHORT}


def main() -> None:
    """Run the command line; the exit code is 1 if a row could not be measured."""
    arguments = _parse()
    measurements = Measurements(arguments.json)
    try:
        is_done = uvloop.run(_run(arguments, measurements))
        if arguments.plot is not None:
            _plot(measurements.rows, _num_gpus(arguments), arguments.plot)
    except ConfigError as error:
        sys.exit(str(error))
    sys.exit(0 if is_done else 1)


def _parse() -> argparse.Namespace:
    parser = make_parser(_NAME, __doc__ or "")
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=2, help="1: both sides share one")
    parser.add_argument("--device", choices=(_CUDA, _CPU), default=_CUDA)
    parser.add_argument("--shape", choices=PLANS, default="qwen3-8b")
    parser.add_argument("--only", nargs="*", type=Row, choices=list(Row), default=list(Row), metavar="ROW")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the waits between tokens of row mixed")
    arguments = parser.parse_args()
    arguments.json = Path(arguments.json)
    return arguments


async def _run(arguments: argparse.Namespace, measurements: Measurements) -> bool:
    """Measure the rows that are asked for. Returns whether none failed."""
    num_gpus = _num_gpus(arguments)
    command = Command(name=_NAME, packages=_PACKAGES, commit=arguments.commit, shape=arguments.shape, num_gpus=num_gpus)
    with LiveLine() as line, tempfile.TemporaryDirectory(prefix="quartet-benchmark-") as directory:
        bench = _Bench(PLANS[arguments.shape], _devices(num_gpus), Path(directory), line)
        return await measure_rows(arguments.only, command, bench.measure, measurements, line)


class _Bench:
    """All rows, on given devices."""

    def __init__(self, plan: Plan, devices: tuple[str, str], model_path: Path, line: LiveLine) -> None:
        """``devices``: of the side that owns blocks, or prefills, and of the one that reads them, or decodes."""
        self._plan = plan
        self._devices = devices
        self._model_path = model_path
        self._line = line
        plan.model.write(model_path)

    async def measure(self, row: Row, on_part: Callable[[_Figures], None]) -> _Figures:
        """The figures of ``row``; ``on_part`` gets those of a part of a long one."""
        match row:
            case Row.PULL:
                return await measure_idle(self._plan.pulls, self._devices, self._line)
            case Row.BUSY:
                return await measure_busy(self._plan.pulls, self._streams, self._line)
            case Row.FIRST_STEP:
                return await self._first_step()
            case Row.MIXED:
                return await self._mixed(on_part)

    @property
    def _streams(self) -> Mapping[str, StreamsPlan]:
        plan = self._plan
        return {
            side: StreamsPlan(
                engine={
                    "model_path": str(self._model_path),
                    "dtype": plan.model.dtype,
                    "device": device,
                    "block_size": _BLOCK_SIZE,
                    "num_blocks": plan.num_stream_blocks,
                    "num_threads": 1 if device == _CPU else None,
                    "random_seed": 0,
                },
                num_streams=plan.num_streams,
                num_prompt_tokens=plan.stream_prompt_tokens,
                num_output_tokens=plan.stream_output_tokens,
                num_settling_steps=plan.num_settling_steps,
            )
            for side, device in zip((OWNER, READER), self._devices, strict=True)
        }

    async def _first_step(self) -> FirstStepRow:
        plan = self._plan
        fleet = self._pair("first-step", plan.num_prompt_blocks, plan.num_prompt_blocks)
        bytes_per_token = plan.model.block_size_bytes(1)
        return await measure_first_step(plan.first_step, fleet, self._model_path, bytes_per_token, self._line)

    async def _mixed(self, on_side: Callable[[MixedRow], None]) -> MixedRow:
        plan = self._plan
        disagg = self._pair("mixed-disagg", plan.num_prefill_blocks, plan.num_decode_blocks)
        return await measure_mixed(plan.mixed, disagg, self._aggregated, self._model_path, self._line, on_side)

    def _pair(self, name: str, num_prefill_blocks: int, num_decode_blocks: int) -> Fleet:
        """A Prefill and a Decode worker."""
        return Fleet(
            name=name,
            workers=tuple(zip((Role.PREFILL, Role.DECODE), self._devices, strict=True)),
            engine=self._engine(),
            num_blocks={Role.PREFILL: num_prefill_blocks, Role.DECODE: num_decode_blocks},
        )

    def _aggregated(self, num_tokens: int) -> Fleet:
        """A Decode worker on each device, whose steps compute up to ``num_tokens`` tokens."""
        return Fleet(
            name=f"mixed-agg-{num_tokens}",
            workers=[(Role.DECODE, device) for device in dict.fromkeys(self._devices)],
            engine=self._engine() | {"max_num_tokens": num_tokens},
            num_blocks={Role.DECODE: self._plan.num_decode_blocks},
        )

    def _engine(self) -> dict[str, Any]:
        return {
            "dtype": self._plan.model.dtype,
            "load_format": "random",
            "block_size": _BLOCK_SIZE,
            "max_model_len": self._plan.max_model_len,
            "max_batch_size": self._plan.max_batch_size,
            **({"num_threads": 1} if self._devices[0] == _CPU else {}),
        }


def _devices(num_gpus: int) -> tuple[str, str]:
    return [(_CPU, _CPU), ("cuda:0", "cuda:0"), ("cuda:0", "cuda:1")][num_gpus]


def _num_gpus(arguments: argparse.Namespace) -> int:
    return 0 if arguments.device == _CPU else arguments.gpus


def _plot(rows: Sequence[Mapping[str, Any]], num_gpus: int, path: Path) -> None:
    """Draw the newest row ``mixed`` of so many GPUs: which share of the waits between tokens is longer than so much."""
    from matplotlib.figure import Figure  # takes a second to import

    found = [row["figures"] for row in rows if (row["row"], row["num_gpus"]) == (Row.MIXED, num_gpus)]
    if not found:
        raise ConfigError(f"--plot: row {Row.MIXED} has not been measured in this form")
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for side in found[-1]["sides"]:
        # The last one is the longest: no share of the waits is longer.
        points = list(zip(side["curve"]["ms"], side["curve"]["longer"], strict=True))[:-1]
        axes.plot(*zip(*points, strict=True), label=_label(side["name"]), lw=2 if side["name"] == DISAGG else 1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.axhline(0.01, color="grey", lw=0.5, ls="--")
    axes.set_title({0: "on the CPU", 1: "one GPU, shared", 2: "two GPUs"}[num_gpus])
    axes.set_xlabel("milliseconds between two tokens of a request")
    axes.set_ylabel("share of all waits that are longer")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _label(side: str) -> str:
    return "disaggregated" if side == DISAGG else f"aggregated, steps of {side.rpartition('_')[2]} tokens"


if __name__ == "__main__":
    main()
