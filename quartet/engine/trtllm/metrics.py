"""TensorRT-LLM's own metrics, beside ours on one page: of its requests, and of its latest step.

Without ``publish_events_and_metrics`` there are none: measuring costs the engine throughput. The metrics of requests
are those of ``tensorrt_llm.metrics.MetricsCollector``, under its names, if the package has it and the engine was made
with ``return_perf_metrics``. The metrics of steps, if the engine was made with ``enable_iter_perf_stats``:

- ``trtllm_kv_cache_blocks{state="used" | "free"}``: KV blocks on the device; those only kept for reuse are free.
- ``trtllm_kv_cache_blocks_reused_total``, ``..._missed_total``: prompts' blocks that were found, and that were not.
- ``trtllm_iteration_latency_seconds``: seconds that the latest step took.
- ``trtllm_iteration_context_tokens``: prompt tokens in it.
- ``trtllm_active_requests``, ``trtllm_queued_requests``, ``trtllm_paused_requests``: as of that step.

An idle engine makes no steps: its metrics are those of its last one. Metrics that the engine does not report are left
out.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import REGISTRY, Metric
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

from quartet.engine.trtllm.errors import trace_of
from quartet.engine.trtllm.feeds import LlmRankStats

logger = logging.getLogger(__name__)

_GAUGES = (
    ("iteration_latency_seconds", "Seconds that the latest step took.", "latency_s"),
    ("iteration_context_tokens", "Prompt tokens in the latest step.", "num_context_tokens"),
    ("active_requests", "Requests that are taken up.", "num_active"),
    ("queued_requests", "Requests that wait to be taken up.", "num_queued"),
    ("paused_requests", "Requests that gave their blocks up and wait.", "num_paused"),
)
_COUNTERS = (
    ("kv_cache_blocks_reused", "Blocks of prompts that were found in the cache.", "num_reused_blocks"),
    ("kv_cache_blocks_missed", "Blocks of prompts that were not.", "num_missed_blocks"),
)


class ResultMetrics:
    """Measures results, and collects all metrics for a scrape. Nothing here waits for the engine."""

    def __init__(self, model: str, latest_record: Callable[[], LlmRankStats | None]) -> None:
        """Metrics of requests get a label ``model_name``; those of steps are of ``latest_record``."""
        self._has_failed = False
        self._latest_record = latest_record
        self._collector = _upstream_collector(model)
        # The collector's metrics; it has no list of them.
        self._families = [] if self._collector is None else _families_of(self._collector)

    def log(self, result: Any) -> None:
        """Measure a request that ended: a ``RequestOutput`` or anything else with a ``metrics_dict``. Never raises."""
        try:
            values = getattr(result, "metrics_dict", None)
            if self._collector is not None and values:
                self._collector.log_metrics_dict(values)
        except Exception as error:  # noqa: BLE001 - a failed measurement must not fail a request
            if not self._has_failed:
                self._has_failed = True
                logger.warning("some of TensorRT-LLM's metrics of requests are missing: %s", trace_of(error))

    def collect(self) -> Iterable[Metric]:
        """All metrics, as of now. Any thread may call."""
        for family in self._families:
            yield from family.collect()
        if (record := self._latest_record()) is not None:
            yield from _step_metrics(record)

    def close(self) -> None:
        """Unregister the metrics: another engine of this process may have the same ones. May be called twice."""
        families, self._families, self._collector = self._families, [], None
        for family in families:
            with contextlib.suppress(KeyError):  # it is not registered any more
                REGISTRY.unregister(family)


def _step_metrics(record: LlmRankStats) -> Iterator[Metric]:
    states = (("used", record.num_used_blocks), ("free", record.num_free_blocks))
    blocks = GaugeMetricFamily("trtllm_kv_cache_blocks", "KV blocks on the device by state.", labels=["state"])
    for state, number in states:
        if number is not None:
            blocks.add_metric([state], number)
    if blocks.samples:
        yield blocks
    for name, text, field in _GAUGES:
        if (value := getattr(record, field)) is not None:
            yield GaugeMetricFamily(f"trtllm_{name}", text, value=value)
    for name, text, field in _COUNTERS:
        if (value := getattr(record, field)) is not None:
            yield CounterMetricFamily(f"trtllm_{name}", text, value=value)


def _upstream_collector(model: str) -> Any:
    """``tensorrt_llm.metrics.MetricsCollector``; ``None``: this version has none, or it measures here already."""
    try:
        from tensorrt_llm.metrics import MetricsCollector
    except ImportError:
        return None
    try:
        return MetricsCollector({"model_name": model})
    except ValueError as error:
        # The collector puts its metrics into the process's registry, which takes each name only once.
        logger.warning("TensorRT-LLM's metrics of requests are left out: %s", error)
        return None


def _families_of(collector: Any) -> list[Any]:
    return [value for value in vars(collector).values() if callable(getattr(value, "collect", None))]
