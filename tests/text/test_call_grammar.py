"""Grammars of calls, held against the parsers that read such calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import llguidance
import pytest

from quartet.errors import UnsupportedFieldError
from quartet.text.call_grammar import (
    CallableTool,
    CallRules,
    ReasoningMarkers,
    call_grammar,
    content_head,
    reasoning_markers,
    with_reasoning,
)
from quartet.text.parse import OutputParser, choose_format
from quartet.text.parse.events import CallArguments, CallBegin, Content
from quartet.text.parse.names import REASONING_PARSERS, TOOL_CALL_PARSERS
from tests import tiny

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["c", "f"]},
        "place": {"$ref": "#/$defs/place"},
    },
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "null"}}, "additionalProperties": False}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER, OTHER = CallableTool("get_weather", SCHEMA), CallableTool("other", None)
ARGUMENTS = {"city": "Rome\n(IT)", "days": 4, "unit": "c", "place": {"x": None}}


def written(parser: str, arguments: Mapping[str, object]) -> str:
    """A call of ``get_weather`` as the family's template shows it."""
    text = json.dumps(arguments)
    tags = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    glm = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value if isinstance(value, str) else json.dumps(value)}</arg_value>\n"
        for key, value in arguments.items()
    )
    return {
        "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        f"{text}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "deepseek_v3_1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        f"{text}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "glm45": f"<tool_call>get_weather\n{glm}</tool_call>",
        "harmony": f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{text}",
        "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {text}}}\n</tool_call>',
        "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        f"<|tool_call_argument_begin|>{text}<|tool_call_end|><|tool_calls_section_end|>",
        "llama3_json": f'{{"name": "get_weather", "parameters": {text}}}',
        "mistral": f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {text}}}]',
        "qwen3_coder": f"<tool_call>\n<function=get_weather>\n{tags}</function>\n</tool_call>",
    }[parser]


FORMS = (
    "deepseek_v3",
    "deepseek_v3_1",
    "glm45",
    "harmony",
    "hermes",
    "kimi_k2",
    "llama3_json",
    "mistral",
    "qwen3_coder",
)
#: These can be told from text where they begin.
IN_TEXT = tuple(name for name in FORMS if name not in ("harmony", "llama3_json"))
#: Parsers of reasoning that go with them.
REASONING = {"harmony": "gpt_oss", "mistral": "mistral"}

TOKENIZER = llguidance.LLTokenizer(
    (tiny.CHECKPOINT / "tokenizer.json").read_text(), n_vocab=tiny.VOCAB_SIZE, eos_token=tiny.EOS_ID
)


def rules(
    *, is_needed: bool, allows_parallel: bool = True, tools: tuple[CallableTool, ...] = (WEATHER, OTHER)
) -> CallRules:
    return CallRules(tools=tools, is_needed=is_needed, allows_parallel=allows_parallel)


def grammar_of(
    parser: str, given: CallRules, markers: ReasoningMarkers | None = None, *, has_begun: bool = False
) -> str:
    answer = call_grammar(parser, given, lambda _text: None)
    assert answer is not None
    return with_reasoning(answer, markers, lambda _text: None, has_begun=has_begun)


def is_whole(grammar: str, text: str) -> bool:
    """Whether ``text`` follows the grammar up to an end of it."""
    matcher = llguidance.LLMatcher(TOKENIZER, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    token_ids = TOKENIZER.tokenize_str(text)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@pytest.mark.parametrize("parser", FORMS)
def test_a_required_call_is_just_what_the_parser_reads(parser: str) -> None:
    grammar, text = grammar_of(parser, rules(is_needed=True)), written(parser, ARGUMENTS)
    assert is_whole(grammar, text)
    format = choose_format(REASONING.get(parser, ""), parser)
    output = OutputParser(format, tools={"get_weather": SCHEMA}, make_id=lambda: "id")
    events = [*output.push(text), *output.finish()]
    [begin] = [event for event in events if isinstance(event, CallBegin)]
    arguments = "".join(event.text for event in events if isinstance(event, CallArguments))
    assert begin.name == "get_weather" and json.loads(arguments) == ARGUMENTS
    assert not any(isinstance(event, Content) and event.text.strip() for event in events)

    assert not is_whole(grammar, f"Sure. {text}"), "text before it"
    assert not is_whole(grammar, ""), "nothing"
    assert not is_whole(grammar, text.replace("get_weather", "get_time"))
    assert not is_whole(grammar, written(parser, {"town": "Rome"})), "another argument"
    assert not is_whole(grammar, written(parser, {"city": "Rome", "days": "two"})), "of another type"
    assert not is_whole(grammar, written(parser, {"days": 2})), "without one that is required"
    assert is_whole(grammar, written(parser, {"city": "Rome"})), "without those that are not"


@pytest.mark.parametrize("parser", IN_TEXT)
def test_in_text_a_call_that_begins_must_go_on_as_one(parser: str) -> None:
    grammar, text = grammar_of(parser, rules(is_needed=False)), written(parser, ARGUMENTS)
    assert is_whole(grammar, text) and is_whole(grammar, "")
    assert is_whole(grammar, f"Sure, {{1}} < 2.\n{text}")
    assert not is_whole(grammar, text.replace("get_weather", "get_time"))
    assert not is_whole(grammar, written(parser, {"town": "Rome"}))
    assert not is_whole(grammar, f"Sure.\n{written(parser, {'days': 2})}")


def test_harmony_and_llama_write_calls_in_text_that_can_not_be_told_from_it() -> None:
    for parser in set(FORMS) - set(IN_TEXT):
        assert call_grammar(parser, rules(is_needed=False), lambda _text: None) is None


def test_formats_that_can_not_be_guided_are_known() -> None:
    guided = {name for name in TOOL_CALL_PARSERS if call_grammar(name, rules(is_needed=True), lambda _text: None)}
    assert guided == set(FORMS)
    assert call_grammar("", rules(is_needed=True), lambda _text: None) is None


@pytest.mark.parametrize("parser", [name for name in FORMS if name not in ("harmony", "mistral")])
def test_one_call_or_several(parser: str) -> None:
    one = written(parser, {"city": "Rome"})
    many, single = (grammar_of(parser, rules(is_needed=True, allows_parallel=allows)) for allows in (True, False))
    two = {
        "deepseek_v3": one.replace("<｜tool▁calls▁end｜>", "\n") + one.removeprefix("<｜tool▁calls▁begin｜>"),
        "deepseek_v3_1": one.replace("<｜tool▁calls▁end｜>", "") + one.removeprefix("<｜tool▁calls▁begin｜>"),
        "kimi_k2": one.replace("<|tool_calls_section_end|>", "") + one.removeprefix("<|tool_calls_section_begin|>"),
        "llama3_json": f"{one}; {one}",
    }.get(parser, f"{one}\n{one}")
    assert is_whole(many, two) and not is_whole(single, two)
    assert is_whole(many, one) and is_whole(single, one)


def strict(**schema: Any) -> CallRules:
    return rules(is_needed=True, tools=(CallableTool("f", {"type": "object", **schema}, is_strict=True),))


@pytest.mark.parametrize("parser", ["qwen3_coder", "glm45"])
@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "^[0-9]$"}}}, "pattern of a"),
        ({"properties": {"a": {"type": "string", "maxLength": 3}}}, "maxLength of a"),
        ({"properties": {"a": {"type": "string", "not": {}}}}, "not of a"),
        ({"not": {}}, "not"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {}}}, "\\$ref"),
        ({"required": ["b"]}, "required"),
        ({"additionalProperties": {"type": "integer"}}, "additionalProperties"),
    ],
)
def test_what_tags_can_not_say_of_a_strict_schema_is_refused_by_name(
    parser: str, schema: Mapping[str, Any], keyword: str
) -> None:
    with pytest.raises(UnsupportedFieldError, match=f"in tags: {keyword}") as caught:
        call_grammar(parser, strict(**schema), lambda _text: None)
    assert caught.value.field == "chat.tools"
    assert call_grammar("hermes", strict(**schema), lambda _text: None), "JSON says it"
    free = rules(is_needed=True, tools=(CallableTool("f", {"type": "object", **schema}),))
    assert call_grammar(parser, free, lambda _text: None)


@pytest.mark.parametrize("parser", ["qwen3_coder", "glm45"])
def test_strict_schemas_that_tags_can_say_are_followed(parser: str) -> None:
    tool = CallableTool("get_weather", {**SCHEMA, "title": "Weather"}, is_strict=True)
    grammar = grammar_of(parser, rules(is_needed=True, tools=(tool,)))
    assert is_whole(grammar, written(parser, ARGUMENTS))


def test_reasoning_comes_first_and_the_template_may_have_begun_it() -> None:
    markers, call = reasoning_markers("qwen3"), written("hermes", ARGUMENTS)
    may, must = (grammar_of("hermes", rules(is_needed=True), markers, has_begun=begun) for begun in (False, True))
    assert is_whole(may, call) and is_whole(may, f"<think>\nRome?\n</think>\n\n{call}")
    assert not is_whole(may, f"<think>\nRome?\n{call}")
    assert is_whole(must, f"Rome?\n</think>\n\n{call}") and not is_whole(must, call)
    harmony = grammar_of("harmony", rules(is_needed=True), reasoning_markers("gpt_oss"))
    thought = "<|channel|>analysis<|message|>Rome?<|end|><|start|>assistant"
    assert is_whole(harmony, thought + written("harmony", ARGUMENTS))


def test_every_parser_of_reasoning_is_guided_or_known_not_to_be() -> None:
    assert {name for name in REASONING_PARSERS if reasoning_markers(name) is None} == {"kimi_k3"}
    assert reasoning_markers("") is None
    assert content_head("gpt_oss") == "<|channel|>final<|message|>" and content_head("qwen3") == ""


def test_markers_that_are_special_tokens_stand_in_it_by_their_ids() -> None:
    known = {"<|channel|>": 2005, "<|message|>": 2008, "<|constrain|>": 2003}
    answer = call_grammar("harmony", rules(is_needed=True), known.get)
    assert answer is not None
    assert all(f"<[{token_id}]>" in answer for token_id in known.values())
    assert not any(marker in answer for marker in known)
    new = call_grammar("mistral", rules(is_needed=True), {"[ARGS]": 9, "[TOOL_CALLS]": 8}.get)
    assert new is not None and "<[8]>" in new and "<[9]>" in new and '"get_weather"' in new


def test_names_and_texts_of_any_kind_stay_literal() -> None:
    tool = CallableTool('say "hi"<|x|>', {"type": "object", "properties": {"a b": {"enum": ['"', "\\"]}}})
    for parser in ("hermes", "qwen3_coder"):
        grammar = grammar_of(parser, rules(is_needed=True, tools=(tool,)))
        name = json.dumps(tool.name)[1:-1] if parser == "hermes" else tool.name
        text = {
            "hermes": f'<tool_call>\n{{"name": "{name}", "arguments": {{"a b": "\\""}}}}\n</tool_call>',
            "qwen3_coder": f'<tool_call>\n<function={name}>\n<parameter=a b>\n"\n</parameter>\n'
            "</function>\n</tool_call>",
        }[parser]
        assert is_whole(grammar, text)
