"""Sends spans to a collector by OTLP over gRPC, with OpenTelemetry's SDK: sampler, batches and exporter are its own.

Only ``quartet.telemetry.tracing.open_tracer`` imports this. Spans do not go through the SDK's ``Tracer``: they come
with ids that were drawn ahead, and are made whole.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace.propagation import set_span_in_context

from quartet.telemetry.tracing import Span

# At the end of the process, what waits has this long to be sent, and an export under way this long to give up.
_FLUSH_TIMEOUT_S, _GIVE_UP_TIMEOUT_S = 2.0, 0.5

# What logs about a collector that is away: the exporter each try and each failure, the processor each full queue.
_LOGGERS = ("opentelemetry.exporter.otlp.proto.grpc.exporter", "opentelemetry.sdk._shared_internal")
_LOG_INTERVAL_S = 60.0

_SAMPLED, _NOT_SAMPLED = TraceFlags(TraceFlags.SAMPLED), TraceFlags(TraceFlags.DEFAULT)

# Of a parent samplers ask whether it is sampled, and no more: to make a context for each request costs as much as the
# rest of the decision.
_SAMPLED_PARENT = set_span_in_context(NonRecordingSpan(SpanContext(1, 1, True, _SAMPLED)))
_OTHER_PARENT = set_span_in_context(NonRecordingSpan(SpanContext(1, 1, True, _NOT_SAMPLED)))

_SCOPE = InstrumentationScope("quartet")
_FINE = Status(StatusCode.UNSET)


class OtlpSink:
    """A ``SpanSink`` whose thread sends batches. It reads the standard variables, as OpenTelemetry's SDK does.

    A collector that is away costs nothing but its spans: they are dropped once ``OTEL_BSP_MAX_QUEUE_SIZE`` wait.
    """

    def __init__(self, endpoint: str, resource: Mapping[str, str], clock: Callable[[], float] = time.monotonic) -> None:
        """Send to ``endpoint``; empty: where the variables say. ``resource`` says whose spans they are.

        ``clock`` gives seconds: the SDK's loggers say something once a minute at most, from now on.
        """
        for name in _LOGGERS:
            logger = logging.getLogger(name)
            # In place of the SDK's own, which leaves out only what was said just before: tries and failures alternate.
            for old in tuple(logger.filters):
                logger.removeFilter(old)
            logger.addFilter(_SeldomFilter(clock))
        self._resource = Resource.create(dict(resource))
        self._sampler = TracerProvider(resource=self._resource, shutdown_on_exit=False).sampler
        self._exporter = OTLPSpanExporter(endpoint=endpoint or None)
        self._processor = BatchSpanProcessor(self._exporter)
        self._is_closed = False

    def is_sampled(self, name: str, trace_id: int, parent_id: int, *, is_parent_sampled: bool) -> bool:
        """What the sampler says that ``OTEL_TRACES_SAMPLER`` names."""
        context = None
        if parent_id:
            context = _SAMPLED_PARENT if is_parent_sampled else _OTHER_PARENT
        return self._sampler.should_sample(context, trace_id, name).decision is Decision.RECORD_AND_SAMPLE

    def take(self, span: Span) -> None:
        """Queue it for the thread."""
        parent = None
        if span.parent_id:
            parent = SpanContext(span.trace_id, span.parent_id, span.has_remote_parent, _SAMPLED)
        self._processor.on_end(
            ReadableSpan(
                span.name,
                context=SpanContext(span.trace_id, span.span_id, False, _SAMPLED),
                parent=parent,
                resource=self._resource,
                attributes=span.attributes,
                events=[Event(name, noted, unix_ns) for name, unix_ns, noted in span.events],
                kind=SpanKind.SERVER if span.is_server else SpanKind.INTERNAL,
                status=Status(StatusCode.ERROR, span.error) if span.error else _FINE,
                start_time=span.begin_unix_ns,
                end_time=span.end_unix_ns,
                instrumentation_scope=_SCOPE,
            )
        )

    async def flush(self) -> None:
        """Send what waits, however long that takes."""
        await asyncio.to_thread(self._processor.force_flush)

    async def close(self) -> None:
        """Send what waits, for two seconds. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            self._processor.shutdown()  # type: ignore[no-untyped-call]
            loop.call_soon_threadsafe(ended.set)

        # Not one of the loop's threads: the end of the process waits for those.
        threading.Thread(target=shut_down, name="otlp-shutdown", daemon=True).start()
        if not await _is_set_within(ended, _FLUSH_TIMEOUT_S):
            self._exporter.shutdown()
            await _is_set_within(ended, _GIVE_UP_TIMEOUT_S)


async def _is_set_within(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


class _SeldomFilter(logging.Filter):
    """Lets one warning or error of a logger through in a minute, and all that is less."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self._next_at = float("-inf")

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        if (now := self._clock()) < self._next_at:
            return False
        self._next_at = now + _LOG_INTERVAL_S
        return True
