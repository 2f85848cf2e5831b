from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.engine.guided.grammar import check_grammar
from quartet.engine.sampling import GrammarKind, GuidedDecoding, guided_choice
from quartet.errors import InvalidRequestError, UnsupportedFieldError
from tests.schemas import SCHEMAS, guided

TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f=a>", "schema": {"type": "object"}, "end": "</f>"}],
    "triggers": ["<f="],
}


def tagged(**changes: Any) -> GuidedDecoding:
    return GuidedDecoding(GrammarKind.STRUCTURAL_TAG, json.dumps(TAG | changes))


def triggered(content: Any, **changes: Any) -> GuidedDecoding:
    tags = [{"begin": "<f=a>", "content": content, "end": "</f>"}]
    form = {"type": "triggered_tags", "triggers": ["<f="], "tags": tags, **changes}
    return GuidedDecoding(GrammarKind.STRUCTURAL_TAG, json.dumps({"type": "structural_tag", "format": form}))


@pytest.mark.parametrize(
    "grammar",
    [
        *map(guided, SCHEMAS.values()),
        GuidedDecoding(GrammarKind.JSON_SCHEMA, "true"),
        GuidedDecoding(GrammarKind.REGEX, "[0-9]+/[a-z]"),
        GuidedDecoding(GrammarKind.EBNF, 'root ::= "a" b+\nb ::= [0-9]'),
        GuidedDecoding(GrammarKind.EBNF, 'start: "a" /[0-9]+/'),
        GuidedDecoding(GrammarKind.LARK, 'start: "a" /[0-9]+/'),
        guided_choice(['say "yes"', "no\n"]),
        tagged(),
        triggered({"type": "json_schema", "json_schema": {"type": "object"}}, at_least_one=True),
    ],
)
def test_what_can_be_followed_is_accepted(grammar: GuidedDecoding) -> None:
    check_grammar(grammar)


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"properties": {"a": {"not": {"type": "string"}}}}, "not"),
        ({"if": {}, "then": {}}, "if, then"),
        ({"propertyNames": {"pattern": "a"}}, "propertyNames"),
        ({"oneOf": [{"type": "string"}, {"maxLength": 3}]}, "oneOf"),
    ],
)
def test_a_keyword_that_can_not_be_followed_is_named(schema: dict[str, Any], keyword: str) -> None:
    with pytest.raises(UnsupportedFieldError, match=f"can't be followed: {keyword}") as caught:
        check_grammar(guided(schema))
    assert caught.value.field == "sampling.guided"


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (GuidedDecoding(GrammarKind.JSON_SCHEMA, "{"), "no JSON"),
        (GuidedDecoding(GrammarKind.JSON_SCHEMA, "[" * 60_000), "no JSON"),
        (GuidedDecoding(GrammarKind.JSON_SCHEMA, '{"items":' * 300 + "{}" + "}" * 300), "recursion limit"),
        (GuidedDecoding(GrammarKind.JSON_SCHEMA, "3"), "an object"),
        (guided({"type": "colour"}), "Invalid type: colour"),
        (guided({"enum": []}), "Unsatisfiable"),
        (guided({"type": "string", "pattern": "(a"}), "regex"),
        (guided({"$ref": "https://example.com/schema"}), "does not fetch"),
        (GuidedDecoding(GrammarKind.REGEX, "(a"), "unclosed group"),
        (GuidedDecoding(GrammarKind.REGEX, "(?=a)b"), "look-around"),
        (GuidedDecoding(GrammarKind.EBNF, "root := a"), "EBNF"),
        (GuidedDecoding(GrammarKind.LARK, 'start: "a" b'), "unknown name"),
        (GuidedDecoding(GrammarKind.STRUCTURAL_TAG, "{}"), "structural_tag"),
        (tagged(structures=[{"begin": "<f=\ud800"}]), "surrogate"),
        (tagged(triggers=[]), "lists of triggers"),
        (tagged(triggers=["<g="]), "no trigger begins"),
        (tagged(structures=[{"schema": {}}]), "a begin, a schema and an end"),
        (tagged(structures=[{"begin": "<f=a>"}] * 1025), "1024 structures"),
        (triggered({"type": "any_text"}), "any_text"),
        (triggered({"type": "json_schema", "json_schema": {}}, stop_after_first=True), "stop_after_first"),
        (GuidedDecoding(GrammarKind.STRUCTURAL_TAG, '{"type": "structural_tag", "format": {"type": "tag"}}'), "'tag'"),
    ],
)
def test_what_is_no_grammar_is_refused_with_what_is_wrong(grammar: GuidedDecoding, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        check_grammar(grammar)
    assert caught.value.field == "sampling.guided"
    assert len(caught.value.message) < 400


def test_half_a_surrogate_pair_is_refused() -> None:
    for make in (lambda: guided_choice(["a\ud800"]), lambda: GuidedDecoding(GrammarKind.REGEX, "\udfff")):
        with pytest.raises(InvalidRequestError, match="surrogate"):
            make()


@pytest.mark.parametrize("kind", list(GrammarKind))
@given(st.data())
def test_any_text_is_a_grammar_or_refused(kind: GrammarKind, data: st.DataObject) -> None:
    if kind is GrammarKind.CHOICE:
        return
    json_values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.sampled_from(["string", "object", "a+", "#/$defs/a"]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["type", "properties", "items", "anyOf", "pattern", "$ref", "$defs"]), inner
            )
        ),
    )
    spellings = st.text(st.sampled_from('ab:|"/[](){}<>*+?\\^$ \n09start'), min_size=1)
    try:
        text = data.draw(st.one_of(spellings, st.text(min_size=1), json_values.map(json.dumps)))
        check_grammar(GuidedDecoding(kind, text))
    except InvalidRequestError as error:
        assert error.field == "sampling.guided"


def test_a_grammar_may_not_be_larger_than_its_bound() -> None:
    schema = {"type": "object", "properties": {f"a{number}": {"type": "string"} for number in range(1, 20_000)}}
    with pytest.raises(InvalidRequestError, match="200000 characters"):
        guided(schema)
