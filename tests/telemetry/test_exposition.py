"""The text of /metrics: fresh for scrapes now and then, shared by a flood of them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from quartet.telemetry.http import Exposition


class Slow(Collector):
    """A counter of how often it was formatted, which takes ``took_s`` of ``now``."""

    def __init__(self, took_s: float) -> None:
        self.took_s = took_s
        self.now = 100.0
        self.num_formatted = 0

    def collect(self) -> Iterator[Metric]:
        self.now += self.took_s
        self.num_formatted += 1
        yield CounterMetricFamily("formatted", "Times.", value=self.num_formatted)


def exposed(took_s: float) -> tuple[Slow, Exposition]:
    slow, registry = Slow(took_s), CollectorRegistry(auto_describe=False)
    exposition = Exposition(registry, lambda: slow.now)
    registry.register(slow)
    slow.num_formatted = 0
    return slow, exposition


def test_a_flood_of_scrapes_takes_a_twentieth_of_the_time() -> None:
    slow, exposition = exposed(took_s=0.01)
    began = slow.now
    while slow.now < began + 10.0:
        text, _ = exposition.get("")
        slow.now += 0.001
    assert 45 <= slow.num_formatted <= 51
    assert f"formatted_total {slow.num_formatted}".encode() in text


def test_scrapes_now_and_then_see_their_moment() -> None:
    slow, exposition = exposed(took_s=0.01)
    for number in range(1, 10):
        assert f"formatted_total {number}.0".encode() in exposition.get("")[0]
        slow.now += 0.2


def test_each_format_has_a_text_of_its_own() -> None:
    _, exposition = exposed(took_s=0.01)
    plain, plain_type = exposition.get("")
    text, content_type = exposition.get("application/openmetrics-text; version=1.0.0")
    assert plain_type != content_type
    assert text.endswith(b"# EOF\n")
    assert exposition.get("") == (plain, plain_type)
