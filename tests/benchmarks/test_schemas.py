"""The referee finds what is wrong in both directions, and nothing invalid passes the suite's schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.schemas import DRAFT, SUITE, Grammars, judge, texts_of
from benchmarks.table import schemas_tables
from quartet.engine.guided.masks import Guide


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    grammars = Grammars()
    yield grammars
    grammars.close()


def test_values_are_written_in_all_layouts_and_orders() -> None:
    value = {"a": 1.0, "b": ["é", {"c": 1.5, "d": 2.0}]}
    plain = list(texts_of(value, is_whole=False, is_ordered=True))
    assert {'{"a":1.0,"b":["é",{"c":1.5,"d":2.0}]}', '{"a": 1.0, "b": ["é", {"c": 1.5, "d": 2.0}]}'} < set(plain)
    assert all(json.loads(text) == value for text in plain)
    assert any("\n" in text for text in plain) and any("\\u00e9" in text for text in plain)
    reordered = set(texts_of(value, is_whole=True, is_ordered=False))
    assert '{"b":["é",{"d":2,"c":1.5}],"a":1}' in reordered and len(reordered) == 4 * len(plain)


def test_a_text_is_accepted_if_it_is_a_whole_output(grammars: Grammars) -> None:
    guide = grammars.compile({"type": "array", "items": {"type": "integer"}})
    assert isinstance(guide, Guide)
    found = [grammars.accepts(guide, text) for text in ("[1,2]", "[1, 2]", "[1,2", "[1.5]", "[]x")]
    assert found == [True, True, False, False, False]


def case(schema: Any, *tests: tuple[Any, bool]) -> dict[str, Any]:
    return {
        "description": json.dumps(schema),
        "schema": schema,
        "tests": [{"description": json.dumps(data), "data": data, "valid": is_valid} for data, is_valid in tests],
    }


def test_what_differs_from_the_suite_is_counted_in_its_direction(tmp_path: Path) -> None:
    cases = [
        # The suite is wrong about the first and the last instance.
        case({"type": "integer"}, ("a", True), (1.0, True), (1.5, False), (2, False)),
        case({"properties": {"a": {"const": 1}, "b": {}}}, ({"b": 1, "a": 1}, True), ({"b": 1, "a": 2}, False)),
        case({"not": {}, "uniqueItems": True}, (1, True)),
        case({"enum": []}, (1, True)),
        case({"format": "iri"}),
    ]
    (tmp_path / DRAFT / "optional").mkdir(parents=True)
    (tmp_path / DRAFT / "made.json").write_text(json.dumps(cases))
    said = list[str]()
    results = judge(tmp_path, said.append)
    part = results.main
    assert (part.num_schemas, part.num_compiled, part.num_refused_by_keyword) == (5, 2, 1)
    assert part.refused_by_keyword == {"not": 1, "uniqueItems": 1}
    assert part.refused_otherwise == {"nothing satisfies it": 1, "unknown format: iri": 1}
    assert [wrong.instance for wrong in part.accepted_though_invalid] == ["2"]
    assert [(wrong.instance, wrong.reason) for wrong in part.refused_though_valid] == [('"a"', ""), ("1", "")]
    assert (part.num_valid, part.num_invalid, part.num_whole, part.num_reordered) == (3, 3, 1, 1)
    assert results.optional.num_schemas == 0
    assert sum(text.startswith("accepted though invalid") for text in said) == 1
    assert "| accepted | `made.json` |" in schemas_tables(asdict(results))


@pytest.mark.bench
def test_no_invalid_instance_of_the_suite_is_accepted_and_each_refused_valid_one_is_explained() -> None:
    if not (SUITE / DRAFT).is_dir():
        pytest.skip("no suite: tools/schema_suite.sh could not get it")
    results = judge(SUITE, lambda _text: None)
    for part in (results.main, results.optional):
        assert part.num_compiled > 30 and part.num_valid > 200 and part.num_invalid > 150
        assert part.accepted_though_invalid == []
        assert [wrong for wrong in part.refused_though_valid if not wrong.reason] == []
    # The main part is one with formats as annotations.
    assert {wrong.file for wrong in results.main.refused_though_valid} <= {"format.json"}
