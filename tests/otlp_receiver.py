"""A collector of spans by OTLP over gRPC, in the process of the test, and what the tests ask of traces."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK, Span

FIRST_TOKEN = "first token"


@dataclass(frozen=True)
class ReceivedSpan:
    """One span; ids are hexadecimal, ``parent_id`` is empty for a root; times are in Unix nanoseconds.

    ``events`` has the time of each by name. ``resource`` says whose it is; ``kind`` is a name of OTLP's, such as
    ``SPAN_KIND_SERVER``.
    """

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    begin: int
    end: int
    attributes: Mapping[str, Any]
    events: Mapping[str, int]
    event_attributes: Mapping[str, Mapping[str, Any]]
    is_error: bool
    kind: str
    has_remote_parent: bool
    resource: Mapping[str, Any]


@dataclass(frozen=True)
class ReceivedTrace:
    """The spans of one trace, in the order of their begins."""

    spans: Sequence[ReceivedSpan]

    def named(self, name: str) -> list[ReceivedSpan]:
        """Its spans of that name."""
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> ReceivedSpan:
        """Its only span of that name."""
        [span] = self.named(name)
        return span

    @property
    def leaves(self) -> list[ReceivedSpan]:
        """The spans that are no other's parent."""
        parents = {span.parent_id for span in self.spans}
        return [span for span in self.spans if span.span_id not in parents]

    def uncovered_share(self) -> float:
        """Of the time to its first token, the share in which no leaf ran; overlaps count once.

        The router that the client asked says when that was, unless the client gets it from a worker.
        """
        asked = min(self.named("request"), key=lambda span: span.begin)
        begin = asked.begin
        end = asked.events.get(FIRST_TOKEN) or min(
            span.events[FIRST_TOKEN] for span in self.spans if FIRST_TOKEN in span.events
        )
        covered, at = 0, begin
        for leaf in self.leaves:
            low, high = max(leaf.begin, at), min(leaf.end, end)
            if high > low:
                covered, at = covered + high - low, high
        return 1 - covered / (end - begin)

    def show(self) -> str:
        """One line a span, for messages of failed tests."""
        begin = self.spans[0].begin
        return "\n".join(
            f"{(span.begin - begin) / 1e6:9.3f} {(span.end - begin) / 1e6:9.3f} ms {span.service}: {span.name} "
            f"{span.span_id} < {span.parent_id} {dict(span.attributes)} "
            f"{ {name: (at - begin) / 1e6 for name, at in span.events.items()} }"
            for span in self.spans
        )


@dataclass
class OtlpReceiver(pb_grpc.TraceServiceServicer):
    """Receives on a free port of loopback between ``__enter__`` and ``__exit__``."""

    spans: list[ReceivedSpan] = field(default_factory=list)
    endpoint: str = ""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._server = grpc.server(ThreadPoolExecutor(4))
        pb_grpc.add_TraceServiceServicer_to_server(self, self._server)

    def __enter__(self) -> Self:
        port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        self.endpoint = f"http://127.0.0.1:{port}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop(0).wait(5)

    def Export(
        self, request: pb.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> pb.ExportTraceServiceResponse:
        """As trace_service.proto says."""
        for resource_spans in request.resource_spans:
            resource = _values(resource_spans.resource.attributes)
            found = [
                ReceivedSpan(
                    service=resource["service.name"],
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    begin=span.start_time_unix_nano,
                    end=span.end_time_unix_nano,
                    attributes=_values(span.attributes),
                    events={event.name: event.time_unix_nano for event in span.events},
                    event_attributes={event.name: _values(event.attributes) for event in span.events},
                    is_error=span.status.code == span.status.STATUS_CODE_ERROR,
                    kind=Span.SpanKind.Name(span.kind),
                    has_remote_parent=bool(span.flags & SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK),
                    resource=resource,
                )
                for scope in resource_spans.scope_spans
                for span in scope.spans
            ]
            with self._lock:
                self.spans += found
        return pb.ExportTraceServiceResponse()

    def traces(self) -> dict[str, ReceivedTrace]:
        """All that came, by trace id."""
        by_id: dict[str, list[ReceivedSpan]] = defaultdict(list)
        with self._lock:
            for span in self.spans:
                by_id[span.trace_id].append(span)
        return {id: ReceivedTrace(sorted(spans, key=lambda span: span.begin)) for id, spans in by_id.items()}


def _values(attributes: Iterable[KeyValue]) -> dict[str, Any]:
    return {attribute.key: _value(attribute.value) for attribute in attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return None if kind is None else getattr(value, kind)
