"""Every disturbance of a hand-off at every moment, one in a run."""

from __future__ import annotations

import pytest

from tests.model.hand_off import explore


@pytest.mark.timeout(400)
def test_no_single_disturbance_at_any_moment_breaks_a_promise() -> None:
    found = explore(1)
    assert found.broken == []
    assert found.num_runs > 1600
