"""Metrics: their names, what they count, and how long a scrape is."""

from __future__ import annotations

import asyncio
import itertools
import re
import time

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from quartet.engine.base import EngineStats, FinishReason, TierCounts
from quartet.errors import all_kinds
from quartet.events.kv import Tier
from quartet.kvcache.block_pool import BlockCounts
from quartet.telemetry.encode_metrics import EncodeMetrics
from quartet.telemetry.metrics import (
    CertificateMetrics,
    CertificateUse,
    PoolMetrics,
    ProcessMetrics,
    ReloadedFile,
    ReloadMetrics,
    RouterMetrics,
    WorkerMetrics,
    monitor_event_loop_lag,
)
from quartet.telemetry.vllm_names import ModelFigures, show_router_as_vllm, show_worker_as_vllm
from router.attempts import attempt_causes

UNITS = (
    "seconds|tokens|requests|blocks|bytes|steps|events|preemptions|attempts|hand_offs|workers|starts|"
    "admissions|snapshots|gaps|reloads|lines"
)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def fill_everything(registry: CollectorRegistry) -> None:
    """Every child that a router and a worker of 8 ranks would have, in one process."""
    process = ProcessMetrics(registry)
    process.observe_event_loop_lag(0.001)
    process.observe_event_loop_stall(0.001)
    certificates = CertificateMetrics(registry)
    for use in CertificateUse:
        certificates.watch(use, lambda: 1.0)
    reloads = ReloadMetrics(registry)
    for file in ReloadedFile:
        reloads.counter(file)(True)
    router, worker = RouterMetrics(registry), WorkerMetrics(registry)
    for model in ("a", "b"):
        router.for_model(model).ttft.observe(0.1)
    router.expect_causes(attempt_causes())
    for state in ("joining", "ready", "suspect", "draining"):
        for role in ("prefill", "decode", "encode"):
            router.set_workers(role, state, 1)
    worker.watch_engine(lambda: [EngineStats()] * 8)
    for way in ("grpc", "shm", "cuda_ipc", "staged", "nixl"):
        worker.observe_transfer(way, 1, 0.1)


def test_every_name_says_its_part_and_ends_in_its_unit(registry: CollectorRegistry) -> None:
    fill_everything(registry)
    names = {metric.name for metric in registry.collect() if not metric.name.startswith("process_")}
    assert len(names) > 25
    for name in names:
        assert re.fullmatch(rf"quartet_(router|worker|process)_([a-z_]+_)?({UNITS})", name), name


def test_of_the_certificates_of_a_use_the_first_that_ends_is_shown(registry: CollectorRegistry) -> None:
    certificates, ends = CertificateMetrics(registry), dict[str, float | None]({"old": None, "new": None})
    for name in ends:
        certificates.watch(CertificateUse.DIAL, lambda name=name: ends[name])  # type: ignore[misc]
    certificates.watch(CertificateUse.GRPC, lambda: None)
    assert b"certificate" not in generate_latest(registry), "there is no TLS"
    name = "quartet_process_certificate_end_timestamp_seconds"
    ends["new"] = 1.9e9
    assert registry.get_sample_value(name, {"use": "dial"}) == 1.9e9
    ends["old"] = 1.8e9
    assert registry.get_sample_value(name, {"use": "dial"}) == 1.8e9
    assert registry.get_sample_value(name, {"use": "grpc"}) is None


def test_a_scrape_stays_short(registry: CollectorRegistry) -> None:
    fill_everything(registry)
    assert num_lines(registry) < 720


def test_a_process_has_few_lines_with_vllms_names_too() -> None:
    router, worker = CollectorRegistry(), CollectorRegistry()
    metrics = RouterMetrics(router)
    ProcessMetrics(router)
    metrics.expect_causes(attempt_causes())
    for role in ("prefill", "decode", "encode"):
        for state in ("joining", "ready", "suspect", "draining"):
            metrics.set_workers(role, state, 1)
    figures = list[ModelFigures]()
    show_router_as_vllm(router, metrics, lambda: figures)
    num_without_models = num_lines(router)
    for model in ("a", "b"):
        metrics.for_model(model)
        figures.append(
            ModelFigures(
                model=model,
                num_waiting=1,
                num_running=1,
                num_used_blocks=1,
                num_total_blocks=2,
                block_size=8,
                max_model_len=131_072,
            )
        )
    ProcessMetrics(worker)
    ranks, of_worker = [EngineStats()] * 8, WorkerMetrics(worker)
    of_worker.watch_engine(lambda: ranks)
    show_worker_as_vllm(worker, of_worker, lambda: ranks, model="a", block_size=8, num_blocks=2, prefills=True)
    for way in ("grpc", "shm", "cuda_ipc", "staged", "nixl"):
        of_worker.observe_transfer(way, 1, 0.1)
    assert num_without_models < 230
    assert num_lines(router) - num_without_models < 2 * 230
    assert num_lines(worker) < 450


def num_lines(registry: CollectorRegistry) -> int:
    return len([line for line in generate_latest(registry).splitlines() if not line.startswith(b"#")])


def test_outcomes_are_there_before_they_occur(registry: CollectorRegistry) -> None:
    router, worker = RouterMetrics(registry), WorkerMetrics(registry)
    router.expect_causes(attempt_causes())
    worker.expect_transfers(["shm"])
    EncodeMetrics(registry)
    PoolMetrics(registry).expect(["east"])
    reasons = {kind.reason.lower() for kind in all_kinds()}
    for name in ("router", "worker"):
        for outcome in {*reasons, *FinishReason}:
            assert registry.get_sample_value(f"quartet_{name}_requests_total", {"outcome": outcome}) == 0, outcome
    for name, labels in (
        ("router_attempts_total", {"cause": "first"}),
        ("router_attempts_total", {"cause": "worker_unavailable"}),
        ("worker_requests_total", {"outcome": "encoded"}),
        ("worker_signed_starts_total", {"outcome": "signed_start_expired"}),
        ("worker_transfer_bytes_total", {"way": "shm"}),
        ("worker_transfer_seconds_count", {"way": "shm"}),
        ("encode_items_total", {"outcome": "handed_over"}),
        ("global_router_requests_total", {"namespace": "east"}),
        ("global_router_retries_total", {"namespace": "east"}),
    ):
        assert registry.get_sample_value(f"quartet_{name}", labels) == 0, name
    assert router.requests.by_outcome() == {}, "of what occurred"


def test_causes_of_attempts_are_failures_that_another_worker_may_mend() -> None:
    causes = attempt_causes()
    assert {"first", "worker_unavailable", "transfer_failed", "prompt_too_long"} <= causes
    assert not {"timeout", "invalid_field", "workers_lost"} & causes


def test_the_same_registry_is_not_shared_by_tests() -> None:
    RouterMetrics(CollectorRegistry())
    RouterMetrics(CollectorRegistry())


def test_engine_figures_become_gauges_by_rank(registry: CollectorRegistry) -> None:
    worker = WorkerMetrics(registry)
    first = EngineStats(num_running=2, num_waiting=1, num_in_use_blocks=3, num_held_blocks=4, num_free_blocks=5)
    worker.watch_engine(lambda: [first, EngineStats(num_cached_blocks=6, num_retained_blocks=5)])
    assert registry.get_sample_value("quartet_worker_retained_blocks", {"rank": "1"}) == 5
    assert registry.get_sample_value("quartet_worker_running_requests", {"rank": "0"}) == 2
    states = {
        state: registry.get_sample_value("quartet_worker_blocks", {"rank": "0", "state": state})
        for state in ("used", "held", "cached", "free")
    }
    assert states == {"used": 3, "held": 4, "cached": 0, "free": 5}
    assert registry.get_sample_value("quartet_worker_blocks", {"rank": "1", "state": "cached"}) == 6


def test_tiers_show_where_there_are_any(registry: CollectorRegistry) -> None:
    host = TierCounts(Tier.HOST, BlockCounts(5, 3, 1, 2, 11), 100, num_stored=7, num_loaded=4, num_dropped=2)
    WorkerMetrics(registry).watch_engine(lambda: [EngineStats(), EngineStats(tiers=(host,))])
    labels = {"rank": "1", "tier": "host"}
    states = {
        state: registry.get_sample_value("quartet_worker_tier_blocks", {**labels, "state": state})
        for state in ("used", "held", "cached", "free")
    }
    assert states == {"used": 2, "held": 1, "cached": 3, "free": 5}
    moves = {
        outcome: registry.get_sample_value("quartet_worker_tier_moves_total", {**labels, "outcome": outcome})
        for outcome in ("stored", "loaded", "dropped", "failed")
    }
    assert moves == {"stored": 7, "loaded": 4, "dropped": 2, "failed": 0}
    read = {**labels, "direction": "loaded"}
    assert registry.get_sample_value("quartet_worker_tier_bytes_total", read) == 400


def test_each_scrape_reads_the_engine_anew(registry: CollectorRegistry) -> None:
    latest = [EngineStats()]
    WorkerMetrics(registry).watch_engine(lambda: latest)
    for num_steps in (3, 3, 10):
        latest = [EngineStats(num_steps=num_steps, num_preemptions=1)]
        assert registry.get_sample_value("quartet_worker_steps_total", {"rank": "0"}) == num_steps
    assert registry.get_sample_value("quartet_worker_preemptions_total", {"rank": "0"}) == 1


def test_transfers_are_counted_by_way(registry: CollectorRegistry) -> None:
    worker = WorkerMetrics(registry)
    worker.observe_transfer("shm", 100, 0.5)
    worker.observe_transfer("shm", 20, 0.5)
    assert registry.get_sample_value("quartet_worker_transfer_bytes_total", {"way": "shm"}) == 120
    assert registry.get_sample_value("quartet_worker_transfer_seconds_count", {"way": "shm"}) == 2


def test_a_models_metrics_are_bound_once(registry: CollectorRegistry) -> None:
    router = RouterMetrics(registry)
    assert router.for_model("m") is router.for_model("m")
    router.for_model("m").output_tokens.inc(3)
    assert registry.get_sample_value("quartet_router_output_tokens_total", {"model": "m"}) == 3


def test_outcomes_and_queues_of_the_router_show(registry: CollectorRegistry) -> None:
    router = RouterMetrics(registry)
    router.requests.count("queue_full", "a")
    router.requests.count("queue_full")
    router.attempts.labels("first").inc()
    router.watch_requests(lambda: 4, lambda: 5)
    router.queue_time.observe(0.2)
    router.tokenize_time.observe(0.001)
    assert registry.get_sample_value("quartet_router_requests_total", {"outcome": "queue_full"}) == 2
    assert registry.get_sample_value("quartet_router_attempts_total", {"cause": "first"}) == 1
    assert registry.get_sample_value("quartet_router_queued_requests") == 4
    assert registry.get_sample_value("quartet_router_running_requests") == 5
    assert registry.get_sample_value("quartet_router_queue_seconds_sum") == pytest.approx(0.2)


def test_totals_have_waits_without_room_and_lost_events(registry: CollectorRegistry) -> None:
    metrics = RouterMetrics(registry)
    for outcome, num in (("placed", 8), ("refused", 1), ("expired", 2), ("unavailable", 16), ("cancelled", 32)):
        metrics.admissions.labels(outcome).inc(num)
    metrics.kv_gaps.inc(4)
    assert (metrics.totals().num_without_room, metrics.totals().num_kv_gaps) == (3, 4)


def test_totals_tell_failures_from_what_clients_wanted(registry: CollectorRegistry) -> None:
    metrics = RouterMetrics(registry)
    for outcome in (*FinishReason, "placed", "queue_full", "internal"):
        metrics.requests.count(outcome)
    totals = metrics.totals()
    assert (totals.num_requests, totals.num_failed) == (len(FinishReason) + 3, 2)


def test_the_longest_stall_is_kept(registry: CollectorRegistry) -> None:
    metrics = ProcessMetrics(registry)
    for stall_s in (0.1, 0.3, 0.2):
        metrics.observe_event_loop_stall(stall_s)
    assert registry.get_sample_value("quartet_process_event_loop_longest_stall_seconds") == 0.3


async def test_a_loop_that_is_busy_before_its_timer_is_due_has_not_stalled(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    used_s = itertools.count(0.0, 1e6)
    monkeypatch.setattr(time, "thread_time", lambda: next(used_s))
    metrics = AwaitableMetrics(registry)
    monitor = asyncio.create_task(monitor_event_loop_lag(metrics, interval_s=0.001))
    async with asyncio.timeout(60):
        await metrics.observed.wait()
    monitor.cancel()
    lag_s, stall_s = (
        registry.get_sample_value(f"quartet_process_event_loop_{name}_seconds_sum") for name in ("lag", "stall")
    )
    assert stall_s == lag_s, "no longer than it was late"


def test_worker_times_and_outcomes_show(registry: CollectorRegistry) -> None:
    worker = WorkerMetrics(registry)
    worker.queue_time.observe(0.1)
    worker.prefill_time.observe(0.2)
    worker.hand_offs.labels("expired").inc()
    assert registry.get_sample_value("quartet_worker_queue_seconds_count") == 1
    assert registry.get_sample_value("quartet_worker_prefill_seconds_sum") == pytest.approx(0.2)
    assert registry.get_sample_value("quartet_worker_hand_offs_total", {"outcome": "expired"}) == 1


class AwaitableMetrics(ProcessMetrics):
    """Says when it was given a lag."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.observed = asyncio.Event()

    def observe_event_loop_stall(self, stall_s: float) -> None:
        super().observe_event_loop_stall(stall_s)
        self.observed.set()


async def test_a_blocked_event_loop_shows_as_lag(registry: CollectorRegistry) -> None:
    metrics = AwaitableMetrics(registry)
    monitor = asyncio.create_task(monitor_event_loop_lag(metrics, interval_s=0.001))
    await asyncio.sleep(0)  # the monitor sets its first timer
    time.sleep(0.06)  # noqa: ASYNC251 - blocking the loop is the point
    async with asyncio.timeout(60):
        await metrics.observed.wait()
    monitor.cancel()
    lag_s = registry.get_sample_value("quartet_process_event_loop_lag_seconds_sum")
    assert lag_s is not None
    assert lag_s > 0.03


async def test_a_loop_that_computes_shows_as_stalled_and_one_that_got_no_cpu_does_not(
    registry: CollectorRegistry,
) -> None:
    metrics = AwaitableMetrics(registry)
    monitor = asyncio.create_task(monitor_event_loop_lag(metrics, interval_s=0.001))
    await asyncio.sleep(0)
    time.sleep(0.06)  # noqa: ASYNC251 - as if other processes had all cores
    async with asyncio.timeout(60):
        await metrics.observed.wait()
        assert (registry.get_sample_value("quartet_process_event_loop_longest_stall_seconds") or 0) < 0.05
        metrics.observed.clear()
        until_s = time.thread_time() + 0.06
        while time.thread_time() < until_s:
            pass
        await metrics.observed.wait()
        await asyncio.sleep(0)
    monitor.cancel()
    assert (registry.get_sample_value("quartet_process_event_loop_longest_stall_seconds") or 0) > 0.05


def test_process_figures_are_there(registry: CollectorRegistry) -> None:
    ProcessMetrics(registry)
    assert (registry.get_sample_value("process_resident_memory_bytes") or 0) > 0
