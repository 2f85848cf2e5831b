"""Seconds and ``timedelta`` to ``google.protobuf.Duration`` and back."""

from __future__ import annotations

from datetime import timedelta

from google.protobuf.duration_pb2 import Duration

from quartet.errors import InvalidRequestError

_NANOS = 10**9
# What the message's own definition allows: 10,000 years.
_MAX_SECONDS = 315_576_000_000


def to_duration(seconds: float) -> Duration:
    """``seconds`` to the nanosecond; what the message cannot hold becomes the most that it can."""
    duration = Duration()
    put_duration(duration, seconds)
    return duration


def put_duration(into: Duration, seconds: float) -> None:
    """Set ``into``, which may be a field not present yet, as ``to_duration`` would."""
    if 0.0 <= seconds < _MAX_SECONDS:  # what nearly all are, at half the price
        into.seconds, into.nanos = divmod(round(seconds * _NANOS), _NANOS)
        return
    nanos = round(max(-_MAX_SECONDS, min(_MAX_SECONDS, seconds)) * _NANOS)
    whole, rest = divmod(abs(nanos), _NANOS)
    sign = -1 if nanos < 0 else 1
    into.seconds = sign * whole
    into.nanos = sign * rest


def to_seconds(duration: Duration) -> float:
    """The duration in seconds."""
    return float(duration.seconds + duration.nanos / _NANOS)


def to_non_negative_seconds(duration: Duration, field: str) -> float:
    """The duration in seconds. Raises ``InvalidRequestError`` naming ``field`` where it is negative."""
    seconds = to_seconds(duration)
    if seconds < 0:
        raise InvalidRequestError(f"{field} must not be negative", field=field)
    return seconds


def to_timedelta(duration: Duration, field: str) -> timedelta:
    """The duration to the microsecond.

    Raises:
        InvalidRequestError: naming ``field``; negative, or beyond what a ``timedelta`` holds.
    """
    seconds = to_non_negative_seconds(duration, field)
    try:
        return timedelta(seconds=seconds)
    except OverflowError as error:
        raise InvalidRequestError(f"{field} is too long", field=field) from error
