"""As ``test_hand_off_model``, of an engine that launches a step before it has read the last: a file for a process."""

from __future__ import annotations

from tests.engine.launching import LaunchingRunner
from tests.model.hand_off import explore


def test_no_single_disturbance_at_any_moment_breaks_a_promise_of_launched_steps() -> None:
    found = explore(1, make_runner=LaunchingRunner)
    assert found.broken == []
    assert found.num_runs > 1600
