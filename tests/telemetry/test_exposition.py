"""The text of /metrics: fresh for some scrapes in a row, shared by a flood of them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from quartet.telemetry.http import Exposition


def test_a_flood_of_scrapes_shares_one_text_a_second_and_others_see_their_moment() -> None:
    now = 100.0
    registry = CollectorRegistry()
    counter = Counter("seen", "Scrapes.", registry=registry)
    exposition = Exposition(registry, lambda: now)
    texts = []
    for _ in range(1000):
        counter.inc()
        texts.append(exposition.get("")[0])
    assert len(set(texts)) == 32
    assert texts[:32] == sorted(set(texts), key=texts.index)
    now += 1.0
    counter.inc()
    assert b"seen_total 1001.0" in exposition.get("")[0]
    counter.inc()
    assert b"seen_total 1001.0" in exposition.get("")[0]
    assert b"seen_total 1002.0" in exposition.get("application/openmetrics-text; version=1.0.0")[0]
