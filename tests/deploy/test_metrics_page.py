"""The list of metrics in docs/observability.md: each that processes show, with its kind, labels and question."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.deploy import known

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/observability.md"
_ROW = re.compile(r"^\| `(quartet_\w+)` \| (\w+) \| ([^|]*) \| ([^|]*) \|$", re.MULTILINE)


def documented() -> Mapping[str, tuple[str, frozenset[str]]]:
    section = PAGE.read_text().partition("### Each metric\n")[2].partition("\n## ")[0]
    rows = [(name, (kind, frozenset(re.findall(r"\w+", labels)))) for name, kind, labels, _ in _ROW.findall(section)]
    assert len({name for name, _ in rows}) == len(rows), "a metric has one row"
    return dict(rows)


def names_in_code() -> Iterator[str]:
    """Texts in our packages that are a metric's name, or begin one."""
    parts = "router|worker|process|encode|consolidator|global_router"
    for package in ("quartet", "router", "services"):
        for path in (ROOT / package).rglob("*.py"):
            yield from re.findall(rf'"(quartet_(?:{parts})(?:_[a-z_]+)?)"', path.read_text())


def test_the_page_has_each_metric_with_its_kind_and_labels() -> None:
    shown, listed = known.families(), documented()
    assert len(shown) > 70
    assert {name: shown[name] for name in shown.keys() - listed.keys()} == {}, "not on the page"
    assert listed.keys() - shown.keys() == set(), "on the page only"
    assert {name: shown[name] for name in shown if listed[name] != shown[name]} == {}, "otherwise on the page"


def test_no_name_in_the_code_is_missing() -> None:
    listed, found = {name.removesuffix("_total") for name in documented()}, set(names_in_code())
    assert len(found) > 70
    assert {
        name for name in found if name not in listed and not any(one.startswith(f"{name}_") for one in listed)
    } == set()


def test_each_metric_has_a_question() -> None:
    rows = _ROW.findall(PAGE.read_text())
    assert [name for name, _, _, question in rows if "?" not in question] == []
