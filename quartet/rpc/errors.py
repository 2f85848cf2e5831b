"""The one table from errors to gRPC codes, and errors on the wire: as a status, or as a ``Failure`` in a slot.

A status carries ``google.rpc`` details: ErrorInfo (reason), BadRequest (the field at fault), RetryInfo (when to try
again). Whatever is not a ``ServingError`` is our own bug: the caller learns no more than INTERNAL, the log everything.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode

from quartet import errors
from quartet.errors import ServingError
from quartet.rpc.durations import to_duration, to_seconds
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
    errors.SealError: StatusCode.PERMISSION_DENIED,
    errors.NoSealKeyError: StatusCode.FAILED_PRECONDITION,
    errors.SealKeyUnknownError: StatusCode.PERMISSION_DENIED,
    errors.SealForeignError: StatusCode.FAILED_PRECONDITION,
    errors.SealExpiredError: StatusCode.FAILED_PRECONDITION,
    errors.SealUsedError: StatusCode.ALREADY_EXISTS,
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
