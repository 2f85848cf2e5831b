"""What a run records of requests, its figures, and how near quantiles come to the recorded values."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.bench.load import Load, LoadKind, Window
from cli.bench.measure import DurationHistogram, Hop, Recorder, split_time
from cli.bench.result import PointResult, WaySpeed, make_result
from quartet.client import ChoiceFinished, FinishReason, TimeBreakdown, TransferWay, Usage
from quartet.errors import QueueFullError

LOAD = Load(LoadKind.CONCURRENCY, 2)
DURATIONS = st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=200)


class Clock:
    """``time.perf_counter`` that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


@pytest.fixture
def recorder(clock: Clock) -> Recorder:
    return Recorder(Window(None))


def end(reason: FinishReason = FinishReason.LENGTH, **times: float) -> ChoiceFinished:
    usage = Usage(num_prompt_tokens=10, num_cached_tokens=4, num_output_tokens=5, num_attempts=1)
    return ChoiceFinished(choice=0, reason=reason, usage=usage, time=TimeBreakdown(**times))


def result(recorder: Recorder) -> PointResult:
    recorder.close()
    return make_result(LOAD, recorder, is_interrupted=False)


def run_request(recorder: Recorder, clock: Clock, *deltas: tuple[float, int], due_s_ago: float = 0.0) -> None:
    """One whole request; ``deltas``: seconds to wait, and then the number of tokens that come."""
    record = recorder.begin(clock.now - due_s_ago)
    for wait_s, num_tokens in deltas:
        clock.now += wait_s
        record.tokens(num_tokens)
    record.finished(end())


def test_a_delta_of_k_tokens_counts_k_gaps_of_a_kth_of_the_wait(recorder: Recorder, clock: Clock) -> None:
    recorder.open()
    run_request(recorder, clock, (1.0, 3), (0.4, 4), (0.6, 1))
    figures = result(recorder)
    # The first delta's tokens came with the first: TTFT, and no gap.
    assert (figures.ttft_ms.count, figures.ttft_ms.max) == (1, pytest.approx(1000))
    assert figures.itl_ms.count == 5
    assert figures.itl_ms.p50 == pytest.approx(100, rel=0.01)
    assert figures.itl_ms.max == pytest.approx(600)
    assert figures.itl_ms.mean == pytest.approx(200)
    assert figures.e2e_ms.max == pytest.approx(2000)


def test_durations_count_from_when_a_request_was_due(recorder: Recorder, clock: Clock) -> None:
    recorder.open()
    run_request(recorder, clock, (1.0, 1), due_s_ago=5.0)
    figures = result(recorder)
    assert figures.ttft_ms.max == pytest.approx(6000)
    assert figures.e2e_ms.max == pytest.approx(6000)
    assert figures.send_delay_ms.max == pytest.approx(5000)


def test_rates_are_of_the_window_and_durations_of_what_was_sent_in_it(recorder: Recorder, clock: Clock) -> None:
    begun_before = recorder.begin(clock.now)
    begun_before.tokens(50)
    recorder.open()
    clock.now += 2.0
    begun_before.tokens(10)
    begun_before.finished(end())
    begun_within = recorder.begin(clock.now)
    clock.now += 2.0
    begun_within.tokens(10)
    recorder.close()
    clock.now += 4.0
    begun_within.tokens(100)
    begun_within.finished(end())
    begun_after = recorder.begin(clock.now)
    begun_after.finished(end())
    figures = result(recorder)
    assert figures.window_s == pytest.approx(4.0)
    assert figures.output_tokens_per_s == pytest.approx(20 / 4)
    assert figures.requests_per_s == pytest.approx(1 / 4)
    assert figures.prompt_tokens_per_s == pytest.approx(10 / 4)
    assert (figures.requests.sent, figures.requests.finished) == (1, 1)
    assert figures.e2e_ms.max == pytest.approx(6000)
    assert (figures.prompt_tokens, figures.cached_tokens, figures.output_tokens) == (10, 4, 5)


def test_every_request_has_one_end(recorder: Recorder) -> None:
    recorder.open()
    ends: list[Callable[[], None]] = []
    for _ in range(2):
        record = recorder.begin(time.perf_counter())
        ends.append(lambda record=record: record.failed(QueueFullError("full")))  # type: ignore[misc]
    cancelled, cut_off, good = (recorder.begin(time.perf_counter()) for _ in range(3))
    ends += [lambda: cancelled.finished(end(FinishReason.CANCELLED)), cut_off.cut_off, lambda: good.finished(end())]
    assert recorder.num_running == 5
    for finish in ends:
        finish()
    assert recorder.num_running == 0
    figures = result(recorder)
    counts = figures.requests
    assert (counts.sent, counts.finished, counts.failed, counts.cut_off) == (5, 1, 3, 1)
    assert [(error.status, error.reason, error.count, error.example) for error in figures.errors] == [
        ("RESOURCE_EXHAUSTED", "QUEUE_FULL", 2, "full"),
        ("CANCELLED", "", 1, "the router cancelled the request"),
    ]
    assert figures.finish_reasons == {"length": 1}


def test_the_hops_add_up_to_what_the_client_waited() -> None:
    time = TimeBreakdown(
        tokenize_s=1, router_queue_s=2, prefill_s=30, prefill_queue_s=10, transfer_s=4, decode_queue_s=5, total_s=100
    )
    parts = split_time(time, 110)
    assert parts == {
        Hop.TOKENIZE: 1,
        Hop.ROUTER_QUEUE: 2,
        Hop.PREFILL_QUEUE: 10,
        Hop.ONBOARD: 0,
        Hop.PREFILL: 20,
        Hop.TRANSFER: 4,
        Hop.DECODE_QUEUE: 5,
        Hop.DECODE: 58,
        Hop.OUTSIDE: 10,
    }
    assert sum(parts.values()) == 110


@pytest.mark.parametrize(
    ("prefill_s", "prefill", "decode"),
    [(30, 13, 58), (None, 0, 81)],
    ids=["within the prefill hop", "at the worker that decodes"],
)
def test_what_was_loaded_counts_neither_as_prefill_nor_as_decode(
    prefill_s: float | None, prefill: float, decode: float
) -> None:
    queue_s = None if prefill_s is None else 10
    time = TimeBreakdown(prefill_s=prefill_s, prefill_queue_s=queue_s, onboard_s=7, decode_queue_s=12, total_s=100)
    parts = split_time(time, 110)
    assert (parts[Hop.ONBOARD], parts[Hop.PREFILL], parts[Hop.DECODE]) == (7, prefill, decode)
    assert sum(parts.values()) == 110


def test_the_shares_of_the_hops_are_of_the_sum_over_all_requests(recorder: Recorder, clock: Clock) -> None:
    recorder.open()
    for total_s in (1.0, 3.0):
        record = recorder.begin(clock.now)
        clock.now += 4.0
        record.finished(end(total_s=total_s))
    hops = result(recorder).hops
    assert hops[Hop.DECODE].share == pytest.approx(0.5)
    assert hops[Hop.DECODE].mean_ms == pytest.approx(2000)
    assert sum(hop.share for hop in hops.values()) == pytest.approx(1.0)


def test_transfers_are_told_apart_by_way(recorder: Recorder, clock: Clock) -> None:
    recorder.open()
    answered = [(TransferWay.SHM, 4.0), (TransferWay.SHM, 4.0), (None, 2.0)]
    for way, transfer_s in answered:
        time = TimeBreakdown(transfer_s=transfer_s, transfer_bytes=2_000_000_000, transfer_way=way)
        recorder.begin(clock.now).finished(replace(end(), time=time))
    recorder.begin(clock.now).finished(end(total_s=1.0))  # one prefilled where it was decoded
    assert result(recorder).transfers == {
        "shm": WaySpeed(num_requests=2, size_bytes=4_000_000_000, gb_per_s=0.5),
        "unknown": WaySpeed(num_requests=1, size_bytes=2_000_000_000, gb_per_s=1.0),
    }


def test_an_empty_measurement_is_no_error(recorder: Recorder) -> None:
    recorder.open()
    figures = result(recorder)
    assert (figures.requests_per_s, figures.ttft_ms.count, figures.ttft_ms.p99, figures.hops) == (0.0, 0, None, {})


@pytest.mark.parametrize(("cpu_s", "is_near"), [(0.5, False), (0.9, True)])
def test_a_client_that_needs_a_whole_core_says_so(
    recorder: Recorder, clock: Clock, monkeypatch: pytest.MonkeyPatch, cpu_s: float, is_near: bool
) -> None:
    used = iter([10.0, 10.0 + cpu_s])
    monkeypatch.setattr(time, "process_time", lambda: next(used))
    recorder.open()
    clock.now += 1.0
    client = result(recorder).client
    assert client.cpu_share == pytest.approx(cpu_s)
    assert client.is_near_limit is is_near


@given(DURATIONS, st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_is_within_half_a_per_cent_of_the_value_of_that_rank(values: list[float], share: float) -> None:
    histogram = DurationHistogram()
    for value in values:
        histogram.add(value)
    exact = sorted(values)[math.ceil(share * len(values)) - 1]
    assert histogram.quantile_s(share) == pytest.approx(exact, rel=0.0051)


@given(DURATIONS)
def test_mean_and_maximum_are_exact(values: list[float]) -> None:
    histogram = DurationHistogram()
    for value in values:
        histogram.add(value)
    assert histogram.count == len(values)
    assert histogram.sum_s == pytest.approx(sum(values))
    assert histogram.max_s == max(values)


def test_a_count_stands_for_as_many_equal_durations() -> None:
    histogram = DurationHistogram()
    histogram.add(0.001, 98)
    histogram.add(1.0, 2)
    assert histogram.count == 100
    assert histogram.quantile_s(0.9) == pytest.approx(0.001, rel=0.01)
    assert histogram.quantile_s(0.99) == pytest.approx(1.0, rel=0.01)


def test_a_duration_out_of_range_is_counted_in_the_outermost_bucket() -> None:
    histogram = DurationHistogram()
    for value in (0.0, 1e-9, 1e9):
        histogram.add(value)
    assert histogram.count == 3
    assert histogram.quantile_s(0.5) < 2e-6
    assert histogram.quantile_s(1.0) > 1e4


def test_the_distribution_ascends_to_the_whole() -> None:
    histogram = DurationHistogram()
    for value in (0.3, 0.1, 0.2, 0.1):
        histogram.add(value)
    values, shares = histogram.distribution()
    assert values.tolist() == pytest.approx([0.1, 0.2, 0.3], rel=0.01)
    assert shares.tolist() == [0.5, 0.75, 1.0]


def test_without_durations_there_are_no_percentiles() -> None:
    histogram = DurationHistogram()
    assert (histogram.count, histogram.quantile_s(0.5)) == (0, 0.0)
    assert [array.tolist() for array in histogram.distribution()] == [[], []]
