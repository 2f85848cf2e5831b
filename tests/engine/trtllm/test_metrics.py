"""TensorRT-LLM's metrics on our page."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector

from quartet.engine.trtllm.feeds import LlmRankStats
from quartet.engine.trtllm.metrics import ResultMetrics
from tests.fakes.driving import MODEL, STORY, ended
from tests.fakes.installation import installed


class _Page(Collector):
    def __init__(self, metrics: ResultMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics.collect()


def page_of(metrics: ResultMetrics) -> str:
    registry = CollectorRegistry()
    registry.register(_Page(metrics))
    return generate_latest(registry).decode()


def test_without_the_package_and_without_records_there_is_nothing() -> None:
    metrics = ResultMetrics("tiny", lambda: None)
    metrics.log(object())
    assert list(metrics.collect()) == []
    metrics.close()


def test_the_latest_step_is_shown_as_far_as_it_is_known() -> None:
    metrics = ResultMetrics("tiny", lambda: LlmRankStats(latency_s=0.25, num_queued=3, num_used_blocks=7))
    page = page_of(metrics)
    assert 'trtllm_kv_cache_blocks{state="used"} 7.0' in page
    assert 'state="free"' not in page
    assert "trtllm_iteration_latency_seconds 0.25" in page
    assert "trtllm_queued_requests 3.0" in page
    assert "trtllm_paused_requests" not in page
    assert "trtllm_kv_cache_blocks_reused_total" not in page


async def test_upstream_metrics_of_results_are_shown_under_their_own_names() -> None:
    with installed() as module, module.LLM(MODEL, return_perf_metrics=True) as llm:
        metrics = ResultMetrics("tiny", lambda: None)
        try:
            sampling = module.SamplingParams(max_tokens=2, return_perf_metrics=True)
            metrics.log(await ended(llm.generate_async(STORY, sampling)))
            page = page_of(metrics)
            assert 'request_success_total{finished_reason="unknown",model_name="tiny"} 1.0' in page
            assert 'time_to_first_token_seconds_count{model_name="tiny"} 1.0' in page
            second = ResultMetrics("tiny", lambda: None)
            assert list(second.collect()) == [], "one engine of a process measures"
            second.close()
        finally:
            metrics.close()
            metrics.close()
        assert list(metrics.collect()) == []
        third = ResultMetrics("other", lambda: None)
        assert "request_success" in page_of(third), "names are free again"
        third.close()
