"""Metrics of how a router places requests: what was admitted, and how much it knows of what workers hold."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Gauge


class AdmissionOutcome(StrEnum):
    """How a choice's wait for room ended."""

    PLACED = "placed"
    REFUSED = "refused"  # the queue was full
    EXPIRED = "expired"  # its time in the queue, or its own, was over
    UNAVAILABLE = "unavailable"  # no decode worker was ready for too long
    CANCELLED = "cancelled"


class SnapshotOutcome(StrEnum):
    """What became of a snapshot of a worker's blocks."""

    USED = "used"
    OUTDATED = "outdated"  # too much was missed meanwhile
    FAILED = "failed"


class RoutingMetrics:
    """Counters and gauges of admission and of the prefix index."""

    def __init__(self, registry: CollectorRegistry) -> None:
        admissions = Counter(
            "quartet_router_admissions", "Waits for room that ended, by outcome.", ["outcome"], registry=registry
        )
        self._admissions = {outcome: admissions.labels(outcome.value) for outcome in AdmissionOutcome}
        snapshots = Counter(
            "quartet_router_kv_snapshots", "Snapshots of workers' blocks, by outcome.", ["outcome"], registry=registry
        )
        self._snapshots = {outcome: snapshots.labels(outcome.value) for outcome in SnapshotOutcome}
        self._matched_tokens = Counter(
            "quartet_router_matched_tokens",
            "Tokens of placed requests that were expected to be cached where they were sent.",
            registry=registry,
        )
        self._live = Gauge("quartet_router_kv_live_workers", "Workers whose blocks are known.", registry=registry)
        self._blocks = Gauge("quartet_router_kv_blocks", "Different blocks on workers' devices.", registry=registry)
        self._predicted = Gauge(
            "quartet_router_kv_predicted_blocks", "Different blocks that workers will have.", registry=registry
        )

    def count_admission(self, outcome: AdmissionOutcome) -> None:
        """A choice's wait ended; each of its attempts waits anew."""
        self._admissions[outcome].inc()

    def count_matched_tokens(self, num_tokens: int) -> None:
        """A choice was placed where so many of its tokens should be cached."""
        self._matched_tokens.inc(num_tokens)

    def count_snapshot(self, outcome: SnapshotOutcome) -> None:
        """A snapshot of a worker's blocks ended."""
        self._snapshots[outcome].inc()

    def watch_index(
        self, num_live: Callable[[], int], num_blocks: Callable[[], int], num_predicted_blocks: Callable[[], int]
    ) -> None:
        """Show at each scrape what these return; they are called on the scrape's thread and may not block."""
        self._live.set_function(num_live)
        self._blocks.set_function(num_blocks)
        self._predicted.set_function(num_predicted_blocks)
