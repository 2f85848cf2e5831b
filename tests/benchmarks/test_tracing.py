"""What traces cost, measured on few requests."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from benchmarks import tracing
from benchmarks.table import tracing_tables

pytestmark = pytest.mark.bench


def test_each_state_makes_its_spans_and_no_more() -> None:
    results = tracing.measure(20, 1)
    spans = {state: (use.router_spans, use.worker_spans) for state, use in results.states.items()}
    assert spans == {"off": (0, 0), "not sampled": (0, 0), "sampled": (7, 5)}
    assert tracing_tables(asdict(results)).count("| <= 70 |") == 2
