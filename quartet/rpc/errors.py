"""Errors on the wire: the one table from error types to gRPC codes, and ``ServingError`` to a message and back.

An error ends a call as a status, or one request of many as a ``Failure`` in its slot. A status carries ``google.rpc``
details: ErrorInfo (reason), BadRequest (the field at fault), RetryInfo (when to try again). An exception that is not a
``ServingError`` is our own bug: the caller sees only INTERNAL, the log has the traceback. The durations of all messages
are converted here too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import grpc
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode

from quartet import errors
from quartet.errors import InvalidRequestError, ServingError
from quartet.v1 import types_pb2

if TYPE_CHECKING:
    from grpc.aio import Metadata

logger = logging.getLogger(__name__)

#: ``google.rpc.ErrorInfo.domain`` of all our reasons.
DOMAIN = "quartet"

#: Trailer that holds the serialized ``google.rpc.Status``.
DETAILS_KEY = "grpc-status-details-bin"

#: The gRPC code of each error type. Routers decide by the type (the reason), not by the code.
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
    errors.ModelUnavailableError: StatusCode.UNAVAILABLE,  # unlike NOT_FOUND, this passes
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
    errors.PlacementBudgetError: StatusCode.RESOURCE_EXHAUSTED,
    errors.RateLimitedError: StatusCode.RESOURCE_EXHAUSTED,
    errors.WorkerUnavailableError: StatusCode.UNAVAILABLE,
    errors.WorkersLostError: StatusCode.INTERNAL,  # not UNAVAILABLE: trying again may cost another worker
    errors.StreamIdleError: StatusCode.UNAVAILABLE,
    errors.RouterUnavailableError: StatusCode.UNAVAILABLE,
    errors.SessionIdleError: StatusCode.UNAVAILABLE,
    errors.DrainingError: StatusCode.UNAVAILABLE,
    errors.StalledStreamError: StatusCode.ABORTED,
    errors.SlowReaderError: StatusCode.RESOURCE_EXHAUSTED,
    errors.RequestTimeoutError: StatusCode.DEADLINE_EXCEEDED,
    errors.RequestCancelledError: StatusCode.CANCELLED,
    errors.DiscoveryError: StatusCode.UNAVAILABLE,
    errors.WorkerReplacedError: StatusCode.FAILED_PRECONDITION,
    errors.HandOffNotFoundError: StatusCode.NOT_FOUND,
    errors.HandOffStateError: StatusCode.FAILED_PRECONDITION,
    errors.StaleEpochError: StatusCode.FAILED_PRECONDITION,
    errors.LayoutMismatchError: StatusCode.FAILED_PRECONDITION,
    errors.NoHandOffError: StatusCode.FAILED_PRECONDITION,  # the router prefills where it decodes
    errors.TransferError: StatusCode.UNAVAILABLE,  # the router prefills again
    errors.TransferTimeoutError: StatusCode.UNAVAILABLE,
    errors.MediaLostError: StatusCode.UNAVAILABLE,  # the router prefills again
}

# The error for a status whose reason is unknown here; a code that is not listed is a plain ServingError.
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

# The errors that the source of a hand-off answers a pull with, and what codes without such a reason mean there.
_PULL_ERRORS = frozenset(
    {
        errors.HandOffNotFoundError,
        errors.HandOffStateError,
        errors.LayoutMismatchError,
        errors.NoHandOffError,
        errors.StaleEpochError,
        errors.TransferError,
        errors.TransferTimeoutError,
    }
)

_PULL_BY_CODE: dict[StatusCode, type[ServingError]] = {
    StatusCode.NOT_FOUND: errors.HandOffNotFoundError,
    StatusCode.FAILED_PRECONDITION: errors.HandOffStateError,
    StatusCode.DEADLINE_EXCEEDED: errors.TransferTimeoutError,
    StatusCode.UNAVAILABLE: errors.WorkerUnavailableError,
}

# What gRPC says when the server ended a stream that the client was writing to.
_HIDDEN_STATUS_MESSAGE = "Internal error from Core"

_BY_NUMBER: dict[int, StatusCode] = {code.value[0]: code for code in StatusCode}

# Trailers are cut off at 8 KiB by default; the message crosses three times, once percent-encoded.
_MAX_MESSAGE_BYTES = 800

_MAX_FIELD_BYTES = 128


class HiddenStatusError(errors.TransferError):
    """The source ended a pull while a message was on its way to it, and gRPC replaced the source's status by its own.

    Asking the source again brings the real status.
    """


def status_code(error: ServingError) -> StatusCode:
    """The gRPC code of ``error``: that of its type, or of the nearest listed type above."""
    return next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)


def public_error(error: BaseException) -> ServingError:
    """The error that a caller may see for ``error``.

    A ``ServingError`` is returned as it is, also from within an exception group. Anything else is a bug: it is logged
    with its traceback, and the caller only sees "internal error".
    """
    for leaf in _leaves(error):
        if isinstance(leaf, ServingError):
            return leaf
    logger.error("unexpected error", exc_info=error)
    return ServingError("internal error")


def is_or_holds(error: BaseException, kind: type[ServingError]) -> bool:
    """Whether ``error`` is of ``kind``, or a group with one of it."""
    return any(isinstance(leaf, kind) for leaf in _leaves(error))


def to_failure(error: BaseException) -> types_pb2.Failure:
    """``error`` as the ``Failure`` that ends one request on a stream of many."""
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
    details = _read_details(error)
    message = error.details() or error.code().name
    return _rebuild(details.reason, error.code(), message, details.field, details.retry_delay_s)


def is_connection_lost(error: grpc.aio.AioRpcError) -> bool:
    """Whether gRPC itself ended the call because the connection broke, or there was none: no server said so."""
    return error.code() is StatusCode.UNAVAILABLE and not _read_details(error).reason


def from_pull_error(error: grpc.aio.AioRpcError) -> ServingError:
    """The error that a pull ended with: as ``from_rpc_error``, but codes mean what they mean for a hand-off.

    NOT_FOUND is ``HandOffNotFoundError``, for example, and an unknown code ``TransferError``; a reason that no source
    of a hand-off gives is ignored. ``HiddenStatusError``: gRPC hid the source's status.
    """
    if error.details() == _HIDDEN_STATUS_MESSAGE:
        return HiddenStatusError("the source of the hand-off ended the stream while it was written to")
    kind = _BY_REASON.get(_read_details(error).reason)
    if kind is None or kind not in _PULL_ERRORS:
        kind = _PULL_BY_CODE.get(error.code(), errors.TransferError)
    return kind(f"the source of the hand-off answered {error.code().name}: {error.details()}")


def _rebuild(
    reason: str, code: StatusCode, message: str, field: str | None, retry_delay_s: float | None
) -> ServingError:
    kind = _BY_REASON.get(reason) or _BY_CODE.get(code, ServingError)
    return kind(message, field=field, retry_delay_s=retry_delay_s)


@dataclass
class _Details:
    """What the details of a status say; ``reason`` is empty where they name none of ours."""

    reason: str = ""
    field: str | None = None
    retry_delay_s: float | None = None


def _read_details(error: grpc.aio.AioRpcError) -> _Details:
    found = _Details()
    for detail in _rich_status(error.trailing_metadata()).details:
        info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        try:
            if detail.Unpack(info):
                found.reason = info.reason if info.domain == DOMAIN else ""
            elif detail.Unpack(bad_request) and bad_request.field_violations:
                found.field = bad_request.field_violations[0].field or None
            elif detail.Unpack(retry):
                found.retry_delay_s = to_seconds(retry.retry_delay)
        except DecodeError:
            # A server that is not ours wrote it; its code and message still count.
            continue
    return found


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
    # This also removes lone surrogates, which protobuf refuses.
    return text[:size_bytes].encode("utf-8", "replace")[:size_bytes].decode("utf-8", "ignore")


# Durations: seconds and ``timedelta`` to ``google.protobuf.Duration`` and back.

_NANOS = 10**9

# The limit of the message's own definition: 10,000 years.
_MAX_SECONDS = 315_576_000_000


def to_duration(seconds: float) -> Duration:
    """``seconds`` to the nanosecond; a value that the message cannot hold becomes the nearest one that it can."""
    duration = Duration()
    put_duration(duration, seconds)
    return duration


def put_duration(into: Duration, seconds: float) -> None:
    """Set ``into``, which may be a field not present yet, as ``to_duration`` would."""
    if 0.0 <= seconds < _MAX_SECONDS:  # nearly all are; this costs half of what follows
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
