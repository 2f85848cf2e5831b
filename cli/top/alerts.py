"""What a person should look at: the rules of ``deploy/prometheus/alerts.yml`` that a router's states can tell.

Names, windows, thresholds and outcomes are those of that file; a test holds both equal. Its ``for`` is left out, as
people look at the moment, and windows begin when ``quartet top`` does: before they are full, that nothing was found
means little (``find_unknown``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cli.top.fleet import COUNTS_S, LOST_S, STATES, Fleet, short
from quartet.client import FleetTotals, WorkerState
from quartet.discovery.base import Role

#: Seconds for which an engine that has requests may make no step.
STALL_S = 120.0
#: Share of requests that may fail.
MAX_FAILED_SHARE = 0.05
#: Outcomes of requests that count as failed: faults of clients and a full queue are left out.
FAILED = frozenset(
    {
        *("internal", "engine_failed", "model_files_invalid", "model_unavailable", "out_of_blocks"),
        *("worker_unavailable", "workers_lost", "stream_stalled", "timeout", "transfer_failed", "transfer_timeout"),
        "media_lost",
    }
)


#: Seconds that a rule must have been watched for, by its name, before its silence says that all is well.
WINDOWS_S: Mapping[str, float] = {
    "QuartetRoleMissing": 0.0,
    "QuartetWorkerLost": LOST_S,
    "QuartetEngineStalled": STALL_S,
    "QuartetQueueFull": COUNTS_S,
    "QuartetIndexGaps": COUNTS_S,
    "QuartetRequestsFail": COUNTS_S,
}
_OF_WORKERS = frozenset({"QuartetRoleMissing", "QuartetWorkerLost", "QuartetEngineStalled"})


@dataclass(frozen=True, kw_only=True)
class Alert:
    """Something to look at. ``rule`` is its name in Prometheus."""

    rule: str
    text: str


def find_alerts(fleet: Fleet, now_s: float) -> list[Alert]:
    """All that hold at ``now_s``."""
    return [
        *(Alert(rule="QuartetRoleMissing", text=text) for text in _missing(fleet)),
        *(Alert(rule="QuartetWorkerLost", text=text) for text in _lost(fleet, now_s)),
        *(Alert(rule="QuartetEngineStalled", text=text) for text in _stalled(fleet, now_s)),
        *(_counted(fleet) if fleet.totals.points else ()),
    ]


def find_unknown(fleet: Fleet, now_s: float) -> list[str]:
    """The rules that may hold although ``find_alerts`` does not have them: they were not watched for long enough."""
    found = {alert.rule for alert in find_alerts(fleet, now_s)}
    return [rule for rule in WINDOWS_S if rule not in found and not _is_watched(fleet, rule, now_s)]


def _is_watched(fleet: Fleet, rule: str, now_s: float) -> bool:
    began_s = fleet.began_s if rule in _OF_WORKERS else fleet.counts_began_s
    return began_s is not None and now_s - began_s >= WINDOWS_S[rule]


def _missing(fleet: Fleet) -> Iterator[str]:
    if fleet.began_s is None:
        return
    for model in sorted(fleet.decoded_models):
        if (model, Role.DECODE) not in fleet.ready_roles:
            yield f"{model} has no ready decode worker"
    if not fleet.decoded_models and not fleet.ready_roles:
        yield "no worker is ready"


def _lost(fleet: Fleet, now_s: float) -> Iterator[str]:
    if not fleet.ready.points:
        return
    _, ready = fleet.ready.points[-1]
    away = [row for row in fleet.rows(now_s) if row.state != WorkerState.READY]
    for role in Role:
        most = max(counts.get(role, 0) for _, counts in fleet.ready.points)
        if most > (num := ready.get(role, 0)):
            names = ", ".join(f"{row.worker_id} ({STATES[row.state]})" for row in away if row.role is role)
            yield f"{num} of {most} {role} workers are ready{f': {names}' if names else ''}"


def _stalled(fleet: Fleet, now_s: float) -> Iterator[str]:
    for worker_id, rank, seconds in fleet.stalled_ranks(STALL_S, now_s):
        yield f"rank {rank} of {worker_id} has requests and has made no step for {seconds:.0f} s"


def _counted(fleet: Fleet) -> Iterator[Alert]:
    then, now = fleet.totals.before(COUNTS_S)[1], fleet.totals.points[-1][1]
    if num := now.num_without_room - then.num_without_room:
        yield Alert(rule="QuartetQueueFull", text=f"{short(num)} requests found no room in time, or in the queue")
    if num := now.num_kv_gaps - then.num_kv_gaps:
        yield Alert(rule="QuartetIndexGaps", text=f"KV events of workers were lost {short(num)} times")
    num_ended = sum(now.outcomes.values()) - sum(then.outcomes.values())
    share = (_num_failed(now) - _num_failed(then)) / num_ended if num_ended else 0.0
    if share > MAX_FAILED_SHARE:
        yield Alert(rule="QuartetRequestsFail", text=f"{share:.0%} of the requests failed")


def _num_failed(totals: FleetTotals) -> int:
    return sum(count for outcome, count in totals.outcomes.items() if outcome in FAILED)
