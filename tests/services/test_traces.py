"""A worker's spans of a request: its time divided by what the engine reports, and what goes back to its caller."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from prometheus_client import CollectorRegistry

from quartet.engine.base import Failed, Finished, FinishReason, Prefilled, Started, StepOutput
from quartet.errors import DuplicateRequestError, EngineError, RequestCancelledError
from quartet.streams.outbox import DecodeOutbox
from quartet.telemetry.metrics import WorkerMetrics
from quartet.telemetry.tracing import Span, valid_traceparent
from quartet.transfer.base import TransferWay
from quartet.v1 import decode_pb2
from services.workers.dispatch import DecodeDispatcher, PrefillDispatcher
from tests.services.fake_encoder import FakeEncoder, picture
from tests.services.media_workers import PLACEHOLDER_ID, media_worker, start_with_files
from tests.services.stream_workers import make_start, until
from tests.services.stub_engine import StubEngine
from tests.services.test_dispatcher_steps import NoHolds
from tests.span_list import SpanList
from tests.streams.test_outbox import make_hand_off

HOP_ID = 0xB7AD
TRACEPARENT = f"00-{'5e' * 16}-{HOP_ID:016x}-01"


@pytest.fixture
def spans() -> SpanList:
    return SpanList()


def decodes(spans: SpanList, engine: StubEngine | None = None) -> DecodeDispatcher:
    return DecodeDispatcher(engine or StubEngine(), WorkerMetrics(CollectorRegistry()), None, spans.tracer)


def prefills(spans: SpanList, holds: NoHolds | None = None) -> PrefillDispatcher:
    metrics = WorkerMetrics(CollectorRegistry())
    return PrefillDispatcher(StubEngine(), holds or NoHolds(), "stub", metrics, None, spans.tracer)


def long_ago() -> int:
    """A minute, in Unix nanoseconds."""
    return time.time_ns() - 60 * 10**9


def step(ids: Sequence[int], offset: int = 0, **outcomes: object) -> StepOutput:
    return StepOutput(
        ids=ids, num_tokens=[1] * len(ids), token_offsets=[offset] * len(ids), token_ids=[7] * len(ids), **outcomes
    )


def taken(outbox: DecodeOutbox) -> decode_pb2.DecodeResponse:
    message = outbox.take()
    assert message is not None
    return message


def assert_divided(spans: SpanList, whole: Span, names: Sequence[str]) -> None:
    """The spans below ``whole`` have these names, and leave no gap in it but the way of its result."""
    parts = [span for span in spans.spans if span.parent_id == whole.span_id]
    assert [span.name for span in parts] == list(names)
    at = whole.begin_unix_ns
    for part in parts:
        assert part.begin_unix_ns == at
        at = part.end_unix_ns
    assert at <= whole.end_unix_ns


def test_a_decode_is_divided_by_its_first_token_of_which_its_caller_learns(spans: SpanList) -> None:
    dispatcher = decodes(spans)
    outbox = dispatcher.new_outbox()
    id = dispatcher.submit(make_start([1, 2], traceparent=TRACEPARENT, sent_at_unix_ns=long_ago()), outbox, 4, list)
    dispatcher.route(step([id], started=[Started(id, 1, 1e-9)]))
    [first] = taken(outbox).first_tokens
    dispatcher.route(step([id], 1))
    assert not taken(outbox).first_tokens
    dispatcher.route(step([id], 2, finished=[Finished(id, FinishReason.LENGTH, 3)]))
    decode, send = spans.one("decode"), spans.one("send")
    assert_divided(spans, decode, ["queue", "compute", "generate"])
    assert (decode.parent_id, send.parent_id) == (HOP_ID, HOP_ID)
    assert 59 < (send.end_unix_ns - send.begin_unix_ns) / 1e9 < 120
    assert send.end_unix_ns == decode.begin_unix_ns
    assert (first.slot, first.sent_at_unix_ns) == (4, decode.events[0][1]) == (4, spans.one("compute").end_unix_ns)
    expected = {
        "quartet.num_tokens": 2,
        "quartet.num_cached_tokens": 1,
        "gen_ai.usage.output_tokens": 3,
        "quartet.outcome": "length",
    }
    assert expected.items() <= decode.attributes.items()


def test_a_decodes_end_is_an_event_that_says_what_ended_it(spans: SpanList) -> None:
    dispatcher = decodes(spans)
    ids = [
        dispatcher.submit(make_start([1], traceparent=TRACEPARENT), dispatcher.new_outbox(), slot, list)
        for slot in (1, 2, 3)
    ]
    dispatcher.route(step(ids[:2], started=[Started(id, 0, 1e-9) for id in ids[:2]]))
    cancelled = Failed(ids[1], RequestCancelledError("cancelled by the caller"))
    dead = Failed(ids[2], EngineError("it is dead"))
    dispatcher.route(step(ids[:1], 1, finished=[Finished(ids[0], FinishReason.LENGTH, 2)], failed=[cancelled, dead]))
    decodes_of = {span.attributes["quartet.outcome"]: span for span in spans.spans if span.name == "decode"}
    assert {outcome: [name for name, _, _ in span.events] for outcome, span in decodes_of.items()} == {
        "length": ["first token", "end"],
        "cancelled": ["first token", "end"],
        "engine_failed": ["end"],
    }
    for outcome, span in decodes_of.items():
        assert span.events[-1] == ("end", span.end_unix_ns, {"quartet.outcome": outcome})


def test_no_part_ends_after_now_whatever_the_engine_reports(spans: SpanList) -> None:
    dispatcher = decodes(spans)
    id = dispatcher.submit(make_start([1], traceparent=TRACEPARENT), dispatcher.new_outbox(), 0, list)
    dispatcher.route(step([id], started=[Started(id, 0, 3600.0)]))
    dispatcher.route(step([id], 1, finished=[Finished(id, FinishReason.LENGTH, 2)]))
    assert_divided(spans, spans.one("decode"), ["queue", "compute", "generate"])
    assert spans.one("generate").end_unix_ns <= time.time_ns()


def test_a_pull_lies_where_it_was_between_two_waits(spans: SpanList) -> None:
    dispatcher = decodes(spans)
    outbox = dispatcher.new_outbox()
    start = make_start(
        [1], generated=[5], hand_off=make_hand_off(8), traceparent=TRACEPARENT, sent_at_unix_ns=long_ago()
    )
    id = dispatcher.submit(start, outbox, 0, list)
    pulled = Started(id, 0, 4e-9, 2e-9, 4096, TransferWay.SHM, queue_after_transfer_s=3e-9)
    dispatcher.route(step([id], started=[pulled]))
    assert not taken(outbox).first_tokens, "its first token came from the prefill"
    dispatcher.route(step([id], 1, finished=[Finished(id, FinishReason.LENGTH, 2)]))
    decode = spans.one("decode")
    assert_divided(spans, decode, ["queue", "pull", "queue", "generate"])
    assert decode.attributes["quartet.num_tokens"] == 2
    assert decode.attributes["gen_ai.usage.output_tokens"] == 1, "the first token is the prefill worker's"
    pull = spans.one("pull")
    assert pull.attributes == {
        "quartet.source_worker": start.hand_off and start.hand_off.worker_id,
        "quartet.transfer_bytes": 4096,
        "quartet.transfer_way": "shm",
    }


def test_a_prefill_says_when_it_had_the_token(spans: SpanList) -> None:
    dispatcher = prefills(spans)
    outbox = dispatcher.new_outbox()
    id = dispatcher.submit(make_start([1], traceparent=TRACEPARENT, sent_at_unix_ns=long_ago()), outbox, 0, list)
    dispatcher.route(StepOutput(prefilled=[Prefilled(id, 5, 0, 2e-9, 0.0, opaque=b"x", onboard_s=1e-9)]))
    message = outbox.take()
    assert message is not None
    prefill = spans.one("prefill")
    assert_divided(spans, prefill, ["queue", "onboard", "compute"])
    assert prefill.attributes["quartet.outcome"] == "prefilled"
    assert message.outputs[0].result.sent_at_unix_ns == spans.one("compute").end_unix_ns == prefill.events[0][1]


def test_what_fails_in_the_queue_says_so(spans: SpanList) -> None:
    dispatcher = decodes(spans)
    id = dispatcher.submit(make_start([1], traceparent=TRACEPARENT), dispatcher.new_outbox(), 0, list)
    dispatcher.route(StepOutput(failed=[Failed(id, EngineError("it is dead"))]))
    decode = spans.one("decode")
    assert_divided(spans, decode, ["queue"])
    assert (decode.error, decode.attributes["error.type"]) == ("it is dead", "engine_failed")
    assert decode.attributes["quartet.outcome"] == "engine_failed"
    assert "send" not in spans.names, "nobody said when it was sent"


def test_what_its_caller_cancels_has_not_failed(spans: SpanList) -> None:
    dispatcher = decodes(spans)
    id = dispatcher.submit(make_start([1], traceparent=TRACEPARENT), dispatcher.new_outbox(), 0, list)
    dispatcher.route(StepOutput(failed=[Failed(id, RequestCancelledError("cancelled by the caller"))]))
    decode = spans.one("decode")
    assert (decode.error, "error.type" in decode.attributes) == ("", False)
    assert decode.attributes["quartet.outcome"] == "cancelled"


async def test_the_wait_for_media_ends_where_the_engine_gets_them(spans: SpanList) -> None:
    encoder = FakeEncoder(is_held=True)
    async with media_worker(encoder=encoder, tracer=spans.tracer) as worker:
        id = worker.submit(start_with_files([picture("cat", 5)], [PLACEHOLDER_ID, 1], traceparent=TRACEPARENT))
        await until(lambda: encoder.num_waiting)
        encoder.may_encode.set()
        await worker.submitted(id)
        before_ns = time.time_ns()
        worker.finish(id)
    prefill, media = spans.one("prefill"), spans.one("media")
    assert_divided(spans, prefill, ["media", "compute"])
    assert media.end_unix_ns <= before_ns


def test_what_fails_before_its_first_token_is_waited_for_no_more(spans: SpanList) -> None:
    dispatcher = decodes(spans)
    id = dispatcher.submit(make_start([1], traceparent=TRACEPARENT), dispatcher.new_outbox(), 0, list)
    dispatcher.route(StepOutput(started=[Started(id, 0, 1e-9)]))
    assert dispatcher._awaited
    dispatcher.route(StepOutput(failed=[Failed(id, EngineError("dead"))]))
    assert not dispatcher._awaited
    assert_divided(spans, spans.one("decode"), ["queue", "compute"])


def test_what_is_refused_has_no_span(spans: SpanList) -> None:
    dispatcher = decodes(spans)
    start = make_start([1], traceparent=TRACEPARENT, sent_at_unix_ns=long_ago())
    dispatcher.submit(start, dispatcher.new_outbox(), 0, list)
    with pytest.raises(DuplicateRequestError):
        dispatcher.submit(start, dispatcher.new_outbox(), 1, list)
    assert spans.spans == []


def test_a_signed_start_was_taken_up(spans: SpanList) -> None:
    dispatcher = decodes(spans)
    start = make_start([1], traceparent=TRACEPARENT, sent_at_unix_ns=long_ago())
    start.is_signed = True
    id = dispatcher.submit(start, dispatcher.new_outbox(), 0, list)
    dispatcher.route(StepOutput(failed=[Failed(id, EngineError("dead"))]))
    assert spans.one("take up").parent_id == HOP_ID


@pytest.mark.parametrize("flags", ["00", "01"])
def test_the_engine_gets_a_context_that_names_the_workers_span(spans: SpanList, flags: str) -> None:
    engine = StubEngine()
    dispatcher = decodes(spans, engine)
    id = dispatcher.submit(
        make_start([1], traceparent=TRACEPARENT[:-2] + flags), dispatcher.new_outbox(), 0, lambda: None
    )
    given = engine.requests[id].traceparent
    assert valid_traceparent(given) and given.endswith(flags)
    dispatcher.route(StepOutput(failed=[Failed(id, EngineError("dead"))]))
    if flags == "01":
        assert given == f"00-{'5e' * 16}-{spans.one('decode').span_id:016x}-01"
    else:
        assert spans.spans == []


def test_without_a_tracer_callers_learn_nothing_new() -> None:
    dispatcher = DecodeDispatcher(StubEngine(), WorkerMetrics(CollectorRegistry()))
    outbox = dispatcher.new_outbox()
    id = dispatcher.submit(make_start([1], traceparent=TRACEPARENT, sent_at_unix_ns=long_ago()), outbox, 0, list)
    dispatcher.route(step([id], started=[Started(id, 0, 0.0)]))
    assert not taken(outbox).first_tokens
