"""Children that check grammars: what would end or stop a process ends at most them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from quartet.engine.guided.checker import GrammarChecker
from quartet.engine.sampling import GrammarKind, GuidedDecoding
from quartet.errors import InvalidRequestError, QueueFullError, UnsupportedFieldError
from tests.engine.fakes import WAIT_S
from tests.schemas import SCHEMAS, guided


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    checker = GrammarChecker()
    yield checker
    checker.close()


def lark(text: str) -> GuidedDecoding:
    return GuidedDecoding(GrammarKind.LARK, text)


def definitions(num: int) -> GuidedDecoding:
    """A chain of references."""
    chain = {f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(num)}
    return guided({"$ref": "#/$defs/d0", "$defs": {**chain, f"d{num}": {"type": "null"}}})


@pytest.mark.parametrize(
    "grammar",
    [
        lark("start: a0\n" + "".join(f'a{i}: a{i + 1} "a"\n' for i in range(5000)) + 'a5000: "b"'),
        definitions(1500),
        guided({"type": "string", "allOf": [{"pattern": f".*a{i}.*b"} for i in range(20)]}),
    ],
    ids=["rules", "references", "patterns"],
)
def test_what_exhausts_the_stack_time_or_memory_is_refused_and_the_next_one_is_checked(
    grammar: GuidedDecoding, checker: GrammarChecker
) -> None:
    with pytest.raises(InvalidRequestError, match="to be read") as caught:
        checker.check(grammar, {})
    assert caught.value.field == "sampling.guided"
    checker.check(guided(SCHEMAS["person"]), {})


@pytest.mark.parametrize("name", SCHEMAS)
def test_ordinary_schemas_pass(name: str, checker: GrammarChecker) -> None:
    checker.check(guided(SCHEMAS[name]), {})


def test_refusals_come_as_they_are(checker: GrammarChecker) -> None:
    with pytest.raises(UnsupportedFieldError, match="uniqueItems") as unsupported:
        checker.check(guided({"uniqueItems": True}), {})
    with pytest.raises(InvalidRequestError, match="unclosed group") as malformed:
        checker.check(GuidedDecoding(GrammarKind.REGEX, "(a"), {})
    assert unsupported.value.field == malformed.value.field == "sampling.guided"
    assert not isinstance(malformed.value, UnsupportedFieldError)


def test_what_fails_with_the_first_tokens_is_refused_at_once(checker: GrammarChecker) -> None:
    schema = {"type": "object", "properties": {f"a{number}": {"type": "string"} for number in range(1500)}}
    with pytest.raises(InvalidRequestError, match="items"):
        checker.check(guided(schema), {})


def test_special_tokens_are_known_by_their_texts(checker: GrammarChecker) -> None:
    tag = {"begin": "<|tool|>", "schema": {"enum": [1]}, "end": ""}
    text = json.dumps({"type": "structural_tag", "structures": [tag], "triggers": ["<|tool|>"]})
    checker.check(GuidedDecoding(GrammarKind.STRUCTURAL_TAG, text), {"<|tool|>": 5})
    checker.check(lark('start: <[5]> "a"'), {})


def test_a_child_that_was_killed_while_idle_is_replaced_and_no_grammar_is_refused_for_it() -> None:
    checker = GrammarChecker()
    checker.check(guided(SCHEMAS["person"]), {})
    [child] = checker._idle
    child._process.kill()
    child._process.wait(WAIT_S)
    checker.check(guided(SCHEMAS["tuple"]), {})
    checker.close()


def test_a_child_that_is_killed_meanwhile_tells_nothing_of_the_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quartet.engine.guided.checker._TIMEOUT_S", 0.0)  # before it has started
    checker = GrammarChecker()
    with pytest.raises(QueueFullError):
        checker.check(guided(SCHEMAS["person"]), {})
    checker.close()


def test_threads_have_children_of_their_own(checker: GrammarChecker) -> None:
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda schema: checker.check(guided(schema), {}), list(SCHEMAS.values()) * 3))
