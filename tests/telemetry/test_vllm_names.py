"""Figures under vLLM's names: the names and labels that its tools and gateways read, and the values that they mean."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from quartet.engine.base import EngineStats
from quartet.telemetry.metrics import RouterMetrics, WorkerMetrics
from quartet.telemetry.vllm_names import AdapterFigures, ModelFigures, show_router_as_vllm, show_worker_as_vllm

ROUTER = {"model_name": "m", "engine": "0"}
FIGURES = ModelFigures(
    model="m",
    num_waiting=3,
    num_running=5,
    num_used_blocks=25,
    num_total_blocks=100,
    block_size=16,
    max_model_len=100,
)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def router(registry: CollectorRegistry) -> RouterMetrics:
    metrics = RouterMetrics(registry)
    show_router_as_vllm(registry, metrics, lambda: [FIGURES])
    metrics.for_model("m")
    return metrics


def show_worker(registry: CollectorRegistry, *ranks: EngineStats, prefills: bool = False) -> WorkerMetrics:
    metrics = WorkerMetrics(registry)
    show_worker_as_vllm(registry, metrics, lambda: ranks, model="m", block_size=32, num_blocks=50, prefills=prefills)
    return metrics


def names(registry: CollectorRegistry) -> set[str]:
    families = text_string_to_metric_families(generate_latest(registry).decode())
    samples = {sample.name for family in families for sample in family.samples}
    return {name.removeprefix("vllm:") for name in samples if name.startswith("vllm:")}


def test_a_router_shows_what_a_gateway_and_benchmarks_read(registry: CollectorRegistry, router: RouterMetrics) -> None:
    gateway = {
        *("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "cache_config_info"),
        "lora_requests_info",
    }
    counters = {
        "prompt_tokens_total",
        "generation_tokens_total",
        "prompt_tokens_cached_total",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "request_success_total",
    }
    histograms = {
        *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
        *("request_time_per_output_token_seconds", "request_inference_time_seconds", "request_decode_time_seconds"),
        *("request_prompt_tokens", "request_generation_tokens"),
    }
    parts = {f"{name}_{part}" for name in histograms for part in ("bucket", "sum", "count")}
    assert names(registry) == gateway | counters | parts


def test_a_models_state_at_a_router_becomes_gauges(registry: CollectorRegistry, router: RouterMetrics) -> None:
    assert registry.get_sample_value("vllm:num_requests_waiting", ROUTER) == 3
    assert registry.get_sample_value("vllm:num_requests_running", ROUTER) == 5
    assert registry.get_sample_value("vllm:kv_cache_usage_perc", ROUTER) == 0.25
    config = {**ROUTER, "block_size": "16", "num_gpu_blocks": "100"}
    assert registry.get_sample_value("vllm:cache_config_info", config) == 1


def test_no_share_of_blocks_is_made_up_before_a_worker_has_reported(registry: CollectorRegistry) -> None:
    unknown = replace(FIGURES, num_waiting=0, num_used_blocks=0, num_total_blocks=0, block_size=0)
    show_router_as_vllm(registry, RouterMetrics(registry), lambda: [unknown])
    assert registry.get_sample_value("vllm:kv_cache_usage_perc", ROUTER) is None
    assert registry.get_sample_value("vllm:num_requests_waiting", ROUTER) == 0


def test_a_models_counts_are_ours_under_other_names(registry: CollectorRegistry, router: RouterMetrics) -> None:
    model = router.for_model("m")
    model.prompt_tokens.inc(100)
    model.cached_tokens.inc(60)
    model.output_tokens.inc(7)
    model.ttft.observe(0.3)
    model.itl.observe(0.02)
    model.duration.observe(1.5)
    values = {
        name: registry.get_sample_value(f"vllm:{name}", ROUTER)
        for name in (
            "prompt_tokens_total",
            "prefix_cache_queries_total",
            "prefix_cache_hits_total",
            "prompt_tokens_cached_total",
            "generation_tokens_total",
            "time_to_first_token_seconds_sum",
            "inter_token_latency_seconds_sum",
            "e2e_request_latency_seconds_sum",
        )
    }
    assert list(values.values()) == [100, 100, 60, 60, 7, 0.3, 0.02, 1.5]
    assert registry.get_sample_value("vllm:time_to_first_token_seconds_bucket", {**ROUTER, "le": "0.2"}) == 0
    assert registry.get_sample_value("vllm:time_to_first_token_seconds_bucket", {**ROUTER, "le": "0.35"}) == 1


def bounds(registry: CollectorRegistry, name: str) -> list[str]:
    families = {family.name: family for family in registry.collect()}
    return [sample.labels["le"] for sample in families[f"vllm:{name}"].samples if "le" in sample.labels]


def test_whole_answers_are_counted_in_vllms_buckets(registry: CollectorRegistry, router: RouterMetrics) -> None:
    whole = router.for_model("m").whole
    whole.observe(20, 5, 1.75, 1.0)
    whole.observe(50, 1, 0.25, 0.0)  # no token after the first: vLLM counts a mean of 0, too
    sums = {
        "request_prompt_tokens": 70,
        "request_generation_tokens": 6,
        "request_time_per_output_token_seconds": 0.25,
        "request_inference_time_seconds": 2.0,
        "request_decode_time_seconds": 1.0,
    }
    for name, total in sums.items():
        assert registry.get_sample_value(f"vllm:{name}_sum", ROUTER) == total
        assert registry.get_sample_value(f"vllm:{name}_count", ROUTER) == 2
    assert registry.get_sample_value("vllm:request_prompt_tokens_bucket", {**ROUTER, "le": "20.0"}) == 1
    assert bounds(registry, "request_time_per_output_token_seconds")[:3] == ["0.01", "0.025", "0.05"]
    for name in ("request_inference_time_seconds", "request_decode_time_seconds"):
        assert bounds(registry, name)[:3] == ["0.3", "0.5", "0.8"]
        assert bounds(registry, name)[-2:] == ["7680.0", "+Inf"]


def test_buckets_of_lengths_end_where_no_sequence_can_be_longer(
    registry: CollectorRegistry, router: RouterMetrics
) -> None:
    for name in ("request_prompt_tokens", "request_generation_tokens"):
        assert bounds(registry, name) == ["1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "100.0", "+Inf"]


def test_a_router_shows_the_same_lines_when_a_models_workers_leave(registry: CollectorRegistry) -> None:
    now, metrics = [FIGURES], RouterMetrics(registry)
    show_router_as_vllm(registry, metrics, lambda: now)
    metrics.for_model("m").whole.observe(20, 5, 1.75, 1.0)

    def lines() -> set[str]:
        """Each line's name and labels; the number of blocks is a label."""
        page = generate_latest(registry).decode().replace('num_gpu_blocks="0"', 'num_gpu_blocks="100"')
        shown = [line for line in page.splitlines() if line.startswith("vllm:")]
        return {line.rpartition(" ")[0] for line in shown}

    before = lines()
    now[0] = replace(FIGURES, num_running=0, num_used_blocks=0, num_total_blocks=0, has_workers=False)
    assert lines() == before
    assert registry.get_sample_value("vllm:num_requests_running", ROUTER) == 0
    assert registry.get_sample_value("vllm:kv_cache_usage_perc", ROUTER) == 1, "else pickers would prefer it"
    config = {**ROUTER, "block_size": "16", "num_gpu_blocks": "0"}
    assert registry.get_sample_value("vllm:cache_config_info", config) == 1


def test_lengths_have_no_buckets_before_the_longest_is_known(
    registry: CollectorRegistry, router: RouterMetrics
) -> None:
    router.for_model("new")
    assert registry.get_sample_value("vllm:request_prompt_tokens_count", ROUTER) == 0
    labels = {"model_name": "new", "engine": "0"}
    assert registry.get_sample_value("vllm:request_prompt_tokens_count", labels) is None
    assert registry.get_sample_value("vllm:request_success_total", {**labels, "finished_reason": "stop"}) == 0


def lora_lines(registry: CollectorRegistry) -> list[tuple[dict[str, str], float]]:
    [family] = [family for family in registry.collect() if family.name == "vllm:lora_requests_info"]
    return [(sample.labels, sample.value) for sample in family.samples]


def test_one_line_names_the_adapters_that_requests_need_now(registry: CollectorRegistry) -> None:
    figures = AdapterFigures(num_served=3, waiting={"b"}, running=("c", "a"))
    show_router_as_vllm(registry, RouterMetrics(registry), lambda: [], lambda: figures)
    before = time.time()
    [(labels, value)] = lora_lines(registry)
    assert labels == {"max_lora": "3", "waiting_lora_adapters": "b", "running_lora_adapters": "a,c"}
    assert before <= value <= time.time()


def test_a_fleet_without_adapters_says_so(registry: CollectorRegistry, router: RouterMetrics) -> None:
    [(labels, _)] = lora_lines(registry)
    assert labels == {"max_lora": "0", "waiting_lora_adapters": "", "running_lora_adapters": ""}


def test_outcomes_become_vllms_reasons_by_model(registry: CollectorRegistry, router: RouterMetrics) -> None:
    for outcome in ("stop_id", "stop_string", "tool_calls", "length", "cancelled", "queue_full", "placed"):
        router.requests.count(outcome, "m")
    router.requests.count("length", "")  # before its model was known
    router.for_model("other")
    router.requests.count("length", "other")

    def success(model: str, reason: str) -> float | None:
        labels = {"model_name": model, "engine": "0", "finished_reason": reason}
        return registry.get_sample_value("vllm:request_success_total", labels)

    assert [success("m", reason) for reason in ("stop", "length", "abort")] == [3, 1, 1]
    assert [success("other", reason) for reason in ("stop", "length", "abort")] == [0, 1, 0]
    assert success("m", "error") is None and success("", "length") is None


def test_a_worker_shows_each_rank_as_an_engine(registry: CollectorRegistry) -> None:
    first = EngineStats(
        num_running=2, num_waiting=1, num_in_use_blocks=3, num_held_blocks=2, num_cached_blocks=4, num_total_blocks=20
    )
    show_worker(registry, first, EngineStats(num_preemptions=6))
    assert registry.get_sample_value("vllm:num_requests_running", ROUTER) == 2
    assert registry.get_sample_value("vllm:num_requests_waiting", ROUTER) == 1
    # Blocks that are only cached can be had, as vLLM counts them.
    assert registry.get_sample_value("vllm:kv_cache_usage_perc", ROUTER) == 0.25
    second = {"model_name": "m", "engine": "1"}
    assert registry.get_sample_value("vllm:num_preemptions_total", second) == 6
    config = {**second, "block_size": "32", "num_gpu_blocks": "50"}  # as announced, as it has no figure of its own
    assert registry.get_sample_value("vllm:cache_config_info", config) == 1


def test_a_worker_without_blocks_has_none_in_use(registry: CollectorRegistry) -> None:
    metrics = WorkerMetrics(registry)
    show_worker_as_vllm(
        registry, metrics, lambda: [EngineStats()], model="m", block_size=32, num_blocks=0, prefills=False
    )
    assert registry.get_sample_value("vllm:kv_cache_usage_perc", ROUTER) == 0


def test_a_workers_waits_are_vllms_phases(registry: CollectorRegistry) -> None:
    metrics = show_worker(registry, EngineStats(), prefills=True)
    metrics.queue_time.observe(0.2)
    metrics.prefill_time.observe(0.4)
    metrics.prefill_time.observe(0.4)
    assert registry.get_sample_value("vllm:request_queue_time_seconds_sum", ROUTER) == 0.2
    assert registry.get_sample_value("vllm:request_queue_time_seconds_bucket", {**ROUTER, "le": "0.25"}) == 1
    assert registry.get_sample_value("vllm:request_prefill_time_seconds_sum", ROUTER) == 0.8
    assert registry.get_sample_value("vllm:request_prefill_time_seconds_count", ROUTER) == 2


def test_only_prefill_workers_know_the_times_of_prompts(registry: CollectorRegistry) -> None:
    show_worker(registry, EngineStats())
    assert not [name for name in names(registry) if name.startswith("request_prefill_time")]


def test_times_that_are_not_kept_by_rank_name_none(registry: CollectorRegistry) -> None:
    show_worker(registry, EngineStats(), EngineStats()).queue_time.observe(0.2)
    labels = {"model_name": "m", "engine": "all"}
    assert registry.get_sample_value("vllm:request_queue_time_seconds_count", labels) == 1


def test_no_count_is_on_both_a_router_and_a_worker(registry: CollectorRegistry, router: RouterMetrics) -> None:
    of_workers = CollectorRegistry()
    show_worker(of_workers, EngineStats(), prefills=True)
    state = {"num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "cache_config_info"}
    assert names(registry) & names(of_workers) == state
