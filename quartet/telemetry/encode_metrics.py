"""Metrics of a worker that has a pool of media embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_QUEUE_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_COMPUTE_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)

# Those of items that did not fail.
_OUTCOMES = ("cached", "encoded", "pulled", "handed_over")


class TowerFigures(Protocol):
    """What the metrics read off an encoder; ``quartet.engine.encoder.EncoderStats`` has them."""

    @property
    def num_running(self) -> int:
        """Items in the vision tower."""
        ...

    @property
    def num_waiting(self) -> int:
        """Items queued for it."""
        ...

    @property
    def num_steps(self) -> int:
        """Batches done; only grows, like all that follow."""
        ...

    @property
    def num_items(self) -> int:
        """Items encoded: divided by the batches, how many are encoded together."""
        ...


class PoolFigures(Protocol):
    """What the metrics read off a pool of embeddings; ``quartet.kvcache.block_pool.BlockCounts`` has them."""

    @property
    def in_use(self) -> int:
        """Blocks that are being written."""
        ...

    @property
    def held(self) -> int:
        """Blocks held for hand-offs or requests."""
        ...

    @property
    def cached(self) -> int:
        """Blocks that no request needs, kept for reuse."""
        ...

    @property
    def free(self) -> int:
        """Blocks that hold nothing."""
        ...


class EncodeMetrics:
    """Media items on one worker."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._items = Counter(
            "quartet_encode_items", "Media items that ended, by outcome.", ["outcome"], registry=registry
        )
        for outcome in _OUTCOMES:  # from the start: Prometheus sees no growth in what begins at 1
            self._items.labels(outcome)
        self._queue_time = Histogram(
            "quartet_encode_queue_seconds", "Waiting for the vision tower.", buckets=_QUEUE_BUCKETS_S, registry=registry
        )
        self._compute_time = Histogram(
            "quartet_encode_seconds", "In the vision tower.", buckets=_COMPUTE_BUCKETS_S, registry=registry
        )

    def watch_tower(self, read: Callable[[], TowerFigures]) -> None:
        """Show at each scrape what ``read`` returns; it is called on the scrape's thread and may not block."""
        self._registry.register(_TowerCollector(read))

    def watch_pool(self, read: Callable[[], PoolFigures]) -> None:
        """Show at each scrape what ``read`` returns; it is called on the scrape's thread and may not block."""
        self._registry.register(_PoolCollector(read))

    def count_item(self, outcome: str) -> None:
        """An item ended: ``cached``, ``encoded``, ``pulled``, ``handed_over``, or its error's reason, in lower case."""
        self._items.labels(outcome).inc()

    def observe_encoded(self, queue_s: float, compute_s: float) -> None:
        """An item went through the vision tower."""
        self._queue_time.observe(queue_s)
        self._compute_time.observe(compute_s)


class _TowerCollector(Collector):
    """Reads the encoder at each scrape."""

    def __init__(self, read: Callable[[], TowerFigures]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        figures = self._read()
        yield GaugeMetricFamily("quartet_encode_running_items", "Items in the tower.", value=figures.num_running)
        yield GaugeMetricFamily("quartet_encode_waiting_items", "Items that wait for it.", value=figures.num_waiting)
        yield CounterMetricFamily("quartet_encode_batches", "Batches of the tower.", value=figures.num_steps)
        yield CounterMetricFamily("quartet_encode_batched_items", "Items of these batches.", value=figures.num_items)


class _PoolCollector(Collector):
    """Reads the pool of embeddings at each scrape."""

    def __init__(self, read: Callable[[], PoolFigures]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        figures = self._read()
        blocks = GaugeMetricFamily("quartet_encode_blocks", "Blocks of embeddings by state.", labels=["state"])
        # States add up to the pool.
        blocks.add_metric(["used"], figures.in_use)
        blocks.add_metric(["held"], figures.held)
        blocks.add_metric(["cached"], figures.cached)
        blocks.add_metric(["free"], figures.free)
        yield blocks
