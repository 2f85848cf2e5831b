"""Every metric that processes show, and every value of labels that the code knows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from quartet.api.fleet import WorkerState
from quartet.discovery.base import Role
from quartet.engine.base import EngineStats, FinishReason, TierCounts
from quartet.errors import ServingError
from quartet.events.kv import Tier
from quartet.kvcache.block_pool import BlockCounts
from quartet.telemetry.gpus import watch_gpus
from quartet.telemetry.metrics import (
    AdmissionOutcome,
    HandOffOutcome,
    ProcessMetrics,
    ReusePart,
    RouterMetrics,
    SnapshotOutcome,
    WorkerMetrics,
)
from tests.fakes.nvml import FakeNvml

#: What ``deploy/prometheus/prometheus.yml`` and Prometheus itself give a process.
TARGET_LABELS = frozenset({"quartet_namespace", "quartet_role", "quartet_worker", "job", "instance"})


@dataclass(frozen=True)
class Selector:
    """A metric in a query, with the values that its labels are compared with; of patterns each alternative."""

    metric: str
    values: Mapping[str, frozenset[str]]


def selectors(expr: str) -> Iterator[Selector]:
    """The metrics of a query in PromQL."""
    for name, matchers in re.findall(r"\b((?:quartet|process)_\w+|up)\b(?:\{([^}]*)\})?", _without_grouping(expr)):
        compared = re.findall(r'(\w+)\s*[=!]~?\s*"([^"]*)"', matchers)
        yield Selector(name, {label: frozenset(values.split("|")) for label, values in compared})


def grouped_labels(expr: str) -> frozenset[str]:
    """The labels in its clauses ``by``."""
    return frozenset(label for clause in re.findall(r"\bby \(([^)]*)\)", expr) for label in re.findall(r"\w+", clause))


def _without_grouping(expr: str) -> str:
    return re.sub(r"\bby \([^)]*\)", "", expr)


def samples() -> Mapping[str, frozenset[str]]:
    """The labels of each sample by its name, of a router and a worker that have everything."""
    registry = CollectorRegistry()
    ProcessMetrics(registry)
    router, worker = RouterMetrics(registry), WorkerMetrics(registry)
    router.for_model("m")
    router.requests.count("length", "m")
    router.attempts.labels("first")
    router.set_workers("decode", "ready", 1)
    for labelled in (worker.requests, worker.signed_starts):
        labelled.labels("length")
    worker.observe_transfer("shm", 1, 0.1)
    tier = TierCounts(Tier.HOST, BlockCounts(1, 1, 1, 1, 4), 100)
    worker.watch_engine(lambda: [EngineStats(tiers=(tier,))])
    watch_gpus(registry, None, None, FakeNvml)
    found: dict[str, frozenset[str]] = {"up": frozenset()}
    for metric in registry.collect():
        for sample in metric.samples:
            found[sample.name] = found.get(sample.name, frozenset()) | frozenset(sample.labels)
    return found


def values() -> Mapping[str, frozenset[str]]:
    """What labels can be, of those whose values are words of ours."""
    reasons = {error.reason.lower() for error in _errors(ServingError)}
    outcomes = {*FinishReason, *AdmissionOutcome, *HandOffOutcome, *SnapshotOutcome, "placed", "cancelled"}
    return {
        "outcome": frozenset(map(str, outcomes | reasons)),
        "cause": frozenset({"first"} | reasons),
        "part": frozenset(map(str, ReusePart)),
        "role": frozenset(map(str, Role)),
        "state": frozenset({*map(str, WorkerState), "used", "held", "cached", "free"}),
    }


def _errors(kind: type[ServingError]) -> Iterator[type[ServingError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _errors(child)
