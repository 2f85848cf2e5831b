"""What parsing reasoning and tool calls costs the process that faces the user: CPU time of each token.

An output of reasoning, content and one call with a long argument is pushed token by token, its text in pieces of about
four characters, and no client takes the events. Llama's outputs are the call alone: nothing marks it, and the request
has 64 functions. The same output as tokens of the tiny model then goes from a worker's stream to a sink that drops it,
with a parser between, and without.

    python -m benchmarks.parsing --json FILE [--short]
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.progress import LiveLine
from benchmarks.report import Report, make_parser
from quartet.api.output import OutputSettings, make_outputs
from quartet.api.request import TextOptions
from quartet.engine.base import FinishReason
from quartet.text.model_files import read_text_files
from quartet.text.model_text import ModelText
from quartet.text.parse import OutputParser, choose_format
from quartet.text.parsed import OutputParsing

_MODEL = Path(__file__).parents[1] / "models/tiny/checkpoint"

_PROSE = ("The quick brown fox jumps over the lazy dog, and then it rests. " * 6 + "\n\n") * 40
_ARGUMENT = _PROSE[:8_000].strip()
# The names of others begin alike, as those of real tools do.
_TOOLS = {"write": {"properties": {"text": {"type": "string"}}}, **{f"write_{number}": {} for number in range(63)}}
_JSON_ARGUMENTS = json.dumps({"text": _ARGUMENT})
_TOKEN = re.compile(r"\s?\w{1,5}|\s+|.", re.DOTALL)

#: Outputs by reasoning and tool-call parser.
OUTPUTS = {
    ("qwen3", "hermes"): f"<think>\n{_PROSE}\n</think>\n\n{_PROSE}"
    f'<tool_call>\n{{"name": "write", "arguments": {_JSON_ARGUMENTS}}}\n</tool_call>',
    ("qwen3", "qwen3_coder"): f"<think>\n{_PROSE}\n</think>\n\n{_PROSE}"
    f"<tool_call>\n<function=write>\n<parameter=text>\n{_ARGUMENT}\n</parameter>\n</function>\n</tool_call>",
    ("gpt_oss", "harmony"): f"<|channel|>analysis<|message|>{_PROSE}<|end|><|start|>assistant<|channel|>commentary"
    f"<|message|>{_PROSE}<|end|><|start|>assistant<|channel|>commentary to=functions.write"
    f"<|message|>{_JSON_ARGUMENTS}<|call|>",
    ("gemma4", "gemma4"): f"<|channel>thought\n{_PROSE}<channel|>{_PROSE}"
    f'<|tool_call>call:write{{text:<|"|>{_ARGUMENT}<|"|>}}<tool_call|>',
    ("", "llama3_json"): f'{{"name": "write", "parameters": {_JSON_ARGUMENTS}}}',
    ("", "pythonic"): f"[write(text={json.dumps(_ARGUMENT)})]",
}


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Microseconds of CPU for each token, over the runs.

    Attributes:
        output_us, output_min_us: median and least of the whole output, its call shown once it is complete.
        streamed_us, streamed_min_us: the same with the call's arguments as they come.
        content_us: median within content alone.
        num_head_tokens: from where the call begins to the text that it is given.
        head_us, head_min_us: median and least of these tokens alone, in the first of the two ways.
    """

    num_tokens: int
    output_us: float
    output_min_us: float
    streamed_us: float
    streamed_min_us: float
    content_us: float
    num_head_tokens: int
    head_us: float
    head_min_us: float


@dataclass(frozen=True, kw_only=True)
class PathCost:
    """Microseconds of CPU for each token that a ``ChoiceOutput`` takes: medians and least of the runs.

    Attributes:
        plain_us, plain_min_us: without a parser.
        parsed_us, parsed_min_us: with one, its call shown once it is complete.
        streamed_us, streamed_min_us: with the call's arguments as they come.
    """

    num_tokens: int
    plain_us: float
    plain_min_us: float
    parsed_us: float
    parsed_min_us: float
    streamed_us: float
    streamed_min_us: float


@dataclass(frozen=True, kw_only=True)
class Results:
    """All that was measured, by ``REASONING PARSER and TOOL-CALL PARSER``, or by the latter alone."""

    num_runs: int
    costs: dict[str, Cost]
    paths: dict[str, PathCost]


def main() -> None:
    """Run the command line."""
    parser = make_parser("parsing", __doc__)
    parser.add_argument("--short", action="store_true", help="3 runs instead of 30")
    arguments = parser.parse_args()
    report = Report("parsing", revision=arguments.commit)
    report.write(measure(3 if arguments.short else 30), arguments.json)


def measure(num_runs: int) -> Results:
    """Measure each output ``num_runs`` times."""
    costs: dict[str, Cost] = {}
    paths: dict[str, PathCost] = {}
    text = ModelText.from_files(read_text_files(_MODEL))
    with LiveLine() as line:
        for names, output in OUTPUTS.items():
            name = " and ".join(filter(None, names))
            costs[name] = cost = _measure_output(names, output, num_runs)
            line.say(
                f"{name}: {cost.output_us:.2f} us a token, {cost.streamed_us:.2f} with streamed arguments, "
                f"{cost.head_us:.2f} where the call begins"
            )
            paths[name] = path = _measure_path(names, output, text, num_runs)
            line.say(f"{name}: {path.plain_us:.2f} us a token to the sink, {path.parsed_us:.2f} with the parser")
    return Results(num_runs=num_runs, costs=costs, paths=paths)


def _measure_output(names: tuple[str, str], output: str, num_runs: int) -> Cost:
    tokens, content = _TOKEN.findall(output), _TOKEN.findall(_PROSE)
    call = output.rpartition(_PROSE)[2]
    before, head = output.removesuffix(call), _TOKEN.findall(call.partition(_ARGUMENT[:20])[0])
    whole, streamed, plain, heads = [], [], [], []
    for _ in range(num_runs):
        whole.append(_run_us(names, tokens, streams_arguments=False))
        streamed.append(_run_us(names, tokens, streams_arguments=True))
        plain.append(_run_us(names, content, streams_arguments=False))
        heads.append(_head_us(names, before, head))
    return Cost(
        num_tokens=len(tokens),
        output_us=median(whole),
        output_min_us=min(whole),
        streamed_us=median(streamed),
        streamed_min_us=min(streamed),
        content_us=median(plain),
        num_head_tokens=len(head),
        head_us=median(heads),
        head_min_us=min(heads),
    )


class _Drop:
    """A sink that keeps nothing."""

    def add(self, *_: object) -> None:
        pass

    def add_prompt_logprobs(self, _: object) -> None:
        pass

    def add_parsed(self, *_: object) -> None:
        pass


def _measure_path(names: tuple[str, str], output: str, text: ModelText, num_runs: int) -> PathCost:
    token_ids = text.tokenizer.encode(output, add_special_tokens=False)
    format = text.output_format(*names)
    ways = [
        None,
        *(
            OutputParsing(format=format, request_id="0" * 32, tools=_TOOLS, streams_arguments=streams)
            for streams in (False, True)
        ),
    ]
    plain, parsed, streamed = zip(
        *([_path_us(token_ids, text, way) for way in ways] for _ in range(num_runs)), strict=True
    )
    return PathCost(
        num_tokens=len(token_ids),
        plain_us=median(plain),
        plain_min_us=min(plain),
        parsed_us=median(parsed),
        parsed_min_us=min(parsed),
        streamed_us=median(streamed),
        streamed_min_us=min(streamed),
    )


def _path_us(token_ids: Sequence[int], text: ModelText, parsing: OutputParsing | None) -> float:
    settings = OutputSettings(num_prompt_tokens=1, arrived_at=0.0, tokenize_s=0.0, omits_token_ids=False)
    output = make_outputs([0], _Drop(), TextOptions(), text.tokenizer, (), settings, parsing)[0]
    output.begin_attempt()
    steps = [(number, (token_id,)) for number, token_id in enumerate(token_ids)]
    began = time.thread_time()
    for number, step in steps:
        output.take(number, step, (), 0.0)
    output.finish(FinishReason.LENGTH)
    return (time.thread_time() - began) / len(token_ids) * 1e6


def _head_us(names: tuple[str, str], before: str, tokens: Sequence[str]) -> float:
    """Microseconds for each of ``tokens``, which follow ``before``."""
    parser = OutputParser(choose_format(*names), tools=_TOOLS)
    parser.push(before)
    began = time.thread_time()
    for token in tokens:
        parser.push(token)
    return (time.thread_time() - began) / len(tokens) * 1e6


def _run_us(names: tuple[str, str], tokens: Sequence[str], *, streams_arguments: bool) -> float:
    parser = OutputParser(choose_format(*names), tools=_TOOLS, streams_arguments=streams_arguments)
    began = time.thread_time()
    for token in tokens:
        parser.push(token)
    parser.finish()
    return (time.thread_time() - began) / len(tokens) * 1e6


if __name__ == "__main__":
    main()
