"""Dashboards and alerts name only what processes show; whether they show it in time, ``make test-deploy`` says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from codegen.dashboards import DASHBOARDS, FOLDER, render
from tests.deploy import known
from tests.deploy.known import TARGET_LABELS, at_first, grouped_labels, rated, selectors

PROMETHEUS = FOLDER.parent / "prometheus"
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"] for rule in group["rules"]
]
EXPRESSIONS = {
    **{
        f"{dashboard.name}: {panel.title}, {query.legend}": query.expr
        for dashboard in DASHBOARDS
        for panel in dashboard.panels
        for query in panel.queries
    },
    **{rule["alert"]: rule["expr"] for rule in RULES},
}


def faults(expr: str) -> list[str]:
    """What in a query no process shows."""
    samples, words = known.samples(), known.values()
    labels, found = set(TARGET_LABELS), []
    for selector in selectors(expr):
        of_metric = samples.get(selector.metric)
        if of_metric is None:
            found.append(selector.metric)
            continue
        labels |= of_metric
        found += [f"{selector.metric}: {label}" for label in selector.values.keys() - of_metric - TARGET_LABELS]
        for label in selector.values.keys() & words.keys():
            found += sorted(selector.values[label] - words[label])
    return found + sorted(grouped_labels(expr) - labels)


def test_the_files_are_what_the_source_makes() -> None:
    assert {path.name: path.read_text() for path in FOLDER.glob("*.json")} == {
        f"{dashboard.name}.json": render(dashboard) for dashboard in DASHBOARDS
    }


def test_everything_that_is_named_is_shown_by_processes() -> None:
    assert len(EXPRESSIONS) > 60
    assert {name: faults(expr) for name, expr in EXPRESSIONS.items() if faults(expr)} == {}


def unborn(expr: str) -> list[str]:
    """What a query misses the first growth of, because it is not there at 0 before."""
    first, found = list(at_first()), []
    for selector in selectors(expr):
        if selector.metric in rated(expr):
            samples = [labels for name, labels in first if name == selector.metric]
            if not samples:
                found.append(selector.metric)
            for label in selector.wanted.keys() & {"outcome", "cause"}:
                found += sorted(selector.wanted[label] - {labels[label] for labels in samples})
    return found


def test_what_grows_is_there_before_so_that_the_first_fault_shows() -> None:
    assert {name: unborn(expr) for name, expr in EXPRESSIONS.items() if unborn(expr)} == {}
    assert unborn('increase(quartet_router_requests_total{outcome=~"timeout|late"}[5m])') == ["late"]
    assert unborn("rate(quartet_router_odd_total[5m])") == ["quartet_router_odd_total"]


@pytest.mark.parametrize(
    ("expr", "fault"),
    [
        ("sum(rate(quartet_router_request_total[5m]))", "quartet_router_request_total"),
        ("sum by (model, rnk) (rate(quartet_router_ttft_seconds_bucket[5m]))", "rnk"),
        ('quartet_worker_hand_offs_total{part="held"}', "quartet_worker_hand_offs_total: part"),
        ('quartet_worker_hand_offs_total{outcome=~"taken|late"}', "late"),
        ("process_cpu_second_total", "process_cpu_second_total"),
    ],
)
def test_what_is_misspelt_is_found(expr: str, fault: str) -> None:
    assert faults(expr) == [fault]


def test_panels_lie_side_by_side_and_each_says_its_question() -> None:
    for dashboard in DASHBOARDS:
        panels = json.loads(render(dashboard))["panels"]
        places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
        assert len(places) == len({panel["id"] for panel in panels}) == len(panels)
        assert all("?" in panel["description"] for panel in panels)


def test_each_alert_says_what_is_wrong_and_where_to_look() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES) == 10
    for rule in RULES:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}
        page, _, anchor = rule["annotations"]["description"].partition("docs/troubleshooting.md#")
        if anchor:
            assert page and anchor in anchors(FOLDER.parents[1] / "docs/troubleshooting.md")


def test_each_alert_and_dashboard_is_documented_and_each_alert_has_its_fault() -> None:
    root = FOLDER.parents[1]
    page, faults = (root / "docs/observability.md").read_text(), (root / "tests/e2e/test_deploy.py").read_text()
    for rule in RULES:
        assert f"| `{rule['alert']}` |" in page
        assert f'wait_fires("{rule["alert"]}"' in faults
    for dashboard in DASHBOARDS:
        assert f"| `{dashboard.name}.json` |" in page
    titles = {panel.title for dashboard in DASHBOARDS for panel in dashboard.panels}
    named = re.findall(r"(?:fleet|worker|routing|hand-offs|errors): ([A-Z][^|;]+?) ?[|;]", page)
    assert len(named) > 15 and set(named) <= titles


def anchors(page: Path) -> set[str]:
    headings = [line.lstrip("# ") for line in page.read_text().splitlines() if line.startswith("#")]
    return {heading.lower().replace(" ", "-") for heading in headings}
