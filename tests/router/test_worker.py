"""What a policy is shown of a worker."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from quartet.events.load import OnboardTime, StepTime
from router.book import Booking
from router.policy.base import DEFAULT_MAX_STEP_TOKENS
from router.workers import KnownWorker
from tests.router.records import make_load, make_record

_RECORD = make_record(data_parallel_size=2)


def take(worker: KnownWorker, now: float, **rank: object) -> None:
    worker.on_load(make_load(_RECORD, **rank), now)


def test_a_forecast_is_based_on_the_last_report() -> None:
    worker = KnownWorker(_RECORD, 100.0)
    assert [candidate.max_step_tokens for candidate in worker.candidates()] == [DEFAULT_MAX_STEP_TOKENS] * 2
    assert worker.candidates()[0].onboard_time == OnboardTime()
    step_time, onboard_time = StepTime(prefill_base_s=0.5), OnboardTime(host_s_per_token=2e-6)
    take(
        worker,
        200.0,
        step_ends_in_s=0.25,
        num_unbegun_prefill_tokens=70,
        num_spare_prefill_tokens=50,
        num_decoding=3,
        num_context_tokens=900,
        max_step_tokens=4096,
        max_running=8,
        num_running=2,
        num_waiting=1,
        step_time=step_time,
        onboard_time=onboard_time,
    )
    worker.book.reserve(1, num_queued_tokens=30).send()
    first, second = worker.candidates()
    assert (first.step_ends_at, first.num_unbegun_tokens, second.num_unbegun_tokens) == (200.25, 70, 100)
    assert (first.num_spare_tokens, second.num_spare_tokens) == (50, 20)
    assert (second.num_decoding, second.num_context_tokens, second.max_step_tokens) == (3, 900, 4096)
    assert (second.step_time, second.onboard_time) == (step_time, onboard_time)
    assert (first.max_requests, second.max_requests) == (8, 8)
    worker.stand_among(frozenset(), is_fed=True)
    assert [candidate.max_requests for candidate in worker.candidates()] == [10, 10]


def test_reported_waiting_prompts_count_no_more_once_reports_have_stopped() -> None:
    worker = KnownWorker(_RECORD, 100.0)
    take(worker, 200.0, num_unbegun_prefill_tokens=70, num_spare_prefill_tokens=10)
    worker.poll(202.0)
    assert worker.candidates()[0].num_unbegun_tokens == 70
    worker.poll(204.0)
    assert worker.candidates()[0].num_unbegun_tokens == worker.candidates()[0].num_spare_tokens == 0
    take(worker, 205.0, num_unbegun_prefill_tokens=50)
    assert worker.candidates()[0].num_unbegun_tokens == 50


@given(st.data())
def test_cached_candidates_equal_freshly_computed_ones(data: st.DataObject) -> None:
    kept, now = KnownWorker(_RECORD, 0.0), 0.0
    bookings: list[Booking] = []
    for _ in range(data.draw(st.integers(1, 20))):
        now += data.draw(st.sampled_from([0.0, 1.0, 5.0]))
        match data.draw(st.sampled_from(["report", "book", "release", "poll", "move"])):
            case "report":
                take(kept, now, num_unbegun_prefill_tokens=data.draw(st.integers(0, 9)))
                kept.book.on_report(0, num_requests=[data.draw(st.integers(0, 9))])
            case "book":
                rank, tokens = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 50))
                bookings.append(kept.book.reserve(rank, num_reserved_tokens=tokens, num_queued_tokens=tokens))
            case "release" if bookings:
                data.draw(st.sampled_from(bookings)).release()
            case "poll":
                kept.poll(now)
            case "move":
                kept.move(replace(_RECORD, grpc_address="10.0.0.1:5", num_blocks=data.draw(st.integers(1, 99))))
        shown = list(kept.candidates())
        kept._read_load()  # forgets what was kept
        assert shown == list(kept.candidates())
