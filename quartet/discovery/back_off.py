"""How long to wait before trying an unreachable registry again."""

from __future__ import annotations

import random

_FIRST_S = 0.05
_LONGEST_S = 1.0


class BackOff:
    """Delays that double from 50 ms to 1 s, each shortened at random by up to half.

    The randomness keeps a fleet that lost its registry at one moment from coming back at one moment.
    """

    def __init__(self) -> None:
        self._num_failures = 0

    def next_delay_s(self) -> float:
        """How long to wait after one more failure, in seconds."""
        # Past 2**10 the longest delay has long been reached; a larger exponent would one day overflow.
        delay_s = min(_LONGEST_S, _FIRST_S * 2.0 ** min(self._num_failures, 10))
        self._num_failures += 1
        return delay_s * random.uniform(0.5, 1.0)

    @property
    def is_first(self) -> bool:
        """Whether nothing has failed since the last success: the failure worth a warning."""
        return self._num_failures == 0

    def reset(self) -> None:
        """It worked: begin with the shortest delay again."""
        self._num_failures = 0
