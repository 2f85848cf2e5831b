"""The quick histogram shows on the page what ``prometheus_client``'s own would."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest

from quartet.telemetry.metrics import FastHistogram

# As in every process of ours.
disable_created_metrics()  # type: ignore[no-untyped-call]

BUCKETS = (0.001, 0.0025, 1.0, 2.0, 30.0)
AMOUNTS = st.lists(st.sampled_from(BUCKETS) | st.floats(0, 100), max_size=30)


def page_of(kind: type[FastHistogram] | type[Histogram], amounts: dict[str, Sequence[float]]) -> bytes:
    registry = CollectorRegistry()
    histogram: FastHistogram | Histogram
    if kind is FastHistogram:
        histogram = FastHistogram("some_seconds", "Some time.", "model", BUCKETS, registry)
    else:
        histogram = Histogram("some_seconds", "Some time.", ["model"], buckets=BUCKETS, registry=registry)
    for model, observed in amounts.items():
        child = histogram.labels(model)
        for amount in observed:
            child.observe(amount)
    return generate_latest(registry)


@given(st.dictionaries(st.sampled_from(["a", 'b"c', "d\\e"]), AMOUNTS))
def test_the_metrics_page_equals_that_of_the_library_histogram(amounts: dict[str, Sequence[float]]) -> None:
    assert page_of(FastHistogram, amounts) == page_of(Histogram, amounts)


def test_each_label_value_has_one_child() -> None:
    histogram = FastHistogram("some_seconds", "Some time.", "model", BUCKETS, CollectorRegistry())
    assert histogram.labels("a") is histogram.labels("a")
    assert histogram.labels("a") is not histogram.labels("b")


@given(AMOUNTS)
def test_a_histogram_without_a_label_shows_the_same_as_the_library_one(amounts: Sequence[float]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    child = FastHistogram("some_seconds", "Some time.", None, BUCKETS, ours).labels()
    histogram = Histogram("some_seconds", "Some time.", buckets=BUCKETS, registry=theirs)
    for amount in amounts:
        child.observe(amount)
        histogram.observe(amount)
    assert generate_latest(ours) == generate_latest(theirs)
