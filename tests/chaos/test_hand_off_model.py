"""Every disturbance of a hand-off at every moment, one in a run."""

from __future__ import annotations

from tests.engine.fakes import FakeRunner
from tests.model.hand_off import explore


def test_no_single_disturbance_at_any_moment_breaks_a_promise() -> None:
    found = explore(1, make_runner=FakeRunner)
    assert found.broken == []
    assert found.num_runs > 1600
