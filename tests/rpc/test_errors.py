"""Errors and durations on the wire: one table, and there and back without loss."""

from __future__ import annotations

import logging

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st

from quartet import errors
from quartet.errors import InvalidRequestError, ServingError
from quartet.rpc.errors import (
    DETAILS_KEY,
    STATUS,
    from_failure,
    from_rpc_error,
    public_error,
    status_code,
    to_duration,
    to_failure,
    to_non_negative_seconds,
    to_seconds,
    to_status,
    to_timedelta,
)
from quartet.v1 import types_pb2

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
SERVING_ERRORS = st.builds(
    lambda kind, message, field, delay_s: kind(message, field=field, retry_delay_s=delay_s),
    st.sampled_from(list(STATUS)),
    TEXT,
    st.none() | TEXT.filter(bool),
    st.none() | st.integers(0, 10**6).map(lambda millis: millis / 1000),
)


def every_kind(kind: type[ServingError] = ServingError) -> set[type[ServingError]]:
    return {kind}.union(*(every_kind(child) for child in kind.__subclasses__()))


def as_rpc_error(error: BaseException) -> grpc.aio.AioRpcError:
    status = to_status(error)
    code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
    trailers = grpc.aio.Metadata((DETAILS_KEY, status.SerializeToString()))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailers, status.message)


def test_every_serving_error_is_in_the_table() -> None:
    declared = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ServingError)}
    assert declared == set(STATUS)


def test_no_two_errors_share_a_reason() -> None:
    assert len({kind.reason for kind in STATUS}) == len(STATUS)


@given(SERVING_ERRORS)
def test_an_error_survives_a_failure(error: ServingError) -> None:
    assert_same(from_failure(types_pb2.Failure.FromString(to_failure(error).SerializeToString())), error)


@given(SERVING_ERRORS)
def test_an_error_survives_a_status(error: ServingError) -> None:
    rebuilt = from_rpc_error(as_rpc_error(error))
    expected = (
        error
        if error.message
        else type(error)(status_code(error).name, field=error.field, retry_delay_s=error.retry_delay_s)
    )
    assert_same(rebuilt, expected)


def assert_same(rebuilt: ServingError, error: ServingError) -> None:
    assert type(rebuilt) is type(error)
    assert (rebuilt.message, rebuilt.field) == (error.message, error.field)
    assert rebuilt.retry_delay_s == pytest.approx(error.retry_delay_s)


def test_an_unexpected_error_is_hidden_from_the_caller_and_logged_in_full(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        failure = to_failure(KeyError("the secret"))
    assert failure.code == grpc.StatusCode.INTERNAL.value[0]
    assert "secret" not in str(failure)
    assert "the secret" in caplog.text and "KeyError" in caplog.text


def test_a_serving_error_in_a_group_is_found() -> None:
    group = ExceptionGroup("tasks", [ValueError("x"), ExceptionGroup("more", [errors.DrainingError("going")])])
    assert isinstance(public_error(group), errors.DrainingError)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.WorkerUnavailableError),
        (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidRequestError),
        (grpc.StatusCode.CANCELLED, errors.RequestCancelledError),
        (grpc.StatusCode.DATA_LOSS, ServingError),
    ],
)
def test_an_unknown_reason_is_read_by_its_status_code(code: grpc.StatusCode, kind: type[ServingError]) -> None:
    number: int = code.value[0]
    assert type(from_failure(types_pb2.Failure(code=number, reason="FROM_THE_FUTURE", message="m"))) is kind
    plain = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "m")
    assert type(from_rpc_error(plain)) is kind


def test_a_code_that_does_not_exist_is_a_plain_error() -> None:
    assert type(from_failure(types_pb2.Failure(code=99))) is ServingError


@pytest.mark.parametrize("details", [b"\xff\xff\xff", b""])
def test_details_that_cannot_be_read_are_left_out(details: bytes) -> None:
    trailers = grpc.aio.Metadata((DETAILS_KEY, details))
    error = grpc.aio.AioRpcError(grpc.StatusCode.NOT_FOUND, grpc.aio.Metadata(), trailers, "not here")
    assert from_rpc_error(error).message == "not here"


def test_a_subclass_that_is_not_listed_takes_the_code_of_its_parent() -> None:
    class OddTransferError(errors.TransferError):
        pass

    assert status_code(OddTransferError("m")) is grpc.StatusCode.UNAVAILABLE


def test_a_long_message_is_cut_to_fit_the_trailers() -> None:
    status = to_status(errors.InvalidRequestError("\N{SNOWMAN}" * 10_000, field="\ud800" * 10_000))
    assert len(status.SerializeToString()) < 4_000


def test_retry_info_is_a_duration_to_the_nanosecond() -> None:
    failure = to_failure(errors.QueueFullError("full", retry_delay_s=1.25))
    assert failure.retry_delay == Duration(seconds=1, nanos=250_000_000)


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
