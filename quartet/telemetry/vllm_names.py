"""The figures that vLLM shows too, once more under its names: for tools and gateways that read these.

Read at each scrape from what is counted anyway; only ``WholeAnswers`` are counted for them, at a choice's end. A name
is here only if it means the same in vLLM (``loggers.py`` and ``stats.py`` in ``vllm/v1/metrics``). Labels are vLLM's:
``model_name`` and ``engine``, a data-parallel rank.

A router shows its models as if each were one server (``engine="0"``), which is what clients and gateways see. A worker
shows its engine. A counter or histogram is on one of the two only, so that its sum over all processes counts nothing
twice. docs/observability.md has the table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from quartet.telemetry.metrics import FastHistogramChild, ModelMetrics, RouterMetrics, WorkerMetrics

_LABELS = ("model_name", "engine")
_ROUTER_ENGINE = "0"
_ALL_ENGINES = "all"  # of a histogram that is not kept by rank

# Our outcomes of choices that ended, as vLLM's ``finished_reason``. Errors are left out: most never reach an engine.
_FINISHED_REASONS: Mapping[str, str] = {
    "stop_id": "stop",
    "stop_string": "stop",
    "tool_calls": "stop",
    "length": "length",
    "cancelled": "abort",
}

_MODEL_HISTOGRAMS: tuple[tuple[str, str, Callable[[ModelMetrics], FastHistogramChild]], ...] = (
    ("time_to_first_token_seconds", "From arrival to the first token.", lambda model: model.ttft),
    ("inter_token_latency_seconds", "From one token to the next.", lambda model: model.itl),
    ("e2e_request_latency_seconds", "From arrival to the end.", lambda model: model.duration),
    (
        "request_time_per_output_token_seconds",
        "A request's mean time for each token after the first.",
        lambda model: model.whole.token_time,
    ),
    ("request_inference_time_seconds", "From the batch to the end.", lambda model: model.whole.inference_time),
    ("request_decode_time_seconds", "From the first token to the end.", lambda model: model.whole.decode_time),
)
# In tokens: vLLM's buckets end where no sequence can be longer.
_MODEL_LENGTHS: tuple[tuple[str, str, Callable[[ModelMetrics], FastHistogramChild]], ...] = (
    ("request_prompt_tokens", "Tokens of a request's prompt.", lambda model: model.whole.prompt_length),
    ("request_generation_tokens", "Tokens generated for it.", lambda model: model.whole.output_length),
)
_MODEL_COUNTERS: tuple[tuple[str, str, Callable[[ModelMetrics], float]], ...] = (
    ("prompt_tokens", "Prompt tokens, cached ones included.", lambda model: model.prompt_tokens.value),
    ("generation_tokens", "Tokens generated.", lambda model: model.output_tokens.value),
    ("prompt_tokens_cached", "Prompt tokens found cached.", lambda model: model.cached_tokens.value),
    ("prefix_cache_queries", "Prompt tokens looked up.", lambda model: model.prompt_tokens.value),
    ("prefix_cache_hits", "Of these, tokens found.", lambda model: model.cached_tokens.value),
)


@dataclass(frozen=True, kw_only=True)
class ModelFigures:
    """One model at a router, now.

    Attributes:
        num_waiting: choices in the router's queue.
        num_running: choices that it has placed and that have not ended.
        num_used_blocks: KV blocks of decode workers that are in use or held, by their last reports.
        num_total_blocks: of these workers; 0: nothing is known, or there are none.
        block_size: tokens of a block; 0: unknown.
        max_model_len: most tokens of a sequence, of any worker that the model has had.
        has_workers: whether there are decode workers now. Without any no block can be had: all count as in use.
    """

    model: str
    num_waiting: int
    num_running: int
    num_used_blocks: int
    num_total_blocks: int
    block_size: int
    max_model_len: int
    has_workers: bool = True


@dataclass(frozen=True, kw_only=True)
class AdapterFigures:
    """LoRA adapters of all models at a router, now.

    Attributes:
        num_served: adapters that workers serve, each of which can run at any time.
        waiting, running: names of those that choices need which wait, or which the router has placed.
    """

    num_served: int = 0
    waiting: Collection[str] = ()
    running: Collection[str] = ()


def show_router_as_vllm(
    registry: CollectorRegistry,
    metrics: RouterMetrics,
    read: Callable[[], Sequence[ModelFigures]],
    read_adapters: Callable[[], AdapterFigures] = AdapterFigures,
) -> None:
    """Show a router's figures under vLLM's names.

    ``read`` and ``read_adapters`` are called on the scrape's thread and may not block.
    """
    registry.register(_RouterCollector(metrics, read, read_adapters))


def show_worker_as_vllm(
    registry: CollectorRegistry,
    metrics: WorkerMetrics,
    read: Callable[[], Sequence[object]],
    *,
    model: str,
    block_size: int,
    num_blocks: int,
    prefills: bool,
) -> None:
    """Show an engine's figures under vLLM's names.

    Args:
        registry: where.
        metrics: the worker's.
        read: as for ``WorkerMetrics.watch_engine``.
        model: its served name.
        block_size: tokens of a block.
        num_blocks: blocks of a rank.
        prefills: whether ``metrics`` has the times of its prompts: a Prefill worker's.
    """
    registry.register(_WorkerCollector(metrics, read, model, block_size, num_blocks, prefills))


@dataclass(frozen=True)
class _RouterCollector(Collector):
    metrics: RouterMetrics
    read: Callable[[], Sequence[ModelFigures]]
    read_adapters: Callable[[], AdapterFigures]

    def collect(self) -> Iterator[Metric]:
        figures, models = self.read(), self.metrics.models()
        yield from _state(figures)
        yield _adapters(self.read_adapters())
        yield from _lengths(models, {one.model: one.max_model_len for one in figures})
        for name, text, histogram_of in _MODEL_HISTOGRAMS:
            histogram = HistogramMetricFamily(f"vllm:{name}", text, labels=_LABELS)
            for model, metrics in models.items():
                child = histogram_of(metrics)
                histogram.add_metric([model, _ROUTER_ENGINE], buckets=child.buckets(), sum_value=child.sum)
            yield histogram
        for name, text, value_of in _MODEL_COUNTERS:
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=_LABELS)
            for model, metrics in models.items():
                counter.add_metric([model, _ROUTER_ENGINE], value_of(metrics))
            yield counter
        yield self._success(models)

    def _success(self, models: Iterable[str]) -> Metric:
        family = CounterMetricFamily(
            "vllm:request_success", "Requests that ended, by reason.", labels=[*_LABELS, "finished_reason"]
        )
        counts = {(model, reason): 0.0 for model in models for reason in sorted(set(_FINISHED_REASONS.values()))}
        for (model, outcome), count in self.metrics.requests.by_model().items():
            key = (model, _FINISHED_REASONS.get(outcome, ""))
            if key in counts:
                counts[key] += count
        for (model, reason), count in counts.items():
            family.add_metric([model, _ROUTER_ENGINE, reason], count)
        return family


def _state(models: Iterable[ModelFigures]) -> Iterator[Metric]:
    running, waiting, usage, config = _state_families()
    for figures in models:
        labels = [figures.model, _ROUTER_ENGINE]
        running.add_metric(labels, figures.num_running)
        waiting.add_metric(labels, figures.num_waiting)
        if figures.num_total_blocks or not figures.has_workers:
            share = figures.num_used_blocks / figures.num_total_blocks if figures.has_workers else 1.0
            usage.add_metric(labels, share)
            config.add_metric([*labels, str(figures.block_size), str(figures.num_total_blocks)], 1)
    yield from (running, waiting, usage, config)


def _adapters(figures: AdapterFigures) -> Metric:
    """One line, of this moment, as readers take the line with the latest time; there also where there are none."""
    family = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "The adapters that requests need; when that was.",
        labels=["max_lora", "waiting_lora_adapters", "running_lora_adapters"],
    )
    names = [",".join(sorted(adapters)) for adapters in (figures.waiting, figures.running)]
    family.add_metric([str(figures.num_served), *names], time.time())
    return family


def _lengths(models: Mapping[str, ModelMetrics], longest: Mapping[str, int]) -> Iterator[Metric]:
    for name, text, histogram_of in _MODEL_LENGTHS:
        family = HistogramMetricFamily(f"vllm:{name}", text, labels=_LABELS)
        for model, metrics in models.items():
            if model not in longest:  # no decode worker was seen, so no answer was; buckets that come never go
                continue
            child, most = histogram_of(metrics), longest[model]
            buckets = [(bound, num) for bound, num in child.buckets() if float(bound) <= most or bound == "+Inf"]
            family.add_metric([model, _ROUTER_ENGINE], buckets=buckets, sum_value=child.sum)
        yield family


@dataclass(frozen=True)
class _WorkerCollector(Collector):
    metrics: WorkerMetrics
    read: Callable[[], Sequence[object]]
    model: str
    block_size: int
    num_blocks: int
    prefills: bool

    def collect(self) -> Iterator[Metric]:
        ranks = self.read()
        running, waiting, usage, config = _state_families()
        preemptions = CounterMetricFamily("vllm:num_preemptions", "Requests preempted.", labels=_LABELS)
        for number, rank in enumerate(ranks):
            labels = [self.model, str(number)]
            figures = vars(rank)
            running.add_metric(labels, figures["num_running"])
            waiting.add_metric(labels, figures["num_waiting"])
            num_used = figures["num_in_use_blocks"] + figures["num_held_blocks"]
            num_total = figures["num_total_blocks"] or self.num_blocks
            usage.add_metric(labels, num_used / num_total if num_total else 0.0)
            config.add_metric([*labels, str(self.block_size), str(num_total)], 1)
            preemptions.add_metric(labels, figures["num_preemptions"])
        yield from (running, waiting, usage, config, preemptions)
        labels = [self.model, "0" if len(ranks) == 1 else _ALL_ENGINES]
        yield _renamed(self.metrics.queue_time, "request_queue_time_seconds", "From arrival to the batch.", labels)
        if self.prefills:
            text = "From the batch to the first token."
            yield _renamed(self.metrics.prefill_time, "request_prefill_time_seconds", text, labels)


def _state_families() -> tuple[GaugeMetricFamily, GaugeMetricFamily, GaugeMetricFamily, GaugeMetricFamily]:
    """Running and waiting requests, the share of KV blocks in use, and the shape of the cache; empty."""
    return (
        GaugeMetricFamily("vllm:num_requests_running", "Requests that run.", labels=_LABELS),
        GaugeMetricFamily("vllm:num_requests_waiting", "Requests that wait.", labels=_LABELS),
        GaugeMetricFamily("vllm:kv_cache_usage_perc", "KV blocks in use; 1 is all of them.", labels=_LABELS),
        GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache; always 1.", labels=[*_LABELS, "block_size", "num_gpu_blocks"]
        ),
    )


def _renamed(histogram: Histogram, name: str, text: str, labels: Sequence[str]) -> Metric:
    family = HistogramMetricFamily(f"vllm:{name}", text, labels=_LABELS)
    [metric] = histogram.collect()
    buckets = [(sample.labels["le"], sample.value) for sample in metric.samples if "le" in sample.labels]
    total = next(sample.value for sample in metric.samples if sample.name.endswith("_sum"))
    family.add_metric(labels, buckets=buckets, sum_value=total)
    return family
