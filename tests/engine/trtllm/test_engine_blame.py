"""An error in our own reading of an answer does not end the engine, and no log repeats the answer's text."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from quartet.engine.base import Failed, Finished, Prefilled, RequestKind
from quartet.engine.trtllm.errors import trace_of
from quartet.engine.trtllm.hand_off import PromptState
from quartet.engine.trtllm.metrics import ResultMetrics
from quartet.engine.trtllm.requests import ResultReader
from quartet.errors import EngineError, RequestCancelledError
from tests.engine.trtllm.engines import Running, asked, running, stand_in
from tests.fakes.driving import STORY

PREFILL, DECODE = RequestKind.PREFILL, RequestKind.DECODE
SECRET = "what somebody asked for"


pytestmark = pytest.mark.usefixtures("package")


async def assert_serves(engine: Running, kind: RequestKind) -> None:
    assert engine.engine.is_alive
    assert not isinstance(await engine.end_of(asked(STORY, 2, kind)), Failed)
    await engine.until(lambda: engine.control.num_running == 0)


@pytest.mark.parametrize(
    ("kind", "method"), [(PREFILL, "take_prefill"), (DECODE, "take_step"), (DECODE, "end_of_decode")]
)
async def test_an_answer_that_we_can_t_read_fails_its_request_alone(
    kind: RequestKind, method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read, request = getattr(ResultReader, method), asked(STORY, 8, kind)

    def misread(self: ResultReader, result: Any) -> Any:
        if self._request.id == request.id:
            raise KeyError(SECRET)
        return read(self, result)

    monkeypatch.setattr(ResultReader, method, misread)
    async with running(kind) as engine:
        end = await engine.end_of(request)
        assert isinstance(end, Failed)
        assert type(end.error) is EngineError
        assert end.error.message.endswith("KeyError")
        await assert_serves(engine, kind)
    assert "in misread" in caplog.text, "where it was is logged"
    assert SECRET not in caplog.text


async def test_a_hand_off_that_can_t_be_sent_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    of = PromptState.of.__func__  # type: ignore[attr-defined]
    fields: list[dict[str, object]] = [{"mrope_position_ids_handle": {"dtype": object()}}, {}]

    def more_of(*given: Any, **named: Any) -> PromptState:
        state = of(*given, **named)
        return replace(state, fields={**state.fields, **fields.pop(0)})

    monkeypatch.setattr(PromptState, "of", classmethod(more_of))
    async with running(PREFILL) as prefill:
        end = await prefill.end_of(asked(STORY, 8, PREFILL))
        assert isinstance(end, Failed)
        assert type(end.error) is EngineError
        assert "hand-off" in end.error.message
        assert prefill.engine.stats()[0].num_held_blocks == 0
        await assert_serves(prefill, PREFILL)


async def test_the_text_of_a_dying_engine_is_never_repeated(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as decode:
        decode.control.steps.close()
        requests = [asked(STORY, 64), asked(STORY, 64)]
        for request in requests:
            decode.engine.submit(request)
        decode.control.steps.let_through(3)
        await decode.consumer.wait_tokens(requests[0], 2)
        decode.control.die(AssertionError(SECRET))
        decode.control.steps.open()
        for request in requests:
            end = await decode.consumer.wait_terminal(request)
            assert isinstance(end, Failed)
            assert isinstance(end.error, EngineError)
            assert "AssertionError" in end.error.message
            assert SECRET not in end.error.message
        with pytest.raises(EngineError):
            await decode.consumer.wait_end()
        with pytest.raises(EngineError) as caught:
            decode.engine.submit(asked(STORY))
        assert SECRET not in str(caught.value)
    ours = [record for record in caplog.records if record.name.startswith("quartet")]
    assert any("the engine is lost" in record.getMessage() for record in ours)
    assert not any(SECRET in record.getMessage() or record.exc_info for record in ours)


async def test_the_engines_message_for_a_failed_request_is_not_repeated_or_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running() as decode:
        decode.control.fail_next_request(SECRET)
        end = await decode.end_of(asked(STORY))
        assert isinstance(end, Failed)
        assert SECRET not in end.error.message
    assert "the engine failed request" in caplog.text
    assert SECRET not in "".join(record.getMessage() for record in caplog.records if record.name.startswith("quartet"))


async def test_a_request_ends_though_it_can_t_be_measured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(publish_events_and_metrics=True) as decode:
        metrics = decode.engine._session.loaded.metrics  # type: ignore[union-attr]
        assert metrics is not None
        monkeypatch.setattr(metrics, "_collector", _Refusing())
        request = asked(STORY, 64)
        decode.control.steps.close()
        decode.engine.submit(request)
        decode.control.steps.let_through(2)
        await decode.consumer.wait_tokens(request, 1)
        decode.engine.cancel(request.id)
        decode.control.steps.open()
        end = await decode.consumer.wait_terminal(request)
        assert isinstance(end, Failed)
        assert isinstance(end.error, RequestCancelledError)
        for _ in range(2):
            assert isinstance(await decode.end_of(asked(STORY, 2)), Finished)
        await decode.settle()
    warnings = [record for record in caplog.records if "metrics of requests are missing" in record.getMessage()]
    assert len(warnings) == 1
    assert warnings[0].levelno == logging.WARNING


class _Refusing:
    def log_metrics_dict(self, values: object) -> None:
        raise KeyError("finished_reason")


async def test_the_time_in_the_queue_is_found_under_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with stand_in():
        from tensorrt_llm._stand_in.request import Request
        from tensorrt_llm.metrics.enums import MetricNames

        measured = {MetricNames.REQUEST_QUEUE_TIME: 1e-6}
        monkeypatch.setattr(Request, "metrics", lambda *_: measured)
        async with running(PREFILL, publish_events_and_metrics=True) as prefill:
            prefilled = await prefill.end_of(asked(STORY, kind=PREFILL))
            assert isinstance(prefilled, Prefilled)
            assert prefilled.queue_s == 1e-6


def test_results_without_anything_to_measure_are_no_matter() -> None:
    metrics = ResultMetrics("tiny", lambda: None)
    metrics.log(object())
    metrics.close()


def test_a_trace_has_types_and_frames_and_the_causes() -> None:
    try:
        try:
            raise KeyError(SECRET)
        except KeyError as error:
            raise ValueError(SECRET) from error
    except ValueError as error:
        trace = trace_of(error)
    assert trace.index("ValueError") < trace.index("after KeyError")
    assert "test_engine_blame.py" in trace
    assert SECRET not in trace
