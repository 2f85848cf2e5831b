"""Traces of one process: ids, sampling, what goes to the collector, and what a collector that is away costs."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from quartet.config import build
from quartet.errors import ConfigError, EngineError, RequestCancelledError, RequestTimeoutError
from quartet.telemetry.tracing import Tracer, TracingConfig, ids_of, open_tracer, valid_traceparent
from services.topology.launch import free_port
from tests.otlp_receiver import OtlpReceiver
from tests.span_list import SpanList

_TRACE = f"{'0af7' * 8}-{'b7ad' * 4}"


@pytest.mark.parametrize("header", [f"00-{_TRACE}-01", f"cc-{_TRACE}-00", f"cc-{_TRACE}-00-what-will-be"])
def test_a_trace_context_is_passed_on_as_it_came(header: str) -> None:
    assert valid_traceparent(header) == header


@pytest.mark.parametrize(
    "header",
    [
        "",
        "x" * 300,
        f"00-{_TRACE}",
        f"00-{_TRACE}-01\n",
        f"00-{_TRACE.upper()}-01",
        f"00-{_TRACE}-01-more",
        f"cc-{_TRACE}-01.more",
        f"cc-{_TRACE}-01-{'x' * 300}",
        f"ff-{_TRACE}-01",
        f"00-{'0' * 32}-{'b7ad' * 4}-01",
        f"00-{'0af7' * 8}-{'0' * 16}-01",
    ],
)
def test_a_malformed_trace_context_is_ignored(header: str) -> None:
    assert valid_traceparent(header) == ""


REQUEST_ID = "5e" * 16
ON = {"OTEL_EXPORT_ENABLED": "1"}


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


def make_tracer(receiver: OtlpReceiver, **config: str) -> Tracer:
    tracer = open_tracer(TracingConfig(enabled=True, endpoint=receiver.endpoint, **config), {}, role="decode")
    assert tracer is not None
    return tracer


async def test_spans_reach_the_collector_with_their_times_attributes_and_places(receiver: OtlpReceiver) -> None:
    tracer = make_tracer(receiver)
    trace = tracer.begin("decode", f"00-{_TRACE}-01", REQUEST_ID)
    child, begin = trace.draw(), time.monotonic()
    before = time.time_ns()
    trace.span("hop", begin, begin + 2, {"quartet.num_tokens": 7, "way": "shm"}, span_id=child)
    trace.span("inner", begin, begin - 1, parent_id=child, error=EngineError("it broke"))
    trace.way_here("send", trace.to_unix_ns(begin) - 1_000_000, begin)
    trace.end(
        begin,
        begin + 3,
        {"reasons": ["stop", "length"]},
        events=[("first token", begin + 1, {"quartet.outcome": "length"})],
    )
    await tracer.close()
    spans = {span.name: span for span in receiver.spans}
    own, hop, inner, send = spans["decode"], spans["hop"], spans["inner"], spans["send"]
    assert {span.trace_id for span in spans.values()} == {ids_of(f"00-{_TRACE}-01")[0]}
    assert (own.parent_id, own.span_id) == (ids_of(f"00-{_TRACE}-01")[1], trace.span_id)
    assert (hop.parent_id, inner.parent_id, send.parent_id) == (own.span_id, hop.span_id, own.parent_id)
    assert trace.traceparent == f"00-{own.trace_id}-{own.span_id}-01"
    assert trace.traceparent_of(child) == f"00-{own.trace_id}-{hop.span_id}-01"
    assert hop.attributes == {"quartet.num_tokens": 7, "way": "shm"} and own.attributes["reasons"] == ["stop", "length"]
    assert own.service == "quartet-decode"
    assert "service.namespace" not in own.resource and own.resource["service.instance.id"] != ""
    assert {span.kind for span in spans.values()} == {"SPAN_KIND_INTERNAL"}
    assert {span.name for span in spans.values() if span.has_remote_parent} == {"decode"}
    assert inner.is_error and not hop.is_error
    assert inner.attributes == {"error.type": "engine_failed"}
    assert inner.begin == inner.end, "a span that ends before it begins has no length"
    lengths_s = [round((span.end - span.begin) / 1e9, 3) for span in (own, hop, send)]
    assert lengths_s == [3, 2, 0.001]
    assert round((own.events["first token"] - own.begin) / 1e9, 3) == 1
    assert own.event_attributes == {"first token": {"quartet.outcome": "length"}}
    assert abs(own.begin - before) < 1e9


async def test_a_request_without_a_trace_begins_one_with_its_own_number(receiver: OtlpReceiver) -> None:
    tracer = make_tracer(receiver, service_name="mine")
    for traceparent in ("", "nonsense"):
        trace = tracer.begin("request", traceparent, REQUEST_ID)
        assert trace.is_sampled and trace.trace_id == REQUEST_ID
        trace.way_here("send", 5, 1.0)
        trace.end(1.0, 2.0, {})
    assert tracer.begin("request", "", "0" * 32).trace_id != "0" * 32
    await tracer.close()
    assert [(span.service, span.name, span.parent_id) for span in receiver.spans] == [("mine", "request", "")] * 2


async def test_a_request_that_a_client_asked_for_is_a_servers_span_of_a_named_instance(receiver: OtlpReceiver) -> None:
    config = TracingConfig(enabled=True, endpoint=receiver.endpoint)
    tracer = open_tracer(config, {}, role="router", namespace="blue", instance="router-7")
    assert tracer is not None
    trace = tracer.begin("request", "", REQUEST_ID)
    trace.span("queue", 1.0, 2.0)
    trace.end(1.0, 2.0, {}, is_server=True)
    await tracer.close()
    spans = {span.name: span for span in receiver.spans}
    assert (spans["request"].kind, spans["queue"].kind) == ("SPAN_KIND_SERVER", "SPAN_KIND_INTERNAL")
    assert not spans["request"].has_remote_parent
    whose = {"service.name": "quartet-router", "service.namespace": "blue", "service.instance.id": "router-7"}
    assert whose.items() <= spans["request"].resource.items()


def test_a_start_that_came_before_it_was_sent_by_another_hosts_clock_has_a_way_without_length() -> None:
    spans = SpanList()
    trace = spans.tracer.begin("decode", f"00-{_TRACE}-01", REQUEST_ID)
    trace.way_here("late", trace.to_unix_ns(5.0), 3.0)
    trace.way_here("early", trace.to_unix_ns(1.0), 3.0)
    trace.end(3.0, 4.0, {})
    late, early = spans.one("late"), spans.one("early")
    assert late.begin_unix_ns == late.end_unix_ns == early.end_unix_ns == trace.to_unix_ns(3.0)
    assert early.begin_unix_ns == pytest.approx(trace.to_unix_ns(1.0), abs=1000)


_OF_TRACES, _OF_ALL = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.mark.parametrize(
    ("setting", "variables", "endpoint"),
    [
        ("", {}, ""),
        ("", {_OF_ALL: "http://all:1"}, "http://all:1"),
        ("", {_OF_ALL: "http://all:1", _OF_TRACES: "http://traces:1"}, "http://traces:1"),
        ("", {_OF_ALL: "https://all:1", _OF_TRACES: ""}, "https://all:1"),
        # Without a scheme it means TLS, unless a variable says otherwise.
        ("", {_OF_ALL: "http://all:1", _OF_TRACES: "traces:1"}, "https://traces:1"),
        ("", {_OF_ALL: "collector"}, "https://collector"),
        ("", {_OF_ALL: "[::1]:4317", "OTEL_EXPORTER_OTLP_INSECURE": "True"}, "http://[::1]:4317"),
        (
            "",
            {_OF_ALL: "all:1", "OTEL_EXPORTER_OTLP_INSECURE": "true", "OTEL_EXPORTER_OTLP_TRACES_INSECURE": "false"},
            "https://all:1",
        ),
        ("http://set:1", {_OF_ALL: "unix:/collector"}, "http://set:1"),
        ("http://set:1", {_OF_ALL: "http://all:1", _OF_TRACES: "http://traces:1"}, "http://set:1"),
    ],
)
def test_the_endpoint_is_that_of_the_setting_then_of_traces_then_of_all(
    setting: str, variables: dict[str, str], endpoint: str
) -> None:
    config = TracingConfig(enabled=True, endpoint=setting).with_variables(variables)
    assert (config.enabled, config.endpoint) == (True, endpoint)


@pytest.mark.parametrize("endpoint", ["unix:/collector", "grpc://collector:4317", "collector:port", "a collector"])
@pytest.mark.parametrize("name", [_OF_TRACES, _OF_ALL])
def test_an_endpoint_that_is_neither_url_nor_host_is_refused(name: str, endpoint: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: must begin with http"):
        TracingConfig(enabled=True).with_variables({name: endpoint})
    assert not TracingConfig().with_variables({name: endpoint}).enabled


async def test_spans_go_where_the_variables_say(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    for of_traces in (receiver.endpoint, receiver.endpoint.removeprefix("http://")):
        variables = {_OF_ALL: f"http://127.0.0.1:{free_port()}", _OF_TRACES: of_traces}
        variables["OTEL_EXPORTER_OTLP_INSECURE"] = "true"
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        tracer = open_tracer(TracingConfig(enabled=True), variables, role="router")
        assert tracer is not None
        tracer.begin("request", "", REQUEST_ID).end(1.0, 2.0, {})
        await tracer.close()
    assert [span.name for span in receiver.spans] == ["request"] * 2


@pytest.mark.parametrize(
    ("setting", "variables", "name"),
    [
        ("", {}, "quartet-router"),
        ("", {"OTEL_SERVICE_NAME": ""}, "quartet-router"),
        ("", {"OTEL_SERVICE_NAME": "theirs"}, "theirs"),
        ("mine", {"OTEL_SERVICE_NAME": "theirs"}, "mine"),
    ],
)
async def test_the_service_is_named_by_the_setting_then_by_the_variable(
    receiver: OtlpReceiver, setting: str, variables: dict[str, str], name: str
) -> None:
    config = TracingConfig(enabled=True, endpoint=receiver.endpoint, service_name=setting)
    tracer = open_tracer(config, variables, role="router")
    assert tracer is not None
    tracer.begin("request", "", REQUEST_ID).end(1.0, 2.0, {})
    await tracer.close()
    assert [span.service for span in receiver.spans] == [name]


async def test_spans_are_given_out_once_their_trace_has_ended() -> None:
    spans = SpanList()
    trace = spans.tracer.begin("decode", "", REQUEST_ID)
    trace.span("queue", 1.0, 2.0)
    assert spans.names == [], "the process may be killed before their parent comes"
    trace.end(1.0, 3.0, {})
    assert spans.names == ["queue", "decode"]
    trace.span("late", 1.0, 4.0)
    assert spans.names == ["queue", "decode", "late"]


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (None, None, ""),
        (RequestTimeoutError("it is late"), "timeout", "it is late"),
        # A caller's cancel is no failure of what it ends.
        (asyncio.CancelledError("it is enough"), None, ""),
        (RequestCancelledError("it is enough"), None, ""),
        # The message of a bug of ours may hold anything.
        (KeyError("a prompt"), "internal", "KeyError"),
    ],
)
def test_what_fails_has_the_reason_as_its_type(error: BaseException | None, kind: str | None, text: str) -> None:
    spans = SpanList()
    trace = spans.tracer.begin("decode", "", REQUEST_ID)
    trace.span("queue", 1.0, 2.0, {"quartet.num_tokens": 3}, error=error)
    trace.end(1.0, 3.0, {"quartet.outcome": "it ended"}, error=error)
    for span in spans.spans:
        assert (span.attributes.get("error.type"), span.error) == (kind, text)
        assert {"quartet.num_tokens": 3, "quartet.outcome": "it ended"}.items() & span.attributes.items()


def test_a_long_text_of_an_error_is_cut() -> None:
    spans = SpanList()
    trace = spans.tracer.begin("decode", "", REQUEST_ID)
    trace.span("queue", 1.0, 2.0, error=EngineError("b" * 1000 + "e"))
    trace.end(1.0, 3.0, {}, error=EngineError("b" * 256))
    queue, decode = spans.spans
    assert len(queue.error) < 300 and "745 characters" in queue.error and queue.error.endswith("be")
    assert decode.error == "b" * 256


@pytest.mark.parametrize(
    ("sampler", "argument", "flags", "is_sampled"),
    [
        ("parentbased_always_on", "", "00", False),
        ("parentbased_always_on", "", "01", True),
        ("parentbased_always_on", "", "02", False),
        ("parentbased_always_on", "", "03", True),
        ("parentbased_always_on", "", None, True),
        ("parentbased_always_off", "", "01", True),
        ("parentbased_always_off", "", None, False),
        ("always_off", "", "01", False),
        ("always_on", "", "00", True),
        ("parentbased_traceidratio", "0", None, False),
        ("parentbased_traceidratio", "1", None, True),
    ],
)
async def test_the_standard_variables_name_the_sampler_and_others_learn_what_it_said(
    receiver: OtlpReceiver,
    monkeypatch: pytest.MonkeyPatch,
    sampler: str,
    argument: str,
    flags: str | None,
    is_sampled: bool,
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", argument)
    tracer = make_tracer(receiver)
    trace = tracer.begin("request", "" if flags is None else f"00-{_TRACE}-{flags}", REQUEST_ID)
    assert trace.is_sampled == is_sampled
    assert int(trace.traceparent[-2:], 16) & 1 == is_sampled
    assert valid_traceparent(trace.traceparent)
    await tracer.close()


async def test_a_collector_that_is_away_holds_up_neither_requests_nor_the_end() -> None:
    config = TracingConfig(enabled=True, endpoint=f"http://127.0.0.1:{free_port()}")
    tracer = open_tracer(config, {}, role="router")
    assert tracer is not None
    for _ in range(5000):  # more than the queue holds
        trace = tracer.begin("request", "", REQUEST_ID)
        trace.end(1.0, 2.0, {})
    async with asyncio.timeout(60):
        await tracer.close()
        await tracer.close()
    join_closing_threads()


async def test_a_collector_that_never_answers_holds_up_the_end_for_two_and_a_half_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")
    loop = asyncio.get_running_loop()
    now = loop.time()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        config = TracingConfig(enabled=True, endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}")
        tracer = open_tracer(config, {}, role="router")
        assert tracer is not None
        tracer.begin("request", "", REQUEST_ID).end(1.0, 2.0, {})
        # The loop's clock stands still, but for what this test adds.
        monkeypatch.setattr(loop, "time", lambda: now)
        closing = asyncio.create_task(tracer.close())
        await let_tasks_run()
        now += 1.9
        await let_tasks_run()
        assert not closing.done(), "the collector has two seconds"
        now += 0.11
        await let_tasks_run()
        now += 0.51
        await let_tasks_run()
        assert closing.done()
        join_closing_threads()


def join_closing_threads() -> None:
    """What they still log must not be taken for another test's."""
    for thread in threading.enumerate():
        if thread.name == "otlp-shutdown":
            thread.join(60)
            assert not thread.is_alive()


async def let_tasks_run() -> None:
    """Until they wait for something else than each other."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_collector_that_is_away_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    from quartet.telemetry.otlp import OtlpSink

    endpoint, now_s = f"http://127.0.0.1:{free_port()}", 1000.0
    sink, exporter = OtlpSink(endpoint, {}, lambda: now_s), OTLPSpanExporter(endpoint=endpoint, timeout=1)
    of_exporter, of_processor = "opentelemetry.exporter.otlp.proto.grpc.exporter", "opentelemetry.sdk._shared_internal"

    def told() -> list[str]:
        """The loggers that say something while spans are lost."""
        caplog.clear()
        for _ in range(2):
            exporter.export([])
            # It takes thousands of spans to fill the queue.
            logging.getLogger(of_processor).warning("queue full")
        return [record.name for record in caplog.records]

    assert told() == [of_exporter, of_processor]
    now_s += 59.0
    assert told() == []
    now_s += 1.0
    assert told() == [of_exporter, of_processor]
    await sink.close()


@pytest.mark.parametrize(
    ("config", "variables", "is_on"),
    [
        (TracingConfig(), {}, False),
        (TracingConfig(), {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317"}, False),
        (TracingConfig(), {"OTEL_EXPORT_ENABLED": "0"}, False),
        (TracingConfig(), ON, True),
        (TracingConfig(enabled=True), {}, True),
        (TracingConfig(), {"OTEL_EXPORT_ENABLED": "TRUE"}, True),
        (TracingConfig(enabled=True), {"OTEL_EXPORT_ENABLED": "0"}, True),
        (TracingConfig(enabled=True), {"OTEL_SDK_DISABLED": "true"}, False),
        (TracingConfig(), {**ON, "OTEL_SDK_DISABLED": " True "}, False),
        (TracingConfig(enabled=True), {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, True),
        (TracingConfig(enabled=True), {"OTEL_TRACES_EXPORTER": "None "}, False),
        (TracingConfig(), {**ON, "OTEL_TRACES_EXPORTER": "none"}, False),
        (TracingConfig(enabled=True), {"OTEL_TRACES_EXPORTER": "otlp"}, True),
        (TracingConfig(), {"OTEL_TRACES_EXPORTER": "otlp"}, False),
        (TracingConfig(), {"OTEL_TRACES_EXPORTER": "console"}, False),
    ],
)
async def test_traces_are_off_unless_settings_or_a_variable_say_otherwise(
    config: TracingConfig, variables: dict[str, str], is_on: bool
) -> None:
    tracer = open_tracer(config, variables, role="router")
    assert (tracer is not None) == is_on
    if tracer is not None:
        await tracer.close()


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"])
def test_another_protocol_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        open_tracer(TracingConfig(), {**ON, name: "http/protobuf"}, role="router")


def test_an_endpoint_is_a_url() -> None:
    with pytest.raises(ConfigError, match=r"tracing\.endpoint: must begin with http"):
        build(TracingConfig, {"endpoint": "localhost:4317"}, "tracing")


def test_a_process_that_does_not_trace_imports_nothing_for_it() -> None:
    code = (
        "import sys, router.process, services.workers.process\n"
        "from quartet.telemetry.tracing import TracingConfig, open_tracer\n"
        "assert open_tracer(TracingConfig(), {}, role='router') is None\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_without_the_packages_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "quartet.telemetry.otlp", None)
    with pytest.raises(ConfigError, match=r"tracing: needs the package .*\[otel\]"):
        open_tracer(TracingConfig(enabled=True), {}, role="router")


def test_another_exporter_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"OTEL_TRACES_EXPORTER: .*'console'"):
        open_tracer(TracingConfig(), {**ON, "OTEL_TRACES_EXPORTER": "console"}, role="router")
