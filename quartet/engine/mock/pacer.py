"""Makes steps last as long as they should."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

# Between two steps of work that waited lies only this code; after a longer pause there was nothing to do.
_MAX_GAP_S = 0.001
# What is made up for of a delay: a process that was stopped for a minute does not rush through a minute's steps.
_MAX_LATENESS_S = 0.1


class StepPacer:
    """Ends each step when it is due, and has one that follows at once begin then, however late it really was.

    So neither the time that sleeping takes too long nor that spent between steps adds up, as long as the machine keeps
    up on the whole.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._due_at = -math.inf
        self._began_at = -math.inf

    def begin(self, *, is_continued: bool) -> None:
        """A step begins; ``is_continued``: some of its requests were in the last one, so nothing lay between."""
        now = self._clock()
        if is_continued or now - self._due_at <= _MAX_GAP_S:
            self._began_at = max(self._due_at, now - _MAX_LATENESS_S)
        else:
            self._began_at = now

    def end(self, duration_s: float) -> None:
        """Return when the step, which takes ``duration_s``, is over."""
        self._due_at = self._began_at + duration_s
        remaining_s = self._due_at - self._clock()
        if remaining_s > 0:
            self._sleep(remaining_s)
