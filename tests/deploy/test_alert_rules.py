"""When alerts begin and end, by Prometheus' own test of rules (``make test-deploy``)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from codegen.dashboards import FOLDER

pytestmark = pytest.mark.deploy

RULES = FOLDER.parent / "prometheus/alerts.yml"
TIMEOUT_S = 60.0
OF_ROUTER = 'quartet_namespace="n",quartet_worker="router-0"'
OF_RANK = 'quartet_namespace="n",quartet_worker="decode-0",rank="0"'
READY = f'quartet_router_workers{{state="ready",role="decode",{OF_ROUTER}}}'
MISSING = f'quartet_router_missing_roles{{model="tiny",role="decode",{OF_ROUTER}}}'
RUNNING = f"quartet_worker_running_requests{{{OF_RANK}}}"
WAITING = f"quartet_worker_waiting_requests{{{OF_RANK}}}"
STEPS = f"quartet_worker_steps_total{{{OF_RANK}}}"
LOST, ROLE, STALLED = "QuartetWorkerLost", "QuartetRoleMissing", "QuartetEngineStalled"


def check(prometheus: Path, directory: Path, test: Mapping[str, Any]) -> None:
    """Run one test of ``promtool test rules`` over the series that it has, one value in 15 s."""
    path = directory / "rules.yml"
    path.write_text(
        yaml.safe_dump(
            {"rule_files": [str(RULES)], "evaluation_interval": "15s", "tests": [{"interval": "15s", **test}]}
        )
    )
    command = [prometheus.with_name("promtool"), "test", "rules", path]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr


def check_firing(prometheus: Path, directory: Path, series: Mapping[str, str], firing: Mapping[str, set[str]]) -> None:
    """``firing``: by time, the alerts that fire then. A value of ``series`` comes every 15 s."""
    expr = 'count by (alertname) (ALERTS{alertstate="firing"})'
    test = {
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": expr,
                "eval_time": at,
                "exp_samples": [{"labels": f"{{alertname={json.dumps(name)}}}", "value": 1} for name in sorted(names)],
            }
            for at, names in firing.items()
        ],
    }
    check(prometheus, directory, test)


def test_a_role_without_workers_alerts_until_it_has_one_and_a_lost_worker_for_ten_minutes(
    prometheus: Path, tmp_path: Path
) -> None:
    series = {READY: "2x20 0x219 1x40", MISSING: "0x20 1x219 0x40"}  # from 5:15 to 1:00:00
    firing = {
        "5m": set[str](),
        "6m": set[str](),
        "6m15s": {LOST, ROLE},
        "10m": {LOST, ROLE},
        "17m": {ROLE},
        "1h": {ROLE},
        "1h15s": set[str](),
    }
    check_firing(prometheus, tmp_path, series, firing)


@pytest.mark.parametrize(("model", "of"), [("tiny", "tiny"), ("", "any model")])
def test_a_missing_role_is_named_with_its_model_where_one_is_known(
    model: str, of: str, prometheus: Path, tmp_path: Path
) -> None:
    labels = {
        "role": "decode",
        "quartet_namespace": "n",
        "quartet_worker": "router-0",
        **({"model": model} if model else {}),
    }
    description = "Requests of the model wait, and fail: quartet workers; docs/troubleshooting.md#workers-go-away"
    alert = {
        "exp_labels": {"severity": "critical", **labels},
        "exp_annotations": {"summary": f"router-0 has no ready decode worker of {of}", "description": description},
    }
    series = MISSING.replace('model="tiny",', f'model="{model}",' if model else "")
    check(
        prometheus,
        tmp_path,
        {
            "input_series": [{"series": series, "values": "1x8"}],
            "alert_rule_test": [{"eval_time": "2m", "alertname": ROLE, "exp_alerts": [alert]}],
        },
    )


def test_an_engine_that_was_idle_stalls_two_minutes_after_work_began_not_before(
    prometheus: Path, tmp_path: Path
) -> None:
    # Work from 3:15 on, and never a step.
    series = {RUNNING: "0x12 1x40", WAITING: "0x52", STEPS: "7x52"}
    firing = {"3m45s": set[str](), "5m30s": set[str](), "5m45s": {STALLED}, "10m": {STALLED}}
    check_firing(prometheus, tmp_path, series, firing)


def test_a_first_step_of_two_minutes_after_idle_ones_is_no_stall(prometheus: Path, tmp_path: Path) -> None:
    series = {RUNNING: "0x12 1x40", WAITING: "0x52", STEPS: "7x20 8+5x32"}
    check_firing(prometheus, tmp_path, series, {f"{minute}m{at}s": set() for minute in range(3, 12) for at in (0, 30)})


def test_an_engine_stalls_that_worked_and_whose_requests_only_wait(prometheus: Path, tmp_path: Path) -> None:
    # The last step shows at 3:00.
    series = {RUNNING: "1x52", WAITING: "0x12 3x40", STEPS: "7+9x12 115x40"}
    check_firing(prometheus, tmp_path, series, {"5m15s": set(), "6m": {STALLED}})


def test_a_process_that_has_just_begun_is_no_stalled_one(prometheus: Path, tmp_path: Path) -> None:
    series = {RUNNING: "_x12 1x40", WAITING: "_x12 0x40", STEPS: "_x12 0x40"}  # from 3:00 on
    check_firing(prometheus, tmp_path, series, {"4m": set(), "5m15s": set(), "5m45s": {STALLED}})
