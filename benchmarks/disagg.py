"""What one request pays when another worker prefills its prompt: time to the first and to the second token.

Two topologies of real processes run beside each other: one Decode worker alone, and a Prefill before a Decode. The
client asks them in turn, one request at a time. Every step of the stub engine takes a fixed time, so what remains after
subtracting the steps and the copying of bytes is Quartet's own cost. The tiny model shows the same with real computing.

    python -m benchmarks.disagg --json FILE [--long]
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
import uvloop

from benchmarks.disagg_client import Answered, ask, median_parts, split
from benchmarks.progress import LiveLine
from benchmarks.report import Report, make_parser
from benchmarks.stack import Stack, run_by
from benchmarks.stub_engine import STEP_S, stub_layout
from quartet.config import build
from quartet.rpc.channels import create_channel
from quartet.transfer.base import PoolMemory
from quartet.v1 import router_pb2_grpc
from services.topology.topology import DEFAULT_MODEL_PATH, Topology

_PROMPT_LENGTHS = (128, 1024, 4096)
_NUM_WARM_UP_ROUNDS = 2
# Time for both sides to finish cleaning up after a request.
_PAUSE_S = 0.02
_NUM_COPY_BLOCKS = 256
_BLOCK_SIZE = 32
# Room for the longest prompt and some; blocks of earlier prompts are evicted, as in a worker that runs for long.
_NUM_BLOCKS = 288
_MAX_MODEL_LEN = 4608  # the tiny model's
_DTYPE, _DTYPE_BYTES = "float32", 4
_LOGS = Path(".run")


class Side(StrEnum):
    """Aggregated (one worker) or disaggregated (a prefill and a decode worker)."""

    AGG = "agg"
    DISAGG = "disagg"


class EngineName(StrEnum):
    """The workers' engine: the stub computes nothing, the tiny model computes in PyTorch."""

    STUB = "stub"
    TINY = "tiny"


@dataclass(frozen=True, kw_only=True)
class Round:
    """One prompt of the same length for each side, one right after the other.

    Attributes:
        copy_ms: time to copy as many bytes as were moved, once, block by block, in the benchmark's own process.
    """

    agg: Answered
    disagg: Answered
    copy_ms: float

    def of(self, side: Side) -> Answered:
        """The request of ``side``."""
        return self.agg if side is Side.AGG else self.disagg

    @property
    def overhead_ms(self) -> float:
        """How much later the second token came disaggregated, minus the time to move the bytes at memory's speed.

        Both sides compute the prompt in as many steps and the second token in one more, so those cancel out.
        """
        return self.disagg.second_token_ms - self.agg.second_token_ms - self.copy_ms


@dataclass(frozen=True, kw_only=True)
class LengthFigures:
    """Medians over all rounds with prompts of one length, in milliseconds.

    Attributes:
        ttft_ms, second_token_ms: by side, as the client saw them.
        parts_ms: by side, the parts of the second token's time; see ``split``.
        transfer_bytes: moved for each request.
        copy_ms, overhead_ms: as in ``Round``. ``overhead_ms`` is ``None`` where the time to compute varies so much
            that it hides the overhead.
        overhead_ms_p10: the overhead was at or below this in a tenth of the rounds.
    """

    ttft_ms: Mapping[str, float]
    second_token_ms: Mapping[str, float]
    parts_ms: Mapping[str, Mapping[str, float]]
    transfer_bytes: int
    copy_ms: float
    overhead_ms: float | None
    overhead_ms_p10: float | None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How many rounds are counted."""

    num_stub_rounds: int = 21
    num_tiny_rounds: int = 3


_LONG = Plan(num_stub_rounds=60, num_tiny_rounds=15)


@dataclass(frozen=True, kw_only=True)
class Results:
    """All that was measured.

    Attributes:
        step_ms: length of one step of the stub engine.
        stub, tiny: by the prompt's length in tokens.
        overhead_ms: with the stub engine, by the prompt's length: how much later the second token came disaggregated,
            minus one step and the time to move the bytes.
    """

    step_ms: float
    num_stub_rounds: int
    num_tiny_rounds: int
    stub: Mapping[str, LengthFigures]
    tiny: Mapping[str, LengthFigures]
    overhead_ms: Mapping[str, float]


def main() -> None:
    """Run the command line."""
    parser = make_parser("disagg", __doc__)
    parser.add_argument("--long", action="store_true", help="more rounds")
    arguments = parser.parse_args()
    report = Report("disagg", packages=("torch", "transformers"), revision=arguments.commit)
    report.write(uvloop.run(_run(_LONG if arguments.long else Plan())), arguments.json)


def summarize(rounds: Sequence[Round], transfer_bytes: int, *, is_paced: bool) -> LengthFigures:
    """Medians of ``rounds``, at least two. ``is_paced``: every step took the same time."""
    overheads = [item.overhead_ms for item in rounds]
    return LengthFigures(
        ttft_ms=_by_side(rounds, lambda answered: answered.ttft_ms),
        second_token_ms=_by_side(rounds, lambda answered: answered.second_token_ms),
        parts_ms={side: median_parts([split(item.of(side)) for item in rounds]) for side in Side},
        transfer_bytes=transfer_bytes,
        copy_ms=statistics.median(item.copy_ms for item in rounds),
        overhead_ms=statistics.median(overheads) if is_paced else None,
        overhead_ms_p10=statistics.quantiles(overheads, n=10, method="inclusive")[0] if is_paced else None,
    )


class BlockCopier:
    """Copies blocks between two pools of this process, made the way workers make theirs.

    Attributes:
        pools: the pool to copy from, and the pool to copy to.
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        """Make pools of ``num_blocks``, each of ``block_bytes``."""
        self.pools = PoolMemory(num_blocks, block_bytes), PoolMemory(num_blocks, block_bytes)
        self._source, self._destination = (
            np.frombuffer(pool.view, np.uint8).reshape(num_blocks, block_bytes) for pool in self.pools
        )
        for pool in self.pools:
            pool.close()  # the mappings live on
        self._num_blocks = num_blocks
        self._next = 0

    def copy(self, num_blocks: int) -> float:
        """Copy the next blocks, which no CPU cache holds any more, one by one; returns milliseconds."""
        began = time.perf_counter()
        for number in range(self._next, self._next + num_blocks):
            block = number % self._num_blocks
            np.copyto(self._destination[block], self._source[block])
        self._next += num_blocks
        return 1e3 * (time.perf_counter() - began)


async def _run(plan: Plan) -> Results:
    stub_block_bytes = stub_layout("", _BLOCK_SIZE).piece_size_bytes
    with LiveLine() as line:
        rounds = await _measure(EngineName.STUB, plan.num_stub_rounds, stub_block_bytes, line)
        stub = _summarize(EngineName.STUB, rounds, stub_block_bytes, line)
        rounds = await _measure(EngineName.TINY, plan.num_tiny_rounds, _tiny_block_bytes(), line)
        tiny = _summarize(EngineName.TINY, rounds, _tiny_block_bytes(), line)
    return Results(
        step_ms=1e3 * STEP_S,
        num_stub_rounds=plan.num_stub_rounds,
        num_tiny_rounds=plan.num_tiny_rounds,
        stub=stub,
        tiny=tiny,
        overhead_ms={
            length: figures.overhead_ms for length, figures in stub.items() if figures.overhead_ms is not None
        },
    )


async def _measure(
    engine: EngineName, num_rounds: int, block_bytes: int, line: LiveLine
) -> Mapping[int, Sequence[Round]]:
    """The rounds by prompt length, without those that warmed the workers up; both sides are asked in turn."""
    rounds: dict[int, list[Round]] = {length: [] for length in _PROMPT_LENGTHS}
    copier, rng = BlockCopier(_NUM_COPY_BLOCKS, block_bytes), random.Random(0)
    num_all_rounds = num_rounds + _NUM_WARM_UP_ROUNDS
    async with AsyncExitStack() as exits:
        directory = Path(exits.enter_context(tempfile.TemporaryDirectory()))
        stacks, stubs = {}, {}
        for side in Side:
            stacks[side] = await exits.enter_async_context(_make_stack(engine, side, directory, line.say))
            channel = await exits.enter_async_context(create_channel(stacks[side].router_address, None))
            stubs[side] = router_pb2_grpc.RouterServiceStub(channel)
        for number in line.rounds(engine, num_all_rounds):
            for length in _PROMPT_LENGTHS:
                measured = await _round(stubs, copier, rng, length)
                if number >= _NUM_WARM_UP_ROUNDS:
                    rounds[length].append(measured)
        await _check_moved(stacks[Side.DISAGG], num_all_rounds, block_bytes)
    return rounds


async def _round(
    stubs: Mapping[Side, router_pb2_grpc.RouterServiceAsyncStub], copier: BlockCopier, rng: random.Random, length: int
) -> Round:
    answered = {}
    for side, stub in stubs.items():
        answered[side] = await ask(stub, rng, length)
        await asyncio.sleep(_PAUSE_S)
    return Round(agg=answered[Side.AGG], disagg=answered[Side.DISAGG], copy_ms=copier.copy(_num_blocks(length)))


def _summarize(
    engine: EngineName, rounds: Mapping[int, Sequence[Round]], block_bytes: int, line: LiveLine
) -> Mapping[str, LengthFigures]:
    figures = {
        str(length): summarize(of_length, _num_blocks(length) * block_bytes, is_paced=engine is EngineName.STUB)
        for length, of_length in rounds.items()
    }
    for length, of_length in figures.items():
        line.say(f"{engine}, {length} tokens: {_describe(of_length)}")
    return figures


def _describe(figures: LengthFigures) -> str:
    second = ", ".join(f"{side} {value:.1f}" for side, value in figures.second_token_ms.items())
    overhead = ""
    if figures.overhead_ms is not None:
        overhead = f"; {figures.overhead_ms:.2f} ms beyond step and copying"
    return f"second token {second} ms{overhead}"


def _make_stack(engine: EngineName, side: Side, discovery_directory: Path, on_progress: Callable[[str], None]) -> Stack:
    """A stack, not started yet, whose workers find each other through ``discovery_directory``."""
    quiet = {"log": {"level": "warning"}}
    roles = ("prefill", "decode") if side is Side.DISAGG else ("decode",)
    settings = {
        "namespace": f"{engine}-{side}",
        "discovery": {"kind": "file", "file": {"directory": str(discovery_directory)}},
        "engine": {
            "num_threads": 1,
            "dtype": _DTYPE,
            "block_size": _BLOCK_SIZE,
            "num_blocks": _NUM_BLOCKS,
            "max_model_len": _MAX_MODEL_LEN,
        },
        "router": {"overrides": {**quiet, "policy": {"local_prefill_max_tokens": 0}}},
        "workers": [{"role": role, "overrides": quiet} for role in roles],
        "drain_timeout_s": 0.5,
    }
    log = _LOGS / f"benchmark-disagg-{engine}-{side}.log"
    adapt = run_by("benchmarks.stub_engine") if engine is EngineName.STUB else (lambda plan: plan)
    return Stack(build(Topology, settings), log, on_progress, adapt=adapt)


async def _check_moved(stack: Stack, num_rounds: int, block_bytes: int) -> None:
    """Check that every prompt was handed off; otherwise the benchmark would measure something else."""
    metrics = await stack.metrics()
    moved = sum(of_process.total("quartet_worker_transfer_bytes_total") for of_process in metrics.values())
    expected = num_rounds * sum(map(_num_blocks, _PROMPT_LENGTHS)) * block_bytes
    if moved != expected:
        raise RuntimeError(f"{moved:.0f} bytes were moved, not {expected}: some prompts were not handed off")


def _tiny_block_bytes() -> int:
    """Bytes of one block of the tiny model's KV cache."""
    config = json.loads((DEFAULT_MODEL_PATH / "config.json").read_text(encoding="utf-8"))["text_config"]
    num_values = config["num_hidden_layers"] * 2 * _BLOCK_SIZE * config["num_key_value_heads"] * config["head_dim"]
    return int(num_values * _DTYPE_BYTES)


def _by_side(rounds: Sequence[Round], value: Callable[[Answered], float]) -> Mapping[str, float]:
    return {side: statistics.median(value(item.of(side)) for item in rounds) for side in Side}


def _num_blocks(num_prompt_tokens: int) -> int:
    return -(-num_prompt_tokens // _BLOCK_SIZE)


if __name__ == "__main__":
    main()
