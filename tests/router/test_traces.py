"""The router's spans of a request: its phases without a gap, its hops, and what starts say of them."""

from __future__ import annotations

import asyncio
import gc
import time
from itertools import pairwise

import pytest

from quartet.api.request import Relayed, Resume, TextPrompt
from quartet.discovery.base import Rank
from quartet.errors import DrainingError, ModelNotFoundError, RequestTimeoutError, WorkerUnavailableError
from quartet.telemetry.tracing import Span, ids_of
from router.policy.base import Placement
from router.request_trace import RequestTrace
from tests.router.fakes import Fleet, Plan, collect, expected_tokens
from tests.router.test_generate import make_start
from tests.span_list import SpanList

PARENT = f"{'0af7' * 8}-{'b7ad' * 4}"


@pytest.fixture
def spans() -> SpanList:
    return SpanList()


def traced(spans: SpanList, *worker_ids: str) -> Fleet:
    return Fleet(*worker_ids, tracer=spans.tracer)


def below(spans: SpanList, parent: Span) -> list[Span]:
    return [span for span in spans.spans if span.parent_id == parent.span_id]


async def test_phases_of_a_request_follow_each_other_without_a_gap(spans: SpanList) -> None:
    fleet = traced(spans, "prefill-0", "decode-0")
    await collect(fleet.generate(make_start(prompt=TextPrompt("hello there " * 9))))
    assert spans.names == ["read", "tokenize", "queue", "reply", "prefill hop", "decode hop", "request"]
    request = spans.one("request")
    phases = [span for span in below(spans, request) if span.name != "reply"]
    assert phases[0].begin_unix_ns == request.begin_unix_ns
    for one, following in pairwise(phases):
        assert one.end_unix_ns == following.begin_unix_ns
    assert request.is_server and request.parent_id == 0
    assert request.attributes["quartet.path"] == "generate"
    [(event, at, _)] = request.events
    assert event == "first token"
    hop, reply = spans.one("prefill hop"), spans.one("reply")
    assert hop.begin_unix_ns <= at <= reply.end_unix_ns
    assert reply.end_unix_ns == hop.end_unix_ns, "what is shown leaves no gap before the next phase"


async def test_a_start_names_its_hop_as_parent_and_says_when_it_was_sent(spans: SpanList) -> None:
    fleet = traced(spans, "prefill-0", "decode-0")
    await collect(fleet.generate(make_start(), traceparent=f"00-{PARENT}-01"))
    for call, name in zip(fleet.hops.calls, ("prefill hop", "decode hop"), strict=True):
        hop, context = spans.one(name), call.start.context
        assert context.traceparent == f"00-{'0af7' * 8}-{hop.span_id:016x}-01"
        assert context.sent_at_unix_ns == hop.begin_unix_ns
        assert hop.attributes["quartet.worker_id"] == call.rank.worker_id
    request = spans.one("request")
    assert (f"{request.parent_id:016x}", request.has_remote_parent) == (ids_of(f"00-{PARENT}-01")[1], True)


@pytest.mark.parametrize("flags", ["00", "01"])
async def test_what_is_not_sampled_makes_no_span_and_tells_workers_so(flags: str) -> None:
    spans = SpanList(samples=False)
    fleet = traced(spans, "decode-0")
    await collect(fleet.generate(make_start(), traceparent=f"00-{PARENT}-{flags}"))
    await collect(fleet.generate(make_start()))
    assert spans.spans == []
    for call in fleet.hops.calls:
        assert call.start.context.traceparent.endswith("-00")
        assert call.start.context.sent_at_unix_ns == 0


async def test_without_a_tracer_a_context_is_passed_on_as_it_came() -> None:
    fleet = Fleet("decode-0")
    await collect(fleet.generate(make_start(), traceparent=f"00-{PARENT}-01"))
    [call] = fleet.hops.calls
    assert (call.start.context.traceparent, call.start.context.sent_at_unix_ns) == (f"00-{PARENT}-01", 0)


async def test_a_failed_attempt_is_an_error_and_the_pause_after_it_has_a_name(spans: SpanList) -> None:
    fleet = traced(spans, "decode-0", "decode-1")
    fleet.hops.plan("decode", Plan(error=WorkerUnavailableError("it died"), fail_after=2))
    await collect(fleet.generate(make_start()))
    assert spans.names == ["read", "queue", "reply", "decode hop", "pause", "queue", "decode hop", "request"]
    first, second = [span for span in spans.spans if span.name == "decode hop"]
    assert (first.error, second.error) == ("it died", "")
    assert first.attributes["error.type"] == "worker_unavailable"
    assert [span.attributes["quartet.attempt"] for span in (first, second)] == [0, 1]
    assert first.attributes["gen_ai.usage.output_tokens"] == 2
    assert spans.one("request").error == ""


async def test_the_reply_lies_beside_the_hop_whose_worker_says_when_it_sent_it(spans: SpanList) -> None:
    fleet = traced(spans, "decode-0")
    await collect(fleet.generate(make_start()))
    hop, reply, request = spans.one("decode hop"), spans.one("reply"), spans.one("request")
    assert reply.parent_id == request.span_id
    assert hop.begin_unix_ns <= reply.begin_unix_ns
    assert reply.end_unix_ns == request.events[0][1]


async def test_a_refused_request_says_why(spans: SpanList) -> None:
    fleet = traced(spans, "decode-0")
    with pytest.raises(ModelNotFoundError):
        await collect(fleet.generate(make_start(model="nobody's")))
    request, read = spans.one("request"), spans.one("read")
    assert request.attributes["error.type"] == read.attributes["error.type"] == "model_not_found"
    assert request.error == read.error != ""


@pytest.mark.parametrize("kind", ["prefill", "decode"])
async def test_what_its_client_cancels_has_not_failed(spans: SpanList, kind: str) -> None:
    fleet = traced(spans, *(["decode-0"] if kind == "decode" else ["prefill-0", "decode-0"]))
    fleet.hops.plan(kind, Plan(hang_after=1))
    request = fleet.generate(make_start())
    async with asyncio.TaskGroup() as group:
        group.create_task(collect(request))
        await fleet.hops.hung.wait()
        request.cancel()
    assert spans.names[-2:] == [f"{kind} hop", "request"]
    assert_no_failure(spans)
    assert spans.one("request").attributes["quartet.outcome"] == "cancelled"


async def test_a_client_that_goes_has_cancelled(spans: SpanList) -> None:
    fleet = traced(spans, "decode-0")
    fleet.hops.plan("decode", Plan(hang_after=1))
    reading = asyncio.create_task(collect(fleet.generate(make_start())))
    await fleet.hops.hung.wait()
    reading.cancel()
    await asyncio.wait([reading])
    assert spans.names[-2:] == ["decode hop", "request"]
    assert_no_failure(spans)
    assert spans.one("request").attributes["quartet.outcome"] == "cancelled"


async def test_a_client_that_goes_while_it_is_placed_has_cancelled(spans: SpanList) -> None:
    fleet = traced(spans, "prefill-0", "decode-0")
    fleet.hops.plan("prefill", Plan(hang_after=0))
    placing = asyncio.create_task(fleet.pipeline.place(make_start()))
    await fleet.hops.hung.wait()
    placing.cancel()
    await asyncio.wait([placing])
    assert spans.names[-2:] == ["prefill hop", "request"]
    assert_no_failure(spans)
    assert spans.one("request").attributes["quartet.outcome"] == "cancelled"


@pytest.mark.parametrize("path", ["generate", "place"])
async def test_what_is_late_is_so_with_the_hop_that_ran(spans: SpanList, path: str) -> None:
    fleet = traced(spans, "prefill-0", "decode-0")
    fleet.hops.plan("prefill", Plan(hang_after=0))
    start = make_start(timeout_s=10.0)
    ran = asyncio.create_task(fleet.pipeline.place(start) if path == "place" else collect(fleet.generate(start)))
    await fleet.hops.hung.wait()
    pass_time(11.0)
    with pytest.raises(RequestTimeoutError):
        await ran
    for name in ("prefill hop", "request"):
        assert spans.one(name).attributes["error.type"] == "timeout"
    assert {span.attributes.get("error.type") for span in spans.spans} == {None, "timeout"}
    assert spans.one("read").error == spans.one("queue").error == ""


async def test_what_ends_with_the_router_says_so_and_its_hop_has_not_failed(spans: SpanList) -> None:
    fleet = traced(spans, "decode-0")
    fleet.hops.plan("decode", Plan(hang_after=1))
    request = fleet.generate(make_start())
    reading = asyncio.create_task(collect(request))
    await fleet.hops.hung.wait()
    request.abort(DrainingError("it leaves"))
    with pytest.raises(DrainingError):
        await reading
    assert spans.one("request").attributes["error.type"] == "draining"
    assert (spans.one("decode hop").error, spans.one("decode hop").attributes.get("error.type")) == ("", None)


def assert_no_failure(spans: SpanList) -> None:
    assert [span for span in spans.spans if span.error or "error.type" in span.attributes] == []


def pass_time(seconds: float) -> None:
    """Move the clock of the event loop's timers."""
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds  # type: ignore[method-assign]


async def test_the_event_of_the_first_token_says_when_it_was_shown(spans: SpanList) -> None:
    fleet = traced(spans, "decode-0")
    answer = await collect(fleet.generate(make_start()))
    request = spans.one("request")
    [(_, at, _)] = request.events
    first_token_s = answer.finished[0].time.first_token_s
    assert first_token_s is not None
    # The request's span begins when it arrived.
    assert at - request.begin_unix_ns == pytest.approx(first_token_s * 1e9, abs=1e5)


async def test_the_queue_says_what_the_policy_has_chosen(spans: SpanList) -> None:
    trace = RequestTrace(spans.tracer.begin("request", "", "5e" * 16), 1.0, 1.0)
    for number, (cost, num_cached_tokens) in enumerate([(0.25, 512), (None, 0)]):
        choice = trace.choice(number)
        choice.wait("queue", 0, 1024)
        choice.placed(Placement(Rank("prefill-0"), Rank("decode-0"), num_cached_tokens, cost=cost))
        choice.phases.end()
    trace.end({}, None, None)
    priced, other = [span.attributes for span in spans.spans if span.name == "queue"]
    assert priced == {
        "quartet.choice": 0,
        "quartet.attempt": 0,
        "quartet.num_tokens": 1024,
        "quartet.prefill_worker": "prefill-0",
        "quartet.decode_worker": "decode-0",
        "quartet.num_matched_tokens": 512,
        "quartet.cost": 0.25,
    }
    assert not {"quartet.num_matched_tokens", "quartet.cost"} & other.keys()


async def test_what_another_router_sent_was_on_its_way_here(spans: SpanList) -> None:
    fleet = traced(spans, "decode-0")
    a_minute_ago = time.time_ns() - 60 * 10**9
    relayed = Relayed(request_id="5e" * 16, sent_at_unix_ns=a_minute_ago)
    await collect(fleet.generate(make_start(), traceparent=f"00-{PARENT}-01", relayed=relayed))
    send, request = spans.one("send"), spans.one("request")
    assert (send.parent_id, send.end_unix_ns) == (request.parent_id, request.begin_unix_ns)
    assert send.begin_unix_ns == pytest.approx(a_minute_ago, abs=1e4)


async def test_a_placed_request_ends_with_its_signature_and_its_start_belongs_to_it(spans: SpanList) -> None:
    fleet = traced(spans, "prefill-0", "decode-0")
    await fleet.pipeline.place(make_start())
    assert spans.names == ["read", "queue", "reply", "prefill hop", "sign", "request"]
    assert spans.one("request").attributes["quartet.path"] == "place"


async def test_a_resumed_request_reads_what_it_brings(spans: SpanList) -> None:
    fleet = traced(spans, "decode-0")
    resume = Resume(
        request_id="7" * 32, attempt=3, seed=5, choice=0, generated_token_ids=tuple(expected_tokens(5, 0, 20, 4))
    )
    async for _part in fleet.generate(make_start(), resume=resume).parts():
        pass
    assert spans.names == ["read", "resume", "queue", "decode hop", "request"]
    assert {span.trace_id for span in spans.spans} == {int("7" * 32, 16)}
    assert spans.one("decode hop").attributes["quartet.attempt"] == 3


async def test_the_attributes_of_a_request_are_those_of_the_conventions(spans: SpanList) -> None:
    fleet = traced(spans, "decode-0")
    answer = await collect(fleet.generate(make_start(tenant="acme", client_request_id="mine")))
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "quartet",
        "gen_ai.request.max_tokens": 12,
        "gen_ai.response.id": answer.accepted.request_id,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 20,
        "gen_ai.usage.output_tokens": 12,
        "gen_ai.usage.cache_read.input_tokens": 3,
        "quartet.tenant": "acme",
        "quartet.client_request_id": "mine",
        "quartet.outcome": "length",
        "quartet.decode_worker": "decode-0",
    }
    assert expected.items() <= spans.one("request").attributes.items()


async def test_choices_have_phases_of_their_own(spans: SpanList) -> None:
    fleet = traced(spans, "decode-0")
    await collect(fleet.generate(make_start(num_choices=2)))
    hops = [span.attributes["quartet.choice"] for span in spans.spans if span.name == "decode hop"]
    assert sorted(hops) == [0, 1]
    assert spans.names.count("queue") == 2 and spans.names.count("request") == 1


@pytest.mark.filterwarnings("error")
async def test_a_request_that_is_dropped_before_it_begins_has_its_span(spans: SpanList) -> None:
    fleet = traced(spans, "decode-0")
    request = fleet.generate(make_start())
    request.abort(WorkerUnavailableError("enough"))
    with pytest.raises(WorkerUnavailableError):
        await collect(request)
    gc.collect()
    assert spans.names == ["read", "request"]
