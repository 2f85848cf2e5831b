"""Alerts of ``quartet top``, which are those of Prometheus."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from cli.top.alerts import FAILED, MAX_FAILED_SHARE, STALL_S, find_alerts
from cli.top.fleet import COUNTS_S, LOST_S, Fleet
from tests.cli.top.fleets import SUSPECT, state, worker
from tests.client.fake_router import worker_pb2

FILE = Path(__file__).parents[3] / "deploy/prometheus/alerts.yml"
RULES = {rule["alert"]: rule["expr"] for group in yaml.safe_load(FILE.read_text())["groups"] for rule in group["rules"]}


def alerts(fleet: Fleet, now_s: float) -> list[tuple[str, str]]:
    return [(alert.rule, alert.text) for alert in find_alerts(fleet, now_s)]


def window_s(rule: str) -> set[float]:
    return {60.0 * int(minutes) for minutes in re.findall(r"\[(\d+)m\]", RULES[rule])}


def test_thresholds_are_those_of_prometheus() -> None:
    assert window_s("QuartetWorkerLost") == {LOST_S}
    assert window_s("QuartetEngineStalled") == {STALL_S}
    assert window_s("QuartetQueueFull") == window_s("QuartetIndexGaps") == window_s("QuartetRequestsFail") == {COUNTS_S}
    assert 'outcome=~"refused|expired"' in RULES["QuartetQueueFull"], "what num_without_room counts"
    [outcomes] = re.findall(r'outcome=~"([^"]*)"', RULES["QuartetRequestsFail"])
    assert set(outcomes.split("|")) == FAILED
    assert float(RULES["QuartetRequestsFail"].rpartition(">")[2]) == MAX_FAILED_SHARE


def test_a_fleet_that_is_well_has_none() -> None:
    fleet = Fleet()
    assert alerts(fleet, 0.0) == []
    before = {"num_without_room": 5, "num_kv_gaps": 5, "outcomes": {"timeout": 100}}
    for now_s in (0.0, 400.0):
        fleet.take(state(worker("decode-0"), worker("decode-1"), **before), now_s)
    assert alerts(fleet, 400.0) == []


def test_a_lost_worker_is_named_until_ten_minutes_are_over() -> None:
    fleet = Fleet()
    fleet.take(state(worker("decode-0"), worker("decode-1"), worker("decode-2")), 0.0)
    fleet.take(state(worker("decode-0"), worker("decode-1", worker_pb2.WORKER_ROLE_DECODE, SUSPECT)), 10.0)
    text = "1 of 3 decode workers are ready: decode-1 (no contact), decode-2 (gone)"
    assert alerts(fleet, 10.0) == [("QuartetWorkerLost", text)]
    fleet.take(state(worker("decode-0")), 11.0 + LOST_S)
    assert alerts(fleet, 11.0 + LOST_S) == []


def test_an_engine_stalls_that_has_work_and_makes_no_step() -> None:
    fleet = Fleet()
    for now_s in (0.0, STALL_S - 1):
        fleet.take(state(worker("decode-0", num_waiting=1, num_steps=7), worker("decode-1", num_steps=7)), now_s)
    assert alerts(fleet, STALL_S - 1) == []
    stalled = ("QuartetEngineStalled", f"rank 0 of decode-0 has requests and has made no step for {STALL_S:.0f} s")
    assert alerts(fleet, STALL_S) == [stalled]
    fleet.take(state(worker("decode-0", num_waiting=1, num_steps=8), worker("decode-1", num_steps=7)), STALL_S)
    assert alerts(fleet, STALL_S) == []


def test_counts_of_the_last_five_minutes_alert() -> None:
    fleet = Fleet()
    fleet.take(state(outcomes={"length": 50, "timeout": 50}), 0.0)
    fleet.take(state(outcomes={"length": 143, "timeout": 55, "queue_full": 2}, num_without_room=2, num_kv_gaps=1), 1.0)
    assert alerts(fleet, 1.0) == [
        ("QuartetQueueFull", "2 requests found no room in time, or in the queue"),
        ("QuartetIndexGaps", "KV events of workers were lost 1 times"),
    ]
    fleet.take(state(outcomes={"length": 143, "timeout": 56, "queue_full": 2}), 2.0)
    assert ("QuartetRequestsFail", "6% of the requests failed") in alerts(fleet, 2.0)
