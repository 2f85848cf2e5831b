"""What a replay measured: latencies, throughput, reuse, and how even the workers' shares of the work were."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from operator import sub

import numpy as np

_MS = 1e3


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Mean and percentiles, in milliseconds."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PolicyResult:
    """One policy's replay of a trace.

    Attributes:
        ttft_ms, itl_ms, e2e_ms: from arrival at the router to the first token; from token to token; from arrival to the
            last token.
        reuse_ratio: prompt tokens found in a cache, over all prompt tokens of the requests that completed.
        imbalance: prompt tokens that the busiest worker computed, over the mean of all workers.
        requests_refused, requests_completed: of all in the trace.
        goodput_per_s: requests a second that completed within the objectives.
        output_tokens_per_s: over the time from the first arrival to the last token.
        duration_s: that time, in the replay's seconds.
        cpu_s: CPU time of the replay.
        host_ratio, disk_ratio: prompt tokens that came from the host's memory or from disk, over the same; a part of
            ``reuse_ratio``.
        blocks_dropped: evicted blocks that did not reach the host, for want of time or room.
        session_ttft_ms, other_ttft_ms: ``ttft_ms`` of requests that belong to a session, and of all others.
        prefill_busy, decode_busy: share of ``duration_s`` for which steps ran, of the workers that only prefill and of
            the others; the mean over them. 0: there are none.
    """

    ttft_ms: Spread
    itl_ms: Spread
    e2e_ms: Spread
    reuse_ratio: float
    imbalance: float
    requests_refused: int
    requests_completed: int
    goodput_per_s: float
    output_tokens_per_s: float
    duration_s: float
    cpu_s: float
    host_ratio: float = 0.0
    disk_ratio: float = 0.0
    blocks_dropped: int = 0
    session_ttft_ms: Spread = Spread()
    other_ttft_ms: Spread = Spread()
    prefill_busy: float = 0.0
    decode_busy: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Objectives:
    """A request is served well if its TTFT and its mean ITL are within these."""

    ttft_ms: float = 2_000.0
    itl_ms: float = 50.0


@dataclass
class Timeline:
    """One request's times, in seconds of the replay."""

    arrived_at: float
    num_prompt_tokens: int
    has_session: bool = False
    first_at: float = -1.0
    last_at: float = -1.0
    num_tokens: int = 0
    num_cached_tokens: int = 0


class Recorder:
    """Records what happens while a trace is replayed."""

    def __init__(self) -> None:
        """No request has come yet."""
        self.num_refused = 0
        self._ended: list[Timeline] = []
        self._gaps_s = array("d")

    @property
    def num_prompt_tokens(self) -> int:
        """Of the requests that have ended."""
        return sum(item.num_prompt_tokens for item in self._ended)

    def took(self, timeline: Timeline, ends: Sequence[float]) -> None:
        """A request got a token at the end of each of these steps."""
        if timeline.first_at < 0:
            timeline.first_at = ends[0]
        else:
            self._gaps_s.append(ends[0] - timeline.last_at)
        if len(ends) > 1:
            self._gaps_s.extend(map(sub, ends[1:], ends))
        timeline.last_at = ends[-1]
        timeline.num_tokens += len(ends)

    def ended(self, timeline: Timeline) -> None:
        """A request has its last token."""
        self._ended.append(timeline)

    def result(self, num_computed_tokens: Sequence[int], objectives: Objectives, cpu_s: float) -> PolicyResult:
        """The figures. ``num_computed_tokens``: prompt tokens that each worker computed."""
        ended = self._ended
        arrived, first, last = (
            np.array([getattr(item, name) for item in ended]) for name in ("arrived_at", "first_at", "last_at")
        )
        num_tokens = np.array([item.num_tokens for item in ended])
        ttft_ms, e2e_ms = _MS * (first - arrived), _MS * (last - arrived)
        has_session = np.array([item.has_session for item in ended], dtype=bool)
        mean_itl_ms = _MS * (last - first) / np.maximum(num_tokens - 1, 1)
        is_good = (ttft_ms <= objectives.ttft_ms) & (mean_itl_ms <= objectives.itl_ms)
        duration_s = float(last.max() - arrived.min()) if ended else 0.0
        work = np.array(num_computed_tokens, dtype=float)
        return PolicyResult(
            ttft_ms=_spread(ttft_ms),
            itl_ms=_spread(_MS * np.frombuffer(self._gaps_s, dtype=float)),
            e2e_ms=_spread(e2e_ms),
            reuse_ratio=sum(item.num_cached_tokens for item in ended) / max(self.num_prompt_tokens, 1),
            imbalance=float(work.max() / work.mean()) if work.any() else 1.0,
            requests_refused=self.num_refused,
            requests_completed=len(ended),
            goodput_per_s=float(is_good.sum()) / duration_s if duration_s else 0.0,
            output_tokens_per_s=float(num_tokens.sum()) / duration_s if duration_s else 0.0,
            duration_s=duration_s,
            cpu_s=cpu_s,
            session_ttft_ms=_spread(ttft_ms[has_session]),
            other_ttft_ms=_spread(ttft_ms[~has_session]),
        )


def _spread(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Spread:
    if not len(values):
        return Spread()
    p50, p90, p95, p99 = map(float, np.percentile(values, (50, 90, 95, 99)))
    return Spread(mean=float(values.mean()), p50=p50, p90=p90, p95=p95, p99=p99)
