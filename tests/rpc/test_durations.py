"""Durations on the wire."""

from __future__ import annotations

import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st

from quartet.errors import InvalidRequestError
from quartet.rpc.errors import to_duration, to_non_negative_seconds, to_seconds, to_timedelta


@given(st.integers(-(10**15), 10**15))
def test_seconds_survive_to_the_nanosecond(nanos: int) -> None:
    assert to_seconds(to_duration(nanos / 1e9)) == pytest.approx(nanos / 1e9, abs=1e-9, rel=1e-12)


def test_both_parts_of_a_negative_duration_are_negative() -> None:
    assert to_duration(-1.5) == Duration(seconds=-1, nanos=-500_000_000)


def test_infinity_becomes_the_longest_duration() -> None:
    assert to_duration(float("inf")).seconds == 315_576_000_000


def test_a_negative_duration_is_refused_by_its_field() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        to_non_negative_seconds(Duration(seconds=-1), "context.timeout")
    assert caught.value.field == "context.timeout"


def test_a_duration_longer_than_a_timedelta_is_refused_by_its_field() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        to_timedelta(Duration(seconds=2**62), "hand_off.time_to_live")
    assert caught.value.field == "hand_off.time_to_live"
