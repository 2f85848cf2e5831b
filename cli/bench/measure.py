"""Counts and durations of one run, recorded while its requests run."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from cli.bench.load import Window
from quartet.client import ChoiceFinished, FinishReason, TimeBreakdown
from quartet.errors import ServingError
from quartet.rpc.errors import status_code

# Buckets of ``DurationHistogram``.
_GROWTH = 1.01
_LOWEST_S = 1e-6
_NUM_BUCKETS = 2400  # up to 6.5 hours
_BUCKETS_PER_E_FOLD = 1.0 / math.log(_GROWTH)


class DurationHistogram:
    """Durations in seconds, from a microsecond to hours; quantiles are within half a per cent, the mean is exact.

    The buckets are those of Gil Tene's HdrHistogram in spirit: their width is a share of the value, so that memory
    does not grow with the number of durations and one ``add`` costs well under a microsecond.
    """

    def __init__(self) -> None:
        self._counts = [0] * _NUM_BUCKETS
        self.count = 0
        self.sum_s = 0.0
        self.max_s = 0.0

    def add(self, value_s: float, count: int = 1) -> None:
        """Count ``value_s`` ``count`` times."""
        index = int(math.log(value_s / _LOWEST_S) * _BUCKETS_PER_E_FOLD) if value_s > _LOWEST_S else 0
        self._counts[min(index, _NUM_BUCKETS - 1)] += count
        self.count += count
        self.sum_s += value_s * count
        self.max_s = max(self.max_s, value_s)

    def quantile_s(self, share: float) -> float:
        """The smallest value, within half a per cent, that at least ``share`` of all don't exceed; 0 without any."""
        if not self.count:
            return 0.0
        cumulated = np.cumsum(self._counts)
        index = int(np.searchsorted(cumulated, math.ceil(share * self.count)))
        return min(_middle_s(index), self.max_s)

    def distribution(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Values in seconds, ascending, and the share of all that don't exceed each; both empty without any."""
        counts = np.asarray(self._counts)
        [used] = counts.nonzero()
        values = np.minimum(_LOWEST_S * _GROWTH ** (used + 0.5), self.max_s)
        return values, counts[used].cumsum() / max(1, self.count)


class Hop(StrEnum):
    """One part of a request's time, in the order in which the parts happen."""

    TOKENIZE = "tokenize"  # template and tokenizer
    ROUTER_QUEUE = "router_queue"  # in the router's queue, until there is room
    PREFILL_QUEUE = "prefill_queue"  # in the prefill worker's queue
    ONBOARD = "onboard"  # loading cached blocks from the memory or the disk of a worker's host, in place of computing
    PREFILL = "prefill"  # the rest of the prefill hop: computing the prompt, and the network both ways
    TRANSFER = "transfer"  # moving KV blocks
    DECODE_QUEUE = "decode_queue"  # in the decode worker's queue, transfer and onboard excluded
    DECODE = "decode"  # the rest of the time that the router saw: computing the tokens, and their way to it
    OUTSIDE = "outside"  # the time that the router did not see: network, this client, and its delay in sending


def split_time(seen: TimeBreakdown, e2e_s: float) -> Mapping[Hop, float]:
    """Seconds by hop; 0 for a hop that did not happen. Their sum is ``e2e_s``, unless the router saw more time."""
    prefill_queue_s, onboard_s = seen.prefill_queue_s or 0.0, seen.onboard_s or 0.0
    parts = {
        Hop.TOKENIZE: seen.tokenize_s or 0.0,
        Hop.ROUTER_QUEUE: seen.router_queue_s or 0.0,
        Hop.PREFILL_QUEUE: prefill_queue_s,
        Hop.ONBOARD: onboard_s,
        Hop.PREFILL: max(0.0, (seen.prefill_s or 0.0) - prefill_queue_s - onboard_s),
        Hop.TRANSFER: seen.transfer_s or 0.0,
        Hop.DECODE_QUEUE: seen.decode_queue_s or 0.0,
    }
    total_s = seen.total_s or 0.0
    parts[Hop.DECODE] = max(0.0, total_s - sum(parts.values()))
    parts[Hop.OUTSIDE] = max(0.0, e2e_s - total_s)
    return parts


@dataclass
class Moved:
    """What the transfers of requests moved by one way; ``duration_s``: of all of them, those at once counted each."""

    num_requests: int = 0
    size_bytes: int = 0
    duration_s: float = 0.0


@dataclass(frozen=True)
class ErrorKind:
    """How a request failed; ``reason`` is empty if the router cancelled it without an error."""

    status: str
    reason: str


@dataclass
class Totals:
    """Sums since the run began, warm-up included; two of them give the rates of an interval.

    Attributes:
        finished: requests that ended well.
        failed: requests that ended otherwise.
        output_tokens: tokens that came, also of requests that failed later.
        prompt_tokens: of requests that ended well.
        ttft_s, itl_s: seconds until first tokens, and between tokens; ``num_ttfts`` and ``num_itls`` of them.
        at_s: when the sums were read, by ``time.perf_counter``.
        cpu_s: CPU seconds of this process, all threads.
    """

    finished: int = 0
    failed: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    ttft_s: float = 0.0
    num_ttfts: int = 0
    itl_s: float = 0.0
    num_itls: int = 0
    at_s: float = 0.0
    cpu_s: float = 0.0

    def minus(self, other: Totals) -> Totals:
        """The difference, field by field."""
        return Totals(**{item.name: getattr(self, item.name) - getattr(other, item.name) for item in fields(self)})


@dataclass
class Measured:
    """Counts and durations of the requests that were sent while the window was open.

    Attributes:
        cut_off: requests that this client gave up: the user interrupted it, or they did not end in time.
        itl: a delta of k tokens counts as k gaps, each a k-th of the wait for it. The first delta counts none.
        e2e: of requests that ended well.
        send_delay: from when a request was due until it was sent.
        hop_s: seconds by hop, of requests that ended well.
        moved: by way, of those among them whose blocks were moved; of a request with several attempts, the last's way.
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
    moved: defaultdict[str, Moved] = field(default_factory=lambda: defaultdict(Moved))


class Recorder:
    """Records what the requests of one run do.

    Attributes:
        num_running: requests that run now.
        measured: the figures that become the result.
    """

    def __init__(self, window: Window) -> None:
        self.num_running = 0
        self.measured = Measured()
        self._window = window
        self._totals = Totals()
        self._opened: Totals | None = None
        self._closed: Totals | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def open(self) -> None:
        """Requests that begin from now on are measured."""
        self._window.open()
        self._opened = self.totals()

    def close(self) -> None:
        """Requests that begin from now on are not measured; those that run still are. A second call does nothing."""
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
        """A copy of the sums, with the present time and CPU time."""
        return replace(self._totals, at_s=time.perf_counter(), cpu_s=time.process_time())

    async def idle(self) -> None:
        """Return when no request runs."""
        await self._idle.wait()

    def begin(self, due_at: float) -> RequestRecord:
        """Record that a request is sent now that was due at ``due_at``, by ``time.perf_counter``."""
        self.num_running += 1
        self._idle.clear()
        measured = self.measured if self._window.is_open else None
        if measured is not None:
            measured.sent += 1
            measured.send_delay.add(max(0.0, time.perf_counter() - due_at))
        return RequestRecord(self, self._totals, measured, due_at)

    def end(self) -> None:
        """A request has ended; called once for each by its record."""
        self.num_running -= 1
        if not self.num_running:
            self._idle.set()


class RequestRecord:
    """Records what one request does; exactly one call of ``finished``, ``failed`` or ``cut_off`` ends it."""

    __slots__ = ("_due_at", "_last_at", "_measured", "_recorder", "_totals")

    def __init__(self, recorder: Recorder, totals: Totals, measured: Measured | None, due_at: float) -> None:
        """Made by ``Recorder.begin``; ``measured`` is ``None`` for a request that does not count."""
        self._recorder = recorder
        self._totals = totals
        self._measured = measured
        self._due_at = due_at
        self._last_at: float | None = None

    def tokens(self, num_tokens: int) -> None:
        """``num_tokens`` tokens came together, now."""
        now = time.perf_counter()
        totals = self._totals
        totals.output_tokens += num_tokens
        if self._last_at is None:
            totals.ttft_s += now - self._due_at
            totals.num_ttfts += 1
            if self._measured is not None:
                self._measured.ttft.add(now - self._due_at)
        else:
            totals.itl_s += now - self._last_at
            totals.num_itls += num_tokens
            if self._measured is not None:
                self._measured.itl.add((now - self._last_at) / num_tokens, num_tokens)
        self._last_at = now

    def finished(self, end: ChoiceFinished) -> None:
        """It ended in order. A cancelled request counts as failed: this client cancels none in that way."""
        if end.reason is FinishReason.CANCELLED:
            self._fail(ErrorKind("CANCELLED", ""), "the router cancelled the request")
            return
        self._recorder.end()
        self._totals.finished += 1
        self._totals.prompt_tokens += end.usage.num_prompt_tokens
        if self._measured is not None:
            self._count(self._measured, end, time.perf_counter() - self._due_at)

    def failed(self, error: ServingError) -> None:
        """It failed with ``error``."""
        self._fail(ErrorKind(status_code(error).name, error.reason), error.message)

    def cut_off(self) -> None:
        """This client gave the request up."""
        self._recorder.end()
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
        if end.time.transfer_bytes:
            moved = measured.moved[end.time.transfer_way or "unknown"]
            moved.num_requests += 1
            moved.size_bytes += end.time.transfer_bytes
            moved.duration_s += end.time.transfer_s or 0.0

    def _fail(self, kind: ErrorKind, message: str) -> None:
        self._recorder.end()
        self._totals.failed += 1
        if self._measured is not None:
            self._measured.errors[kind] += 1
            self._measured.examples.setdefault(kind, message)


def _middle_s(index: int) -> float:
    """The value that stands for a bucket: the geometric mean of its bounds, off by half a per cent at most."""
    return _LOWEST_S * math.pow(_GROWTH, index + 0.5)
