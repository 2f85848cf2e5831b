"""Generates ``deploy/grafana/*.json``, dashboards for Grafana, from the tables below.

python -m codegen.dashboards            write them
python -m codegen.dashboards --check    write nothing; fail if they differ

Queries go by the labels that ``deploy/prometheus/prometheus.yml`` gives a process: ``quartet_namespace``,
``quartet_role`` and ``quartet_worker``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "deploy/grafana"

_PANEL_WIDTH, _PANEL_HEIGHT, _GRID_WIDTH = 8, 8, 24
_SCHEMA = 39  # of Grafana 10 and later
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_RATE = "[$__rate_interval]"
_ALL = 'quartet_namespace=~"$namespace"'
_ONE = f'{_ALL},quartet_worker=~"$worker"'
# Encode workers' requests end as "encoded".
_NOT_WELL = 'outcome!~"stop_id|stop_string|length|tool_calls|cancelled|placed|encoded"'


@dataclass(frozen=True)
class Query:
    """A line, or several: ``legend`` names their labels."""

    expr: str
    legend: str


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A chart of some lines over time.

    Attributes:
        text: the question that it answers.
        unit: Grafana's name of it.
        is_on_gpus: its figures are of workers on GPUs only.
    """

    title: str
    text: str
    queries: Sequence[Query]
    unit: str = "short"
    is_on_gpus: bool = False


@dataclass(frozen=True, kw_only=True)
class Dashboard:
    """A page of panels; ``of_worker``: one worker is chosen on it."""

    name: str
    title: str
    panels: Sequence[Panel]
    of_worker: bool = False


def _rate(metric: str, by: str, where: str = _ALL) -> str:
    return f"sum by ({by}) (rate({metric}{{{where}}}{_RATE}))"


def _occurring(metric: str, by: str, where: str = _ALL) -> str:
    """The rates that are not 0: what has a name for all that may happen is there from the start, at 0."""
    return f"{_rate(metric, by, where)} > 0"


def _quantiles(metric: str, where: str = _ALL, by: str = "", legend: str = "") -> list[Query]:
    labels = f"le, {by}" if by else "le"
    return [
        Query(f"histogram_quantile({share}, {_rate(f'{metric}_bucket', labels, where)})", f"p{share * 100:g}{legend}")
        for share in (0.5, 0.9, 0.99)
    ]


_FLEET = Dashboard(
    name="fleet",
    title="Quartet: fleet",
    panels=[
        Panel(
            title="Workers by state",
            text="Is every worker ready, as the routers see it?",
            queries=[Query(f"max by (role, state) (quartet_router_workers{{{_ALL}}})", "{{role}} {{state}}")],
        ),
        Panel(
            title="Requests that end",
            text="How much is served, and how does it end? Choices a second, by outcome.",
            queries=[Query(_occurring("quartet_router_requests_total", "outcome"), "{{outcome}}")],
            unit="reqps",
        ),
        Panel(
            title="Requests now",
            text="How many requests run, and how many of them wait for room?",
            queries=[
                Query(f"sum(quartet_router_running_requests{{{_ALL}}})", "between arrival and end"),
                Query(f"sum(quartet_router_queued_requests{{{_ALL}}})", "waiting for room"),
            ],
        ),
        Panel(
            title="Time to first token",
            text="How long do clients wait for the first token?",
            queries=_quantiles("quartet_router_ttft_seconds"),
            unit="s",
        ),
        Panel(
            title="Time between tokens",
            text="How long do clients wait for each token after it?",
            queries=_quantiles("quartet_router_itl_seconds"),
            unit="s",
        ),
        Panel(
            title="Time of a request",
            text="How long does a whole answer take?",
            queries=_quantiles("quartet_router_request_duration_seconds"),
            unit="s",
        ),
        Panel(
            title="Tokens",
            text="How many tokens are read, found cached, and shown? Counted when requests end.",
            queries=[
                Query(f"sum(rate(quartet_router_{kind}_tokens_total{{{_ALL}}}{_RATE}))", kind)
                for kind in ("prompt", "cached", "output")
            ],
            unit="suffix:tokens/s",
        ),
        Panel(
            title="KV blocks in use",
            text="How full are the pools, by role? Blocks that are only cached can be had.",
            queries=[
                Query(
                    f'sum by (quartet_role) (quartet_worker_blocks{{{_ALL},state=~"used|held"}})'
                    f" / sum by (quartet_role) (quartet_worker_blocks{{{_ALL}}})",
                    "{{quartet_role}}",
                )
            ],
            unit="percentunit",
        ),
        Panel(
            title="CPU",
            text="Which process is at the end of its core? An event loop has one.",
            queries=[Query(_rate("process_cpu_seconds_total", "quartet_worker"), "{{quartet_worker}}")],
        ),
    ],
)

_WORKER = Dashboard(
    name="worker",
    title="Quartet: one worker",
    of_worker=True,
    panels=[
        Panel(
            title="Batch",
            text="How full is the batch, and how many requests wait for it?",
            queries=[
                Query(f"sum by (rank) (quartet_worker_{kind}_requests{{{_ONE}}})", f"{kind}, rank {{{{rank}}}}")
                for kind in ("running", "waiting", "max_running")
            ],
        ),
        Panel(
            title="KV blocks",
            text="What is the pool filled with?",
            queries=[Query(f"sum by (state) (quartet_worker_blocks{{{_ONE}}})", "{{state}}")],
        ),
        Panel(
            title="Steps",
            text="Does the engine move? Steps a second.",
            queries=[Query(_rate("quartet_worker_steps_total", "rank", _ONE), "rank {{rank}}")],
            unit="ops",
        ),
        Panel(
            title="Tokens",
            text="What does the engine compute, and what does it find cached?",
            queries=[
                Query(f"sum(rate(quartet_worker_{kind}_tokens_total{{{_ONE}}}{_RATE}))", legend)
                for kind, legend in (
                    ("prompt", "prompt, computed"),
                    ("cached", "prompt, cached"),
                    ("output", "sampled"),
                )
            ],
            unit="suffix:tokens/s",
        ),
        Panel(
            title="Prompt tokens that wait",
            text="Is the engine behind with prompts?",
            queries=[Query(f"sum by (rank) (quartet_worker_queued_prefill_tokens{{{_ONE}}})", "rank {{rank}}")],
        ),
        Panel(
            title="Wait for the batch",
            text="How long do requests wait in the worker?",
            queries=_quantiles("quartet_worker_queue_seconds", _ONE),
            unit="s",
        ),
        Panel(
            title="Preemptions",
            text="Is the pool too small for the batch? Requests a second that gave up their blocks.",
            queries=[Query(_rate("quartet_worker_preemptions_total", "rank", _ONE), "rank {{rank}}")],
            unit="reqps",
        ),
        Panel(
            title="Requests that end",
            text="How do the worker's requests end?",
            queries=[Query(_occurring("quartet_worker_requests_total", "outcome", _ONE), "{{outcome}}")],
            unit="reqps",
        ),
        Panel(
            title="Memory of the process",
            text="Does the process grow?",
            queries=[Query(f"sum by (quartet_worker) (process_resident_memory_bytes{{{_ONE}}})", "{{quartet_worker}}")],
            unit="bytes",
        ),
        Panel(
            title="GPU: busy",
            text="In which share of the time does a kernel run?",
            queries=[Query(f"max by (gpu) (quartet_worker_gpu_utilization_ratio{{{_ONE}}})", "GPU {{gpu}}")],
            unit="percentunit",
            is_on_gpus=True,
        ),
        Panel(
            title="GPU: memory",
            text="How much of its memory is taken, by all processes?",
            queries=[
                Query(
                    f"max by (gpu) (quartet_worker_gpu_memory_used_bytes{{{_ONE}}}"
                    f" / quartet_worker_gpu_memory_total_bytes{{{_ONE}}})",
                    "GPU {{gpu}}",
                )
            ],
            unit="percentunit",
            is_on_gpus=True,
        ),
        Panel(
            title="GPU: power",
            text="How hard does it work?",
            queries=[Query(f"max by (gpu) (quartet_worker_gpu_power_watts{{{_ONE}}})", "GPU {{gpu}}")],
            unit="watt",
            is_on_gpus=True,
        ),
        Panel(
            title="GPU: temperature",
            text="Is it too hot to keep its clock?",
            queries=[Query(f"max by (gpu) (quartet_worker_gpu_temperature_celsius{{{_ONE}}})", "GPU {{gpu}}")],
            unit="celsius",
            is_on_gpus=True,
        ),
    ],
)

_ROUTING = Dashboard(
    name="routing",
    title="Quartet: routing and cache",
    panels=[
        Panel(
            title="Share of prompts that was cached",
            text="How much of the prompts is not computed again?",
            queries=[
                Query(
                    f"sum(rate(quartet_router_cached_tokens_total{{{_ALL}}}{_RATE}))"
                    f" / sum(rate(quartet_router_prompt_tokens_total{{{_ALL}}}{_RATE}))",
                    "cached",
                )
            ],
            unit="percentunit",
        ),
        Panel(
            title="What became of prompt tokens",
            text="Why is little reused? docs/routing.md explains the parts.",
            queries=[Query(_rate("quartet_router_reuse_tokens_total", "part"), "{{part}}")],
            unit="suffix:tokens/s",
        ),
        Panel(
            title="Expected and found",
            text="Do workers still have what the router expected there?",
            queries=[
                Query(f"sum(rate(quartet_router_matched_tokens_total{{{_ALL}}}{_RATE}))", "expected"),
                Query(f"sum(rate(quartet_router_cached_tokens_total{{{_ALL}}}{_RATE}))", "found"),
            ],
            unit="suffix:tokens/s",
        ),
        Panel(
            title="Wait for room",
            text="How long do requests wait in the router?",
            queries=_quantiles("quartet_router_queue_seconds"),
            unit="s",
        ),
        Panel(
            title="How full queues are",
            text="Are requests about to be refused? Full is 100 %; the prompts that wait have a bound of memory.",
            queries=[Query(f"max by (queue) (quartet_router_queue_usage_ratio{{{_ALL}}})", "{{queue}}")],
            unit="percentunit",
        ),
        Panel(
            title="Ends of the wait",
            text="Does every request get room, or are some refused?",
            queries=[Query(_rate("quartet_router_admissions_total", "outcome"), "{{outcome}}")],
            unit="reqps",
        ),
        Panel(
            title="Attempts",
            text="How many requests have to begin again, and why?",
            queries=[Query(_occurring("quartet_router_attempts_total", "cause"), "{{cause}}")],
            unit="reqps",
        ),
        Panel(
            title="Workers whose blocks are known",
            text="Does the router know what every worker has cached?",
            queries=[
                Query(f"min(quartet_router_kv_live_workers{{{_ALL}}})", "known"),
                Query(
                    f'sum(max by (role) (quartet_router_workers{{{_ALL},role=~"prefill|decode",state="ready"}}))',
                    "ready",
                ),
            ],
        ),
        Panel(
            title="Blocks in the index",
            text="How many different blocks does the fleet hold?",
            queries=[
                Query(f"max(quartet_router_kv_blocks{{{_ALL}}})", "held"),
                Query(f"max(quartet_router_kv_predicted_blocks{{{_ALL}}})", "expected soon"),
            ],
        ),
        Panel(
            title="Gaps and snapshots",
            text="Are KV events lost on their way, and is what was lost fetched?",
            queries=[
                Query(f"sum(rate(quartet_router_kv_gaps_total{{{_ALL}}}{_RATE}))", "gaps"),
                Query(_rate("quartet_router_kv_snapshots_total", "outcome"), "snapshots {{outcome}}"),
            ],
            unit="ops",
        ),
        Panel(
            title="Templates and tokenizers",
            text="How long is a prompt prepared?",
            queries=_quantiles("quartet_router_tokenize_seconds"),
            unit="s",
        ),
        Panel(
            title="Media: in the vision tower",
            text="Is encoding slow? How long files are computed, where workers encode media.",
            queries=_quantiles("quartet_encode_seconds"),
            unit="s",
        ),
        Panel(
            title="Media: wait for the vision tower",
            text="Or do files wait for it?",
            queries=_quantiles("quartet_encode_queue_seconds"),
            unit="s",
        ),
        Panel(
            title="Blocks below the devices",
            text="What do the host's memory and disk hold, where there are such tiers?",
            queries=[Query(f"sum by (tier, state) (quartet_worker_tier_blocks{{{_ALL}}})", "{{tier}} {{state}}")],
        ),
        Panel(
            title="Blocks that move between tiers",
            text="Do evicted blocks come back from there?",
            queries=[Query(_rate("quartet_worker_tier_moves_total", "tier, outcome"), "{{tier}} {{outcome}}")],
            unit="ops",
        ),
    ],
)

_HAND_OFFS = Dashboard(
    name="hand_offs",
    title="Quartet: hand-offs",
    panels=[
        Panel(
            title="Hand-offs that end",
            text="Are they taken, or do they expire?",
            queries=[Query(_rate("quartet_worker_hand_offs_total", "outcome"), "{{outcome}}")],
            unit="ops",
        ),
        Panel(
            title="Blocks held for them",
            text="Where do blocks wait to be pulled?",
            queries=[
                Query(f'sum by (quartet_worker) (quartet_worker_blocks{{{_ALL},state="held"}})', "{{quartet_worker}}")
            ],
        ),
        Panel(
            title="Bytes pulled",
            text="How much moves, and by which way?",
            queries=[Query(_rate("quartet_worker_transfer_bytes_total", "way"), "{{way}}")],
            unit="Bps",
        ),
        Panel(
            title="Time of a pull",
            text="How long does Decode wait for blocks?",
            queries=_quantiles("quartet_worker_transfer_seconds", by="way", legend=" {{way}}"),
            unit="s",
        ),
        Panel(
            title="Speed of a pull",
            text="How fast is one pull, by way?",
            queries=[
                Query(
                    f"{_rate('quartet_worker_transfer_bytes_total', 'way')}"
                    f" / {_rate('quartet_worker_transfer_seconds_sum', 'way')}",
                    "{{way}}",
                )
            ],
            unit="Bps",
        ),
        Panel(
            title="Prompt at Prefill",
            text="How long is a prompt computed, from the batch to its first token?",
            queries=_quantiles("quartet_worker_prefill_seconds"),
            unit="s",
        ),
        Panel(
            title="Wait at workers",
            text="Does the wait come before Prefill or before Decode?",
            queries=[
                Query(
                    "histogram_quantile(0.9, " + _rate("quartet_worker_queue_seconds_bucket", "le, quartet_role") + ")",
                    "p90 {{quartet_role}}",
                )
            ],
            unit="s",
        ),
        Panel(
            title="Signed starts",
            text="Do clients on the direct path bring good starts?",
            queries=[Query(_occurring("quartet_worker_signed_starts_total", "outcome"), "{{outcome}}")],
            unit="reqps",
        ),
    ],
)

_ERRORS = Dashboard(
    name="errors",
    title="Quartet: errors",
    panels=[
        Panel(
            title="Share of choices that failed",
            text="How many requests end with an error, clients' faults included?",
            queries=[
                Query(
                    f"(sum(rate(quartet_router_requests_total{{{_ALL},{_NOT_WELL}}}{_RATE})) or vector(0))"
                    f" / sum(rate(quartet_router_requests_total{{{_ALL}}}{_RATE}))",
                    "failed",
                )
            ],
            unit="percentunit",
        ),
        Panel(
            title="Failures by reason",
            text="With which error?",
            queries=[
                Query(_occurring("quartet_router_requests_total", "outcome", f"{_ALL},{_NOT_WELL}"), "{{outcome}}")
            ],
            unit="reqps",
        ),
        Panel(
            title="Requests without room",
            text="Is more sent than is served?",
            queries=[
                Query(
                    _rate("quartet_router_admissions_total", "outcome", f'{_ALL},outcome!~"placed|cancelled"'),
                    "{{outcome}}",
                )
            ],
            unit="reqps",
        ),
        Panel(
            title="Refused by limits",
            text="Which limits of a minute do tenants and keys reach?",
            queries=[Query(_rate("quartet_router_rate_limited_requests_total", "limit"), "{{limit}}")],
            unit="reqps",
        ),
        Panel(
            title="Attempts after the first",
            text="Which failures did clients not see?",
            queries=[
                Query(_occurring("quartet_router_attempts_total", "cause", f'{_ALL},cause!="first"'), "{{cause}}")
            ],
            unit="reqps",
        ),
        Panel(
            title="Failures at workers",
            text="At which worker?",
            queries=[
                Query(
                    _occurring("quartet_worker_requests_total", "quartet_worker, outcome", f"{_ALL},{_NOT_WELL}"),
                    "{{quartet_worker}} {{outcome}}",
                )
            ],
            unit="reqps",
        ),
        Panel(
            title="Lost and unreadable",
            text="Are KV events lost, or events unreadable, or lines of a log dropped?",
            queries=[
                Query(f"sum(rate(quartet_router_kv_gaps_total{{{_ALL}}}{_RATE}))", "gaps in KV events"),
                Query(f"sum(rate(quartet_router_malformed_events_total{{{_ALL}}}{_RATE}))", "unreadable events"),
                Query(f"sum(rate(quartet_process_dropped_log_lines_total{{{_ALL}}}{_RATE}))", "dropped lines of logs"),
            ],
            unit="ops",
        ),
        Panel(
            title="Usage records that are lost",
            text="Is there anything that tenants used and nobody accounts for? Empty where no `usage_log` is set.",
            queries=[Query(_rate("quartet_router_lost_usage_records_total", "quartet_worker"), "{{quartet_worker}}")],
            unit="ops",
        ),
        Panel(
            title="Changed files",
            text="Was a change of tenants, keys or certificates taken over? In the last 5 minutes.",
            queries=[
                Query(f"sum by (file) (increase(quartet_process_reloads_total{{{_ALL}}}[5m]))", "{{file}}, in use"),
                Query(
                    f"sum by (file) (increase(quartet_process_failed_reloads_total{{{_ALL}}}[5m]))", "{{file}}, refused"
                ),
            ],
        ),
        Panel(
            title="Time until certificates end",
            text="Which certificate that is in use must be renewed, or its process restarted? Empty without TLS.",
            queries=[
                Query(
                    "min by (quartet_worker, use)"
                    f" (quartet_process_certificate_end_timestamp_seconds{{{_ALL}}}) - time()",
                    "{{quartet_worker}} {{use}}",
                )
            ],
            unit="s",
        ),
        Panel(
            title="Lateness of event loops",
            text="Does something block a process? 99 of 100 timers ran no later than this.",
            queries=[
                Query(
                    "histogram_quantile(0.99, "
                    + _rate("quartet_process_event_loop_lag_seconds_bucket", "le, quartet_worker")
                    + ")",
                    "{{quartet_worker}}",
                )
            ],
            unit="s",
        ),
        Panel(
            title="Longest stall since the start",
            text="Did it ever?",
            queries=[
                Query(
                    f"max by (quartet_worker) (quartet_process_event_loop_longest_stall_seconds{{{_ALL}}})",
                    "{{quartet_worker}}",
                )
            ],
            unit="s",
        ),
        Panel(
            title="Processes that can be scraped",
            text="Does every process answer Prometheus? 1: yes.",
            queries=[Query(f"min by (quartet_role, quartet_worker) (up{{{_ALL}}})", "{{quartet_worker}}")],
        ),
    ],
)

#: All of them.
DASHBOARDS: Sequence[Dashboard] = (_FLEET, _WORKER, _ROUTING, _HAND_OFFS, _ERRORS)


def render(dashboard: Dashboard) -> str:
    """The dashboard as Grafana's JSON model; the same always gives the same text."""
    variables = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
        _choice("namespace", "Namespace", "label_values(up, quartet_namespace)", includes_all=True),
    ]
    if dashboard.of_worker:
        query = 'label_values(quartet_worker_steps_total{quartet_namespace=~"$namespace"}, quartet_worker)'
        variables.append(_choice("worker", "Worker", query, includes_all=False))
    model = {
        "uid": f"quartet-{dashboard.name.replace('_', '-')}",
        "title": dashboard.title,
        "tags": ["quartet"],
        "schemaVersion": _SCHEMA,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": variables},
        "links": [
            {"type": "dashboards", "tags": ["quartet"], "title": "Quartet", "asDropdown": True, "keepTime": True}
        ],
        "panels": [_panel(number, panel) for number, panel in enumerate(dashboard.panels)],
    }
    return json.dumps(model, indent=2) + "\n"


def _choice(name: str, label: str, query: str, *, includes_all: bool) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _DATASOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,  # whenever the time changes
        "sort": 1,
        "includeAll": includes_all,
        "multi": includes_all,
        "current": {"text": "All", "value": "$__all"} if includes_all else {},
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, _GRID_WIDTH // _PANEL_WIDTH)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": _DATASOURCE,
        "gridPos": {"x": column * _PANEL_WIDTH, "y": row * _PANEL_HEIGHT, "w": _PANEL_WIDTH, "h": _PANEL_HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": _DATASOURCE,
                "expr": query.expr,
                "legendFormat": query.legend,
            }
            for place, query in enumerate(panel.queries)
        ],
    }


def main() -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(description="Generate deploy/grafana from codegen/dashboards.py.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is out of date")
    arguments = parser.parse_args()
    texts = {FOLDER / f"{dashboard.name}.json": render(dashboard) for dashboard in DASHBOARDS}
    stale = [path for path in FOLDER.glob("*.json") if path not in texts]
    differing = [path for path, text in texts.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if arguments.check:
        for path in (*stale, *differing):
            print(f"{path}: out of date; run `make generate`", file=sys.stderr)
        return 1 if stale or differing else 0
    for path in stale:
        path.unlink()
    for path in differing:
        path.write_text(texts[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
