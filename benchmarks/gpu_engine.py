"""The embedded engine on a GPU: tokens a second of batches, what sampling and the whole stack cost, and how it starts.

Rows: ``one``, ``many``, ``large`` and ``prefill`` are batches of requests that are submitted at once, ``sampled`` is
``many`` with sampling over the same without, ``guided`` the same with answers that follow a JSON schema, ``sampler`` is
what sampling takes of a step, by itself, ``chunk`` is what attention takes of a prompt's chunk, in three ways,
``start`` is from when the weights are loaded until the engine is ready, and ``stack`` is streams through Router,
Prefill and Decode over the same streams in the engine alone.

Weights are random (``engine.load_format``), in the shape of Qwen3-8B; the shape ``tiny`` with ``--device cpu`` shows in
seconds that all of it works. Each row is written to the file as soon as it is measured, with its own command, commit
and machine; the file keeps the last two measurements of each row, and those of other commands.

    python -m benchmarks.gpu_engine --json FILE [--gpus 1|2] [--only ROW ...]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import uvloop

from benchmarks.children import Child, start_child
from benchmarks.gpu_rows import Command, Measurements, measure_rows
from benchmarks.gpu_serving import Fleet, serving
from benchmarks.progress import LiveLine
from benchmarks.random_model import QWEN3_8B, TINY, RandomModel
from benchmarks.report import make_parser
from cli.bench.load import Window, run_closed_loop
from cli.bench.workload import BenchRequest, IntRange, WorkloadConfig, make_workload
from quartet.client import Delta, QuartetClient, Sampling
from quartet.discovery.base import Role
from quartet.errors import ConfigError

_NAME = "gpu_engine"
_PACKAGES = ("torch", "transformers", "triton")
_SIDE = "benchmarks.gpu_engine_side"
_BLOCK_SIZE = 16
_CPU, _CUDA = "cpu", "cuda"
# Loading a model of 8 billion parameters, and compiling all kernels.
_START_TIMEOUT_S = 300.0
_BATCH_TIMEOUT_S = 120.0
# Where Triton keeps what it has compiled.
_CACHE_VARIABLE = "TRITON_CACHE_DIR"
_IDS = IntRange(16, 1023)
# Of the free memory.
_SHARE = 0.9
# No answer to it ends before its bound of tokens.
_SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "is_here": {"type": "boolean"}},
        "required": ["name", "age", "is_here"],
    },
    "minItems": 1000,
}


class Row(StrEnum):
    """What can be measured by itself, in this order."""

    ONE = "one"
    MANY = "many"
    LARGE = "large"
    PREFILL = "prefill"
    SAMPLED = "sampled"
    GUIDED = "guided"
    SAMPLER = "sampler"
    CHUNK = "chunk"
    START = "start"
    STACK = "stack"


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Requests that are submitted at once, ``num_runs`` times after once to warm up."""

    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_runs: int


@dataclass(frozen=True, kw_only=True)
class StreamsPlan:
    """Streams that decode, each followed by another one."""

    num_streams: int
    num_prompt_tokens: int
    num_output_tokens: int
    warm_up_s: float
    window_s: float


@dataclass(frozen=True, kw_only=True)
class SamplerPlan:
    """Steps of so many rows each."""

    num_rows: Sequence[int]
    num_steps: int


@dataclass(frozen=True, kw_only=True)
class ChunkPlan:
    """A chunk of so many tokens after each of these numbers of tokens, ``num_runs`` times in each way."""

    num_tokens: int
    contexts: Sequence[int]
    num_runs: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured with one shape of model.

    Attributes:
        batches: by row.
        sampling: of ``sampled`` and ``sampler``; the batch of ``sampled`` is that of ``many``.
        num_blocks, max_num_seqs, max_num_batched_tokens: of the engine of the batches.
        num_stream_blocks: of each engine of ``stack``.
    """

    model: RandomModel
    batches: Mapping[Row, BatchPlan]
    sampling: Mapping[str, float]
    sampler: SamplerPlan
    chunk: ChunkPlan
    streams: StreamsPlan
    num_blocks: int
    num_stream_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int


_SAMPLING = {"temperature": 0.8, "top_p": 0.95, "presence_penalty": 0.5, "frequency_penalty": 0.5}

#: By the name of the shape.
PLANS: Mapping[str, Plan] = {
    "qwen3-8b": Plan(
        model=QWEN3_8B,
        batches={
            Row.ONE: BatchPlan(num_requests=1, num_prompt_tokens=32, num_output_tokens=256, num_runs=3),
            Row.MANY: BatchPlan(num_requests=64, num_prompt_tokens=128, num_output_tokens=256, num_runs=3),
            Row.LARGE: BatchPlan(num_requests=256, num_prompt_tokens=1024, num_output_tokens=256, num_runs=2),
            Row.PREFILL: BatchPlan(num_requests=32, num_prompt_tokens=4096, num_output_tokens=1, num_runs=3),
        },
        sampling=_SAMPLING,
        sampler=SamplerPlan(num_rows=(1, 64, 256), num_steps=20),
        chunk=ChunkPlan(num_tokens=2048, contexts=(0, 2048, 8192, 16384), num_runs=20),
        streams=StreamsPlan(num_streams=64, num_prompt_tokens=128, num_output_tokens=256, warm_up_s=4.0, window_s=10.0),
        num_blocks=20992,
        num_stream_blocks=4096,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
    ),
    "tiny": Plan(
        model=TINY,
        batches={
            Row.ONE: BatchPlan(num_requests=1, num_prompt_tokens=8, num_output_tokens=8, num_runs=2),
            Row.MANY: BatchPlan(num_requests=4, num_prompt_tokens=16, num_output_tokens=8, num_runs=2),
            Row.LARGE: BatchPlan(num_requests=8, num_prompt_tokens=32, num_output_tokens=8, num_runs=2),
            Row.PREFILL: BatchPlan(num_requests=4, num_prompt_tokens=64, num_output_tokens=1, num_runs=2),
        },
        sampling=_SAMPLING,
        sampler=SamplerPlan(num_rows=(1, 2, 4), num_steps=2),
        chunk=ChunkPlan(num_tokens=40, contexts=(0, 16, 50, 128), num_runs=2),
        streams=StreamsPlan(num_streams=4, num_prompt_tokens=16, num_output_tokens=16, warm_up_s=0.3, window_s=1.0),
        num_blocks=128,
        num_stream_blocks=128,
        max_num_seqs=8,
        max_num_batched_tokens=256,
    ),
}


@dataclass(frozen=True, kw_only=True)
class BatchRow:
    """A batch.

    Attributes:
        tokens_per_s: output tokens from the submit until the last request has ended; median of the runs.
        input_tokens_per_s: prompts' tokens in that time, likewise.
        runs_s: how long each run took.
    """

    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    tokens_per_s: float
    input_tokens_per_s: float
    runs_s: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class SampledRow:
    """The row ``sampled``: runs by turns; ``ratio``: the greedy time over the sampled one, median of the pairs."""

    sampling: Mapping[str, float]
    greedy_s: Sequence[float]
    sampled_s: Sequence[float]
    ratio: float


@dataclass(frozen=True, kw_only=True)
class GuidedRow:
    """The row ``guided``: as ``sampled``, of requests that follow ``schema``, or of half of them only."""

    schema: Mapping[str, Any]
    plain_s: Sequence[float]
    guided_s: Sequence[float]
    half_guided_s: Sequence[float]
    ratio: float
    half_ratio: float


@dataclass(frozen=True, kw_only=True)
class SamplerRow:
    """The row ``sampler``: each is a ``gpu_sampler.SamplerCase``, of a number of rows with flat or peaked logits."""

    sampling: Mapping[str, float]
    cases: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class ChunkRow:
    """The row ``chunk``: each is a ``gpu_chunk.ChunkCase``, of one context."""

    cases: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class StartRow:
    """The row ``start``: seconds from loaded weights to ready, with nothing compiled before, and once more.

    Attributes:
        share_s: the third time, with a pool of a share of the free memory.
    """

    cold_s: float
    warm_s: float
    share_s: float


@dataclass(frozen=True, kw_only=True)
class StackRow:
    """The row ``stack``: tokens a second of the same streams; ``ratio``: the stack's over the engine's."""

    num_streams: int
    engine_tokens_per_s: float
    stack_tokens_per_s: float
    ratio: float


_Figures: TypeAlias = BatchRow | SampledRow | GuidedRow | SamplerRow | ChunkRow | StartRow | StackRow


def main() -> None:
    """Run the command line; the exit code is 1 if a row could not be measured."""
    parser = make_parser(_NAME, __doc__ or "")
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=1, help="2: Decode of row stack has its own")
    parser.add_argument("--device", choices=(_CUDA, _CPU), default=_CUDA)
    parser.add_argument("--shape", choices=PLANS, default="qwen3-8b")
    parser.add_argument("--only", nargs="+", type=Row, choices=list(Row), default=list(Row), metavar="ROW")
    arguments = parser.parse_args()
    try:
        is_done = uvloop.run(_run(arguments))
    except ConfigError as error:
        sys.exit(str(error))
    sys.exit(0 if is_done else 1)


async def _run(arguments: argparse.Namespace) -> bool:
    """Measure the rows that are asked for. Returns whether none failed."""
    num_gpus = 0 if arguments.device == _CPU else arguments.gpus
    devices = [(_CPU, _CPU), ("cuda:0", "cuda:0"), ("cuda:0", "cuda:1")][num_gpus]
    command = Command(name=_NAME, packages=_PACKAGES, commit=arguments.commit, shape=arguments.shape, num_gpus=num_gpus)
    measurements = Measurements(Path(arguments.json))
    with LiveLine() as line, tempfile.TemporaryDirectory(prefix="quartet-benchmark-") as directory:
        plan = PLANS[arguments.shape]
        plan.model.write(Path(directory))
        bench = _Bench(plan, devices, Path(directory), line)
        try:
            return await measure_rows(arguments.only, command, bench.measure, measurements, line)
        finally:
            await bench.close_engine()


class _Bench:
    """All rows, on given devices."""

    def __init__(self, plan: Plan, devices: tuple[str, str], model_path: Path, line: LiveLine) -> None:
        """``devices``: of engine and Prefill, and of Decode."""
        self._plan = plan
        self._devices = devices
        self._model_path = model_path
        self._line = line
        self._exits = AsyncExitStack()
        self._engine: Child | None = None

    async def measure(self, row: Row, _on_part: Callable[[Any], None]) -> _Figures:
        """The figures of ``row``. Where it fails, the next one gets a new engine."""
        try:
            return await self._measure(row)
        except Exception:
            await self.close_engine()
            raise

    async def close_engine(self) -> None:
        """End the engine of the batches, if there is one: its memory is needed."""
        self._engine = None
        await self._exits.aclose()

    async def _measure(self, row: Row) -> _Figures:
        match row:
            case Row.SAMPLED:
                return await self._sampled()
            case Row.GUIDED:
                return await self._guided()
            case Row.SAMPLER:
                return await self._sampler()
            case Row.CHUNK:
                return await self._chunk()
            case Row.START:
                return await self._start()
            case Row.STACK:
                return await self._stack()
            case _:
                return await self._batch(row)

    async def _batch(self, row: Row) -> BatchRow:
        plan, engine = self._plan.batches[row], await self._batch_engine()
        await self._time(engine, plan, {})
        runs = [await self._time(engine, plan, {}) for _ in self._line.rounds(row, plan.num_runs)]
        figures = BatchRow(
            num_requests=plan.num_requests,
            num_prompt_tokens=plan.num_prompt_tokens,
            num_output_tokens=plan.num_output_tokens,
            tokens_per_s=plan.num_requests * plan.num_output_tokens / median(runs),
            input_tokens_per_s=plan.num_requests * plan.num_prompt_tokens / median(runs),
            runs_s=runs,
        )
        self._line.say(
            f"{row}: {plan.num_requests} x {plan.num_prompt_tokens} -> {plan.num_output_tokens}: "
            f"{figures.tokens_per_s:.0f} tok/s, input {figures.input_tokens_per_s:.0f} tok/s"
        )
        return figures

    async def _sampled(self) -> SampledRow:
        plan, engine, sampling = self._plan.batches[Row.MANY], await self._batch_engine(), self._plan.sampling
        for options in ({}, sampling):
            await self._time(engine, plan, options)
        greedy, sampled = [], []
        for _ in self._line.rounds(Row.SAMPLED, plan.num_runs):
            greedy.append(await self._time(engine, plan, {}))
            sampled.append(await self._time(engine, plan, sampling))
        ratio = median(quick / slow for quick, slow in zip(greedy, sampled, strict=True))
        self._line.say(f"sampled: {ratio:.3f} of greedy's tokens a second")
        return SampledRow(sampling=sampling, greedy_s=greedy, sampled_s=sampled, ratio=ratio)

    async def _guided(self) -> GuidedRow:
        plan, engine = self._plan.batches[Row.MANY], await self._batch_engine()
        runs: dict[float, list[float]] = {0.0: [], 1.0: [], 0.5: []}
        for share in runs:
            await self._time(engine, plan, self._plan.sampling, guided_share=share)
        for _ in self._line.rounds(Row.GUIDED, plan.num_runs):
            for share, times in runs.items():
                times.append(await self._time(engine, plan, self._plan.sampling, guided_share=share))
        plain, all_guided, half_guided = runs.values()
        ratio, half_ratio = (
            median(quick / slow for quick, slow in zip(plain, guided, strict=True))
            for guided in (all_guided, half_guided)
        )
        self._line.say(
            f"guided: {ratio:.3f} of unguided tokens a second; with half of the rows guided {half_ratio:.3f}"
        )
        return GuidedRow(
            schema=_SCHEMA,
            plain_s=plain,
            guided_s=all_guided,
            half_guided_s=half_guided,
            ratio=ratio,
            half_ratio=half_ratio,
        )

    async def _sampler(self) -> SamplerRow:
        plan, cases = self._plan, []
        async with start_child(_SIDE) as child:
            await child.read()
            for num_rows, logits in itertools.product(plan.sampler.num_rows, ("flat", "peaked")):
                order = {
                    "do": "sampler",
                    "device": self._devices[0],
                    "dtype": plan.model.dtype,
                    "vocab_size": plan.model.vocab_size,
                    "num_rows": num_rows,
                    "logits": logits,
                    "num_steps": plan.sampler.num_steps,
                    "sampling": plan.sampling,
                }
                case = await child.ask(order, _BATCH_TIMEOUT_S)
                cases.append(case)
                self._line.say(
                    f"sampler: {num_rows} rows, {logits}: {case['device_ms']:.3f} ms a step, the best token "
                    f"{case['greedy_device_ms']:.3f}; host {case['host_ms']:.3f}"
                )
        return SamplerRow(sampling=plan.sampling, cases=cases)

    async def _chunk(self) -> ChunkRow:
        plan, model, cases = self._plan.chunk, self._plan.model, []
        layout = {
            "dtype": model.dtype,
            "num_layers": model.num_layers,
            "num_kv_heads": model.num_kv_heads,
            "head_dim": model.head_dim,
            "block_size": _BLOCK_SIZE,
        }
        async with start_child(_SIDE) as child:
            await child.read()
            for context in plan.contexts:
                order = {
                    "do": "chunk",
                    "device": self._devices[0],
                    "num_heads": model.num_heads,
                    "layout": layout,
                    "num_tokens": plan.num_tokens,
                    "context": context,
                    "num_runs": plan.num_runs,
                }
                case = await child.ask(order, _BATCH_TIMEOUT_S)
                cases.append(case)
                self._line.say(
                    f"chunk: {plan.num_tokens} tokens after {context}: {case['engine_us']:.0f} us; in blocks "
                    f"{case['paged_us']:.0f}, by flash attention {case['flash_us']:.0f}"
                )
        return ChunkRow(cases=cases)

    async def _start(self) -> StartRow:
        await self.close_engine()
        with tempfile.TemporaryDirectory(prefix="quartet-benchmark-") as cache:
            before, os.environ[_CACHE_VARIABLE] = os.environ.get(_CACHE_VARIABLE), cache
            try:
                cold_s, warm_s = [await self._start_once() for _ in range(2)]
                share_s = await self._start_once(takes_share=True)
            finally:
                if before is None:
                    del os.environ[_CACHE_VARIABLE]
                else:
                    os.environ[_CACHE_VARIABLE] = before
        self._line.say(
            f"start: {cold_s:.1f} s with nothing compiled, then {warm_s:.1f} s; with a share of memory {share_s:.1f} s"
        )
        return StartRow(cold_s=cold_s, warm_s=warm_s, share_s=share_s)

    async def _start_once(self, *, takes_share: bool = False) -> float:
        async with start_child(_SIDE) as child:
            await child.read()
            plan = self._plan
            # On a CPU there is no such share.
            takes_share = takes_share and self._devices[0] != _CPU
            order = self._start_order(None if takes_share else plan.num_blocks, plan.max_num_seqs)
            return float(await child.ask(order, _START_TIMEOUT_S))

    async def _stack(self) -> StackRow:
        await self.close_engine()
        streams = self._plan.streams
        async with self._child(self._plan.num_stream_blocks, streams.num_streams) as child:
            order = {"do": "streams", **asdict(streams)}
            engine_tokens_per_s = float(await child.ask(order, _BATCH_TIMEOUT_S))
        fleet = Fleet(
            name="engine-stack",
            workers=tuple(zip((Role.PREFILL, Role.DECODE), self._devices, strict=True)),
            engine={
                "dtype": self._plan.model.dtype,
                "load_format": "random",
                "block_size": _BLOCK_SIZE,
                "max_batch_size": streams.num_streams,
                "max_num_tokens": self._plan.max_num_batched_tokens,
                **({"num_threads": 1} if self._devices[0] == _CPU else {}),
            },
            num_blocks=dict.fromkeys((Role.PREFILL, Role.DECODE), self._plan.num_stream_blocks),
        )
        async with serving(fleet, self._model_path, self._line) as stack:
            stack_tokens_per_s = await _run_streams(streams, stack.router_address, self._line)
        figures = StackRow(
            num_streams=streams.num_streams,
            engine_tokens_per_s=engine_tokens_per_s,
            stack_tokens_per_s=stack_tokens_per_s,
            ratio=stack_tokens_per_s / engine_tokens_per_s,
        )
        self._line.say(
            f"stack: {figures.stack_tokens_per_s:.0f} tok/s of {figures.engine_tokens_per_s:.0f} of the engine alone"
        )
        return figures

    async def _batch_engine(self) -> Child:
        """The engine that all batches share."""
        if self._engine is None:
            child = self._child(self._plan.num_blocks, self._plan.max_num_seqs)
            self._engine = await self._exits.enter_async_context(child)
        return self._engine

    @asynccontextmanager
    async def _child(self, num_blocks: int, max_num_seqs: int) -> AsyncIterator[Child]:
        """A process with an engine that is ready."""
        async with start_child(_SIDE) as child:
            await child.read()
            with self._line.showing(lambda elapsed, _: f"the engine starts: {elapsed:.0f} s"):
                await child.ask(self._start_order(num_blocks, max_num_seqs), _START_TIMEOUT_S)
            yield child

    def _start_order(self, num_blocks: int | None, max_num_seqs: int) -> Mapping[str, Any]:
        engine: dict[str, Any] = {
            "model_path": str(self._model_path),
            "dtype": self._plan.model.dtype,
            "device": self._devices[0],
            "block_size": _BLOCK_SIZE,
            "random_seed": 0,
        }
        engine |= {"free_gpu_memory_fraction": _SHARE} if num_blocks is None else {"num_blocks": num_blocks}
        bounds = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": self._plan.max_num_batched_tokens}
        return {"do": "start", "engine": engine, "bounds": bounds}

    async def _time(
        self, engine: Child, plan: BatchPlan, sampling: Mapping[str, float], *, guided_share: float = 0.0
    ) -> float:
        order = {
            "do": "batch",
            "num_requests": plan.num_requests,
            "num_prompt_tokens": plan.num_prompt_tokens,
            "num_output_tokens": plan.num_output_tokens,
            "sampling": sampling,
            "schema": _SCHEMA,
            "num_guided": round(guided_share * plan.num_requests),
        }
        return float(await engine.ask(order, _BATCH_TIMEOUT_S))


@dataclass
class _Seen:
    """What clients get while the window is open."""

    window: Window
    num_tokens: int = 0

    async def send(self, client: QuartetClient, request: BenchRequest, _due_at: float) -> float:
        """Send ``request``; as ``cli.bench.load.Send``."""
        sampling = Sampling(max_tokens=request.num_output_tokens, ignore_eos=True, temperature=0.0)
        async with client.generate(token_ids=request.token_ids, sampling=sampling, path="session") as stream:
            async for part in stream:
                if type(part) is Delta and self.window.is_open:
                    self.num_tokens += len(part.token_ids)
        return 0.0


async def _run_streams(plan: StreamsPlan, address: str, line: LiveLine) -> float:
    """Tokens a second of streams through the router, over one Session."""
    window = Window(None)
    seen = _Seen(window)
    output_tokens = IntRange(plan.num_output_tokens, plan.num_output_tokens)
    prompt_tokens = IntRange(plan.num_prompt_tokens, plan.num_prompt_tokens)
    workload = make_workload(WorkloadConfig(prompt_tokens=prompt_tokens, output_tokens=output_tokens, ids=_IDS), (0, 0))
    async with QuartetClient(address) as client:
        loop = asyncio.create_task(run_closed_loop(partial(seen.send, client), workload, window, plan.num_streams))
        try:
            with line.showing(lambda elapsed, _: f"the stack: {elapsed:.0f} s, {seen.num_tokens} tokens"):
                await asyncio.wait({loop}, timeout=plan.warm_up_s)
                window.open()
                began = time.perf_counter()
                await asyncio.wait({loop}, timeout=plan.window_s)
                elapsed_s = time.perf_counter() - began
                window.close()
            if loop.done():
                loop.result()
            return seen.num_tokens / elapsed_s
        finally:
            loop.cancel()
            await asyncio.wait({loop})


if __name__ == "__main__":
    main()
