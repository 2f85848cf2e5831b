"""What a failed attempt means for the next one, whoever counts the attempts; pure."""

from __future__ import annotations

from quartet import errors
from quartet.errors import ServingError

#: Trying again elsewhere would end the same way, or nobody waits any more.
FINAL = (
    errors.InvalidRequestError,
    errors.ProtocolError,
    errors.MessageTooLargeError,
    errors.ModelNotFoundError,
    errors.PermissionDeniedError,
    errors.UnauthenticatedError,
    errors.UnimplementedError,
    errors.RequestTimeoutError,
)
#: No room just now.
_CAPACITY = (errors.OutOfBlocksError, errors.QueueFullError)

_FIRST_PAUSE_S, _PAUSE_GROWTH, _MAX_PAUSE_S = 0.02, 4.0, 1.0


def pause_s(error: ServingError, num_failures: int) -> float:
    """Seconds to pause after so many failed attempts, the last of which a worker ended with ``error``."""
    is_capacity = isinstance(error, _CAPACITY)
    if error.retry_delay_s is not None and is_capacity:
        return min(error.retry_delay_s, _MAX_PAUSE_S)
    # The first move elsewhere is free, unless everybody may be short of the same thing.
    num_pauses = num_failures - (0 if is_capacity else 1)
    return min(_FIRST_PAUSE_S * _PAUSE_GROWTH ** (num_pauses - 1), _MAX_PAUSE_S) if num_pauses else 0.0
