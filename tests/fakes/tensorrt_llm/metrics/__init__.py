"""What measures requests for Prometheus, in the process's registry."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Histogram
from tensorrt_llm.metrics.enums import MetricNames

_HISTOGRAMS = {
    "e2e_request_latency_seconds": MetricNames.E2E,
    "time_to_first_token_seconds": MetricNames.TTFT,
    "time_per_output_token_seconds": MetricNames.TPOT,
    "request_queue_time_seconds": MetricNames.REQUEST_QUEUE_TIME,
}


class MetricsCollector:
    """Measures what results' ``metrics_dict`` says; a second one in a process finds its names taken."""

    def __init__(self, labels: dict[str, str]) -> None:
        self.labels = labels
        names = list(labels)
        self.counter_request_success = Counter(
            "request_success_total", "Count of successfully processed requests.", labelnames=[*names, "finished_reason"]
        )
        self.histogram_e2e = Histogram("e2e_request_latency_seconds", "Of a request.", labelnames=names)
        self.histogram_ttft = Histogram("time_to_first_token_seconds", "Of a request.", labelnames=names)
        self.histogram_tpot = Histogram("time_per_output_token_seconds", "Of a request.", labelnames=names)
        self.histogram_queue = Histogram("request_queue_time_seconds", "Of a request.", labelnames=names)

    def log_metrics_dict(self, metrics_dict: dict[MetricNames, Any]) -> None:
        """Measure one result."""
        self.counter_request_success.labels(**self.labels, finished_reason="unknown").inc()
        histograms = (self.histogram_e2e, self.histogram_ttft, self.histogram_tpot, self.histogram_queue)
        for histogram, key in zip(histograms, _HISTOGRAMS.values(), strict=True):
            if key in metrics_dict:
                histogram.labels(**self.labels).observe(metrics_dict[key])
