"""Counts and durations of one run, taken down while its requests run."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field, fields, replace

from cli.bench.histogram import DurationHistogram
from cli.bench.hops import Hop, split_time
from cli.bench.window import Window
from quartet.client import ChoiceFinished, FinishReason
from quartet.errors import ServingError
from quartet.rpc.errors import status_code


@dataclass(frozen=True)
class ErrorKind:
    """What a request failed with; the empty ``reason`` is that of an end in order, but before its time."""

    status: str
    reason: str


@dataclass
class Totals:
    """Sums since the run began, the warm-up included; their differences over an interval are rates.

    Attributes:
        finished: requests that ended well.
        failed: requests that ended otherwise.
        output_tokens: tokens that came, whatever became of their requests.
        prompt_tokens: of requests that ended well.
        at_s: when these were read, by ``time.perf_counter``.
        cpu_s: CPU seconds of this process, all threads.
    """

    finished: int = 0
    failed: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    at_s: float = 0.0
    cpu_s: float = 0.0

    def minus(self, other: Totals) -> Totals:
        """The difference, field by field."""
        return Totals(**{item.name: getattr(self, item.name) - getattr(other, item.name) for item in fields(self)})


@dataclass
class Recent:
    """Sums since somebody last looked: what TTFT and ITL are now."""

    ttft_s: float = 0.0
    num_ttfts: int = 0
    itl_s: float = 0.0
    num_itls: int = 0


@dataclass
class Measured:
    """Of requests that were sent while the window was open.

    Attributes:
        cut_off: requests that this client gave up: it was interrupted, or they did not end in time.
        itl: a delta with k tokens counts k gaps of a k-th of the wait for it each. The first delta counts none.
        e2e: of requests that ended well.
        send_delay: from when a request was due until it was sent.
        hop_s: seconds by hop, of requests that ended well.
        examples: a message for each kind of error.
    """

    sent: int = 0
    finished: int = 0
    cut_off: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    ttft: DurationHistogram = field(default_factory=DurationHistogram)
    itl: DurationHistogram = field(default_factory=DurationHistogram)
    e2e: DurationHistogram = field(default_factory=DurationHistogram)
    send_delay: DurationHistogram = field(default_factory=DurationHistogram)
    errors: Counter[ErrorKind] = field(default_factory=Counter)
    examples: dict[ErrorKind, str] = field(default_factory=dict)
    finish_reasons: Counter[FinishReason] = field(default_factory=Counter)
    hop_s: dict[Hop, float] = field(default_factory=lambda: dict.fromkeys(Hop, 0.0))


class Recorder:
    """Takes down what the requests of one run do.

    Attributes:
        num_running: requests that run now.
        recent: for a display, which puts a new one in its place.
        measured: what becomes the result.
    """

    def __init__(self, window: Window) -> None:
        self.num_running = 0
        self.recent = Recent()
        self.measured = Measured()
        self._window = window
        self._totals = Totals()
        self._opened: Totals | None = None
        self._closed: Totals | None = None

    def open(self) -> None:
        """Requests that begin from now on are measured."""
        self._window.open()
        self._opened = self.totals()

    def close(self) -> None:
        """Requests that begin from now on are not measured; those that run still are. The second time does nothing."""
        if self._closed is None:
            self._window.close()
            self._closed = self.totals()

    @property
    def in_window(self) -> Totals:
        """What happened between ``open`` and ``close``; all zero where it never opened."""
        if self._opened is None or self._closed is None:
            return Totals()
        return self._closed.minus(self._opened)

    def totals(self) -> Totals:
        """A copy of the sums, with the time and the CPU time of now."""
        return replace(self._totals, at_s=time.perf_counter(), cpu_s=time.process_time())

    def begin(self, due_at: float) -> RequestRecord:
        """A request is sent now that was due at ``due_at``, by ``time.perf_counter``."""
        self.num_running += 1
        measured = self.measured if self._window.is_open else None
        if measured is not None:
            measured.sent += 1
            measured.send_delay.add(max(0.0, time.perf_counter() - due_at))
        return RequestRecord(self, self._totals, measured, due_at)


class RequestRecord:
    """What one request does; exactly one of ``finished``, ``failed`` and ``cut_off`` ends it."""

    __slots__ = ("_due_at", "_last_at", "_measured", "_recorder", "_totals")

    def __init__(self, recorder: Recorder, totals: Totals, measured: Measured | None, due_at: float) -> None:
        """Made by ``Recorder.begin``; ``measured`` is ``None`` for a request that does not count."""
        self._recorder = recorder
        self._totals = totals
        self._measured = measured
        self._due_at = due_at
        self._last_at: float | None = None

    def tokens(self, num_tokens: int) -> None:
        """That many tokens came together, now."""
        now = time.perf_counter()
        recent = self._recorder.recent
        self._totals.output_tokens += num_tokens
        if self._last_at is None:
            recent.ttft_s += now - self._due_at
            recent.num_ttfts += 1
            if self._measured is not None:
                self._measured.ttft.add(now - self._due_at)
        else:
            recent.itl_s += now - self._last_at
            recent.num_itls += num_tokens
            if self._measured is not None:
                self._measured.itl.add((now - self._last_at) / num_tokens, num_tokens)
        self._last_at = now

    def finished(self, end: ChoiceFinished) -> None:
        """It ended in order; one that was cancelled, which nobody here asked for, has failed."""
        if end.reason is FinishReason.CANCELLED:
            self._fail(ErrorKind("CANCELLED", ""), "the router cancelled the request")
            return
        self._recorder.num_running -= 1
        self._totals.finished += 1
        self._totals.prompt_tokens += end.usage.num_prompt_tokens
        if self._measured is not None:
            self._count(self._measured, end, time.perf_counter() - self._due_at)

    def failed(self, error: ServingError) -> None:
        """It failed."""
        self._fail(ErrorKind(status_code(error).name, error.reason), error.message)

    def cut_off(self) -> None:
        """This client gave it up."""
        self._recorder.num_running -= 1
        if self._measured is not None:
            self._measured.cut_off += 1

    def _count(self, measured: Measured, end: ChoiceFinished, e2e_s: float) -> None:
        measured.finished += 1
        measured.prompt_tokens += end.usage.num_prompt_tokens
        measured.cached_tokens += end.usage.num_cached_tokens
        measured.output_tokens += end.usage.num_output_tokens
        measured.finish_reasons[end.reason] += 1
        measured.e2e.add(e2e_s)
        for hop, duration_s in split_time(end.time, e2e_s).items():
            measured.hop_s[hop] += duration_s

    def _fail(self, kind: ErrorKind, message: str) -> None:
        self._recorder.num_running -= 1
        self._totals.failed += 1
        if self._measured is not None:
            self._measured.errors[kind] += 1
            self._measured.examples.setdefault(kind, message)
