"""What following JSON schemas costs the torch engine, and whether all answers follow them.

32 streams at temperature 1 on the tiny model, guided by five ordinary schemas, beside the same prompts unguided. Each
unguided stream has as many tokens as its guided twin, so both batches shrink alike. Both sides run in one process: in
each round guided, twice unguided, guided again, so that a machine that becomes slower disturbs both alike. What counts
is tokens per second of the process's CPU time, for masks are computed in a thread of their own. Grammars are compiled
before; what that takes, and what masks take, is measured alone. Then 200 answers to ten schemas are checked by
``jsonschema``.

    python -m benchmarks.guided --json FILE [--short]
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import jsonschema
import llguidance
import numpy as np
import tokenizers

from benchmarks.guided_schemas import ORDINARY, SCHEMAS
from benchmarks.progress import LiveLine
from benchmarks.report import Report, make_parser
from quartet.engine.base import EngineRequest, FinishReason, Generation, RequestKind, StepOutput
from quartet.engine.guided.compiler import Compiled, GrammarCompiler
from quartet.engine.guided.masks import Guide, Restarts
from quartet.engine.runner import ModelRunner
from quartet.engine.sampling import GrammarKind, GuidedDecoding, Sampling
from quartet.engine.scheduler import SchedulerConfig
from quartet.engine.step_engine import StepEngine
from quartet.engine.torch import TorchEngineConfig, create_runner

_MODEL = Path(__file__).resolve().parents[1] / "models/tiny/checkpoint"
_NUM_PROMPT_TOKENS = 32
_MAX_TOKENS = 1000
_NUM_BLOCKS = 2048
_WAIT_S = 60.0
_US, _MS = 1e6, 1e3


@dataclass(frozen=True, kw_only=True)
class Form:
    """How much is measured.

    Attributes:
        num_streams: at once.
        num_rounds: of both sides, each twice; an odd number, so that the median is a round.
        num_compiles: of each schema.
        num_seeds: answers to each of the ten schemas.
    """

    num_streams: int
    num_rounds: int
    num_compiles: int
    num_seeds: int


LONG = Form(num_streams=32, num_rounds=7, num_compiles=50, num_seeds=20)
SHORT = Form(num_streams=32, num_rounds=3, num_compiles=5, num_seeds=2)


@dataclass(frozen=True, kw_only=True)
class Round:
    """Both sides twice on the same prompts; ``ratio`` is of the tokens per CPU second, guided over plain."""

    num_tokens: int
    guided_per_cpu_s: float
    plain_per_cpu_s: float
    guided_per_s: float
    plain_per_s: float
    ratio: float


@dataclass(frozen=True, kw_only=True)
class Times:
    """Of one kind of work, which is done ``num`` times."""

    num: int
    p50: float
    p99: float
    max: float


@dataclass(frozen=True, kw_only=True)
class SchemaCost:
    """Of one schema alone, on a thread with nothing else to do.

    Attributes:
        compile_ms: from the request to a guide, of a schema that was not known.
        mask_us: taking a token and the mask of the next one.
        num_tokens: of its outputs, the mean.
    """

    compile_ms: Times
    mask_us: Times
    num_tokens: float


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Of ten schemas, ``num_seeds`` answers each.

    Attributes:
        num_valid: ended by themselves and valid, formats too as far as ``jsonschema`` checks them.
        invalid: what is wrong with the others.
    """

    num_schemas: int
    num_answers: int
    num_valid: int
    invalid: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Results:
    """``ratio``, ``guided_per_cpu_s`` and ``plain_per_cpu_s`` are medians of ``rounds``.

    Attributes:
        batch_us: the masks of all streams, as in a step.
        schemas: by name.
    """

    num_streams: int
    ratio: float
    guided_per_cpu_s: float
    plain_per_cpu_s: float
    rounds: Sequence[Round]
    batch_us: Times
    schemas: Mapping[str, SchemaCost]
    answers: Answers


@dataclass(frozen=True, kw_only=True)
class Stream:
    """One request of a batch; ``guided`` is what it follows, ``num_tokens`` how many it has if that is nothing."""

    prompt: tuple[int, ...] = field(repr=False)
    seed: int
    guided: GuidedDecoding | None
    num_tokens: int | None = None


@dataclass
class Output:
    """What came of one."""

    token_ids: list[int] = field(default_factory=list)
    reason: FinishReason | None = None


def main() -> None:
    """Run the command line."""
    parser = make_parser("guided", __doc__)
    parser.add_argument("--short", action="store_true", help=f"{SHORT.num_rounds} rounds instead of {LONG.num_rounds}")
    arguments = parser.parse_args()
    report = Report("guided", packages=("torch", "llguidance", "jsonschema"), revision=arguments.commit)
    report.write(asyncio.run(measure(SHORT if arguments.short else LONG)), arguments.json)


async def measure(form: Form) -> Results:
    """Measure all."""
    engine = Engine()
    with LiveLine() as line:
        try:
            await engine.start()
            rounds, outputs = list[Round](), dict[str, list[list[int]]]()
            await engine.run(_streams(-1, form.num_streams), salt="warm-up")
            for number in line.rounds("guided and plain", form.num_rounds):
                measured, answers = await compare(engine, _streams(number, form.num_streams), number)
                rounds.append(measured)
                for stream_number, answer in enumerate(answers):
                    outputs.setdefault(_name_of(stream_number), []).append(answer.token_ids)
                line.say(_describe_round(measured))
            answers_checked = await _check_answers(engine, form.num_seeds, line)
        finally:
            await engine.close()
        masks = _Masks()
        try:
            costs = {name: _cost(masks, schema, outputs[name], form.num_compiles) for name, schema in ORDINARY.items()}
            batch_us = _batch_times(masks, outputs, form.num_streams)
        finally:
            masks.close()
        for name, cost in costs.items():
            line.say(_describe_cost(name, cost))
    return Results(
        num_streams=form.num_streams,
        ratio=median(one.ratio for one in rounds),
        guided_per_cpu_s=median(one.guided_per_cpu_s for one in rounds),
        plain_per_cpu_s=median(one.plain_per_cpu_s for one in rounds),
        rounds=rounds,
        batch_us=batch_us,
        schemas=costs,
        answers=answers_checked,
    )


async def compare(engine: Engine, streams: Sequence[Stream], number: int) -> tuple[Round, list[Output]]:
    """Run ``streams`` twice, and between these runs twice the same unguided; also returns the guided outputs.

    Raises:
        RuntimeError: a side has other tokens than it should.
    """
    cpu_s, wall_s = {"guided": 0.0, "plain": 0.0}, {"guided": 0.0, "plain": 0.0}
    answers, plain = list[Output](), list[Stream]()
    for turn, name in enumerate(("guided", "plain", "plain", "guided")):
        gc.collect()  # so that no side pays for the other's garbage
        wall, cpu = time.perf_counter(), time.process_time()
        outputs = await engine.run(plain if name == "plain" else streams, salt=f"{number} {turn}")
        wall_s[name] += time.perf_counter() - wall
        cpu_s[name] += time.process_time() - cpu
        if not turn:
            answers = outputs
            plain = [
                Stream(prompt=stream.prompt, seed=stream.seed, guided=None, num_tokens=len(answer.token_ids))
                for stream, answer in zip(streams, answers, strict=True)
            ]
        if [len(output.token_ids) for output in outputs] != [len(answer.token_ids) for answer in answers]:
            raise RuntimeError(f"the {name} side has other numbers of tokens than the answers")
        if name == "guided" and [output.token_ids for output in outputs] != [answer.token_ids for answer in answers]:
            raise RuntimeError("the same seeds gave other answers")
    num_tokens = 2 * sum(len(answer.token_ids) for answer in answers)
    measured = Round(
        num_tokens=num_tokens,
        guided_per_cpu_s=num_tokens / cpu_s["guided"],
        plain_per_cpu_s=num_tokens / cpu_s["plain"],
        guided_per_s=num_tokens / wall_s["guided"],
        plain_per_s=num_tokens / wall_s["plain"],
        ratio=cpu_s["plain"] / cpu_s["guided"],
    )
    return measured, answers


class Engine:
    """The torch engine on the tiny model and one CPU thread, as the topologies on CPUs have it, with its outputs."""

    def __init__(self) -> None:
        """Load nothing before ``start``."""
        config = TorchEngineConfig(
            model_path=str(_MODEL), dtype="float32", num_blocks=_NUM_BLOCKS, num_threads=1, takes_media=False
        )
        self._engine = StepEngine(lambda: create_runner(config), SchedulerConfig(), grammars=_compiler)
        self._num_requests = 0

    async def start(self) -> None:
        """Load the model."""
        await self._engine.start()

    async def run(self, streams: Sequence[Stream], *, salt: str) -> list[Output]:
        """Submit all at once and read until the last one ends. Runs with other salts share no cached prefix."""
        outputs = dict[int, Output]()
        for stream in streams:
            self._num_requests += 1
            outputs[self._num_requests] = Output()
            self._engine.submit(_request(self._num_requests, stream, salt))
        num_running = len(streams)
        async for step in self._engine.outputs():
            _collect(step, outputs)
            num_running -= len(step.finished)
            if not num_running:
                break
        return list(outputs.values())

    async def close(self) -> None:
        """Release the model."""
        await self._engine.close()


def _compiler(runner: ModelRunner) -> GrammarCompiler:
    return GrammarCompiler(_tokenizer_json(), runner.vocab_size, runner.eos_token_ids)


def _tokenizer_json() -> str:
    return (_MODEL / "tokenizer.json").read_text(encoding="utf-8")


def _request(id: int, stream: Stream, salt: str) -> EngineRequest:
    sampling = Sampling(
        temperature=1.0,
        max_tokens=_MAX_TOKENS if stream.num_tokens is None else stream.num_tokens,
        ignore_eos=stream.num_tokens is not None,
        guided=stream.guided,
    )
    generation = Generation(prompt_token_ids=stream.prompt, sampling=sampling, seed=stream.seed, cache_salt=salt)
    return EngineRequest(id=id, kind=RequestKind.DECODE, generation=generation)


def _collect(step: StepOutput, outputs: Mapping[int, Output]) -> None:
    if step.failed:
        raise step.failed[0].error
    first = 0
    for id, num_tokens in zip(step.ids, step.num_tokens, strict=True):
        outputs[id].token_ids += step.token_ids[first : first + num_tokens]
        first += num_tokens
    for finished in step.finished:
        outputs[finished.id].reason = finished.reason


def _streams(number: int, num_streams: int) -> list[Stream]:
    """The streams of a round: the schemas take turns."""
    source = random.Random(number)
    return [_stream(source, ORDINARY[_name_of(index)]) for index in range(num_streams)]


def _name_of(stream_number: int) -> str:
    return list(ORDINARY)[stream_number % len(ORDINARY)]


def _stream(source: random.Random, schema: Mapping[str, Any]) -> Stream:
    prompt = tuple(source.randrange(10, 2_000) for _ in range(_NUM_PROMPT_TOKENS))
    guided = GuidedDecoding(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    return Stream(prompt=prompt, seed=source.getrandbits(64), guided=guided)


async def _check_answers(engine: Engine, num_seeds: int, line: LiveLine) -> Answers:
    tokenizer = tokenizers.Tokenizer.from_file(str(_MODEL / "tokenizer.json"))
    source, invalid, num_answers = random.Random("answers"), list[str](), 0
    for name, schema in SCHEMAS.items():
        validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
        streams = [_stream(source, schema) for _ in range(num_seeds)]
        for output in await engine.run(streams, salt=name):
            num_answers += 1
            text = tokenizer.decode(output.token_ids)
            if wrong := _what_is_wrong(text, output, validator):
                invalid.append(f"{name}: {wrong}: {text}")
                line.say(invalid[-1])
    line.say(f"{num_answers - len(invalid)} of {num_answers} answers are valid")
    return Answers(
        num_schemas=len(SCHEMAS), num_answers=num_answers, num_valid=num_answers - len(invalid), invalid=invalid
    )


def _what_is_wrong(text: str, output: Output, validator: jsonschema.Draft202012Validator) -> str | None:
    if output.reason is not FinishReason.STOP_ID:
        return f"ended by {output.reason}"
    try:
        error = next(iter(validator.iter_errors(json.loads(text))), None)
    except ValueError as no_json:
        return str(no_json)
    return None if error is None else error.message


class _Masks:
    """Compiles schemas for the tiny model and computes masks, as an engine does, but with nothing beside."""

    def __init__(self) -> None:
        config = json.loads((_MODEL / "config.json").read_text(encoding="utf-8"))
        vocab_size = config["text_config"]["vocab_size"]
        self._num_words = -(-vocab_size // 32)
        self._compiler = GrammarCompiler(_tokenizer_json(), vocab_size, [config["eos_token_id"]])
        self._executor = llguidance.LLExecutor(num_threads=1)

    def compile(self, schema: Mapping[str, Any]) -> tuple[Guide, float]:
        """A guide, and milliseconds to have it."""
        found, ended = list[Compiled](), threading.Event()

        def end(compiled: Compiled) -> None:
            found.append(compiled)
            ended.set()

        began = time.perf_counter()
        self._compiler.compile(GuidedDecoding(GrammarKind.JSON_SCHEMA, json.dumps(schema)), end, lambda: True)
        ended.wait(_WAIT_S)
        took_s = time.perf_counter() - began
        [guide] = found
        assert isinstance(guide, Guide), guide
        return guide, took_s * _MS

    def times_us(self, guides: Sequence[Guide], outputs: Sequence[Sequence[int]]) -> list[float]:
        """Microseconds for each step of ``outputs``: to take the tokens before, and to compute the masks."""
        bits, times = np.empty((len(guides), self._num_words), np.int32), list[float]()
        for number in range(max(map(len, outputs))):
            going = [row for row, token_ids in enumerate(outputs) if number < len(token_ids)]
            began = time.perf_counter()
            restarts = Restarts()
            for row in going if number else ():
                guides[row].take(outputs[row][number - 1 : number], restarts)
            matchers = [(guides[row].matcher, index) for index, row in enumerate(going)]
            self._executor.unsafe_compute_mask_ptr(matchers, bits.ctypes.data, bits.nbytes // len(bits), len(bits))
            times.append((time.perf_counter() - began) * _US)
        return times

    def close(self) -> None:
        self._compiler.close()


def _cost(masks: _Masks, schema: Mapping[str, Any], outputs: Sequence[Sequence[int]], num_compiles: int) -> SchemaCost:
    # Another title each time, so that no grammar is known.
    compiled = [masks.compile({**schema, "title": str(number)}) for number in range(num_compiles)]
    times_us = list[float]()
    for token_ids in outputs:
        times_us += masks.times_us([masks.compile(schema)[0]], [token_ids])
    return SchemaCost(
        compile_ms=_times([took_ms for _, took_ms in compiled]),
        mask_us=_times(times_us),
        num_tokens=sum(map(len, outputs)) / len(outputs),
    )


def _batch_times(masks: _Masks, outputs: Mapping[str, Sequence[Sequence[int]]], num_streams: int) -> Times:
    """Of the streams of the first round."""
    remaining = {name: iter(of_name) for name, of_name in outputs.items()}
    names = [_name_of(number) for number in range(num_streams)]
    guides = [masks.compile(ORDINARY[name])[0] for name in names]
    return _times(masks.times_us(guides, [next(remaining[name]) for name in names]))


def _times(values: Sequence[float]) -> Times:
    ordered = sorted(values)
    return Times(
        num=len(ordered), p50=median(ordered), p99=ordered[math.ceil(0.99 * len(ordered)) - 1], max=ordered[-1]
    )


def _describe_round(one: Round) -> str:
    return (
        f"{one.num_tokens} tokens: {one.guided_per_cpu_s:.0f} guided and {one.plain_per_cpu_s:.0f} plain a CPU second: "
        f"{one.ratio:.3f}"
    )


def _describe_cost(name: str, cost: SchemaCost) -> str:
    compiling, mask = cost.compile_ms, cost.mask_us
    return (
        f"{name}: compiled in {compiling.p50:.1f} ms, {compiling.max:.1f} at most; "
        f"masks {mask.p50:.0f} us, p99 {mask.p99:.0f}, {mask.max:.0f} at most"
    )


if __name__ == "__main__":
    main()
