"""Traces: the spans of a request in one process, made from times that were taken anyway; needs no package by itself.

A request that is not sampled makes no span. One that is makes each with an explicit begin and end, once both are known,
so tokens cost nothing. The id of a span is drawn ahead: what another process does for it can name it as its parent.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

from quartet.errors import ConfigError, RequestCancelledError, ServingError
from quartet.telemetry import span_names
from quartet.telemetry.logging import MAX_FIELD_LENGTH, cut

Attribute: TypeAlias = str | bool | int | float | Sequence[str]

# W3C Trace Context, section 3.2: version, trace id, parent id, flags; later versions may add fields.
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?P<more>-.*)?")
_MAX_TRACEPARENT_LENGTH = 256

_SAMPLED = 1

NO_ATTRIBUTES: Mapping[str, Attribute] = {}

#: Where spans go unless settings or variables say otherwise.
DEFAULT_ENDPOINT = "http://localhost:4317"

_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_INSECURE_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_INSECURE", "OTEL_EXPORTER_OTLP_INSECURE")
# What an endpoint variable may hold in place of a URL.
_HOST_AND_PORT = re.compile(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+)(:\d+)?")

# The variables that say by themselves whether a process traces.
_ON_VARIABLE, _OFF_VARIABLE = "OTEL_EXPORT_ENABLED", "OTEL_SDK_DISABLED"
_EXPORTER_VARIABLE = "OTEL_TRACES_EXPORTER"
_OTLP_EXPORTERS = frozenset({"", "otlp", "otlp_proto_grpc"})
_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_YES = frozenset({"1", "true"})


@dataclass(frozen=True, kw_only=True)
class TracingConfig:
    """Whether and where a process sends spans. The standard variables ``OTEL_*`` say the rest, such as the sampler.

    Attributes:
        enabled: also by ``OTEL_EXPORT_ENABLED=1``; ``OTEL_SDK_DISABLED=true`` and
            ``OTEL_TRACES_EXPORTER=none`` are stronger than both.
        endpoint: ``http://host:port`` of a collector that takes OTLP over gRPC, ``https`` with TLS; empty: that of
            ``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`` or ``OTEL_EXPORTER_OTLP_ENDPOINT``, else ``http://localhost:4317``.
        service_name: empty: that of ``OTEL_SERVICE_NAME``, else ``quartet-`` and the role.
    """

    enabled: bool = False
    endpoint: str = ""
    service_name: str = ""

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        if self.endpoint and not _is_url(self.endpoint):
            raise ConfigError(f"endpoint: must begin with http:// or https://, not {self.endpoint!r}")

    def with_variables(self, variables: Mapping[str, str]) -> TracingConfig:
        """The same, with what an environment adds: whether it is enabled, and a URL where no endpoint is set.

        Raises:
            ConfigError: it is on, and a variable names an endpoint or an exporter that can't be used.
        """
        is_on = self.enabled or variables.get(_ON_VARIABLE, "").lower() in _YES
        exporter = variables.get(_EXPORTER_VARIABLE, "").strip().lower()
        if not is_on or variables.get(_OFF_VARIABLE, "").strip().lower() == "true" or exporter == "none":
            return replace(self, enabled=False)
        if exporter not in _OTLP_EXPORTERS:
            raise ConfigError(f"{_EXPORTER_VARIABLE}: spans are sent by otlp or by none, not by {exporter!r}")
        return replace(self, enabled=True, endpoint=self.endpoint or _named_endpoint(variables))


@dataclass(slots=True, kw_only=True)
class Span:
    """One span, complete.

    Attributes:
        parent_id: 0: it is the root of its trace.
        has_remote_parent: another process makes the parent.
        begin_unix_ns, end_unix_ns: end is not before begin.
        events: name, time in nanoseconds of the Unix clock, and attributes.
        error: why it failed, for people; empty: it did not.
        is_server: it is the work that a caller outside asked for.
    """

    name: str
    trace_id: int
    span_id: int
    parent_id: int
    begin_unix_ns: int
    end_unix_ns: int
    attributes: Mapping[str, Attribute]
    events: Sequence[tuple[str, int, Mapping[str, Attribute]]] = ()
    error: str = ""
    has_remote_parent: bool = False
    is_server: bool = False


class SpanSink(Protocol):
    """Decides which traces are sampled, and takes their spans. Called on the event loop; only ``close`` waits."""

    def is_sampled(self, name: str, trace_id: int, parent_id: int, *, is_parent_sampled: bool) -> bool:
        """Whether to sample what ``name`` begins; ``parent_id`` 0: it has no parent."""
        ...

    def take(self, span: Span) -> None:
        """Send it, or drop it where too many wait."""
        ...

    async def flush(self) -> None:
        """Send what waits, however long that takes."""
        ...

    async def close(self) -> None:
        """Send what waits, in bounded time."""
        ...


class Tracer:
    """Makes the traces of one process."""

    def __init__(self, sink: SpanSink) -> None:
        """Give spans to ``sink``."""
        self._sink = sink

    def begin(self, name: str, traceparent: str, request_id: str) -> Trace:
        """The trace of one request here; ``name`` is that of its span, which is made by ``Trace.end``.

        It belongs to ``traceparent``, which need not be valid; without one it is a new trace with the number
        ``request_id``, which is hexadecimal or empty: all attempts of a request are then in one trace.
        """
        if traceparent and valid_traceparent(traceparent):
            trace_id, parent_id = int(traceparent[3:35], 16), int(traceparent[36:52], 16)
            is_parent_sampled = bool(int(traceparent[53:55], 16) & _SAMPLED)
        else:
            trace_id, parent_id, is_parent_sampled = int(request_id or "0", 16) or _draw(128), 0, False
        is_sampled = self._sink.is_sampled(name, trace_id, parent_id, is_parent_sampled=is_parent_sampled)
        # A context that says already that nothing is sampled is passed on as it came.
        given = traceparent if parent_id and not (is_sampled or is_parent_sampled) else ""
        return Trace(self._sink, name, trace_id, parent_id, given, is_sampled=is_sampled)

    async def flush(self) -> None:
        """Send what waits, however long that takes."""
        await self._sink.flush()

    async def close(self) -> None:
        """Send what waits, in bounded time. May be called twice."""
        await self._sink.close()


class Trace:
    """One request in this process: its own span and those below it. Times are monotonic seconds.

    All are given out at its end: of a process that is killed there is then no span whose parent is missing.

    Attributes:
        name: of its own span.
        is_sampled: else it makes no span, and only ``traceparent`` counts: it says so to others.
        traceparent: names its own span; if that is not sampled, it may be the one that came.
    """

    __slots__ = (
        "_has_ended",
        "_offset_ns",
        "_parent_id",
        "_sink",
        "_span_id",
        "_spans",
        "_trace_id",
        "is_sampled",
        "name",
        "traceparent",
    )

    def __init__(
        self, sink: SpanSink, name: str, trace_id: int, parent_id: int, given: str = "", *, is_sampled: bool
    ) -> None:
        """Made by ``Tracer.begin``; ``given`` is its ``traceparent``, empty: one that names its own span."""
        self.name = name
        self.is_sampled = is_sampled
        self._sink = sink
        self._trace_id = trace_id
        self._parent_id = parent_id
        self._span_id = _draw(64)
        self.traceparent = given or self.traceparent_of(self._span_id)
        if is_sampled:
            self._offset_ns = time.time_ns() - time.monotonic_ns()
            self._spans: list[Span] = []
            self._has_ended = False

    @property
    def trace_id(self) -> str:
        """As 32 hexadecimal digits."""
        return f"{self._trace_id:032x}"

    @property
    def span_id(self) -> str:
        """Of its own span, as 16 hexadecimal digits."""
        return f"{self._span_id:016x}"

    def draw(self) -> int:
        """An id for a span that is made later."""
        return _draw(64)

    def traceparent_of(self, span_id: int) -> str:
        """What tells another process that a span is its parent."""
        return f"00-{self._trace_id:032x}-{span_id:016x}-{int(self.is_sampled):02x}"

    def to_unix_ns(self, at: float) -> int:
        """The Unix time of a monotonic one."""
        return int(at * 1e9) + self._offset_ns

    def from_unix_ns(self, unix_ns: int) -> float:
        """The monotonic time of a Unix one, which may come from another host."""
        return (unix_ns - self._offset_ns) / 1e9

    def span(
        self,
        name: str,
        begin: float,
        end: float,
        attributes: Mapping[str, Attribute] = NO_ATTRIBUTES,
        *,
        span_id: int = 0,
        parent_id: int = 0,
        error: BaseException | None = None,
    ) -> None:
        """Make a span below the trace's own one, or below the span ``parent_id``; it ended with ``error``.

        ``span_id`` was drawn for it; 0: none was. A span that would end before it begins, as clocks of hosts differ,
        has no length.
        """
        begin_unix_ns = self.to_unix_ns(begin)
        kind, text = _failure(error)
        span = Span(
            name=name,
            trace_id=self._trace_id,
            span_id=span_id or _draw(64),
            parent_id=parent_id or self._span_id,
            begin_unix_ns=begin_unix_ns,
            end_unix_ns=max(self.to_unix_ns(end), begin_unix_ns),
            attributes={**attributes, span_names.ERROR_TYPE: kind} if kind else attributes,
            error=text,
        )
        if self._has_ended:
            self._sink.take(span)  # what it began may end after it
        else:
            self._spans.append(span)

    def way_here(self, name: str, sent_at_unix_ns: int, arrived_at: float) -> None:
        """Make the span of a start on its way to this process, below the span of who sent it.

        Nothing happens where it is not known when that was: ``sent_at_unix_ns`` is 0 then.
        """
        if sent_at_unix_ns and self._parent_id:
            begin = min(self.from_unix_ns(sent_at_unix_ns), arrived_at)
            self.span(name, begin, arrived_at, parent_id=self._parent_id)

    def end(
        self,
        begin: float,
        end: float,
        attributes: Mapping[str, Attribute],
        *,
        events: Sequence[tuple[str, float, Mapping[str, Attribute]]] = (),
        error: BaseException | None = None,
        is_server: bool = False,
    ) -> None:
        """Make its own span, which ended with ``error``, and give all out; called once.

        ``events`` are names, monotonic times and attributes.
        """
        kind, text = _failure(error)
        for span in self._spans:
            self._sink.take(span)
        self._spans, self._has_ended = [], True
        self._sink.take(
            Span(
                name=self.name,
                trace_id=self._trace_id,
                span_id=self._span_id,
                parent_id=self._parent_id,
                begin_unix_ns=self.to_unix_ns(begin),
                end_unix_ns=self.to_unix_ns(end),
                attributes={**attributes, span_names.ERROR_TYPE: kind} if kind else attributes,
                events=[(event, self.to_unix_ns(at), noted) for event, at, noted in events],
                error=text,
                has_remote_parent=self._parent_id != 0,
                is_server=is_server,
            )
        )


def valid_traceparent(header: str) -> str:
    """``header`` if it is a W3C ``traceparent``, else empty: the standard says to ignore any other."""
    match = _TRACEPARENT.fullmatch(header)
    if match is None or len(header) > _MAX_TRACEPARENT_LENGTH or (header.startswith("00") and match["more"]):
        return ""
    return header


def ids_of(traceparent: str) -> tuple[str, str]:
    """The ids of trace and span in a valid ``traceparent``; empty ones where it is empty."""
    return traceparent[3:35], traceparent[36:52]


def open_tracer(
    config: TracingConfig, variables: Mapping[str, str], *, role: str, namespace: str = "", instance: str = ""
) -> Tracer | None:
    """What traces the requests of a process, with a thread of its own; ``None``: nothing does.

    Args:
        config: of the process.
        variables: its environment.
        role: router, encode, prefill or decode.
        namespace: groups the processes of one system; empty: none.
        instance: the id of the worker or router.

    Raises:
        ConfigError: it is on, and the packages that it takes are not installed, or the variables ask for
            another protocol, exporter or kind of endpoint.
    """
    config = config.with_variables(variables)
    if not config.enabled:
        return None
    for name in _PROTOCOL_VARIABLES:
        if variables.get(name, "grpc") not in ("", "grpc"):
            raise ConfigError(f"{name}: spans are sent by grpc, not by {variables[name]}")
    try:
        # Imported here: only processes that trace need the packages.
        from quartet.telemetry.otlp import OtlpSink
    except ModuleNotFoundError as error:
        message = f"tracing: needs the package {error.name}: .venv/bin/pip install -e '.[otel]'"
        raise ConfigError(message) from error
    name = config.service_name or variables.get("OTEL_SERVICE_NAME", "") or f"quartet-{role}"
    resource = {"service.name": name, "service.namespace": namespace, "service.instance.id": instance}
    return Tracer(OtlpSink(config.endpoint, {key: value for key, value in resource.items() if value}))


def _failure(error: BaseException | None) -> tuple[str, str]:
    """The ``error.type`` and the text of what ended with ``error``; both empty: it did not fail.

    A caller's cancel is no failure of what it ends, as in OpenTelemetry's conventions for gRPC servers. A bug of ours
    may hold anything in its message, so it has none here.
    """
    if error is None or isinstance(error, (asyncio.CancelledError, RequestCancelledError)):
        return "", ""
    if not isinstance(error, ServingError):
        return "internal", type(error).__name__
    kind = error.reason.lower()
    return kind, cut(error.message or kind, MAX_FIELD_LENGTH)


def _named_endpoint(variables: Mapping[str, str]) -> str:
    """The URL of the collector that ``variables`` name; empty: none.

    A host without a scheme means TLS unless a variable says otherwise, as for the exporter. Raises ``ConfigError``.
    """
    name = next(filter(variables.get, _ENDPOINT_VARIABLES), "")
    endpoint = variables.get(name, "")
    if not endpoint or _is_url(endpoint):
        return endpoint
    if not _HOST_AND_PORT.fullmatch(endpoint):
        raise ConfigError(f"{name}: must begin with http:// or https://, or be HOST:PORT, not {endpoint!r}")
    is_insecure = next(filter(None, map(variables.get, _INSECURE_VARIABLES)), "").lower() == "true"
    return f"{'http' if is_insecure else 'https'}://{endpoint}"


def _is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def _draw(num_bits: int) -> int:
    return random.getrandbits(num_bits) or 1
