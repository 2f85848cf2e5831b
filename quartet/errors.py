"""Every way in which serving can fail, as types that know nothing of gRPC.

``quartet.rpc.errors`` holds the one table that turns each of them into a status; a test checks that
every ``ServingError`` is listed there.
"""

from __future__ import annotations


class ServingError(Exception):
    """A failure that the caller gets as a status.

    Attributes:
        message: one sentence for a person; never holds a prompt, a ticket or a secret.
        field: dotted path of the request field at fault (``sampling.top_p``), else ``None``.
        retry_delay_s: when trying again makes sense, in seconds, else ``None``.
    """

    #: Stable UPPER_SNAKE_CASE name that programs can match on (``google.rpc.ErrorInfo.reason``).
    reason = "INTERNAL"

    def __init__(self, message: str, *, field: str | None = None, retry_delay_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_delay_s = retry_delay_s


class ConfigError(Exception):
    """A configuration that can't be used; the message names the setting. It never reaches a caller."""


class EngineError(ServingError):
    """The engine broke while it worked on the request; our bug or a dying device."""

    reason = "ENGINE_FAILED"


class ModelFilesError(ServingError):
    """A model's tokenizer, template or configuration file is missing or malformed."""

    reason = "MODEL_FILES_INVALID"


# The caller's fault.


class InvalidRequestError(ServingError):
    """A field's value is impossible; ``field`` names it."""

    reason = "INVALID_FIELD"


class PromptTooLongError(InvalidRequestError):
    """Prompt and wanted tokens do not fit the model or the whole block pool."""

    reason = "PROMPT_TOO_LONG"


class UnsupportedFieldError(InvalidRequestError):
    """The field is fine, but no worker of this pool can honour it."""

    reason = "UNSUPPORTED_FIELD"


class InvalidMediaError(InvalidRequestError):
    """A media file is damaged, or is not of a kind that the model takes."""

    reason = "MEDIA_INVALID"


class MediaTooLargeError(InvalidRequestError):
    """A media file has more bytes, pixels or tokens than is allowed."""

    reason = "MEDIA_TOO_LARGE"


class MediaFetchError(InvalidRequestError):
    """A media item's URL gives nothing, or not in time."""

    reason = "MEDIA_NOT_FETCHED"


class ProtocolError(ServingError):
    """Messages of a stream in a wrong order or shape."""

    reason = "PROTOCOL_VIOLATION"


class MessageTooLargeError(ServingError):
    """A message exceeds the plane's limit; sending it would end a shared stream."""

    reason = "MESSAGE_TOO_LARGE"


class ModelNotFoundError(ServingError):
    """No pool serves a model of this name."""

    reason = "MODEL_NOT_FOUND"


class ModelMismatchError(ServingError):
    """The server that was asked serves another model than the one that was named by its fingerprint."""

    reason = "MODEL_MISMATCH"


class DuplicateRequestError(ServingError):
    """A start repeats the key (RPC, request id, choice, attempt) of a running one."""

    reason = "DUPLICATE_REQUEST"


class PermissionDeniedError(ServingError):
    """The caller's identity may not call this method, or the secret is wrong."""

    reason = "PERMISSION_DENIED"


class MediaNotAllowedError(PermissionDeniedError):
    """The configuration allows no such path, scheme, host or address for media."""

    reason = "MEDIA_NOT_ALLOWED"


class UnauthenticatedError(ServingError):
    """The caller showed no identity where one is needed."""

    reason = "UNAUTHENTICATED"


class UnimplementedError(ServingError):
    """The method is part of the contract, but this server does not offer it."""

    reason = "UNIMPLEMENTED"


# Signed starts. After any of these but the first two a client asks the router for another placement.


class SignedStartError(ServingError):
    """The MAC of a signed start is not that of its bytes under the key that it names."""

    reason = "SIGNED_START_INVALID"


class NoSigningKeyError(ServingError):
    """This server has no key: it neither makes nor takes signed starts."""

    reason = "NO_SIGNING_KEY"


class SigningKeyUnknownError(ServingError):
    """The key that a signed start names is not, or no longer, one of this server's."""

    reason = "SIGNING_KEY_UNKNOWN"


class SignedStartForeignError(ServingError):
    """The signed start is for another worker, or for another life of this one."""

    reason = "SIGNED_START_FOREIGN"


class SignedStartExpiredError(ServingError):
    """The signed start came too late."""

    reason = "SIGNED_START_EXPIRED"


class SignedStartUsedError(ServingError):
    """The signed start was used before: each is valid once."""

    reason = "SIGNED_START_USED"


class PlaceTooLargeError(ServingError):
    """There is no room for all choices of a request at once, as placing them takes; Generate runs them in turn."""

    reason = "PLACE_TOO_LARGE"


# Capacity and life.


class OutOfBlocksError(ServingError):
    """Too few free KV blocks; nothing was changed."""

    reason = "OUT_OF_BLOCKS"


class QueueFullError(ServingError):
    """The queue is full or the request waited there for too long; try again later."""

    reason = "QUEUE_FULL"


class WorkerUnavailableError(ServingError):
    """No worker that can serve the request is reachable, or the one that did is gone."""

    reason = "WORKER_UNAVAILABLE"


class RouterUnavailableError(ServingError):
    """No router can be reached, or the connection to the one that answered broke."""

    reason = "ROUTER_UNAVAILABLE"


class DrainingError(ServingError):
    """The server is going away and takes nothing new."""

    reason = "DRAINING"


class StalledStreamError(ServingError):
    """The reader of a stream took nothing for too long."""

    reason = "STREAM_STALLED"


class SlowReaderError(ServingError):
    """The reader of a session lets more of a request gather than is kept for it."""

    reason = "READER_TOO_SLOW"


class RequestTimeoutError(ServingError):
    """The request's own timeout ran out."""

    reason = "TIMEOUT"


class RequestCancelledError(ServingError):
    """The caller cancelled, or its stream broke."""

    reason = "CANCELLED"


class DiscoveryError(ServingError):
    """The registry cannot be reached or refuses us."""

    reason = "DISCOVERY_UNAVAILABLE"


# Hand-offs and transfers: the router's answer to each is to prefill again.


class HandOffNotFoundError(ServingError):
    """No such hand-off: never made, ended, expired, or asked for with a wrong secret."""

    reason = "HAND_OFF_NOT_FOUND"


class HandOffStateError(ServingError):
    """The hand-off is in a state that does not allow the step asked for."""

    reason = "HAND_OFF_STATE"


class StaleEpochError(ServingError):
    """The message is for an earlier life of this worker."""

    reason = "STALE_EPOCH"


class LayoutMismatchError(ServingError):
    """Blocks of this dtype, shape, block size or model cannot be taken over here."""

    reason = "LAYOUT_MISMATCH"


class TransferError(ServingError):
    """Moving blocks failed; the blocks that arrived must be thrown away."""

    reason = "TRANSFER_FAILED"


class TransferTimeoutError(TransferError):
    """Moving blocks took too long."""

    reason = "TRANSFER_TIMEOUT"


class MediaLostError(ServingError):
    """The KV of a prompt's media was lost, and their embeddings are not here to compute it again."""

    reason = "MEDIA_LOST"
