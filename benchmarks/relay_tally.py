"""What a load client counts for each token; it has to cost little beside what it measures."""

from __future__ import annotations

import time
from collections import Counter

from benchmarks.paced_clock import PacedClock
from benchmarks.relay_job import Window, new_latencies

_NS_PER_US = 1_000


class Tally:
    """Counts since the last ``begin``.

    Attributes:
        num_waiting: streams that don't run yet.
        errors: requests that failed, by what was said.
    """

    def __init__(self, clock: PacedClock) -> None:
        self.num_waiting = 0
        self.errors: Counter[str] = Counter()
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Forget what was counted; errors are remembered for ever."""
        self._began_at, self._began_cpu_s = time.monotonic(), time.process_time()
        self._num_tokens = self._num_messages = self._num_requests = 0
        self._latencies_us = new_latencies()

    def read(self) -> Window:
        """What was counted."""
        return Window(
            duration_s=time.monotonic() - self._began_at,
            num_tokens=self._num_tokens,
            num_messages=self._num_messages,
            num_requests=self._num_requests,
            cpu_s=time.process_time() - self._began_cpu_s,
            errors=dict(self.errors),
            latencies_us=self._latencies_us,
        )

    def message(self) -> int:
        """A message with tokens came; the time, for ``tokens``."""
        self._num_messages += 1
        return time.monotonic_ns()

    def tokens(self, seed: int, offset: int, num_tokens: int, now_ns: int) -> None:
        """It holds these of the request ``seed``, the first being output token number ``offset``."""
        self._num_tokens += num_tokens
        for number in range(offset, offset + num_tokens):
            self._latencies_us.append((now_ns - self._clock.made_at_ns(seed, number)) // _NS_PER_US)

    def request(self, num_tokens: int) -> None:
        """A whole request has ended well."""
        self._num_requests += 1
        self._num_tokens += num_tokens

    def failed(self, why: str) -> None:
        """A request has failed."""
        self.errors[why] += 1
