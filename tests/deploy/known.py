"""Every metric that processes show, and every value of labels that the code knows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from quartet.api.fleet import WorkerState
from quartet.discovery.base import Role
from quartet.engine.base import EngineStats, FinishReason, TierCounts
from quartet.engine.encoder import EncoderStats
from quartet.errors import all_kinds
from quartet.events.kv import Tier
from quartet.kvcache.block_pool import BlockCounts
from quartet.telemetry.consolidator_metrics import ConsolidatorFigures, SourceFigures, watch_consolidator
from quartet.telemetry.encode_metrics import EncodeMetrics
from quartet.telemetry.gpus import watch_gpus
from quartet.telemetry.metrics import (
    AdmissionOutcome,
    CertificateMetrics,
    CertificateUse,
    HandOffOutcome,
    PoolMetrics,
    ProcessMetrics,
    ReloadedFile,
    ReloadMetrics,
    ReusePart,
    RouterMetrics,
    SnapshotOutcome,
    WorkerMetrics,
)
from router.attempts import attempt_causes
from tests.fakes.nvml import FakeNvml

#: What ``deploy/prometheus/prometheus.yml`` and Prometheus itself give a process.
TARGET_LABELS = frozenset({"quartet_namespace", "quartet_role", "quartet_worker", "job", "instance"})


@dataclass(frozen=True)
class Selector:
    """A metric in a query, with the values that its labels are compared with; of patterns each alternative.

    ``wanted`` has those of them that the labels must have.
    """

    metric: str
    values: Mapping[str, frozenset[str]]
    wanted: Mapping[str, frozenset[str]]


def selectors(expr: str) -> Iterator[Selector]:
    """The metrics of a query in PromQL."""
    for name, matchers in re.findall(r"\b((?:quartet|process)_\w+|up)\b(?:\{([^}]*)\})?", _without_grouping(expr)):
        compared = re.findall(r'(\w+)\s*([=!]~?)\s*"([^"]*)"', matchers)
        values = {label: frozenset(texts.split("|")) for label, _, texts in compared}
        wanted = {label: values[label] for label, operator, _ in compared if not operator.startswith("!")}
        yield Selector(name, values, wanted)


def grouped_labels(expr: str) -> frozenset[str]:
    """The labels in its clauses ``by``."""
    return frozenset(label for clause in re.findall(r"\bby \(([^)]*)\)", expr) for label in re.findall(r"\w+", clause))


def _without_grouping(expr: str) -> str:
    return re.sub(r"\bby \([^)]*\)", "", expr)


def samples() -> Mapping[str, frozenset[str]]:
    """The labels of each sample by its name, of a router and a worker that have everything."""
    found: dict[str, frozenset[str]] = {"up": frozenset()}
    for name, labels in at_first():
        found[name] = found.get(name, frozenset()) | frozenset(labels)
    return found


def rated(expr: str) -> Iterator[str]:
    """The names of metrics whose growth a query asks for."""
    yield from re.findall(r"\b(?:rate|increase)\((\w+)", expr)


def at_first() -> Iterator[tuple[str, Mapping[str, str]]]:
    """The name and labels of each sample of a router and a worker that know each other, before the first request."""
    for metric in _router_and_worker().collect():
        for sample in metric.samples:
            yield sample.name, sample.labels


def families() -> Mapping[str, tuple[str, frozenset[str]]]:
    """The kind and labels of each of our metrics, of any process, by the name that a page has for it."""
    registry = _router_and_worker()
    pools = PoolMetrics(registry)
    pools.expect(["east"])
    pools.set_ready("east", 1)
    source = SourceFigures(
        name="trtllm",
        is_connected=True,
        num_blocks=1,
        num_gaps=0,
        num_restarts=0,
        num_drops=0,
        num_replays=0,
        num_malformed=0,
        left_out={"medium": 1},
    )
    watch_consolidator(registry, lambda: ConsolidatorFigures(sources=[source], num_blocks=1, num_batches=1))
    found = {}
    for metric in registry.collect():
        if metric.name.startswith("quartet_"):
            name = f"{metric.name}_total" if metric.type == "counter" else metric.name
            labels = {label for sample in metric.samples for label in sample.labels} - {"le"}
            found[name] = (metric.type, frozenset(labels))
    return found


def _router_and_worker() -> CollectorRegistry:
    registry = CollectorRegistry()
    ProcessMetrics(registry)
    CertificateMetrics(registry).watch(CertificateUse.GRPC, lambda: 1.0)
    reloads = ReloadMetrics(registry)
    for file in ReloadedFile:
        reloads.counter(file)
    router, worker = RouterMetrics(registry), WorkerMetrics(registry)
    router.expect_causes(attempt_causes())
    router.for_model("m")
    router.set_workers("decode", "ready", 1)
    router.watch_usage(lambda: 0)
    router.watch_queues(lambda: {"room": 0.0})
    encode = EncodeMetrics(registry)
    encode.watch_tower(EncoderStats)
    encode.watch_pool(lambda: BlockCounts(1, 1, 1, 1, 4))
    router.watch_missing_roles(lambda: {("m", "decode"): False})
    worker.expect_transfers(("shm", "grpc"))
    tier = TierCounts(Tier.HOST, BlockCounts(1, 1, 1, 1, 4), 100)
    worker.watch_engine(lambda: [EngineStats(tiers=(tier,))])
    watch_gpus(registry, None, None, FakeNvml)
    return registry


def values() -> Mapping[str, frozenset[str]]:
    """What labels can be, of those whose values are words of ours."""
    reasons = {kind.reason.lower() for kind in all_kinds()}
    outcomes = {*FinishReason, *AdmissionOutcome, *HandOffOutcome, *SnapshotOutcome, "placed", "cancelled", "encoded"}
    return {
        "outcome": frozenset(map(str, outcomes | reasons)),
        "cause": frozenset({"first"} | reasons),
        "part": frozenset(map(str, ReusePart)),
        "role": frozenset(map(str, Role)),
        "use": frozenset(map(str, CertificateUse)),
        "state": frozenset({*map(str, WorkerState), "used", "held", "cached", "free"}),
    }
