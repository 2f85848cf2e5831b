from __future__ import annotations

import json
from typing import Any

import llguidance
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.engine.guided.grammar import LIMITS, check_grammar, llguidance_grammar
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
        GuidedDecoding(GrammarKind.REGEX, "a\\\\"),
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
        # What llguidance would follow too loosely: a name written twice counts as two, such characters are left out.
        ({"type": "object", "minProperties": 2}, "minProperties, where more than one"),
        ({"items": {"minProperties": 3, "required": ["a", "a"]}}, "minProperties, where more than one"),
        ({"$ref": "#/own", "own": {"minProperties": 9}}, "minProperties, where more than one"),
        ({"properties": {"const": {"const": "a\0b"}}}, "const, where it has a control character"),
        ({"enum": ["a", {"a": ["\x7f"]}]}, "enum, where it has a control character"),
        ({"pattern": r"^a\x01b$"}, "pattern, where it asks for a control character"),
        ({"pattern": r"^a[\u0001]b$"}, "pattern, where it asks for a control character"),
        ({"patternProperties": {"\x02": {}}}, "patternProperties, where it asks for a control character"),
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
        (guided({"format": "date", "allOf": 3}), "allOf"),
        (guided({"enum": []}), "Unsatisfiable"),
        (guided({"type": "string", "pattern": "(a"}), "regex"),
        (guided({"$ref": "https://example.com/schema"}), "does not fetch"),
        (GuidedDecoding(GrammarKind.REGEX, "(a"), "unclosed group"),
        (GuidedDecoding(GrammarKind.REGEX, "(?=a)b"), "look-around"),
        (GuidedDecoding(GrammarKind.REGEX, "\\"), "lone backslash"),
        (GuidedDecoding(GrammarKind.REGEX, "a\\\\\\"), "lone backslash"),
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


TOKENIZER = llguidance.LLTokenizer("byte")


def accepts(schema: Any, *texts: str) -> list[bool]:
    grammar = llguidance_grammar(guided(schema), lambda _text: None)
    start = llguidance.LLMatcher(TOKENIZER, grammar, log_level=0, limits=LIMITS)
    assert not start.is_error(), start.get_error()
    matchers = [start.deep_copy() for _ in texts]
    return [
        matcher.consume_tokens(TOKENIZER.tokenize_str(text)) and matcher.is_accepting()
        for matcher, text in zip(matchers, texts, strict=True)
    ]


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        (
            {"format": "date"},
            ["2024-02-29", "2000-02-29", "2023-12-31"],
            ["2023-02-29", "1900-02-29", "2023-04-31", "0000-02-29", "0000-01-01"],
        ),
        (
            {"format": "time"},
            ["23:59:60Z", "23:59:60.5+00:00", "00:00:00-23:59"],
            ["22:59:60Z", "23:58:60Z", "23:59:60+01:00", "24:00:00Z"],
        ),
        ({"format": "date-time"}, ["2024-02-29T23:59:60Z", "2023-02-28t00:00:00z"], ["2023-02-29T00:00:00Z"]),
        (
            {"format": "ipv6"},
            ["::ffff:1.2.3.4", "1::", "::", "1:2:3:4:5:6:7:8"],
            ["1:2:3:4:5:6:7:1.2.3.4", "::256.0.0.1"],
        ),
        ({"format": "date", "pattern": "^2"}, ["2024-02-29"], ["1024-02-29", "2023-02-29"]),
        ({"format": "date", "pattern": "^2", "allOf": [{"pattern": "9$"}]}, ["2024-02-29"], ["2024-02-28"]),
        ({"pattern": r"^[\s]\S$"}, ["\ufeffa", " a"], [" \ufeff", "\x85a"]),
        ({"pattern": "^\\\\s$"}, ["\\s"], ["\\ "]),
        ({"pattern": r"^[^\x00-\x1f]\\\\x01$"}, [r"a\\x01"], ["\\nx01", "\\x01"]),
        # Property names, schemas that only a reference leads to, and values that look like schemas.
        ({"$ref": "#/own/format", "own": {"format": {"format": "date"}}}, ["2024-02-29"], ["2023-02-29"]),
        ({"const": {"format": "date"}}, [{"format": "date"}], [{"format": "2024-02-29"}]),
        ({"properties": {"enum": {"format": "date"}}}, [{"enum": "2024-02-29"}], [{"enum": "2023-02-29"}]),
        ({"type": "object", "minProperties": 1}, [{"a": 1}], [{}]),
        ({"minProperties": 3, "required": ["a", "b"]}, [{"a": 1, "b": 2, "c": 3}], [{"a": 1, "b": 2}]),
    ],
)
def test_a_schema_accepts_what_is_valid_and_nothing_else(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    texts = [json.dumps(value, ensure_ascii=False) for value in (*valid, *invalid)]
    assert accepts(schema, *texts) == [True] * len(valid) + [False] * len(invalid)


def test_no_property_passes_for_another_one_by_the_way_its_name_is_written() -> None:
    schema = {"properties": {"a": {"type": "integer"}, "\n": {"type": "integer"}}}
    names = ("a", r"\u0061", r"\n", r"\u000a", "b")
    assert accepts(schema, *(f'{{"{name}":"x"}}' for name in names)) == [False, False, False, False, True]
    assert accepts(schema, *(f'{{"{name}":1}}' for name in names)) == [True, False, True, False, True]


def test_schemas_of_tags_are_read_as_strictly() -> None:
    grammar = tagged(structures=[{"begin": "<f=a>", "schema": {"format": "date"}, "end": "</f>"}])
    start = llguidance.LLMatcher(TOKENIZER, llguidance_grammar(grammar, lambda _text: None), log_level=0)
    wrong, right = start.deep_copy(), start
    assert not wrong.consume_tokens(TOKENIZER.tokenize_str('<f=a>"2023-02-29"'))
    assert right.consume_tokens(TOKENIZER.tokenize_str('<f=a>"2024-02-29"</f>'))
    with pytest.raises(UnsupportedFieldError, match="minProperties"):
        check_grammar(tagged(structures=[{"begin": "<f=a>", "schema": {"minProperties": 2}, "end": "</f>"}]))
