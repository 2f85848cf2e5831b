"""The figures of one load, as they are shown and written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cli.bench.load import Load
from cli.bench.measure import DurationHistogram, Hop, Measured, Moved, Recorder

#: CPU seconds a second above which the figures are probably those of this client, whose event loop has one core.
BOTTLENECK_CPU_SHARE = 0.85


@dataclass(frozen=True, kw_only=True)
class LatencyMs:
    """Durations in milliseconds; all but ``count`` are ``None`` where there were none."""

    count: int
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None


@dataclass(frozen=True, kw_only=True)
class RequestCounts:
    """Requests that were sent within the window, by their end; the last three add up to the first."""

    sent: int
    finished: int
    failed: int
    cut_off: int


@dataclass(frozen=True, kw_only=True)
class ErrorCount:
    """Requests that failed in one way; ``example`` is the message of the first of them."""

    status: str
    reason: str
    count: int
    example: str


@dataclass(frozen=True, kw_only=True)
class HopTime:
    """One part of the requests' time: milliseconds on average, and its share of the whole."""

    mean_ms: float
    share: float


@dataclass(frozen=True, kw_only=True)
class WaySpeed:
    """Blocks moved by one way: of how many requests, bytes, and 10^9 bytes a second of one transfer."""

    num_requests: int
    size_bytes: int
    gb_per_s: float | None


@dataclass(frozen=True, kw_only=True)
class ClientUse:
    """What this process used: CPU seconds a second within the window, and whether that is near a whole core."""

    cpu_share: float
    is_near_limit: bool


@dataclass(frozen=True, kw_only=True)
class PointResult:
    """One load's figures.

    Rates count what came within the window. All other figures are of the requests that were sent within it, up to
    their ends.

    Attributes:
        is_interrupted: the user ended it early; these are the figures so far.
        prompt_tokens, cached_tokens, output_tokens: of requests that ended well, as the router reports.
        send_delay_ms: from when a request was due until it was sent.
        hops: of requests that ended well; empty if none did.
        transfers: by the way that their answers name.
    """

    load: Load
    is_interrupted: bool
    window_s: float
    requests: RequestCounts
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_ms: LatencyMs
    itl_ms: LatencyMs
    e2e_ms: LatencyMs
    send_delay_ms: LatencyMs
    errors: tuple[ErrorCount, ...]
    finish_reasons: Mapping[str, int]
    hops: Mapping[Hop, HopTime]
    transfers: Mapping[str, WaySpeed]
    client: ClientUse


def make_result(load: Load, recorder: Recorder, *, is_interrupted: bool) -> PointResult:
    """The figures of a run whose requests have all ended."""
    measured, window = recorder.measured, recorder.in_window
    per_s = 1.0 / window.at_s if window.at_s > 0 else 0.0
    cpu_share = window.cpu_s * per_s
    return PointResult(
        load=load,
        is_interrupted=is_interrupted,
        window_s=window.at_s,
        requests=RequestCounts(
            sent=measured.sent,
            finished=measured.finished,
            failed=measured.errors.total(),
            cut_off=measured.cut_off,
        ),
        requests_per_s=window.finished * per_s,
        output_tokens_per_s=window.output_tokens * per_s,
        prompt_tokens_per_s=window.prompt_tokens * per_s,
        prompt_tokens=measured.prompt_tokens,
        cached_tokens=measured.cached_tokens,
        output_tokens=measured.output_tokens,
        ttft_ms=_latency(measured.ttft),
        itl_ms=_latency(measured.itl),
        e2e_ms=_latency(measured.e2e),
        send_delay_ms=_latency(measured.send_delay),
        errors=_errors(measured),
        finish_reasons={reason.value: count for reason, count in measured.finish_reasons.most_common()},
        hops=_hops(measured),
        transfers={way: _speed(moved) for way, moved in measured.moved.items()},
        client=ClientUse(cpu_share=cpu_share, is_near_limit=cpu_share >= BOTTLENECK_CPU_SHARE),
    )


def _latency(histogram: DurationHistogram) -> LatencyMs:
    if not histogram.count:
        return LatencyMs(count=0, mean=None, p50=None, p90=None, p99=None, max=None)
    return LatencyMs(
        count=histogram.count,
        mean=1e3 * histogram.sum_s / histogram.count,
        p50=1e3 * histogram.quantile_s(0.5),
        p90=1e3 * histogram.quantile_s(0.9),
        p99=1e3 * histogram.quantile_s(0.99),
        max=1e3 * histogram.max_s,
    )


def _errors(measured: Measured) -> tuple[ErrorCount, ...]:
    return tuple(
        ErrorCount(status=kind.status, reason=kind.reason, count=count, example=measured.examples[kind])
        for kind, count in measured.errors.most_common()
    )


def _hops(measured: Measured) -> Mapping[Hop, HopTime]:
    whole_s = sum(measured.hop_s.values())
    if not measured.finished or not whole_s:
        return {}
    return {
        hop: HopTime(mean_ms=1e3 * duration_s / measured.finished, share=duration_s / whole_s)
        for hop, duration_s in measured.hop_s.items()
    }


def _speed(moved: Moved) -> WaySpeed:
    gb_per_s = moved.size_bytes / moved.duration_s / 1e9 if moved.duration_s else None
    return WaySpeed(num_requests=moved.num_requests, size_bytes=moved.size_bytes, gb_per_s=gb_per_s)
