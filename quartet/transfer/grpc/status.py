"""gRPC statuses as a puller sees them, back into the errors that the source raised."""

from __future__ import annotations

from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode
from grpc.aio import AioRpcError

from quartet.errors import (
    HandOffNotFoundError,
    HandOffStateError,
    LayoutMismatchError,
    ServingError,
    StaleEpochError,
    TransferError,
    TransferTimeoutError,
    WorkerUnavailableError,
)

_BY_REASON: dict[str, type[ServingError]] = {
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
_BY_CODE: dict[StatusCode, type[ServingError]] = {
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
    error_type = _BY_REASON.get(_reason(error)) or _BY_CODE.get(error.code(), TransferError)
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
