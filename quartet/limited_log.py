"""Warnings that a peer can cause, a few a minute of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

_LIMITED_INTERVAL_S = 60.0


class LimitedLog:
    """What a peer can cause to be logged as often as it likes: a few a minute are written, the others only counted.

    The first one after a minute in which some were left out says how many. No timer runs: a count that nothing follows
    is never written. Use it on one thread at a time.
    """

    def __init__(
        self, logger: logging.Logger, *, max_per_minute: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Write at most ``max_per_minute`` records to ``logger`` in 60 s of ``clock``."""
        self._logger = logger
        self._max_per_minute = max_per_minute
        self._clock = clock
        self._began_at = -_LIMITED_INTERVAL_S
        self._num_written = self._num_left_out = 0

    def warning(self, message: str, *args: object) -> None:
        """Write the warning, or count it."""
        self._log(logging.WARNING, message, args)

    def exception(self, message: str, *args: object) -> None:
        """Write the error with the traceback of the exception that is handled now, or count it."""
        self._log(logging.ERROR, message, args, exc_info=True)

    def _log(self, level: int, message: str, args: tuple[object, ...], *, exc_info: bool = False) -> None:
        now = self._clock()
        if now - self._began_at >= _LIMITED_INTERVAL_S:
            self._began_at, self._num_written = now, 0
        if self._num_written == self._max_per_minute:
            self._num_left_out += 1
            return
        self._num_written += 1
        if self._num_left_out:
            message, args = message + " (%d more like it were not logged)", (*args, self._num_left_out)
            self._num_left_out = 0
        self._logger.log(level, message, *args, exc_info=exc_info)
