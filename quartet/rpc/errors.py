"""The one table from errors to gRPC codes, and errors on the wire: as a status, or as a ``Failure`` in a slot.

A status carries ``google.rpc`` details: ErrorInfo (reason), BadRequest (the field at fault), RetryInfo (when to try
again). Whatever is not a ``ServingError`` is our own bug: the caller learns no more than INTERNAL, the log everything.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

import grpc
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode
from grpc.aio import AioRpcError

from quartet import errors
from quartet.errors import (
    HandOffNotFoundError,
    HandOffStateError,
    InvalidRequestError,
    LayoutMismatchError,
    ServingError,
    StaleEpochError,
    TransferError,
    TransferTimeoutError,
    WorkerUnavailableError,
)
from quartet.v1 import types_pb2

if TYPE_CHECKING:
    from grpc.aio import Metadata

logger = logging.getLogger(__name__)

#: ``google.rpc.ErrorInfo.domain`` of all our reasons.
DOMAIN = "quartet"

#: Trailer that holds the serialized ``google.rpc.Status``.
DETAILS_KEY = "grpc-status-details-bin"

#: What each error is to gRPC. A router's reaction hangs on the type (its reason), not on the code.
STATUS: dict[type[ServingError], StatusCode] = {
    ServingError: StatusCode.INTERNAL,
    errors.EngineError: StatusCode.INTERNAL,
    errors.ModelFilesError: StatusCode.INTERNAL,
    errors.InvalidRequestError: StatusCode.INVALID_ARGUMENT,
    errors.PromptTooLongError: StatusCode.INVALID_ARGUMENT,
    errors.UnsupportedFieldError: StatusCode.INVALID_ARGUMENT,
    errors.InvalidMediaError: StatusCode.INVALID_ARGUMENT,
    errors.MediaTooLargeError: StatusCode.INVALID_ARGUMENT,
    errors.MediaFetchError: StatusCode.INVALID_ARGUMENT,
    errors.ProtocolError: StatusCode.INVALID_ARGUMENT,
    errors.MessageTooLargeError: StatusCode.INVALID_ARGUMENT,  # not RESOURCE_EXHAUSTED: trying again is no use
    errors.ModelNotFoundError: StatusCode.NOT_FOUND,
    errors.ModelMismatchError: StatusCode.FAILED_PRECONDITION,
    errors.DuplicateRequestError: StatusCode.ALREADY_EXISTS,
    errors.PermissionDeniedError: StatusCode.PERMISSION_DENIED,
    errors.MediaNotAllowedError: StatusCode.PERMISSION_DENIED,
    errors.UnauthenticatedError: StatusCode.UNAUTHENTICATED,
    errors.UnimplementedError: StatusCode.UNIMPLEMENTED,
    errors.SignedStartError: StatusCode.PERMISSION_DENIED,
    errors.NoSigningKeyError: StatusCode.FAILED_PRECONDITION,
    errors.SigningKeyUnknownError: StatusCode.PERMISSION_DENIED,
    errors.SignedStartForeignError: StatusCode.FAILED_PRECONDITION,
    errors.SignedStartExpiredError: StatusCode.FAILED_PRECONDITION,
    errors.SignedStartUsedError: StatusCode.ALREADY_EXISTS,
    errors.PlaceTooLargeError: StatusCode.FAILED_PRECONDITION,
    errors.OutOfBlocksError: StatusCode.RESOURCE_EXHAUSTED,  # the router tries another worker
    errors.QueueFullError: StatusCode.RESOURCE_EXHAUSTED,
    errors.WorkerUnavailableError: StatusCode.UNAVAILABLE,
    errors.RouterUnavailableError: StatusCode.UNAVAILABLE,
    errors.DrainingError: StatusCode.UNAVAILABLE,
    errors.StalledStreamError: StatusCode.ABORTED,
    errors.SlowReaderError: StatusCode.RESOURCE_EXHAUSTED,
    errors.RequestTimeoutError: StatusCode.DEADLINE_EXCEEDED,
    errors.RequestCancelledError: StatusCode.CANCELLED,
    errors.DiscoveryError: StatusCode.UNAVAILABLE,
    errors.HandOffNotFoundError: StatusCode.NOT_FOUND,
    errors.HandOffStateError: StatusCode.FAILED_PRECONDITION,
    errors.StaleEpochError: StatusCode.FAILED_PRECONDITION,
    errors.LayoutMismatchError: StatusCode.FAILED_PRECONDITION,
    errors.TransferError: StatusCode.UNAVAILABLE,  # the router prefills again
    errors.TransferTimeoutError: StatusCode.UNAVAILABLE,
    errors.MediaLostError: StatusCode.UNAVAILABLE,  # the router prefills again
}

# What a status without a reason that we know is to us; other codes are a plain ServingError.
_BY_CODE: dict[StatusCode, type[ServingError]] = {
    StatusCode.INVALID_ARGUMENT: errors.InvalidRequestError,
    StatusCode.OUT_OF_RANGE: errors.InvalidRequestError,
    StatusCode.NOT_FOUND: errors.ModelNotFoundError,
    StatusCode.ALREADY_EXISTS: errors.DuplicateRequestError,
    StatusCode.PERMISSION_DENIED: errors.PermissionDeniedError,
    StatusCode.UNAUTHENTICATED: errors.UnauthenticatedError,
    StatusCode.UNIMPLEMENTED: errors.UnimplementedError,
    StatusCode.RESOURCE_EXHAUSTED: errors.QueueFullError,
    StatusCode.UNAVAILABLE: errors.WorkerUnavailableError,
    StatusCode.ABORTED: errors.StalledStreamError,
    StatusCode.DEADLINE_EXCEEDED: errors.RequestTimeoutError,
    StatusCode.CANCELLED: errors.RequestCancelledError,
    StatusCode.FAILED_PRECONDITION: errors.HandOffStateError,
}

_BY_REASON: dict[str, type[ServingError]] = {kind.reason: kind for kind in STATUS}

_BY_NUMBER: dict[int, StatusCode] = {code.value[0]: code for code in StatusCode}

# Trailers are cut off at 8 KiB by default; the message crosses three times, once percent-encoded.
_MAX_MESSAGE_BYTES = 800

_MAX_FIELD_BYTES = 128


def status_code(error: ServingError) -> StatusCode:
    """The gRPC code of ``error``: that of its type, or of the nearest listed type above."""
    return next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)


def public_error(error: BaseException) -> ServingError:
    """What a caller may learn of ``error``.

    A ``ServingError`` is returned as it is, also from within an exception group. Anything else is a bug: it is logged
    with its traceback, and the caller learns only that there was one.
    """
    for leaf in _leaves(error):
        if isinstance(leaf, ServingError):
            return leaf
    logger.error("unexpected error", exc_info=error)
    return ServingError("internal error")


def to_failure(error: BaseException) -> types_pb2.Failure:
    """How one request's end with ``error`` is told on a stream that carries many."""
    shown = public_error(error)
    delay = None if shown.retry_delay_s is None else to_duration(shown.retry_delay_s)
    return types_pb2.Failure(
        code=status_code(shown).value[0],
        reason=shown.reason,
        message=_cut(shown.message, _MAX_MESSAGE_BYTES),
        field=_cut(shown.field or "", _MAX_FIELD_BYTES),
        retry_delay=delay,
    )


def from_failure(failure: types_pb2.Failure) -> ServingError:
    """The error that ``to_failure`` was given: of the type with its reason, else of the one nearest to its code."""
    delay_s = to_seconds(failure.retry_delay) if failure.HasField("retry_delay") else None
    code = _BY_NUMBER.get(failure.code, StatusCode.UNKNOWN)
    return _rebuild(failure.reason, code, failure.message, failure.field or None, delay_s)


def to_status(error: BaseException) -> status_pb2.Status:
    """``error`` as ``google.rpc.Status`` with its details."""
    shown = public_error(error)
    message = _cut(shown.message, _MAX_MESSAGE_BYTES)
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=shown.reason, domain=DOMAIN)]
    if shown.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_cut(shown.field, _MAX_FIELD_BYTES), description=message, reason=shown.reason
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if shown.retry_delay_s is not None:
        details.append(error_details_pb2.RetryInfo(retry_delay=to_duration(shown.retry_delay_s)))
    return status_pb2.Status(
        code=status_code(shown).value[0], message=message, details=[_pack(detail) for detail in details]
    )


async def abort(context: grpc.aio.ServicerContext[object, object], error: BaseException) -> None:
    """End the call of ``context`` with ``error``'s status; raises ``grpc.aio.AbortError``, as gRPC wants it."""
    status = to_status(error)
    await context.abort(_BY_NUMBER[status.code], status.message, ((DETAILS_KEY, status.SerializeToString()),))


def from_rpc_error(error: grpc.aio.AioRpcError) -> ServingError:
    """The error that a call ended with: of the type with its reason, else of the one nearest to its code."""
    status = _rich_status(error.trailing_metadata())
    info, field, delay_s = error_details_pb2.ErrorInfo(), None, None
    for detail in status.details:
        bad_request, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        try:
            detail.Unpack(info)
            if detail.Unpack(bad_request) and bad_request.field_violations:
                field = bad_request.field_violations[0].field or None
            if detail.Unpack(retry):
                delay_s = to_seconds(retry.retry_delay)
        except DecodeError:
            # Somebody else's server; its code and message still count.
            continue
    reason = info.reason if info.domain == DOMAIN else ""
    return _rebuild(reason, error.code(), error.details() or error.code().name, field, delay_s)


def _rebuild(
    reason: str, code: StatusCode, message: str, field: str | None, retry_delay_s: float | None
) -> ServingError:
    kind = _BY_REASON.get(reason) or _BY_CODE.get(code, ServingError)
    return kind(message, field=field, retry_delay_s=retry_delay_s)


def _rich_status(trailers: Metadata | None) -> status_pb2.Status:
    for key, value in trailers or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                break
    return status_pb2.Status()


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _pack(detail: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


def _cut(text: str, size_bytes: int) -> str:
    # Also rids the text of lone surrogates, which protobuf refuses.
    return text.encode("utf-8", "replace")[:size_bytes].decode("utf-8", "ignore")


# Seconds and ``timedelta`` to ``google.protobuf.Duration`` and back.

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


# gRPC statuses as a puller sees them, back into the errors that the source raised.

_TRANSFER_BY_REASON: dict[str, type[ServingError]] = {
    error.reason: error
    for error in (
        HandOffNotFoundError,
        HandOffStateError,
        LayoutMismatchError,
        StaleEpochError,
        TransferError,
        TransferTimeoutError,
    )
}

_TRANSFER_BY_CODE: dict[StatusCode, type[ServingError]] = {
    StatusCode.NOT_FOUND: HandOffNotFoundError,
    StatusCode.FAILED_PRECONDITION: HandOffStateError,
    StatusCode.DEADLINE_EXCEEDED: TransferTimeoutError,
    StatusCode.UNAVAILABLE: WorkerUnavailableError,
}

_DETAILS_KEY = "grpc-status-details-bin"

_MADE_UP_DETAILS = "Internal error from Core"


class HiddenStatusError(TransferError):
    """The source ended the stream while a message was on its way to it: gRPC put a status of its own over the source's.

    Asking again tells more.
    """


def to_error(error: AioRpcError) -> ServingError:
    """What the source meant: by the reason it gave, else by the status code, else a ``TransferError``."""
    if error.details() == _MADE_UP_DETAILS:
        return HiddenStatusError("the source of the hand-off ended the stream while it was written to")
    error_type = _TRANSFER_BY_REASON.get(_reason(error)) or _TRANSFER_BY_CODE.get(error.code(), TransferError)
    return error_type(f"the source of the hand-off answered {error.code().name}: {error.details()}")


def _reason(error: AioRpcError) -> str:
    """``google.rpc.ErrorInfo.reason`` of the status details, or an empty string."""
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            return _reason_in(value)
    return ""


def _reason_in(details: bytes) -> str:
    info = error_details_pb2.ErrorInfo()
    try:
        for detail in status_pb2.Status.FromString(details).details:
            if detail.Unpack(info):
                return str(info.reason)
    except DecodeError:
        return ""  # the code still says enough
    return ""
