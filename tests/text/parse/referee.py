"""The fixtures of canitoolcall: which parsers they are for, how their outputs are split, and what ours make of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from canitoolcall.chunking import ChunkStrategy, group_sizes
from canitoolcall.fixtures import Family, Fixture, load_fixtures
from canitoolcall.pytest_plugin import assert_conforms, family_for
from canitoolcall.results import ParsedToolCall, ParseResult

from quartet.text.parse import Event, OutputParser, choose_format
from quartet.text.parse.events import CallArguments, CallBegin, CallEnd, Content, Reasoning

#: For each family, by a part of the model's name: reasoning and tool-call parser; the first that fits counts.
PARSERS: Mapping[str, tuple[tuple[str, str, str], ...]] = {
    "deepseek": (
        ("V4", "deepseek_v3", "deepseek_v4"),
        ("V3.2", "deepseek_v3", "deepseek_v3_2"),
        ("V3.1", "deepseek_v3", "deepseek_v3_1"),
        ("V3", "", "deepseek_v3"),
    ),
    "gemma4": (("", "gemma4", "gemma4"),),
    "glm": (("", "glm45", "glm45"),),
    "gpt-oss": (("", "gpt_oss", "harmony"),),
    "kimi": (("K3", "kimi_k3", "kimi_k3"), ("Instruct", "", "kimi_k2"), ("", "kimi_k2", "kimi_k2")),
    "llama": (("Llama-4", "", "pythonic"), ("", "", "llama3_json")),
    "mistral": (("", "mistral", "mistral"),),
    "qwen3-hermes": (
        ("Instruct-2507", "", "hermes"),
        ("Thinking-2507", "deepseek_r1", "hermes"),
        ("", "qwen3", "hermes"),
    ),
    "qwen3-xml": (("Coder", "", "qwen3_coder"), ("", "qwen3", "qwen3_coder")),
}

_WORD = re.compile(r"\s?\w{1,6}|\s+|.", re.DOTALL)


@cache
def fixtures() -> dict[str, Fixture]:
    """All, by id."""
    return {fixture.id: fixture for fixture in load_fixtures()}


def split(units: Sequence[str], mask: Sequence[bool], strategy: ChunkStrategy) -> list[str]:
    """An output's ``units`` in deltas; ``mask``: which of them are markers."""
    deltas, at = [], 0
    for size in group_sizes(len(units), strategy, mask):
        deltas.append("".join(units[at : at + size]))
        at += size
    return deltas


def units_of(fixture: Fixture) -> tuple[list[str], list[bool]]:
    """The output in units, and which of them are markers.

    The fixtures have token ids, but the package has no tokenizers: markers count as tokens, and pieces of words.
    """
    markers = sorted(family_of(fixture.family).markers, key=len, reverse=True)
    units: list[str] = []
    mask: list[bool] = []
    for number, part in enumerate(re.split(f"({'|'.join(map(re.escape, markers))})", fixture.raw_output)):
        pieces = [part] if number % 2 else _WORD.findall(part)
        units += pieces
        mask += [bool(number % 2)] * len(pieces)
    return units, mask


def parser_of(fixture: Fixture, *, streams_arguments: bool) -> OutputParser:
    """The parser that a server of the fixture's model would use."""
    reasoning, calls = next(rule[1:] for rule in PARSERS[fixture.family] if rule[0] in fixture.reference_model)
    return OutputParser(
        choose_format(reasoning, calls),
        prompt_end=_prompt_end(fixture),
        tools={tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in fixture.tools},
        streams_arguments=streams_arguments,
    )


def parse(parser: OutputParser, deltas: Iterable[str]) -> ParseResult:
    """What a client has made of the events at the end."""
    events = [event for delta in deltas for event in parser.push(delta)]
    return to_result([*events, *parser.finish()])


def to_result(events: Sequence[Event]) -> ParseResult:
    """The same, from the events."""
    content, reasoning = "", ""
    names: list[str] = []
    arguments: list[list[str]] = []
    for event in events:
        match event:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case CallBegin(index, _, name):
                assert index == len(names), "calls are numbered in order"
                names.append(name)
                arguments.append([])
            case CallArguments(index, text):
                assert index == len(names) - 1, "arguments are of the call that began last"
                arguments[index].append(text)
            case CallEnd(index):
                assert index == len(names) - 1, "the call that began last ends"
    calls = tuple(ParsedToolCall(name, "".join(parts)) for name, parts in zip(names, arguments, strict=True))
    return ParseResult(content or None, reasoning or None, calls)


def verdict(fixture: Fixture, result: ParseResult) -> str:
    """``pass``, ``soft`` (whitespace differs) or ``fail``."""
    for name, soft in (("pass", False), ("soft", True)):
        try:
            assert_conforms(fixture, result, soft=soft, family=family_of(fixture.family))
            return name
        except AssertionError:
            pass
    return "fail"


@cache
def family_of(name: str) -> Family:
    """What the fixtures say of a family."""
    family = family_for(next(fixture for fixture in fixtures().values() if fixture.family == name))
    assert family is not None
    return family


def _prompt_end(fixture: Fixture) -> str:
    """What the template writes before the output; where the fixture leaves that out, its model's default."""
    if fixture.generation_prompt is not None:
        return fixture.generation_prompt
    models = {model.repo: model for model in family_of(fixture.family).reference_models}
    return models[fixture.reference_model].default_generation_prompt or ""
