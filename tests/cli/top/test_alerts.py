"""Alerts of ``quartet top``, which are those of Prometheus."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from cli.top.alerts import FAILED, MAX_FAILED_SHARE, STALL_S, WINDOWS_S, find_alerts, find_unknown
from cli.top.fleet import COUNTS_S, LOST_S, Fleet
from tests.cli.top.fleets import PREFILL, SUSPECT, state, worker
from tests.client.fake_router import worker_pb2

FILE = Path(__file__).parents[3] / "deploy/prometheus/alerts.yml"
RULES = {rule["alert"]: rule["expr"] for group in yaml.safe_load(FILE.read_text())["groups"] for rule in group["rules"]}


def alerts(fleet: Fleet, now_s: float) -> list[tuple[str, str]]:
    return [(alert.rule, alert.text) for alert in find_alerts(fleet, now_s)]


def window_s(rule: str) -> set[float]:
    return {60.0 * int(minutes) for minutes in re.findall(r"(?:\[|offset )(\d+)m", RULES[rule])}


def test_thresholds_are_those_of_prometheus() -> None:
    assert window_s("QuartetWorkerLost") == {LOST_S}
    assert window_s("QuartetEngineStalled") == {STALL_S}
    assert window_s("QuartetQueueFull") == window_s("QuartetIndexGaps") == window_s("QuartetRequestsFail") == {COUNTS_S}
    assert 'outcome=~"refused|expired"' in RULES["QuartetQueueFull"], "what num_without_room counts"
    [outcomes] = re.findall(r'outcome=~"([^"]*)"', RULES["QuartetRequestsFail"])
    assert set(outcomes.split("|")) == FAILED
    assert float(RULES["QuartetRequestsFail"].rpartition(">")[2]) == MAX_FAILED_SHARE


def test_the_page_names_the_rules_that_are_found_and_those_that_are_not() -> None:
    page = (FILE.parents[2] / "docs/observability.md").read_text()
    found, missed = re.findall(r"^- \*\*Alerts\*\*(.*?)It does not show (.*?)[:;]", page, re.MULTILINE | re.DOTALL)[0]
    assert set(re.findall(r"`(Quartet\w+)`", found)) == set(WINDOWS_S)
    assert set(re.findall(r"`(Quartet\w+)`", missed)) == RULES.keys() - WINDOWS_S.keys()
    assert all({window} == (window_s(rule) or {0.0}) for rule, window in WINDOWS_S.items())


def test_silence_says_something_once_the_window_of_a_rule_was_watched() -> None:
    fleet = Fleet()
    assert find_unknown(fleet, 0.0) == list(WINDOWS_S)
    fleet.take(state(worker("decode-0")), 0.0)
    lost, stalled, *of_counts = [rule for rule in WINDOWS_S if rule != "QuartetRoleMissing"]
    assert find_unknown(fleet, 1.0) == [lost, stalled, *of_counts]
    assert find_unknown(fleet, STALL_S) == [lost, *of_counts]
    fleet.take(state(worker("decode-0"), router_id="router-2"), COUNTS_S)
    assert find_unknown(fleet, COUNTS_S) == [lost, *of_counts], "another router has counts of its own"
    assert find_unknown(fleet, 2 * COUNTS_S) == []
    fleet.take(state(router_id="router-2"), 2 * COUNTS_S)
    assert lost not in find_unknown(fleet, 1.0), "what is found is known"


def test_a_model_without_a_ready_decode_worker_alerts_for_as_long() -> None:
    fleet = Fleet()
    fleet.take(state(worker("decode-0"), worker("prefill-0", PREFILL)), 0.0)
    fleet.take(state(worker("decode-0", worker_pb2.WORKER_ROLE_DECODE, SUSPECT), worker("prefill-0", PREFILL)), 1.0)
    assert ("QuartetRoleMissing", "tiny has no ready decode worker") in alerts(fleet, 1.0)
    fleet.take(state(), 10 * LOST_S)
    assert alerts(fleet, 10 * LOST_S) == [("QuartetRoleMissing", "tiny has no ready decode worker")]
    fleet.take(state(worker("decode-0")), 10 * LOST_S + 1)
    assert alerts(fleet, 10 * LOST_S + 1) == []


def test_a_pool_that_only_prefills_misses_no_decode_worker() -> None:
    fleet = Fleet()
    fleet.take(state(worker("prefill-0", PREFILL)), 0.0)
    assert alerts(fleet, 0.0) == []
    fleet.take(state(worker("prefill-0", PREFILL, SUSPECT)), 1.0)
    assert ("QuartetRoleMissing", "no worker is ready") in alerts(fleet, 1.0)


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
    # Idle for as long, and then the first work comes.
    fleet.take(state(worker("decode-0", num_steps=7), worker("decode-1", num_steps=7)), -STALL_S)
    for now_s in (0.0, STALL_S - 1):
        fleet.take(state(worker("decode-0", num_waiting=1, num_steps=7), worker("decode-1", num_steps=7)), now_s)
    assert alerts(fleet, STALL_S - 1) == []
    stalled = ("QuartetEngineStalled", f"rank 0 of decode-0 has requests and has made no step for {STALL_S:.0f} s")
    assert alerts(fleet, STALL_S) == [stalled]
    fleet.take(state(worker("decode-0", num_waiting=1, num_steps=8), worker("decode-1", num_steps=7)), STALL_S)
    assert alerts(fleet, STALL_S) == []


def test_counts_of_the_last_five_minutes_alert() -> None:
    fleet = Fleet()
    decode = worker("decode-0")
    fleet.take(state(decode, outcomes={"length": 50, "timeout": 50}), 0.0)
    ended = {"length": 143, "timeout": 55, "queue_full": 2}
    fleet.take(state(decode, outcomes=ended, num_without_room=2, num_kv_gaps=1), 1.0)
    assert alerts(fleet, 1.0) == [
        ("QuartetQueueFull", "2 requests found no room in time, or in the queue"),
        ("QuartetIndexGaps", "KV events of workers were lost 1 times"),
    ]
    fleet.take(state(outcomes={"length": 143, "timeout": 56, "queue_full": 2}), 2.0)
    assert ("QuartetRequestsFail", "6% of the requests failed") in alerts(fleet, 2.0)
