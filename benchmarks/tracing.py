"""What traces cost: CPU time a request and a span in a router and in a decode worker, and a token of a traced request.

Each state has a process of its own: traces off, on with a request that is not sampled, and sampled. It runs what a
request does for its traces: in the worker the real dispatcher over an engine that does nothing, in the router the same
calls as a request makes, hop by hop. A collector in this process takes the spans by gRPC. CPU time is that of all
threads of the process, until the last span is sent; the states take turns.

    python -m benchmarks.tracing --json FILE [--short]
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, cast

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from prometheus_client import CollectorRegistry

from benchmarks.progress import LiveLine
from benchmarks.report import Report, make_parser
from quartet.api.request import GenerateStart, TokenPrompt
from quartet.discovery.base import Rank
from quartet.engine.base import Engine, Finished, FinishReason, Generation, Started, StepOutput
from quartet.streams.messages import RequestContext, WorkerStart
from quartet.streams.outbox import DecodeOutbox
from quartet.telemetry.metrics import WorkerMetrics
from quartet.telemetry.tracing import Attribute, Tracer, TracingConfig, open_tracer
from router.policy.base import Placement
from router.prepare import RouterRequest
from services.workers.dispatch import DecodeDispatcher

_NUM_REQUESTS, _SHORT_NUM_REQUESTS = 4_000, 200
_NUM_ROUNDS, _SHORT_NUM_ROUNDS = 5, 1
_NUM_TOKENS = 100
# Before anything counts.
_NUM_WARM_UPS = 300
# Of requests that run at a time when a token's cost is measured.
_NUM_STREAMS = 64

# Of the trace context of which the router tells the worker.
_FLAGS_VARIABLE = "QUARTET_BENCHMARK_TRACE_FLAGS"
_PLACEMENT = Placement(prefill=Rank("prefill-0"), decode=Rank("decode-0"), num_cached_tokens=512, cost=0.25)
_ATTRIBUTES: Mapping[str, Attribute] = {
    "gen_ai.operation.name": "chat",
    "gen_ai.provider.name": "quartet",
    "gen_ai.request.max_tokens": 256,
    "gen_ai.response.model": "qwen3",
    "gen_ai.response.id": "5e" * 16,
    "gen_ai.response.finish_reasons": ["stop_id"],
    "gen_ai.usage.input_tokens": 1024,
    "gen_ai.usage.output_tokens": 256,
    "gen_ai.usage.cache_read.input_tokens": 512,
    "quartet.request_id": "5e" * 16,
    "quartet.outcome": "stop_id",
    "quartet.num_attempts": 1,
    "quartet.prefill_worker": "prefill-0",
    "quartet.decode_worker": "decode-0",
}
#: What each process is told by its environment; ``off`` is not told to trace.
_STATES = ("off", "not sampled", "sampled")
# Nothing is to be dropped: a dropped span costs less.
_QUEUE_SIZE = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Use:
    """Microseconds of CPU in one state.

    Attributes:
        router_us, worker_us: of a request; the worker's has its own work too, the router's only the traces and the
            making of the request's object.
        token_us: of a token in the worker, beside 63 other streams.
        router_spans, worker_spans: of a request, as the collector counted them.
    """

    router_us: float
    worker_us: float
    token_us: float
    router_spans: float
    worker_spans: float


@dataclass(frozen=True, kw_only=True)
class Results:
    """What was measured: medians over the rounds, and what follows.

    Attributes:
        states: by name.
        not_sampled_us: a request that is not sampled, router and worker together, more than with traces off.
        router_span_us, worker_span_us: a span of a sampled request, in the process that makes it.
        token_us: a token of a sampled request, more than with traces off.
        token_spread_us: by how much the rounds with traces off differ in a token.
    """

    num_requests: int
    num_rounds: int
    states: dict[str, Use]
    not_sampled_us: float
    router_span_us: float
    worker_span_us: float
    token_us: float
    token_spread_us: float


def main() -> None:
    """Run the command line; ``--measure`` is how this starts the process of one state."""
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(asyncio.run(_measure_here(int(sys.argv[2])))))
        return
    parser = make_parser("tracing", __doc__ or "")
    parser.add_argument("--short", action="store_true", help="few requests: shows that it runs, and no more")
    arguments = parser.parse_args()
    report = Report("tracing", packages=("opentelemetry-sdk",), revision=arguments.commit)
    sizes = (_SHORT_NUM_REQUESTS, _SHORT_NUM_ROUNDS) if arguments.short else (_NUM_REQUESTS, _NUM_ROUNDS)
    report.write(measure(*sizes), arguments.json)


def measure(num_requests: int, num_rounds: int) -> Results:
    """All states in turn, ``num_rounds`` times."""
    rounds: dict[str, list[Use]] = {state: [] for state in _STATES}
    with LiveLine() as line, _collector() as collector:
        for number in range(num_rounds):
            for state in _STATES:
                line.say(f"round {number + 1} of {num_rounds}: {state}")
                rounds[state].append(_run(state, collector, num_requests))
    states = {state: _median(uses) for state, uses in rounds.items()}
    of_off = [use.token_us for use in rounds["off"]]
    off, idle, sampled = (states[state] for state in _STATES)
    return Results(
        num_requests=num_requests,
        num_rounds=num_rounds,
        states=states,
        not_sampled_us=round(idle.router_us - off.router_us + idle.worker_us - off.worker_us, 2),
        router_span_us=round((sampled.router_us - off.router_us) / sampled.router_spans, 2),
        worker_span_us=round((sampled.worker_us - off.worker_us) / sampled.worker_spans, 2),
        token_us=round(sampled.token_us - off.token_us, 3),
        token_spread_us=round(max(of_off) - min(of_off), 3),
    )


class _Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Counts the spans that come."""

    def __init__(self) -> None:
        self.num_spans: Counter[str] = Counter()  # by service
        self.endpoint = ""

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        for resource_spans in request.resource_spans:
            attributes = {one.key: one.value.string_value for one in resource_spans.resource.attributes}
            num_spans = sum(len(scope.spans) for scope in resource_spans.scope_spans)
            self.num_spans[attributes["service.name"]] += num_spans
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def _collector() -> Iterator[_Collector]:
    collector = _Collector()
    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(0).wait()


def _run(state: str, collector: _Collector, num_requests: int) -> Use:
    """One state, in a process of its own."""
    variables = {
        "OTEL_EXPORT_ENABLED": str(int(state != "off")),
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": str(int(state == "sampled")),
        _FLAGS_VARIABLE: str(int(state == "sampled")),
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint,
        "OTEL_BSP_MAX_QUEUE_SIZE": str(_QUEUE_SIZE),
    }
    collector.num_spans.clear()
    command = [sys.executable, "-m", "benchmarks.tracing", "--measure", str(num_requests)]
    done = subprocess.run(command, env={**os.environ, **variables}, check=True, capture_output=True, text=True)
    figures: dict[str, float] = json.loads(done.stdout)
    router_spans, worker_spans = (
        collector.num_spans[f"quartet-{part}"] / (num_requests + _NUM_WARM_UPS) for part in ("router", "worker")
    )
    return Use(**figures, router_spans=router_spans, worker_spans=worker_spans)


def _median(uses: Sequence[Use]) -> Use:
    rows = [asdict(use) for use in uses]
    return Use(**{name: round(median(row[name] for row in rows), 3) for name in rows[0]})


async def _measure_here(num_requests: int) -> dict[str, float]:
    """CPU microseconds of each part, in the state that the environment names."""
    figures = {}
    for part, prepare in (("router", _router), ("worker", _worker)):
        tracer = open_tracer(TracingConfig(), os.environ, role=part)
        run = prepare(tracer)
        await _cpu_us(tracer, run, _NUM_WARM_UPS)
        figures[f"{part}_us"] = await _cpu_us(tracer, run, num_requests)
    tracer = open_tracer(TracingConfig(), os.environ, role="token")
    run = _tokens_of(tracer)
    await _cpu_us(tracer, run, _NUM_WARM_UPS)
    figures["token_us"] = await _cpu_us(tracer, run, num_requests * _NUM_TOKENS // _NUM_STREAMS) / _NUM_STREAMS
    return figures


def _router(tracer: Tracer | None) -> Callable[[int], None]:
    return lambda _number: _route(tracer)


def _route(tracer: Tracer | None) -> None:
    """What a request whose prompt is prefilled remotely does in a router for its traces."""
    request = RouterRequest(_START)
    if tracer is not None:
        request.begin_trace(tracer)
    if request.trace is None:
        return
    request.trace.prepare.begin("tokenize")
    request.trace.prepare.end()
    choice = request.trace.choice(0)
    choice.wait("queue", 0, 1024)
    choice.placed(_PLACEMENT)
    choice.hop("prefill hop", "prefill-0")
    choice.phases.note({"quartet.num_cached_tokens": 512})
    choice.first_token(choice.sent_at_unix_ns)
    choice.prefilled()
    choice.hop("decode hop", "decode-0")
    choice.phases.end()
    request.trace.end(_ATTRIBUTES, 0.1, None)


_START = GenerateStart(prompt=TokenPrompt((1, 2, 3)))


def _worker(tracer: Tracer | None) -> Callable[[int], None]:
    """A whole request in a decode worker: it starts, has two tokens, and ends."""
    dispatcher = _dispatcher(tracer)

    def run(number: int) -> None:
        id = _submit(dispatcher, number)
        dispatcher.route(StepOutput(started=[Started(id, 0, 1e-6)], **_tokens([id], 0)))
        dispatcher.route(StepOutput(finished=[Finished(id, FinishReason.LENGTH, 2)], **_tokens([id], 1)))
        _outbox.take()

    return run


def _tokens_of(tracer: Tracer | None) -> Callable[[int], None]:
    """One token of each of many requests that have begun."""
    dispatcher = _dispatcher(tracer)
    ids = [_submit(dispatcher, number) for number in range(_NUM_STREAMS)]
    dispatcher.route(StepOutput(started=[Started(id, 0, 0.0) for id in ids], **_tokens(ids, 0)))
    _outbox.take()

    def run(step: int) -> None:
        dispatcher.route(StepOutput(**_tokens(ids, step + 1)))
        _outbox.take()

    return run


async def _cpu_us(tracer: Tracer | None, run: Callable[[int], None], num_runs: int) -> float:
    """CPU time of this process, all its threads, for one ``run`` of many, until what these left is sent."""
    began_cpu_s = time.process_time()
    for number in range(num_runs):
        run(number)
    if tracer is not None:
        await tracer.flush()
    return (time.process_time() - began_cpu_s) * 1e6 / num_runs


_TRACEPARENT = f"00-{'0af7' * 8}-{'b7ad' * 4}-0{os.environ.get(_FLAGS_VARIABLE, '0')}"
_outbox = DecodeOutbox()


class _IdleEngine:
    """Takes requests, and computes nothing."""

    is_alive = True

    def submit(self, _request: object) -> None:
        """Take it."""


def _dispatcher(tracer: Tracer | None) -> DecodeDispatcher:
    return DecodeDispatcher(cast(Engine, _IdleEngine()), WorkerMetrics(CollectorRegistry()), None, tracer)


def _submit(dispatcher: DecodeDispatcher, number: int) -> int:
    context = RequestContext(request_id=f"{number + 1:032x}", traceparent=_TRACEPARENT, sent_at_unix_ns=time.time_ns())
    start = WorkerStart(context=context, generation=Generation(prompt_token_ids=[1, 2, 3]))
    return dispatcher.submit(start, _outbox, number % _NUM_STREAMS, lambda: None)


def _tokens(ids: Sequence[int], offset: int) -> dict[str, Any]:
    num = len(ids)
    return {"ids": ids, "num_tokens": [1] * num, "token_offsets": [offset] * num, "token_ids": [7] * num}


if __name__ == "__main__":
    main()
