"""Every way in which serving can fail, as types that know nothing of gRPC.

``quartet.rpc.errors`` holds the one table that turns each of them into a status; a test checks that
every ``ServingError`` is listed there.
"""

from __future__ import annotations

from typing import Any


class ServingError(Exception):
    """A failure that the caller gets as a status.

    Attributes:
        message: one sentence for a person; never holds a prompt, a ticket or a secret.
        field: dotted path of the request field at fault (``sampling.top_p``), else ``None``.
        retry_delay_s: when trying again makes sense, in seconds, else ``None``.
    """

    #: Stable UPPER_SNAKE_CASE name that programs can match on (``google.rpc.ErrorInfo.reason``).
    reason = "INTERNAL"

    def __init_subclass__(cls, *, reason: str = "", **more: object) -> None:
        """``reason``: of the new type; empty: that of its base."""
        super().__init_subclass__(**more)
        cls.reason = reason or cls.reason

    def __init__(self, message: str, *, field: str | None = None, retry_delay_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_delay_s = retry_delay_s


def all_kinds(of: type[ServingError] = ServingError) -> set[type[ServingError]]:
    """Each kind of failure that is defined by now: ``of`` and all below it."""
    return {of}.union(*map(all_kinds, of.__subclasses__()))


class ConfigError(Exception):
    """A configuration that can't be used; the message names the setting. It never reaches a caller."""


class EngineError(ServingError, reason="ENGINE_FAILED"):
    """The engine broke while it worked on the request; our bug or a dying device."""


class ModelFilesError(ServingError, reason="MODEL_FILES_INVALID"):
    """A model's tokenizer, template or configuration file is missing or malformed."""


# The caller's fault.


class InvalidRequestError(ServingError, reason="INVALID_FIELD"):
    """A field's value is impossible; ``field`` names it."""


class PromptTooLongError(InvalidRequestError, reason="PROMPT_TOO_LONG"):
    """Prompt and wanted tokens do not fit the model or the whole block pool."""


class UnsupportedFieldError(InvalidRequestError, reason="UNSUPPORTED_FIELD"):
    """The field is fine, but no worker of this pool can honour it."""


class InvalidMediaError(InvalidRequestError, reason="MEDIA_INVALID"):
    """A media file is damaged, or is not of a kind that the model takes."""


class MediaTooLargeError(InvalidRequestError, reason="MEDIA_TOO_LARGE"):
    """A media file has more bytes, pixels or tokens than is allowed."""


class MediaFetchError(InvalidRequestError, reason="MEDIA_NOT_FETCHED"):
    """A media item's URL gives nothing, or not in time."""


class ProtocolError(ServingError, reason="PROTOCOL_VIOLATION"):
    """Messages of a stream in a wrong order or shape.

    Attributes:
        size_bytes, measure_s: as ``MessageTooLargeError``'s, of a message that is malformed.
    """

    size_bytes = 0
    measure_s = 0.0


class MessageTooLargeError(ServingError, reason="MESSAGE_TOO_LARGE"):
    """A message exceeds the plane's limit: it would end a shared stream, or hold its receiver for too long.

    Attributes:
        head: the first bytes of a message that was refused before it was parsed.
        size_bytes: of such a message.
        measure_s: CPU time that it took to find that it is too large, in seconds.
    """

    size_bytes = 0
    measure_s = 0.0

    def __init__(self, message: str, *, head: bytes = b"", **more: Any) -> None:
        super().__init__(message, **more)
        self.head = head


class ModelNotFoundError(ServingError, reason="MODEL_NOT_FOUND"):
    """No pool serves a model of this name."""


class ModelUnavailableError(ServingError, reason="MODEL_UNAVAILABLE"):
    """Whether the model is served is not known now: the router has not heard of its workers yet, or they have gone."""


class ModelMismatchError(ServingError, reason="MODEL_MISMATCH"):
    """The server that was asked serves another model than the one that was named by its fingerprint."""


class DuplicateRequestError(ServingError, reason="DUPLICATE_REQUEST"):
    """A start repeats the key (RPC, request id, choice, attempt) of a running one."""


class PermissionDeniedError(ServingError, reason="PERMISSION_DENIED"):
    """The caller's identity may not call this method, or the secret is wrong."""


class MediaNotAllowedError(PermissionDeniedError, reason="MEDIA_NOT_ALLOWED"):
    """The configuration allows no such path, scheme, host or address for media."""


class UnauthenticatedError(ServingError, reason="UNAUTHENTICATED"):
    """The caller showed no identity where one is needed."""


class UnimplementedError(ServingError, reason="UNIMPLEMENTED"):
    """The method is part of the contract, but this server does not offer it."""


# Signed starts. After any of these but the first two a client asks the router for another placement.


class SignedStartError(ServingError, reason="SIGNED_START_INVALID"):
    """The MAC of a signed start is not that of its bytes under the key that it names."""


class NoSigningKeyError(ServingError, reason="NO_SIGNING_KEY"):
    """This server has no key: it neither makes nor takes signed starts."""


class SigningKeyUnknownError(ServingError, reason="SIGNING_KEY_UNKNOWN"):
    """The key that a signed start names is not, or no longer, one of this server's."""


class SignedStartForeignError(ServingError, reason="SIGNED_START_FOREIGN"):
    """The signed start is for another worker, or for another epoch of this one."""


class SignedStartExpiredError(ServingError, reason="SIGNED_START_EXPIRED"):
    """The signed start came too late."""


class SignedStartUsedError(ServingError, reason="SIGNED_START_USED"):
    """The signed start was used before: each is valid once."""


class PlaceTooLargeError(ServingError, reason="PLACE_TOO_LARGE"):
    """There is no room for all choices of a request at once, as placing them takes; Generate runs them in turn."""


# Capacity and life.


class OutOfBlocksError(ServingError, reason="OUT_OF_BLOCKS"):
    """Too few free KV blocks; nothing was changed."""


class QueueFullError(ServingError, reason="QUEUE_FULL"):
    """The queue is full or the request waited there for too long; try again later."""


class RateLimitedError(ServingError, reason="RATE_LIMITED"):
    """The tenant, or its API key, has used up what it may ask for in a minute; the message names the limit."""


class PlacementBudgetError(QueueFullError, reason="PLACEMENT_BUDGET"):
    """The tenant's clients don't take up what was placed for them; the message says which budget is used up."""


class WorkerUnavailableError(ServingError, reason="WORKER_UNAVAILABLE"):
    """No worker that can serve the request is reachable, or the one that did is gone."""


class WorkersLostError(ServingError, reason="WORKERS_LOST"):
    """As many workers were lost while they ran the request as one request may take with it: it may be the cause."""


class StreamIdleError(WorkerUnavailableError, reason="STREAM_IDLE"):
    """The worker ended a stream on which no request ran for a long time; the next one opens another."""


class RouterUnavailableError(ServingError, reason="ROUTER_UNAVAILABLE"):
    """No router can be reached, or the connection to the one that answered broke."""


class SessionIdleError(RouterUnavailableError, reason="SESSION_IDLE"):
    """The router ended a session in which no request ran for a long time; the next one opens another."""


class DrainingError(ServingError, reason="DRAINING"):
    """The server is going away and takes nothing new."""


class StalledStreamError(ServingError, reason="STREAM_STALLED"):
    """The reader of a stream took nothing for too long."""


class SlowReaderError(ServingError, reason="READER_TOO_SLOW"):
    """The reader of a session lets more of a request gather than is kept for it."""


class RequestTimeoutError(ServingError, reason="TIMEOUT"):
    """The request's own timeout ran out."""


class RequestCancelledError(ServingError, reason="CANCELLED"):
    """The caller cancelled, or its stream broke."""


class DiscoveryError(ServingError, reason="DISCOVERY_UNAVAILABLE"):
    """The registry cannot be reached or refuses us."""


class WorkerReplacedError(ServingError, reason="WORKER_REPLACED"):
    """Another process is registered under this worker's id: this one is to finish its present work and end."""


# Hand-offs and transfers: the router's answer to each is to prefill again.


class HandOffNotFoundError(ServingError, reason="HAND_OFF_NOT_FOUND"):
    """No such hand-off: never made, ended, expired, or asked for with a wrong secret."""


class HandOffStateError(ServingError, reason="HAND_OFF_STATE"):
    """The hand-off is in a state that does not allow the step asked for."""


class StaleEpochError(ServingError, reason="STALE_EPOCH"):
    """The message is for an earlier epoch of this worker."""


class LayoutMismatchError(ServingError, reason="LAYOUT_MISMATCH"):
    """Blocks of this dtype, shape, block size or model cannot be taken over here."""


class NoHandOffError(ServingError, reason="NO_HAND_OFF"):
    """This engine hands no blocks off, or takes none over: the router has the decode worker prefill."""


class TransferError(ServingError, reason="TRANSFER_FAILED"):
    """Moving blocks failed; the blocks that arrived must be thrown away."""


class TransferTimeoutError(TransferError, reason="TRANSFER_TIMEOUT"):
    """Moving blocks took too long."""


class MediaLostError(ServingError, reason="MEDIA_LOST"):
    """The KV of a prompt's media was lost, and their embeddings are not here to compute it again."""
