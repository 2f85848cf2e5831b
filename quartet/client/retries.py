"""What a failed attempt of a direct request means for the next one; pure."""

from __future__ import annotations

from quartet import errors
from quartet.client.routers import ClientClosedError
from quartet.errors import ServingError
from quartet.rpc import retry

MAX_ATTEMPTS = 5

#: Another placement would end the same way.
_FINAL = (
    *retry.FINAL,
    errors.StalledStreamError,
    errors.SealError,
    errors.NoSealKeyError,
    errors.ModelFilesError,
    ClientClosedError,
)
#: What a router refuses to place a choice with that may soon be otherwise: it is full, or going away and coming back.
_PASSING = (
    errors.QueueFullError,
    errors.DrainingError,
    errors.RouterUnavailableError,
    errors.WorkerUnavailableError,
)

#: Longer than between workers: a router that restarts takes seconds, and often there is no other.
_FIRST_ROUTER_PAUSE_S, _MAX_ROUTER_PAUSE_S = 0.5, 5.0


class Retries:
    """Counts the failed attempts of one choice."""

    def __init__(self) -> None:
        """None has failed."""
        self._num_failures = 0

    def note(self, error: ServingError) -> float:
        """Learn of a failure at a decode worker and return the seconds to pause before asking for another placement.

        Raises:
            ServingError: ``error``, where another placement makes no sense, or there were enough of them.
        """
        self._count(error, is_final=isinstance(error, _FINAL))
        return retry.pause_s(error, self._num_failures)

    def note_refusal(self, error: ServingError) -> float:
        """Learn that no router placed the choice again and return the seconds to pause before asking once more.

        Raises:
            ServingError: ``error``, where asking makes no sense, or there were enough attempts.
        """
        self._count(error, is_final=isinstance(error, _FINAL) or not isinstance(error, _PASSING))
        pause_s = error.retry_delay_s
        if pause_s is None:
            pause_s = _FIRST_ROUTER_PAUSE_S * 2 ** (self._num_failures - 1)
        return min(pause_s, _MAX_ROUTER_PAUSE_S)

    def _count(self, error: ServingError, *, is_final: bool) -> None:
        self._num_failures += 1
        if is_final or self._num_failures >= MAX_ATTEMPTS:
            raise error
