"""Metrics of a consolidator of KV events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


@dataclass(frozen=True, kw_only=True)
class SourceFigures:
    """One source, now.

    Attributes:
        is_connected: whether it can be reached.
        num_blocks: that it has.
        num_gaps, num_restarts: times that its numbers jumped, or went back.
        num_drops: times that all it had was dropped.
        num_replays: times that it was asked for what was lost.
        num_malformed: messages that could not be read.
        left_out: what had no effect, by reason.
    """

    name: str
    is_connected: bool
    num_blocks: int
    num_gaps: int
    num_restarts: int
    num_drops: int
    num_replays: int
    num_malformed: int
    left_out: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class ConsolidatorFigures:
    """All sources, the blocks that at least one of them has, and the batches that were published."""

    sources: Iterable[SourceFigures]
    num_blocks: int
    num_batches: int


_COUNTERS: tuple[tuple[str, str, Callable[[SourceFigures], int]], ...] = (
    ("quartet_consolidator_gaps", "Times that a source's numbers jumped.", lambda source: source.num_gaps),
    ("quartet_consolidator_restarts", "Times that they went back.", lambda source: source.num_restarts),
    ("quartet_consolidator_drops", "Times that all a source had was dropped.", lambda source: source.num_drops),
    ("quartet_consolidator_replays", "Times that a source was asked.", lambda source: source.num_replays),
    ("quartet_consolidator_malformed", "Messages that can't be read.", lambda source: source.num_malformed),
)


def watch_consolidator(registry: CollectorRegistry, read: Callable[[], ConsolidatorFigures]) -> None:
    """Show at each scrape what ``read`` returns; it is called on the scrape's thread and may not block."""
    registry.register(_ConsolidatorCollector(read))


class _ConsolidatorCollector(Collector):
    """Reads the figures at each scrape."""

    def __init__(self, read: Callable[[], ConsolidatorFigures]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        figures = self._read()
        sources = list(figures.sources)
        yield GaugeMetricFamily(
            "quartet_consolidator_blocks", "Blocks that at least one source has.", value=figures.num_blocks
        )
        yield CounterMetricFamily("quartet_consolidator_batches", "Batches published.", value=figures.num_batches)
        held = GaugeMetricFamily("quartet_consolidator_source_blocks", "Blocks of a source.", labels=["source"])
        up = GaugeMetricFamily("quartet_consolidator_source_up", "Whether it can be reached.", labels=["source"])
        left_out = CounterMetricFamily(
            "quartet_consolidator_left_out", "What a source said without an effect.", labels=["source", "reason"]
        )
        for source in sources:
            held.add_metric([source.name], source.num_blocks)
            up.add_metric([source.name], float(source.is_connected))
            for reason, number in source.left_out.items():
                left_out.add_metric([source.name, reason], number)
        yield from (held, up, left_out)
        for name, text, value in _COUNTERS:
            family = CounterMetricFamily(name, text, labels=["source"])
            for source in sources:
                family.add_metric([source.name], value(source))
            yield family
