"""Dashboards and alerts name only what processes show; whether they show it in time, ``make test-deploy`` says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from codegen.dashboards import DASHBOARDS, FOLDER, render
from quartet.engine.base import FinishReason
from quartet.telemetry.targets import Target, render_targets
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


#: By Grafana's name of a unit, what it fits, in the words of ``measured``.
FITTING = {
    "s": r"\w+_seconds",
    "bytes": r"\w+_bytes",
    "percentunit": r"\w+_ratio|share",
    "watt": r"\w+_watts",
    "celsius": r"\w+_celsius",
    "Bps": r"rate \w+_bytes|bytes / seconds",
    "suffix:tokens/s": r"rate \w+_tokens",
    "reqps": r"rate \w+_(requests|admissions|attempts|preemptions|signed_starts)",
    "ops": r"rate \w+_(steps|hand_offs|moves|gaps|snapshots|events|lines|records)",
    "short": r"\w+_(requests|blocks|workers|tokens)|up|rate \w+_cpu_seconds|increase \w+_reloads",
}


def measured(expr: str) -> str:
    """What a query shows: a metric, its ``rate`` or ``increase``, the quotient of two, or a ``share``."""
    names = [re.sub("_total|_bucket|_sum", "", selector.metric) for selector in selectors(expr)]
    if " / " in expr:
        ends = [name.rpartition("_")[2] for name in names]
        return " / ".join(ends) if len(set(ends)) > 1 else "share"
    growth = re.match(r".*\b(rate|increase)\(", expr)
    is_growth = growth and "histogram_quantile" not in expr
    return f"{growth[1]} {names[0]}" if growth and is_growth else names[0]


def models() -> list[tuple[Any, list[Any]]]:
    """The JSON of each dashboard, and that of its panels."""
    return [(model, model["panels"]) for model in (json.loads(path.read_text()) for path in FOLDER.glob("*.json"))]


def test_each_query_of_a_panel_has_a_name_of_its_own() -> None:
    for _, panels in models():
        for panel in panels:
            names = [target["refId"] for target in panel["targets"]]
            assert len(names) == len(set(names)) > 0


def test_the_variables_of_a_dashboard_are_those_that_it_uses() -> None:
    defined = {}
    for model, panels in models():
        known_before = set[str]()
        for variable in model["templating"]["list"]:
            assert variables_in([variable["query"], variable.get("datasource")]) <= known_before
            known_before.add(variable["name"])
        assert known_before == variables_in(panels)
        defined[model["uid"]] = known_before
    everywhere = {"datasource", "namespace"}
    assert defined.pop("quartet-worker") == everywhere | {"worker"}
    assert all(names == everywhere for names in defined.values())


def variables_in(value: object) -> set[str]:
    """The names of Grafana's variables in a part of the JSON, but for those that it sets itself."""
    return set(re.findall(r"\$\{?(\w+)", json.dumps(value))) - {"__rate_interval"}


def test_units_are_grafanas_and_fit_the_metrics() -> None:
    shown = [
        (panel["title"], panel["fieldConfig"]["defaults"]["unit"], measured(target["expr"]))
        for _, panels in models()
        for panel in panels
        for target in panel["targets"]
    ]
    assert [found for found in shown if not re.fullmatch(FITTING.get(found[1], ""), found[2])] == []


def test_what_queries_count_is_what_their_panels_say() -> None:
    exprs = {
        f"{dashboard.name}: {panel.title}": panel.queries[0].expr
        for dashboard in DASHBOARDS
        for panel in dashboard.panels
    }
    in_use, blocks = selectors(exprs["fleet: KV blocks in use"])
    assert in_use.metric == blocks.metric and "state" not in blocks.values
    assert in_use.wanted["state"] == {"used", "held"}, "blocks that are only cached can be had"
    moved, time = selectors(exprs["hand_offs: Speed of a pull"])
    assert (moved.metric, time.metric) == ("quartet_worker_transfer_bytes_total", "quartet_worker_transfer_seconds_sum")
    for title in ("Share of choices that failed", "Failures by reason", "Failures at workers"):
        failed = next(selectors(exprs[f"errors: {title}"]))
        assert failed.values["outcome"] == {*map(str, FinishReason), "placed", "encoded"}
        assert "outcome" not in failed.wanted, "these are left out"


def test_panels_lie_side_by_side_and_each_says_its_question() -> None:
    for dashboard in DASHBOARDS:
        panels = json.loads(render(dashboard))["panels"]
        places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
        assert len(places) == len({panel["id"] for panel in panels}) == len(panels)
        assert all("?" in panel["description"] for panel in panels)


def test_each_alert_says_what_is_wrong_and_where_to_look() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES) == 12
    for rule in RULES:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}
        page, _, anchor = rule["annotations"]["description"].partition("docs/troubleshooting.md#")
        if anchor:
            assert page and anchor in anchors(FOLDER.parents[1] / "docs/troubleshooting.md")


#: Of each alert: its longest window in minutes, ``for`` and threshold, and what its line in the page says of them.
BOUNDS = {
    "QuartetWorkerLost": (10, "1m", None, ("the last 10 minutes", "for 1 minute")),
    "QuartetRoleMissing": (None, "1m", 0.0, ("for 1 minute",)),
    "QuartetNotScraped": (None, "1m", 0.0, ("for 1 minute",)),
    "QuartetQueueFull": (5, None, 0.0, ("within 5 minutes",)),
    "QuartetQueueNearFull": (None, "1m", 0.8, ("more than 80 % full", "for 1 minute")),
    "QuartetUsageRecordsLost": (5, None, 0.0, ("within 5 minutes",)),
    "QuartetReloadFailed": (5, None, 0.0, ("within 5 minutes",)),
    "QuartetCertificateExpires": (None, None, 14.0, ("less than 14 days",)),
    "QuartetHandOffsExpired": (5, None, 0.0, ("within 5 minutes",)),
    "QuartetEngineStalled": (2, "30s", 0.0, ("for 2 minutes", "for 30 s more")),
    "QuartetIndexGaps": (5, None, 0.0, ("within 5 minutes",)),
    "QuartetRequestsFail": (5, "1m", 0.05, ("more than 5 %", "within 5 minutes", "for 1 minute")),
}


def test_windows_and_thresholds_are_those_of_the_page() -> None:
    page = (FOLDER.parents[1] / "docs/observability.md").read_text()
    for rule in RULES:
        expr, (window, waits, threshold, words) = rule["expr"], BOUNDS[rule["alert"]]
        assert set(re.findall(r"\[(\w+)\]", expr)) == ({f"{window}m"} if window else set()), rule["alert"]
        assert rule.get("for") == waits, rule["alert"]
        assert {float(number) for number in re.findall(r"(?:[<>]|==) ([\d.]+)", expr)} == (
            set() if threshold is None else {threshold}
        ), rule["alert"]
        [line] = re.findall(rf"^\| `{rule['alert']}` \| (.*?) \|", page, re.MULTILINE)
        assert all(word in line for word in words), line
        assert len(re.findall(r"\d+ (?:minutes?|days|s|%)", line)) == len(words), line


def test_prometheus_gives_each_process_the_labels_of_the_queries_and_asks_often_enough() -> None:
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    [job] = config["scrape_configs"]
    renamed = {rule["target_label"]: rule["source_labels"] for rule in job["relabel_configs"]}
    worker = Target(address="10.0.0.1:9000", role="decode", worker_id="decode-0", namespace="here")
    [group] = json.loads(render_targets([worker]))
    given = {label: group["labels"][source] for label, [source] in renamed.items()}
    assert given == {"quartet_namespace": "here", "quartet_role": "decode", "quartet_worker": "decode-0"}
    assert given.keys() | {"job", "instance"} == TARGET_LABELS
    assert f'up{{job="{job["job_name"]}"}}' in EXPRESSIONS["QuartetNotScraped"]
    intervals = {config["global"]["scrape_interval"], config["global"]["evaluation_interval"]}
    assert intervals | {job["http_sd_configs"][0]["refresh_interval"]} == {"15s"}, "windows hold several scrapes"
    assert config["rule_files"] == ["alerts.yml"]


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
