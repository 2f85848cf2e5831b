"""What it costs one request that its prompt is prefilled by another worker: time to the first and second token.

Two topologies of real processes run beside each other, one Decode worker alone and a Prefill before a Decode, and are
asked in turn, one request at a time. With the stub engine, whose steps take a fixed time, all that is left when steps
and the copying of bytes are taken off is Quartet's own cost; the tiny model shows the same with computing.
Each round also goes the same way with nothing of Quartet (``benchmarks.bare_chain``), and then with the contract's
messages too (``benchmarks.contract_chain``).

    python -m benchmarks.disagg --json FILE [--long]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import uvloop

from benchmarks.bare_chain import BareChain, bare_chain
from benchmarks.disagg_client import ask, random_prompt
from benchmarks.disagg_copies import BlockCopier
from benchmarks.disagg_figures import BareFigures, LengthFigures, Round, summarize, summarize_bare
from benchmarks.disagg_stack import BLOCK_SIZE, EngineName, Side, StackMaker, tiny_block_bytes
from benchmarks.progress import LiveLine
from benchmarks.report import Report, add_report_argument
from benchmarks.stack import Stack
from benchmarks.stub_engine.runner import STEP_S, stub_layout
from quartet.rpc.channels import create_channel
from quartet.telemetry.provenance import write_report
from quartet.v1 import router_pb2_grpc

_PROMPT_LENGTHS = (128, 1024, 4096)
_NUM_WARM_UP_ROUNDS = 2
# Lets what a request left behind come to rest, on both sides alike.
_PAUSE_S = 0.02
_NUM_COPY_BLOCKS = 256


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
        step_ms: of the stub engine.
        stub, tiny: by the prompt's length in tokens.
        overhead_ms: of ``stub``, by the prompt's length: second token, less one step and moving the bytes, later than
            aggregated.
        bare: with nothing of Quartet, in the rounds of ``stub``.
    """

    step_ms: float
    num_stub_rounds: int
    num_tiny_rounds: int
    stub: Mapping[str, LengthFigures]
    tiny: Mapping[str, LengthFigures]
    overhead_ms: Mapping[str, float]
    bare: BareFigures


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.disagg", description=__doc__.partition("\n")[0])
    add_report_argument(parser)
    parser.add_argument("--long", action="store_true", help="more rounds")
    arguments = parser.parse_args()
    report = Report("disagg", packages=("torch", "transformers"))
    write_report(report.finish(uvloop.run(_run(_LONG if arguments.long else Plan()))), arguments.json)


async def _run(plan: Plan) -> Results:
    stub_block_bytes = stub_layout("", BLOCK_SIZE).piece_size_bytes
    with LiveLine() as line:
        rounds = await _measure(EngineName.STUB, plan.num_stub_rounds, stub_block_bytes, line)
        stub = _summarize(EngineName.STUB, rounds, stub_block_bytes, line)
        bare = summarize_bare([item.bare for of_length in rounds.values() for item in of_length])
        line.say(
            f"nothing of Quartet: {bare.bare_chain_ms:.2f} ms the same way, {bare.contract_chain_ms:.2f} ms with the "
            "contract's messages"
        )
        rounds = await _measure(EngineName.TINY, plan.num_tiny_rounds, tiny_block_bytes(), line)
        tiny = _summarize(EngineName.TINY, rounds, tiny_block_bytes(), line)
    return Results(
        step_ms=1e3 * STEP_S,
        num_stub_rounds=plan.num_stub_rounds,
        num_tiny_rounds=plan.num_tiny_rounds,
        stub=stub,
        tiny=tiny,
        overhead_ms={
            length: figures.overhead_ms for length, figures in stub.items() if figures.overhead_ms is not None
        },
        bare=bare,
    )


async def _measure(
    engine: EngineName, num_rounds: int, block_bytes: int, line: LiveLine
) -> Mapping[int, Sequence[Round]]:
    async with AsyncExitStack() as exits:
        maker = StackMaker(Path(exits.enter_context(tempfile.TemporaryDirectory())), line.say)
        stacks = {side: await exits.enter_async_context(maker.make(engine, side)) for side in Side}
        # Before the first channel is open, behind which gRPC complains of every fork.
        bare = await exits.enter_async_context(bare_chain())
        stubs = {}
        for side, stack in stacks.items():
            channel = await exits.enter_async_context(create_channel(stack.router_address, None))
            stubs[side] = router_pb2_grpc.RouterServiceStub(channel)
        rounds = await _Rounds(engine, stubs, bare, block_bytes, line).run(num_rounds)
        await _check_moved(stacks[Side.DISAGG], num_rounds + _NUM_WARM_UP_ROUNDS, block_bytes)
    return rounds


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
        overhead = (
            f"; {figures.overhead_ms:.2f} ms beyond step and copying, bare chain {figures.bare_chain_ms:.2f} ms, "
            f"with the contract's messages {figures.contract_chain_ms:.2f} ms"
        )
    return f"second token {second} ms{overhead}"


class _Rounds:
    """Asks both sides in turn."""

    def __init__(
        self,
        engine: EngineName,
        stubs: Mapping[Side, router_pb2_grpc.RouterServiceAsyncStub],
        bare: BareChain,
        block_bytes: int,
        line: LiveLine,
    ) -> None:
        self._engine = engine
        self._stubs = stubs
        self._bare = bare
        self._copier = BlockCopier(_NUM_COPY_BLOCKS, block_bytes)
        self._line = line
        self._rng = random.Random(0)
        self._num_done = 0

    async def run(self, num_rounds: int) -> Mapping[int, Sequence[Round]]:
        """By prompt length, the rounds; what was needed to become warm is left out."""
        following = asyncio.create_task(self._line.follow(lambda elapsed, _: self._describe(elapsed, num_rounds)))
        rounds: dict[int, list[Round]] = {length: [] for length in _PROMPT_LENGTHS}
        try:
            for number in range(num_rounds + _NUM_WARM_UP_ROUNDS):
                for length in _PROMPT_LENGTHS:
                    measured = await self._round(length)
                    if number >= _NUM_WARM_UP_ROUNDS:
                        rounds[length].append(measured)
                self._num_done += 1
        finally:
            following.cancel()
        return rounds

    async def _round(self, length: int) -> Round:
        answered = {}
        for side in Side:
            answered[side] = await ask(self._stubs[side], self._rng, length)
            await asyncio.sleep(_PAUSE_S)
        copies = await self._copier.copy(_num_blocks(length))
        bare = await self._bare.measure(random_prompt(self._rng, length))
        return Round(agg=answered[Side.AGG], disagg=answered[Side.DISAGG], copies=copies, bare=bare)

    def _describe(self, elapsed: float, num_rounds: int) -> str:
        return f"{self._engine}: round {self._num_done} of {num_rounds + _NUM_WARM_UP_ROUNDS}, {elapsed:.0f} s"


async def _check_moved(stack: Stack, num_rounds: int, block_bytes: int) -> None:
    """Every prompt must have been handed off: else this measures something else."""
    metrics = await stack.metrics()
    moved = sum(of_process.total("quartet_worker_transfer_bytes_total") for of_process in metrics.values())
    expected = num_rounds * sum(map(_num_blocks, _PROMPT_LENGTHS)) * block_bytes
    if moved != expected:
        raise RuntimeError(f"{moved:.0f} bytes were moved, not {expected}: some prompts were not handed off")


def _num_blocks(num_prompt_tokens: int) -> int:
    return -(-num_prompt_tokens // BLOCK_SIZE)


if __name__ == "__main__":
    main()
