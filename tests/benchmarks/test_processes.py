"""What benchmarks read off processes: CPU time, counters, and the sums over them."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from benchmarks.processes import CoreMeter, CpuMeter, Evidence, Metrics, collect_evidence, parse


def test_a_busy_process_is_seen_to_be_busy() -> None:
    meter = CpuMeter({"me": os.getpid()})
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    use = meter.read()
    assert use.cpu_s["me"] == pytest.approx(0.2, abs=0.05)
    assert use.share["me"] == pytest.approx(use.cpu_s["me"] / use.duration_s)
    assert 0 <= use.others_share <= (os.cpu_count() or 1) + 0.1


def test_a_thread_that_is_ready_and_has_no_core_is_seen_to_wait() -> None:
    spin = "import time\nwhile time.process_time() < 30: pass"
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # the child inherits it
    try:
        with subprocess.Popen([sys.executable, "-c", spin]) as child:
            meter = CoreMeter({"child": child.pid, "gone": 2**22 + 1})
            end = time.process_time() + 0.2
            while time.process_time() < end:
                pass
            use = meter.read()
            child.kill()
    finally:
        os.sched_setaffinity(0, cores)
    assert use.keys() == {"child"}
    # On one core what this process used the other one waited for; others may be there too.
    assert use["child"].main_waited == use["child"].busiest_waited > 0.2
    assert 0.05 < use["child"].cores + use["child"].main_waited <= 1.05


def test_a_process_that_is_gone_is_not_measured_as_idle() -> None:
    with pytest.raises(OSError):
        CpuMeter({"nobody": 2**22 + 1})  # no process id is so high


def test_counters_are_summed_over_labels_or_split_by_one() -> None:
    metrics = parse(
        'hand_offs_total{outcome="taken",rank="0"} 3\n'
        'hand_offs_total{outcome="taken",rank="1"} 4\n'
        'hand_offs_total{outcome="expired",rank="0"} 1\n'
    )
    assert metrics.total("hand_offs_total") == 8
    assert metrics.total("hand_offs_total", outcome="expired") == 1
    assert metrics.by_label("hand_offs_total", "outcome") == {"taken": 7, "expired": 1}
    assert metrics.total("never_seen_total") == 0


def test_growth_counts_a_counter_that_is_new_from_zero() -> None:
    before = parse('attempts_total{cause="first"} 5\n')
    after = parse('attempts_total{cause="first"} 9\nattempts_total{cause="worker_unavailable"} 2\n')
    assert after.since(before).by_label("attempts_total", "cause") == {"first": 4, "worker_unavailable": 2}


def test_a_quiet_run_leaves_no_evidence_of_double_work() -> None:
    evidence = _evidence()
    assert (evidence.hand_offs_expired, evidence.preemptions, evidence.prompts_prefilled_twice) == (0, 0, 0)
    assert evidence.tokens_computed_again == 0
    assert (evidence.requests_waited, evidence.mean_wait_s) == (4, 0.5)


def test_a_prompt_that_is_prefilled_again_shows_even_where_it_was_cached() -> None:
    evidence = _evidence(prefilled=11, cached_tokens=100, attempts='quartet_router_attempts_total{cause="lost"} 1')
    assert evidence.prompts_prefilled_twice == 1
    assert evidence.tokens_computed_again == 100
    assert evidence.attempts == {"first": 10, "lost": 1}


def test_prompt_tokens_that_decode_computes_beyond_one_a_prompt_count_as_double_work() -> None:
    assert _evidence(decode_tokens=310).tokens_computed_again == 300


def test_expired_hand_offs_and_preemptions_are_counted() -> None:
    evidence = _evidence(expired=2, preemptions=3)
    assert (evidence.hand_offs_expired, evidence.preemptions) == (2, 3)


def _evidence(
    *,
    prefilled: int = 10,
    cached_tokens: int = 0,
    decode_tokens: int = 10,
    expired: int = 0,
    preemptions: int = 0,
    attempts: str = "",
) -> Evidence:
    """Ten requests of 100 prompt tokens each, all taken over by decode."""
    router = f"""\
quartet_router_attempts_total{{cause="first"}} 10
{attempts}
quartet_router_queue_seconds_bucket{{le="0.01"}} 6
quartet_router_queue_seconds_count 10
quartet_router_queue_seconds_sum 5
"""
    prefill = f"""\
quartet_worker_requests_total{{outcome="length"}} {prefilled}
quartet_worker_prompt_tokens_total{{rank="0"}} 1000
quartet_worker_cached_tokens_total{{rank="0"}} {cached_tokens}
quartet_worker_hand_offs_total{{outcome="taken"}} 10
quartet_worker_hand_offs_total{{outcome="expired"}} {expired}
"""
    decode = f"""\
quartet_worker_requests_total{{outcome="length"}} 10
quartet_worker_prompt_tokens_total{{rank="0"}} {decode_tokens}
quartet_worker_preemptions_total{{rank="0"}} {preemptions}
"""
    return collect_evidence(parse(router), parse(prefill), _as_growth(decode), prompt_tokens_sent=1000)


def _as_growth(text: str) -> Metrics:
    """The same after it was compared with nothing, as a phase does."""
    return parse(text).since(parse(""))
