"""When a process that ended is started again."""

from __future__ import annotations

import pytest

from quartet.errors import ConfigError
from services.topology.supervisor import Backoff, RestartConfig


def delays(backoff: Backoff, *ends: tuple[float, float]) -> list[float | None]:
    """For ends at so many seconds, after so many seconds of service."""
    return [backoff.next_delay_s(now_s, served_s) for now_s, served_s in ends]


def test_delays_double_up_to_the_longest() -> None:
    backoff = Backoff(RestartConfig())
    assert delays(backoff, *((float(end), 0.0) for end in range(7))) == [1, 2, 4, 8, 16, 30, 30]


def test_who_has_served_for_a_minute_begins_again() -> None:
    backoff = Backoff(RestartConfig())
    assert delays(backoff, (0, 0), (5, 1), (70, 59.9), (200, 60), (210, 0)) == [1, 2, 4, 1, 2]


def test_too_many_restarts_in_the_window_are_given_up_however_well_it_served() -> None:
    backoff = Backoff(RestartConfig(max_restarts=2, window_s=100))
    assert delays(backoff, (0, 0), (50, 60), (99.9, 60), (100.1, 0), (120, 0)) == [1, 1, None, 2, None]


def test_none_at_all_may_be_allowed() -> None:
    assert Backoff(RestartConfig(max_restarts=0)).next_delay_s(0.0, 1000.0) is None


def test_many_restarts_stay_at_the_longest_delay() -> None:
    backoff = Backoff(RestartConfig(max_restarts=10_000))
    assert delays(backoff, *((0.0, 0.0) for _ in range(3000)))[-1] == 30


@pytest.mark.parametrize("name", ["first_delay_s", "max_delay_s", "reset_after_s", "window_s"])
def test_times_are_above_zero(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}: must be above 0"):
        RestartConfig(**{name: 0.0})
    with pytest.raises(ConfigError, match="max_restarts: must not be negative"):
        RestartConfig(max_restarts=-1)
