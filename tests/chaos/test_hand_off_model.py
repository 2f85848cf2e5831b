"""Every disturbance of a hand-off at every moment, one in a run."""

from __future__ import annotations

import pytest

from tests.engine.fakes import FakeRunner
from tests.engine.launching import LaunchingRunner
from tests.model.hand_off import MakeRunner, explore


@pytest.mark.parametrize("make_runner", [FakeRunner, LaunchingRunner])
def test_no_single_disturbance_at_any_moment_breaks_a_promise(make_runner: MakeRunner) -> None:
    found = explore(1, make_runner=make_runner)
    assert found.broken == []
    assert found.num_runs > 1600
