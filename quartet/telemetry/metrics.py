"""Every metric of the project, named ``quartet_<part>_<what>_<unit>``.

Each class takes the registry that it registers in, so a test has its own. Children are bound once: with that an
observation costs under 1 us. A scrape takes some 6 us of Python a line, so no label grows without bound: a worker of 8
ranks has less than 450 lines, and a router less than 230, and 230 more for each model with those under vLLM's names.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from quartet.errors import all_kinds
from quartet.telemetry.log_writer import num_dropped_lines

# They double a counter's lines in every scrape.
disable_created_metrics()  # type: ignore[no-untyped-call]

_FIRST_TOKEN_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0)
_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 2.0)
_REQUEST_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0)
_WAIT_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_TRANSFER_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
# These are vLLM's own (``vllm/v1/metrics/loggers.py``), for what is shown under its names alone.
_SPAN_BUCKETS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
_MEAN_TOKEN_BUCKETS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_LENGTH_BUCKETS = tuple(float(digit * 10**power) for power in range(8) for digit in (1, 2, 5))
# Outcomes of choices that did what their clients wanted.
_NO_FAILURES = frozenset({"stop_id", "stop_string", "length", "tool_calls", "cancelled", "placed"})
_LAG_INTERVAL_S = 0.1
_LAG_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
_STALL_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)

# Field of ``quartet.engine.base.EngineStats``, name and help of its metric.
_ENGINE_GAUGES = (
    ("num_running", "quartet_worker_running_requests", "Requests in the running batch."),
    ("num_waiting", "quartet_worker_waiting_requests", "Requests that wait for the batch."),
    ("max_running", "quartet_worker_max_running_requests", "Most requests that the batch can have."),
    ("num_queued_prefill_tokens", "quartet_worker_queued_prefill_tokens", "Prompt tokens not computed yet."),
    ("num_retained_blocks", "quartet_worker_retained_blocks", "KV blocks that sessions retain, in any state."),
)
# These states add up to the pool.
_BLOCK_STATES = (
    (("used",), "num_in_use_blocks"),
    (("held",), "num_held_blocks"),
    (("cached",), "num_cached_blocks"),
    (("free",), "num_free_blocks"),
)
# Of a tier below the device, from the fields of ``quartet.engine.base.TierCounts``.
_TIER_STATES = (("used", "in_use"), ("held", "held"), ("cached", "cached"), ("free", "free"))
_TIER_OUTCOMES = ("stored", "loaded", "dropped", "failed")
_TIER_DIRECTIONS = ("stored", "loaded")
_ENGINE_COUNTERS = (
    ("num_steps", "quartet_worker_steps", "Engine steps that did something."),
    ("num_preemptions", "quartet_worker_preemptions", "Requests preempted and computed again."),
    ("num_prompt_tokens", "quartet_worker_prompt_tokens", "Prompt tokens computed."),
    ("num_output_tokens", "quartet_worker_output_tokens", "Tokens sampled."),
    ("num_cached_tokens", "quartet_worker_cached_tokens", "Prompt tokens found in the cache."),
)


class ProcessMetrics:
    """Metrics of every process: CPU, memory and files (``process_*``), and how late its event loop is."""

    def __init__(self, registry: CollectorRegistry) -> None:
        ProcessCollector(registry=registry)
        self._lag = Histogram(
            "quartet_process_event_loop_lag_seconds",
            "How late the event loop ran a timer.",
            buckets=_LAG_BUCKETS_S,
            registry=registry,
        )
        self._stall = Histogram(
            "quartet_process_event_loop_stall_seconds",
            "CPU time that the event loop's thread used, at most, while a timer waited for it.",
            buckets=_STALL_BUCKETS_S,
            registry=registry,
        )
        self._longest_stall = Gauge(
            "quartet_process_event_loop_longest_stall_seconds",
            "The longest of these times since the process started.",
            registry=registry,
        )
        self._longest_stall_s = 0.0
        registry.register(_ReadCollector(_read_dropped_lines))

    def observe_event_loop_lag(self, lag_s: float) -> None:
        """A timer ran ``lag_s`` seconds after its time."""
        self._lag.observe(lag_s)

    def observe_event_loop_stall(self, stall_s: float) -> None:
        """The loop's thread used at most ``stall_s`` seconds of CPU time while a timer waited for it."""
        self._stall.observe(stall_s)
        if stall_s > self._longest_stall_s:
            self._longest_stall_s = stall_s
            self._longest_stall.set(stall_s)


class CertificateUse(StrEnum):
    """What a process shows a certificate for."""

    GRPC = "grpc"  # to those who call it
    HTTP = "http"  # the same, over HTTP
    DIAL = "dial"  # to processes of Quartet that it calls
    ETCD = "etcd"  # to etcd


class CertificateMetrics:
    """When the certificates end that a process uses; nothing where it uses none."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._ends: list[tuple[CertificateUse, Callable[[], float | None]]] = []
        registry.register(_ReadCollector(self._read))

    def watch(self, use: CertificateUse, end: Callable[[], float | None]) -> None:
        """Show at each scrape the Unix time that ``end`` gives, of several the first; ``None``: no certificate.

        It is called on the scrape's thread.
        """
        self._ends.append((use, end))

    def _read(self) -> Iterator[Metric]:
        first: dict[CertificateUse, float] = {}
        for use, read in tuple(self._ends):
            if (end := read()) is not None:
                first[use] = min(end, first.get(use, end))
        if first:
            name, text = (
                "quartet_process_certificate_end_timestamp_seconds",
                "Unix time at which a certificate in use ends.",
            )
            family = GaugeMetricFamily(name, text, labels=["use"])
            for use, end in first.items():
                family.add_metric([use], end)
            yield family


class ReloadedFile(StrEnum):
    """What a process reads again when it has changed."""

    CONFIG = "config"
    KEYS = "keys"  # of HTTP
    SIGNING_KEYS = "signing_keys"
    GRPC_CERTIFICATE = "grpc_certificate"  # of those who call it, and of processes that it calls: they are the same
    HTTP_CERTIFICATE = "http_certificate"


class ReloadMetrics:
    """What became of changed files."""

    def __init__(self, registry: CollectorRegistry) -> None:
        # Not ``FastCounter``: threads of gRPC and of scrapes count, too.
        self._used, self._failed = (
            Counter(name, text, ["file"], registry=registry)
            for name, text in (
                ("quartet_process_reloads", "Changed files that are in use now."),
                ("quartet_process_failed_reloads", "Changed files that could not be used: what was before stays."),
            )
        )

    def counter(self, file: ReloadedFile) -> Callable[[bool], None]:
        """Counts each change of ``file`` by whether it could be used. Any thread may call it; scrapes show 0 before."""
        used, failed = self._used.labels(file), self._failed.labels(file)

        def count(is_used: bool) -> None:
            (used if is_used else failed).inc()

        return count


async def monitor_event_loop_lag(metrics: ProcessMetrics, interval_s: float = _LAG_INTERVAL_S) -> None:
    """Measure every ``interval_s`` seconds how late the running event loop is, until cancelled.

    A late loop is the first sign that something blocks it. On a busy machine it may be late because its thread got no
    CPU; the thread's CPU time shows whether the loop itself was busy.
    """
    loop = asyncio.get_running_loop()
    while True:
        due, used_s = loop.time() + interval_s, time.thread_time()
        await asyncio.sleep(interval_s)
        lag_s = max(0.0, loop.time() - due)
        metrics.observe_event_loop_lag(lag_s)
        # A bound: part of this CPU time may have been used before the timer was due.
        metrics.observe_event_loop_stall(min(lag_s, time.thread_time() - used_s))


@dataclass(frozen=True)
class ModelMetrics:
    """Requests of one model at the router, bound once; its histograms and counters are used as they are.

    Attributes:
        ttft: seconds from a request's arrival to its first token, one observation a choice.
        itl: seconds from one message with tokens of a choice to the next, divided by its tokens.
        duration: seconds from a request's arrival to its end, one observation a choice, also of those that failed.
        prompt_tokens: of requests that were placed, once a request, however many its choices and attempts.
        cached_tokens: of these, tokens whose KV was cached; of a request's choices, the most.
        output_tokens: shown to clients.
        whole: the answers that began, at their ends.
    """

    ttft: FastHistogramChild
    itl: FastHistogramChild
    duration: FastHistogramChild
    prompt_tokens: FastCounterChild
    cached_tokens: FastCounterChild
    output_tokens: FastCounterChild
    whole: WholeAnswers


class WholeAnswers:
    """Choices that had a token, one observation each at their ends; shown under vLLM's names only.

    Attributes:
        prompt_length, output_length: tokens.
        token_time: seconds for each token after the first, on average; 0 if there was only one.
        inference_time: seconds from the first batch that had the choice to its end.
        decode_time: seconds from its first token to its end.
    """

    __slots__ = ("decode_time", "inference_time", "output_length", "prompt_length", "token_time")

    def __init__(self) -> None:
        """Nothing was observed."""
        self.prompt_length, self.output_length = (
            FastHistogramChild(_LENGTH_BUCKETS),
            FastHistogramChild(_LENGTH_BUCKETS),
        )
        self.token_time = FastHistogramChild(_MEAN_TOKEN_BUCKETS_S)
        self.inference_time, self.decode_time = FastHistogramChild(_SPAN_BUCKETS_S), FastHistogramChild(_SPAN_BUCKETS_S)

    def observe(self, num_prompt_tokens: int, num_output_tokens: int, inference_s: float, decode_s: float) -> None:
        """One has ended."""
        self.prompt_length.observe(num_prompt_tokens)
        self.output_length.observe(num_output_tokens)
        self.token_time.observe(decode_s / (num_output_tokens - 1) if num_output_tokens > 1 else 0.0)
        self.inference_time.observe(inference_s)
        self.decode_time.observe(decode_s)


@dataclass(frozen=True, kw_only=True)
class RouterTotals:
    """What a router has counted since its start, of all models together, and what it has now.

    Attributes:
        num_requests: choices that ended; ``num_failed`` of them with an error that was not their client's leaving.
        num_output_tokens: of requests that have ended.
        ttft_bounds_s: upper bounds of the buckets of ``ttft_counts``, which has one more, without a bound.
        num_queued: requests that wait for room now.
        num_running: requests between arrival and end now.
        num_without_room: waits for room that ended because the queue was full or they took too long.
        num_kv_gaps: times that KV events of a worker were lost.
        reuse: prompt tokens by what became of them.
    """

    num_requests: int
    num_failed: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    ttft_bounds_s: Sequence[float]
    ttft_counts: Sequence[int]
    num_queued: int
    num_running: int
    num_without_room: int
    num_kv_gaps: int
    reuse: Mapping[str, int]


class AdmissionOutcome(StrEnum):
    """How a choice's wait for room ended."""

    PLACED = "placed"
    REFUSED = "refused"  # the queue was full
    EXPIRED = "expired"  # its time in the queue, or its own, was over
    UNAVAILABLE = "unavailable"  # no decode worker was ready for too long
    CANCELLED = "cancelled"


_WITHOUT_ROOM = (AdmissionOutcome.REFUSED, AdmissionOutcome.EXPIRED)


class ReusePart(StrEnum):
    """What became of a prompt's tokens that might have been found cached, as ``quartet.api.reuse.Reuse`` has them."""

    HELD = "held"
    MATCHED = "matched"
    CACHED = "cached"
    EVICTED = "evicted"
    ELSEWHERE = "elsewhere"
    MISSING = "missing"
    UNANNOUNCED = "unannounced"
    FOREIGN = "foreign"


class HandOffOutcome(StrEnum):
    """How a hand-off ended where it was offered, as ``quartet.kvcache.hand_off.HandOffState`` has them."""

    TAKEN = "taken"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


# How signed starts end: each reason of the errors that ``quartet.streams.signed_start`` raises.
_STARTS = (
    *("opened", "signed_start_invalid", "no_signing_key", "signing_key_unknown"),
    *("signed_start_foreign", "signed_start_expired", "signed_start_used"),
)


class SnapshotOutcome(StrEnum):
    """What became of a snapshot of a worker's blocks."""

    USED = "used"
    OUTDATED = "outdated"  # too much was missed meanwhile
    FAILED = "failed"


def _read_dropped_lines() -> Iterator[Metric]:
    text = "Lines of the log that nothing took in time, or whose writing failed."
    yield CounterMetricFamily("quartet_process_dropped_log_lines", text, value=num_dropped_lines())


def known_outcomes() -> frozenset[str]:
    """Each way in which a choice can end.

    Prometheus sees no growth in a series that begins at 1: so what a rate is taken of is there from the start, at 0.
    """
    return _NO_FAILURES | {kind.reason.lower() for kind in all_kinds()}


class RouterMetrics:
    """Metrics of a router. ``model`` is a label: give only names of models that are served, never a client's text.

    Attributes:
        requests: choices that ended, by finish reason, or by the error's reason, in lower case.
        attempts: attempts begun, by ``first`` or the lower-case reason of the error that ended the one before; the
            router names the reasons, see ``expect_causes``.
        queue_time: seconds that a choice waited for room.
        tokenize_time: seconds in which a prompt was laid out and tokenized.
        admissions: choices' waits that ended, by outcome; each attempt of a choice waits anew.
        reuse: prompt tokens of placed requests, by what became of them, for each ``ReusePart``.
        matched_tokens: prompt tokens of placed choices that the router expects to be cached on their rank.
        rate_limited: requests that a limit of a minute refused, by the setting.
        snapshots: snapshots of a worker's blocks that ended, by outcome.
        malformed_events: events of workers that the router could not read.
        kv_gaps: times that KV events of a worker whose blocks were known have been lost.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._models: dict[str, ModelMetrics] = {}
        self._num_queued: Callable[[], int] = lambda: 0
        self._num_running: Callable[[], int] = lambda: 0
        self._running_adapters: dict[str, int] = {}
        self._ttft, self._itl, self._duration = (
            FastHistogram(name, text, "model", buckets, registry)
            for name, text, buckets in (
                ("quartet_router_ttft_seconds", "From arrival to the first token.", _FIRST_TOKEN_BUCKETS_S),
                ("quartet_router_itl_seconds", "From one token to the next.", _TOKEN_BUCKETS_S),
                ("quartet_router_request_duration_seconds", "From arrival to the end.", _REQUEST_BUCKETS_S),
            )
        )
        self._prompt_tokens, self._cached_tokens, self._output_tokens = (
            FastCounter(name, text, "model", registry)
            for name, text in (
                ("quartet_router_prompt_tokens", "Prompt tokens of requests that were placed."),
                ("quartet_router_cached_tokens", "Prompt tokens whose KV was cached."),
                ("quartet_router_output_tokens", "Tokens shown to clients."),
            )
        )
        self.requests = EndedRequests(registry, known_outcomes())
        self.attempts = FastCounter(
            "quartet_router_attempts", "Attempts begun, by what made them necessary.", "cause", registry
        )
        self.admissions = FastCounter(
            "quartet_router_admissions",
            "Waits for room that ended, by outcome.",
            "outcome",
            registry,
            known=AdmissionOutcome,
        )
        self.snapshots = FastCounter(
            "quartet_router_kv_snapshots",
            "Snapshots of workers' blocks, by outcome.",
            "outcome",
            registry,
            known=SnapshotOutcome,
        )
        self.rate_limited = FastCounter(
            "quartet_router_rate_limited_requests",
            "Requests refused by a tenant's or a key's limit, by the setting.",
            "limit",
            registry,
            known=("requests_per_minute", "tokens_per_minute"),
        )
        reuse = FastCounter(
            "quartet_router_reuse_tokens",
            "Prompt tokens that might have been found cached, by what became of them.",
            "part",
            registry,
            known=ReusePart,
        )
        self.reuse = {part: reuse.labels(part) for part in ReusePart}
        self.queue_time, self.tokenize_time = (
            FastHistogram(name, text, None, _WAIT_BUCKETS_S, registry).labels()
            for name, text in (
                ("quartet_router_queue_seconds", "Waiting for room."),
                ("quartet_router_tokenize_seconds", "Template and tokenizer."),
            )
        )
        self.matched_tokens, self.malformed_events, self.kv_gaps = (
            FastCounter(name, text, None, registry).labels()
            for name, text in (
                (
                    "quartet_router_matched_tokens",
                    "Tokens of placed requests that were expected to be cached where they were sent.",
                ),
                ("quartet_router_malformed_events", "Events of workers that made no sense."),
                ("quartet_router_kv_gaps", "Times that a worker's KV events were lost, and its blocks fetched anew."),
            )
        )
        self._workers = Gauge("quartet_router_workers", "Workers known.", ["role", "state"], registry=registry)
        self._queued, self._running, self._live, self._blocks, self._predicted = (
            Gauge(name, text, registry=registry)
            for name, text in (
                ("quartet_router_queued_requests", "Requests that wait for room."),
                ("quartet_router_running_requests", "Requests between arrival and end."),
                ("quartet_router_kv_live_workers", "Workers whose blocks are known."),
                ("quartet_router_kv_blocks", "Different blocks on workers' devices."),
                ("quartet_router_kv_predicted_blocks", "Different blocks that workers will have."),
            )
        )

    def expect_causes(self, causes: Iterable[str]) -> None:
        """Show attempts that have these causes from the start, at 0."""
        for cause in causes:
            self.attempts.labels(cause)

    def for_model(self, model: str) -> ModelMetrics:
        """The metrics of requests for ``model``, a name that is served; the same ones at each call."""
        if model not in self._models:
            self._models[model] = ModelMetrics(
                ttft=self._ttft.labels(model),
                itl=self._itl.labels(model),
                duration=self._duration.labels(model),
                prompt_tokens=self._prompt_tokens.labels(model),
                cached_tokens=self._cached_tokens.labels(model),
                output_tokens=self._output_tokens.labels(model),
                whole=WholeAnswers(),
            )
        return self._models[model]

    def models(self) -> Mapping[str, ModelMetrics]:
        """Those of all models that had a worker or a request, by name. Any thread may ask."""
        return dict(self._models)

    def totals(self) -> RouterTotals:
        """The sums over all models; for the thread that counts."""
        models = tuple(self._models.values())
        outcomes = self.requests.by_outcome()
        return RouterTotals(
            num_requests=int(sum(outcomes.values())),
            num_failed=int(sum([count for outcome, count in outcomes.items() if outcome not in _NO_FAILURES])),
            num_prompt_tokens=int(sum([model.prompt_tokens.value for model in models])),
            num_cached_tokens=int(sum([model.cached_tokens.value for model in models])),
            num_output_tokens=int(sum([model.output_tokens.value for model in models])),
            ttft_bounds_s=_FIRST_TOKEN_BUCKETS_S,
            ttft_counts=[sum(counts) for counts in zip(*[model.ttft.counts for model in models], strict=True)],
            num_queued=self._num_queued(),
            num_running=self._num_running(),
            num_without_room=int(sum([self.admissions.labels(outcome).value for outcome in _WITHOUT_ROOM])),
            num_kv_gaps=int(self.kv_gaps.value),
            reuse={part.value: int(counter.value) for part, counter in self.reuse.items()},
        )

    def watch_requests(self, num_queued: Callable[[], int], num_running: Callable[[], int]) -> None:
        """Show at each scrape how many requests wait for room, and how many are between arrival and end.

        Both are called on the scrape's thread, too, and may not block.
        """
        self._num_queued, self._num_running = num_queued, num_running
        self._queued.set_function(num_queued)
        self._running.set_function(num_running)

    def watch_queues(self, read: Callable[[], Mapping[str, float]]) -> None:
        """Show at each scrape which share of each queue is taken, by its name: of more than all, requests are refused.

        ``read`` is called on the scrape's thread and may not block.
        """

        def collect() -> Iterator[Metric]:
            text = "Share of what the queue may hold."
            family = GaugeMetricFamily("quartet_router_queue_usage_ratio", text, labels=["queue"])
            for name, share in read().items():
                family.add_metric([name], share)
            yield family

        self._registry.register(_ReadCollector(collect))

    def watch_missing_roles(self, read: Callable[[], Mapping[tuple[str, str], bool]]) -> None:
        """Show at each scrape by model and role whether no worker is ready that must be; an empty model: of any model.

        ``read`` is called on the scrape's thread and may not block.
        """

        def collect() -> Iterator[Metric]:
            text = "1: the model has no ready worker of a role that the router requires."
            family = GaugeMetricFamily("quartet_router_missing_roles", text, labels=["model", "role"])
            for labels, is_missing in read().items():
                family.add_metric(labels, is_missing)
            yield family

        self._registry.register(_ReadCollector(collect))

    def watch_index(
        self, num_live: Callable[[], int], num_blocks: Callable[[], int], num_predicted_blocks: Callable[[], int]
    ) -> None:
        """Show at each scrape what these return; they are called on the scrape's thread and may not block."""
        self._live.set_function(num_live)
        self._blocks.set_function(num_blocks)
        self._predicted.set_function(num_predicted_blocks)

    def note_adapter(self, adapter: str, num_choices: int) -> None:
        """So many more choices that need ``adapter``, a name that is served, have a place; less if negative."""
        num = self._running_adapters.get(adapter, 0) + num_choices
        if num:
            self._running_adapters[adapter] = num
        else:
            del self._running_adapters[adapter]

    def running_adapters(self) -> Collection[str]:
        """Those that choices with a place need. Any thread may ask."""
        return tuple(self._running_adapters)

    def watch_usage(self, num_lost: Callable[[], int]) -> None:
        """Show at each scrape how many usage records are lost; it is called on the scrape's thread, too."""

        def read() -> Iterator[Metric]:
            text = "Usage records that were not written."
            yield CounterMetricFamily("quartet_router_lost_usage_records", text, value=num_lost())

        self._registry.register(_ReadCollector(read))

    def set_workers(self, role: str, state: str, num_workers: int) -> None:
        """So many workers of ``role`` are in ``state``."""
        self._workers.labels(role, state).set(num_workers)


class EndedRequests(Collector):
    """Choices that ended at a router, counted once by model and outcome; our own metric shows them by outcome.

    Only one thread may count.
    """

    def __init__(self, registry: CollectorRegistry, known: Iterable[str] = ()) -> None:
        """Scrapes show the outcomes ``known`` from the start, at 0."""
        self._counts: dict[tuple[str, str], float] = {}
        self._known = dict.fromkeys(sorted(known), 0.0)
        registry.register(self)

    def count(self, outcome: str, model: str = "") -> None:
        """One ended. ``model``: a name that is served; empty: it ended before its model was known."""
        key = model, outcome
        self._counts[key] = self._counts.get(key, 0.0) + 1.0

    def by_model(self) -> Mapping[tuple[str, str], float]:
        """The counts by model and outcome. Any thread may ask."""
        return dict(self._counts)

    def by_outcome(self) -> Mapping[str, float]:
        """The sums over all models, of outcomes that occurred. Any thread may ask."""
        sums: dict[str, float] = {}
        for (_model, outcome), count in self.by_model().items():
            sums[outcome] = sums.get(outcome, 0.0) + count
        return sums

    def collect(self) -> Iterator[Metric]:
        """What a scrape shows."""
        family = CounterMetricFamily("quartet_router_requests", "Choices that ended, by outcome.", labels=["outcome"])
        for outcome, count in {**self._known, **self.by_outcome()}.items():
            family.add_metric([outcome], count)
        yield family


class PoolMetrics:
    """Metrics of a router over several pools, by the pool's namespace.

    Attributes:
        requests: requests that were sent there, each as often as it was.
        retries: of these, how many went on elsewhere, or on another router of the pool.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        name = "quartet_global_router"
        self.requests = FastCounter(f"{name}_requests", "Requests sent to the pool.", "namespace", registry)
        self.retries = FastCounter(f"{name}_retries", "Requests that left the pool early.", "namespace", registry)
        self._ready = Gauge(f"{name}_ready_workers", "Ready workers of the pool.", ["namespace"], registry=registry)

    def expect(self, namespaces: Iterable[str]) -> None:
        """Show these pools from the start, at 0."""
        for namespace in namespaces:
            self.requests.labels(namespace)
            self.retries.labels(namespace)

    def set_ready(self, namespace: str, num_workers: int) -> None:
        """So many workers of the pool are ready."""
        self._ready.labels(namespace).set(num_workers)


@dataclass(frozen=True)
class _ReadCollector(Collector):
    collect: Callable[[], Iterable[Metric]]


class WorkerMetrics:
    """Metrics of a worker; figures of its engine by data-parallel rank.

    Attributes:
        fetch_time: seconds until the model's files were on this machine.
        load_time: seconds in which the model was loaded and warmed up.
        requests: requests that ended, by finish reason, or by the error's reason, in lower case.
        hand_offs: hand-offs held here that ended: ``taken``, ``expired``, ``cancelled``.
        signed_starts: signed starts that clients came with: ``opened``, or the lower-case reason of the refusal.
        queue_time: seconds from a request's arrival until it joined the running batch.
        prefill_time: seconds from there to a prompt's first token.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.fetch_time = Gauge(
            "quartet_worker_model_fetch_seconds",
            "Until the model's files were on this machine: next to nothing for a folder.",
            registry=registry,
        )
        self.load_time = Gauge(
            "quartet_worker_model_load_seconds", "From there to a model that is loaded and warm.", registry=registry
        )
        self.requests, self.hand_offs, self.signed_starts = (
            Counter(name, text, ["outcome"], registry=registry)
            for name, text in (
                ("quartet_worker_requests", "Requests that ended, by outcome."),
                ("quartet_worker_hand_offs", "Hand-offs that ended, by outcome."),
                ("quartet_worker_signed_starts", "Signed starts that came, by outcome."),
            )
        )
        for counter, outcomes in (
            (self.requests, known_outcomes() - {"placed"} | {"encoded"}),
            (self.hand_offs, HandOffOutcome),
            (self.signed_starts, _STARTS),
        ):
            for outcome in sorted(outcomes):  # from the start, as in ``known_outcomes``
                counter.labels(outcome)
        self.queue_time, self.prefill_time = (
            Histogram(name, text, buckets=buckets, registry=registry)
            for name, text, buckets in (
                ("quartet_worker_queue_seconds", "From arrival to the batch.", _WAIT_BUCKETS_S),
                ("quartet_worker_prefill_seconds", "From the batch to the first token.", _FIRST_TOKEN_BUCKETS_S),
            )
        )
        self._transfer_bytes = Counter(
            "quartet_worker_transfer_bytes", "Bytes of KV and embeddings pulled, by way.", ["way"], registry=registry
        )
        self._transfer_time = Histogram(
            "quartet_worker_transfer_seconds",
            "Duration of a pull, by way.",
            ["way"],
            buckets=_TRANSFER_BUCKETS_S,
            registry=registry,
        )

    def watch_engine(self, read: Callable[[], Sequence[object]]) -> None:
        """Show at each scrape what ``read`` returns: an entry a data-parallel rank, always in the same order.

        An entry has the fields of ``quartet.engine.base.EngineStats``. ``read`` is called on the scrape's thread and
        may not block.
        """
        self._registry.register(_EngineCollector(read))

    def watch_collected(self, read: Callable[[], Iterable[Metric]]) -> None:
        """Show at each scrape what ``read`` returns, which an engine measures by itself; as in ``watch_engine``."""
        self._registry.register(_ReadCollector(read))

    def expect_transfers(self, ways: Iterable[str]) -> None:
        """Show transfers by these ways from the start, at 0."""
        for way in ways:
            self._transfer_bytes.labels(way)
            self._transfer_time.labels(way)

    def observe_transfer(self, way: str, size_bytes: int, duration_s: float) -> None:
        """Blocks, or embeddings, were pulled from another worker by ``way``."""
        self._transfer_bytes.labels(way).inc(size_bytes)
        self._transfer_time.labels(way).observe(duration_s)


class _EngineCollector(Collector):
    """Reads the engine at each scrape: nothing is kept here, so scrapes may overlap and figures are never old."""

    def __init__(self, read: Callable[[], Sequence[object]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        ranks = self._read()
        for fields, family in _engine_families():
            for number, figures in enumerate(ranks):
                for labels, field in fields:
                    family.add_metric([str(number), *labels], getattr(figures, field))
            yield family
        yield from _tier_families(ranks)


def _engine_families() -> Iterator[tuple[Sequence[tuple[Sequence[str], str]], GaugeMetricFamily | CounterMetricFamily]]:
    """Each metric of an engine, still empty, with the labels beside the rank and the field of each of its figures."""
    for field, name, text in _ENGINE_GAUGES:
        yield [((), field)], GaugeMetricFamily(name, text, labels=["rank"])
    yield _BLOCK_STATES, GaugeMetricFamily("quartet_worker_blocks", "KV blocks by state.", labels=["rank", "state"])
    for field, name, text in _ENGINE_COUNTERS:
        yield [((), field)], CounterMetricFamily(name, text, labels=["rank"])


def _tier_families(ranks: Sequence[object]) -> Iterator[Metric]:
    """The metrics of tiers below the devices; none where there are no such tiers."""
    tiers = [(str(rank), tier) for rank, figures in enumerate(ranks) for tier in getattr(figures, "tiers", ())]
    if not tiers:
        return
    names = ["rank", "tier"]
    blocks = GaugeMetricFamily("quartet_worker_tier_blocks", "KV blocks of a tier by state.", labels=[*names, "state"])
    moves = CounterMetricFamily(
        "quartet_worker_tier_moves", "KV blocks of a tier by what became of them.", labels=[*names, "outcome"]
    )
    size = CounterMetricFamily("quartet_worker_tier_bytes", "Bytes by direction.", labels=[*names, "direction"])
    for rank, tier in tiers:
        labels = [rank, tier.tier.name.lower()]
        for state, field in _TIER_STATES:
            blocks.add_metric([*labels, state], getattr(tier.blocks, field))
        for outcome in _TIER_OUTCOMES:
            moves.add_metric([*labels, outcome], getattr(tier, f"num_{outcome}"))
        for direction in _TIER_DIRECTIONS:
            size.add_metric([*labels, direction], getattr(tier, f"num_{direction}") * tier.block_size_bytes)
    yield from (blocks, moves, size)


class FastCounter(Collector):
    """A counter with one label or none, for what happens often: the same page as ``prometheus_client``'s at a tenth.

    That one takes a lock. Here only one thread may count.
    """

    def __init__(
        self, name: str, text: str, label: str | None, registry: CollectorRegistry, *, known: Iterable[str] = ()
    ) -> None:
        """Register it. ``label`` ``None``: none; scrapes show ``known`` values of the label from the start, at 0."""
        self._name = name
        self._text = text
        self._label_names = () if label is None else (label,)
        self._children: dict[tuple[str, ...], FastCounterChild] = {}
        for values in [(value,) for value in known] if label else [()]:
            self.labels(*values)
        registry.register(self)

    def labels(self, *values: str) -> FastCounterChild:
        """The count under this value of the label, or, without a label, the only one; the same object each time."""
        child = self._children.get(values)
        if child is None:
            assert len(values) == len(self._label_names), "a value a label"
            child = self._children[values] = FastCounterChild()
        return child

    def collect(self) -> Iterator[Metric]:
        """What a scrape shows."""
        family = CounterMetricFamily(self._name, self._text, labels=self._label_names)
        for values, child in tuple(self._children.items()):
            family.add_metric(values, child.value)
        yield family


class FastCounterChild:
    """The count under one value of the label; ``value`` only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Count ``amount`` more."""
        self.value += amount


class FastHistogram(Collector):
    """A histogram with one label or none, for what happens often: the same page as ``prometheus_client``'s at a fifth.

    That one takes a lock for each of its two counters and searches its buckets one by one. Here only one thread may
    observe; a scrape on another one may see an observation in the buckets that is not in the sum yet.
    """

    def __init__(
        self, name: str, text: str, label: str | None, buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        """Register it; ``buckets`` are upper bounds in ascending order, without infinity. ``label`` ``None``: none."""
        self._name = name
        self._text = text
        self._label_names = () if label is None else (label,)
        self._bounds = tuple(buckets)
        self._children: dict[tuple[str, ...], FastHistogramChild] = {}
        registry.register(self)

    def labels(self, *values: str) -> FastHistogramChild:
        """The counts under this value of the label, or, without a label, the only ones; the same object each time."""
        assert len(values) == len(self._label_names), "a value a label"
        if values not in self._children:
            self._children[values] = FastHistogramChild(self._bounds)
        return self._children[values]

    def collect(self) -> Iterator[Metric]:
        """What a scrape shows."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._label_names)
        for values, child in tuple(self._children.items()):
            family.add_metric(values, buckets=child.buckets(), sum_value=child.sum)
        yield family


class FastHistogramChild:
    """Counts under one value of the label.

    Attributes:
        sum: of all observations.
    """

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """Nothing was observed."""
        self.sum = 0.0
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, amount: float) -> None:
        """Count one."""
        self._counts[bisect_left(self._bounds, amount)] += 1
        self.sum += amount

    @property
    def counts(self) -> Sequence[int]:
        """Observations in each bucket alone, the last of which has no bound."""
        return self._counts

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bounds as texts, each with the number of observations up to it."""
        total = 0
        found: list[tuple[str, float]] = []
        for bound, count in zip((*self._bounds, float("inf")), tuple(self._counts), strict=True):
            total += count
            found.append((floatToGoString(bound), float(total)))  # type: ignore[no-untyped-call]
        return found
