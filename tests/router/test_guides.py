"""Grammars in the router: checked before any worker is touched, and made for calls that must come."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from quartet.api.chat import ChatPrompt, ToolChoice
from quartet.engine.guided.checker import GrammarChecker
from quartet.engine.guided.grammar import check_grammar
from quartet.engine.sampling import GrammarKind, GuidedDecoding, Sampling, guided_choice, guided_fields
from quartet.engine.step_engine import ALL_SAMPLING_FIELDS
from quartet.errors import InvalidRequestError, UnsupportedFieldError
from quartet.text.chat_message import ChatMessage, Tool
from quartet.text.chat_template import ChatTemplate
from quartet.text.json_object import JsonObject
from quartet.text.tokenizer import SpecialTokens
from router import guides
from tests.router.fakes import MODEL_TEXT, Fleet, collect
from tests.router.test_generate import make_start
from tests.text.test_call_grammar import is_whole

FIELDS = tuple(ALL_SAMPLING_FIELDS | guided_fields(GrammarKind))
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
UNIQUE = {"type": "array", "uniqueItems": True}
#: The model thinks in tags, which the template begins, and calls as Qwen does.
REASONING = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}<tool_call></think><think>"
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}<tool_call>"
GEMMA = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}<|tool_call>"


def guided(schema: Any) -> GuidedDecoding:
    return GuidedDecoding(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def tool(name: str = "weather", schema: Any = SCHEMA, *, strict: bool | None = None) -> Tool:
    return Tool(name, "", JsonObject.of_text(json.dumps(schema)), strict)


def chat(*tools: Tool, **fields: Any) -> ChatPrompt:
    return ChatPrompt((ChatMessage("user", "hi"),), tools=tools, **fields)


def fleet_with(template: str = PLAIN, **record: Any) -> Fleet:
    fleet = Fleet("decode-0", **({"sampling_fields": FIELDS} | record))
    fleet.texts.text = replace(MODEL_TEXT, chat_template=ChatTemplate(template, SpecialTokens()))
    return fleet


async def guide_at_worker(fleet: Fleet, prompt: Any, grammar: GuidedDecoding | None = None) -> GuidedDecoding | None:
    """What the worker is told."""
    sampling = Sampling(max_tokens=2, guided=grammar)
    await collect(fleet.generate(make_start(prompt=prompt, sampling=sampling)))
    [call] = fleet.hops.calls
    told: Sampling = call.start.generation.sampling
    return told.guided


async def refusal_of(fleet: Fleet, prompt: Any, grammar: GuidedDecoding | None = None) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        await collect(fleet.generate(make_start(prompt=prompt, sampling=Sampling(max_tokens=2, guided=grammar))))
    assert fleet.hops.calls == [], "a worker was asked"
    return caught.value


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[GuidedDecoding]:
    """The grammars that children were given."""
    asked = list[GuidedDecoding]()
    check = GrammarChecker.check

    def note(self: GrammarChecker, grammar: GuidedDecoding, special_tokens: Mapping[str, int]) -> None:
        asked.append(grammar)
        check(self, grammar, special_tokens)

    monkeypatch.setattr(GrammarChecker, "check", note)
    return asked


@pytest.fixture(autouse=True)
def one_checker(monkeypatch: pytest.MonkeyPatch, children: GrammarChecker) -> None:
    """All fleets of this file have the same children: each takes half a second to start."""
    monkeypatch.setattr(guides, "GrammarChecker", lambda: children)


@pytest.fixture(scope="module")
def children() -> Iterator[GrammarChecker]:
    checker = GrammarChecker()
    yield checker
    checker.close()


async def test_a_grammar_is_checked_once_before_any_worker_is_asked(checked: list[GuidedDecoding]) -> None:
    fleet = fleet_with()
    for _ in range(3):
        error = await refusal_of(fleet, chat(), guided(UNIQUE))
        assert isinstance(error, UnsupportedFieldError)
        assert error.field == "sampling.guided" and "uniqueItems" in error.message
    assert checked == [guided(UNIQUE)]
    assert await guide_at_worker(fleet, chat(), guided(SCHEMA)) == guided(SCHEMA)
    assert len(checked) == 2


async def test_requests_with_one_grammar_wait_for_one_check_also_if_the_first_has_gone(
    checked: list[GuidedDecoding],
) -> None:
    fleet, grammar = fleet_with(), guided({**SCHEMA, "description": "one"})
    start = make_start(prompt=chat(), sampling=Sampling(max_tokens=2, guided=grammar), tenant="ann")
    requests = [asyncio.create_task(collect(fleet.generate(start))) for _ in range(4)]
    while not fleet.pipeline.context.grammars._running:  # noqa: ASYNC110 - nothing tells it
        await asyncio.sleep(0)
    requests[0].cancel()
    await asyncio.gather(*requests[1:])
    assert len(checked) <= 2 and set(checked) == {grammar}


async def test_a_grammar_that_waits_behind_those_of_another_tenant_is_checked_in_ones_own_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, goes_on = threading.Event(), threading.Event()
    common, first, checked = guided(SCHEMA), guided_choice(["first"]), list[GuidedDecoding]()

    def check(_self: GrammarChecker, grammar: GuidedDecoding, _special_tokens: Mapping[str, int]) -> None:
        checked.append(grammar)
        if grammar == first:
            begun.set()
            assert goes_on.wait(30)

    monkeypatch.setattr(GrammarChecker, "check", check)
    checks = guides.GrammarChecks()
    flood = [asyncio.create_task(checks.check(grammar, MODEL_TEXT, "flood")) for grammar in (first, common)]
    await asyncio.to_thread(begun.wait, 30)
    await asyncio.wait_for(checks.check(common, MODEL_TEXT, "other"), 30)
    assert not any(task.done() for task in flood)
    goes_on.set()
    await asyncio.gather(*flood)
    assert checked == [first, common], "what is known is not checked again"
    checks.close()


async def test_grammars_that_would_end_or_stop_a_router_are_refused(checked: list[GuidedDecoding]) -> None:
    rules = "start: a0\n" + "".join(f'a{i}: a{i + 1} "a"\n' for i in range(5000)) + 'a5000: "b"'
    patterns = {"type": "string", "allOf": [{"pattern": f".*a{i}.*b"} for i in range(20)]}
    for grammar in (GuidedDecoding(GrammarKind.LARK, rules), guided(patterns)):
        for _ in range(2):
            error = await refusal_of(fleet_with(), chat(), grammar)
            assert "to be read" in error.message and error.field == "sampling.guided"
    assert await guide_at_worker(fleet_with(), chat(), guided(SCHEMA)) == guided(SCHEMA)


async def test_checks_are_forgotten_at_last(checked: list[GuidedDecoding], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.guides._NUM_KEPT", 16)
    fleet = fleet_with()
    for number in range(20):
        await collect(fleet.generate(make_start(sampling=Sampling(max_tokens=2, guided=guided_choice([str(number)])))))
    assert len(fleet.pipeline.context.grammars._known) == 16
    first, last = guided_choice(["0"]), guided_choice(["19"])
    for grammar in (first, last):
        await collect(fleet.generate(make_start(sampling=Sampling(max_tokens=2, guided=grammar))))
    assert len(checked) == 21 and checked[-1] == first


async def test_engines_of_other_libraries_check_grammars_themselves(checked: list[GuidedDecoding]) -> None:
    fleet = fleet_with(sampling_fields=(*ALL_SAMPLING_FIELDS, "guided"))
    assert await guide_at_worker(fleet, chat(), guided(UNIQUE)) == guided(UNIQUE)
    assert checked == []


@pytest.mark.parametrize(
    ("choice", "names"), [(ToolChoice.REQUIRED, ["weather", "time"]), (ToolChoice.FUNCTION, ["time"])]
)
async def test_calls_that_must_come_have_a_grammar(choice: ToolChoice, names: list[str]) -> None:
    name = "time" if choice is ToolChoice.FUNCTION else ""
    grammar = await guide_at_worker(fleet_with(), chat(tool(), tool("time"), tool_choice=choice, tool_name=name))
    assert grammar is not None and grammar.kind is GrammarKind.LARK
    assert [one for one in ("weather", "time") if f'"{one}"' in grammar.text] == names
    assert "<tool_call>" in grammar.text and "Rome" in grammar.text and "TEXT" not in grammar.text
    check_grammar(grammar)


async def test_strict_tools_have_a_grammar_and_others_none() -> None:
    free = chat(tool(), tool("time"))
    assert await guide_at_worker(fleet_with(), free) is None
    mixed = chat(tool(strict=True), tool("time", {"type": "object", "required": ["zone"]}))
    grammar = await guide_at_worker(fleet_with(), mixed)
    assert grammar is not None and "TEXT" in grammar.text
    assert "Rome" in grammar.text and "zone" not in grammar.text, "only the strict one's schema counts"
    hidden = chat(tool(strict=True), tool_choice=ToolChoice.NONE)
    assert await guide_at_worker(fleet_with(), hidden) is None


async def test_what_can_not_be_followed_of_a_tool_is_refused_if_it_is_strict_and_left_out_if_not() -> None:
    schema = {"type": "object", "properties": {"a": UNIQUE}}
    for choice in (ToolChoice.AUTO, ToolChoice.REQUIRED):
        error = await refusal_of(fleet_with(), chat(tool(schema=schema, strict=True), tool_choice=choice))
        assert error.field == "chat.tools" and "uniqueItems" in error.message
    lenient = chat(tool(schema=schema), tool_choice=ToolChoice.REQUIRED)
    assert await guide_at_worker(fleet_with(), lenient) is not None


LOOSE = {"type": "object", "minProperties": 2}


async def test_what_would_be_followed_too_loosely_is_refused_wherever_the_schema_stands() -> None:
    for template in (PLAIN, REASONING):
        error = await refusal_of(fleet_with(template), chat(), guided(LOOSE))
        assert error.field == "sampling.guided" and "minProperties" in error.message
        for choice in (ToolChoice.AUTO, ToolChoice.REQUIRED):
            strict = chat(tool(schema=LOOSE, strict=True), tool_choice=choice)
            error = await refusal_of(fleet_with(template), strict)
            assert error.field == "chat.tools" and "minProperties" in error.message
    deep = GuidedDecoding(GrammarKind.JSON_SCHEMA, '{"items":' * 300 + "{}" + "}" * 300)
    assert (await refusal_of(fleet_with(REASONING), chat(), deep)).field == "sampling.guided"


async def test_calls_are_refused_where_nobody_can_force_them() -> None:
    required = chat(tool(), tool_choice=ToolChoice.REQUIRED)
    for fleet, grammar in (
        (fleet_with(sampling_fields=(*ALL_SAMPLING_FIELDS, "guided")), None),
        (fleet_with(GEMMA), None),
        (fleet_with(), guided(SCHEMA)),
    ):
        assert (await refusal_of(fleet, required, grammar)).field == "chat.tool_choice"
    assert (await refusal_of(fleet_with(), chat(tool_choice=ToolChoice.REQUIRED))).field == "chat.tool_choice"


@pytest.mark.parametrize(
    "grammar", [guided(SCHEMA), GuidedDecoding(GrammarKind.REGEX, r"a/b\/+"), guided_choice(["yes", "n/o"])]
)
async def test_a_model_that_reasons_does_so_before_its_structured_answer(grammar: GuidedDecoding) -> None:
    whole = await guide_at_worker(fleet_with(REASONING), chat(), grammar)
    assert whole is not None and whole.kind is GrammarKind.LARK
    check_grammar(whole)
    assert "start: reasoning answer" in whole.text and "</think>" in whole.text
    assert await guide_at_worker(fleet_with(), chat(), grammar) == grammar, "one that does not reason"


async def test_a_structured_answer_may_be_a_call_where_there_are_tools() -> None:
    grammar = await guide_at_worker(fleet_with(), chat(tool()), guided({"enum": ["sunny"]}))
    assert grammar is not None
    check_grammar(grammar)
    for text in ('"sunny"', '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'):
        assert is_whole(grammar.text, text)
    assert not is_whole(grammar.text, "sunny") and not is_whole(grammar.text, "")
    hidden = chat(tool(), tool_choice=ToolChoice.NONE)
    assert await guide_at_worker(fleet_with(), hidden, guided(SCHEMA)) == guided(SCHEMA)


async def test_long_schemas_of_tools_are_read_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set[str]()
    make = guides.guide_of

    def note(*arguments: Any) -> GuidedDecoding | None:
        threads.add(threading.current_thread().name)
        return make(*arguments)

    monkeypatch.setattr(guides, "guide_of", note)
    long = tool(schema={**SCHEMA, "description": "x" * 10_000}, strict=True)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}<tool_call>{% endif %}"
    assert await guide_at_worker(fleet_with(template), chat(long)) is not None
    assert all(name.startswith("grammars") for name in threads) and threads


async def test_a_malformed_expression_is_refused_also_where_it_is_a_part_of_the_grammar() -> None:
    broken = GuidedDecoding(GrammarKind.REGEX, "\\")
    for fleet, prompt in ((fleet_with(), chat()), (fleet_with(), chat(tool())), (fleet_with(REASONING), chat())):
        assert (await refusal_of(fleet, prompt, broken)).field == "sampling.guided"


async def test_grammars_of_all_of_the_output_stay_as_they_are() -> None:
    for grammar in (GuidedDecoding(GrammarKind.LARK, 'start: "a"'), GuidedDecoding(GrammarKind.EBNF, 'root ::= "a"')):
        assert await guide_at_worker(fleet_with(REASONING), chat(), grammar) == grammar
