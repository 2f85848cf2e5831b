"""Refusals, hand-offs and watermarks, step by step on an engine that computes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from quartet.engine.base import Failed, Finished, FinishReason, Prefilled, Started, StepOutput
from quartet.errors import DrainingError, EngineError, RequestCancelledError
from quartet.events.load import PlacementProgress
from quartet.kvcache.layout import BlocksPayload, HandOff, OpaquePayload
from quartet.streams.messages import MAX_UNCHUNKED_BYTES, WorkerStart
from quartet.telemetry.metrics import WorkerMetrics
from services.workers.dispatch import DecodeDispatcher, PrefillDispatcher
from services.workers.requests import CountedStarts
from tests.services.stream_workers import make_start, until
from tests.services.stub_engine import StubEngine
from tests.streams.test_outbox import make_hand_off


class NoHolds:
    """Notes the hand-offs that it is given."""

    def __init__(self) -> None:
        self.offered: list[int] = []
        self.withdrawn: list[int] = []
        self.is_closed = False

    def offer(self, holder: int, block_ids: tuple[int, ...], payload: BlocksPayload | OpaquePayload) -> HandOff:
        if self.is_closed:
            raise DrainingError("closing")
        self.offered.append(holder)
        assert isinstance(payload, OpaquePayload)
        return make_hand_off(len(payload.state))

    def withdraw(self, holder: int) -> None:
        self.withdrawn.append(holder)


def metrics() -> WorkerMetrics:
    return WorkerMetrics(CollectorRegistry())


def prefilled(id: int, num_bytes: int, finished: FinishReason | None = None) -> StepOutput:
    outcome = Prefilled(id, 5, 0, 0.0, 0.0, opaque=bytes(num_bytes), finished=finished)
    return StepOutput(prefilled=[outcome])


def test_a_state_too_long_for_a_message_fails_its_prefill_and_is_released() -> None:
    engine, holds = StubEngine(), NoHolds()
    dispatcher = PrefillDispatcher(engine, holds, "stub", metrics())
    outbox = dispatcher.new_outbox()
    for slot, num_bytes in ((1, MAX_UNCHUNKED_BYTES + 1), (2, MAX_UNCHUNKED_BYTES)):
        id = dispatcher.submit(make_start([1]), outbox, slot, lambda: None)
        dispatcher.route(prefilled(id, num_bytes))
    message = outbox.take()
    assert message is not None
    assert [output.failure.reason for output in message.outputs] == ["NO_HAND_OFF", ""]
    assert engine.released == [1]
    assert holds.offered == [2]


def test_a_closing_source_fails_the_prefill_and_releases_its_blocks() -> None:
    engine, holds = StubEngine(), NoHolds()
    dispatcher = PrefillDispatcher(engine, holds, "stub", metrics())
    outbox = dispatcher.new_outbox()
    holds.is_closed = True
    id = dispatcher.submit(make_start([1]), outbox, 1, lambda: None)
    dispatcher.route(prefilled(id, 1))
    message = outbox.take()
    assert message is not None
    assert [output.failure.reason for output in message.outputs] == ["DRAINING"]
    assert engine.released == [id]


def test_blocks_prefilled_for_a_lost_stream_are_released() -> None:
    engine, holds = StubEngine(), NoHolds()
    dispatcher = PrefillDispatcher(engine, holds, "stub", metrics())
    outbox = dispatcher.new_outbox()
    id = dispatcher.submit(make_start([1]), outbox, 1, lambda: None)
    dispatcher.abandon([id])
    assert engine.cancelled == [id]
    dispatcher.route(prefilled(id, 1))
    assert engine.released == [id]
    assert outbox.take() is None
    assert dispatcher.num_running == 0


def test_a_submit_that_the_engine_refuses_leaves_nothing_behind() -> None:
    engine = StubEngine(is_closed=True)
    dispatcher = DecodeDispatcher(engine, metrics())
    start = make_start([1], timeout_s=60.0, router_id="r", router_request_number=4)
    for _ in range(2):  # the second is no duplicate
        try:
            dispatcher.submit(start, dispatcher.new_outbox(), 1, lambda: None)
        except EngineError:
            continue
        raise AssertionError("the engine is closed")
    assert dispatcher.num_running == 0
    assert dispatcher.starts.watermarks() == {"r": 4}


def test_only_what_the_worker_ended_itself_ends_with_its_reason() -> None:
    decodes = DecodeDispatcher(StubEngine(), metrics())
    outbox = decodes.new_outbox()
    ids = [decodes.submit(make_start([1]), outbox, slot, lambda: None) for slot in range(2)]
    decodes.end_all(DrainingError("going"))
    failed = [Failed(ids[0], EngineError("broke")), Failed(ids[1], RequestCancelledError("cancelled"))]
    decodes.route(StepOutput(failed=failed))
    message = outbox.take()
    assert message is not None
    assert [item.failure.reason for item in message.failures] == [EngineError.reason, DrainingError.reason]


async def test_a_start_whose_time_is_up_when_it_comes_ends_at_once() -> None:
    engine = StubEngine()
    decodes = DecodeDispatcher(engine, metrics())
    id = decodes.submit(make_start([1], timeout_s=0.0), decodes.new_outbox(), 1, lambda: None)
    await until(lambda: engine.cancelled == [id])


def test_a_prefill_is_counted_in_from_its_arrival_a_decode_from_its_start() -> None:
    numbered = make_start([1], router_id="r", router_request_number=1)
    prefills = PrefillDispatcher(StubEngine(), NoHolds(), "stub", metrics())
    prefills.submit(numbered, prefills.new_outbox(), 1, lambda: None)
    assert prefills.starts.watermarks() == {"r": 1}
    decodes = DecodeDispatcher(StubEngine(), metrics())
    id = decodes.submit(numbered, decodes.new_outbox(), 1, lambda: None)
    assert decodes.starts.watermarks() == {"r": 0}
    decodes.route(StepOutput(started=[Started(id, 0, 0.0)]))
    assert decodes.starts.watermarks() == {"r": 1}


def test_a_decode_that_ends_before_it_started_is_counted_in() -> None:
    decodes = DecodeDispatcher(StubEngine(), metrics())
    outbox = decodes.new_outbox()
    ids = [
        decodes.submit(make_start([1], router_id="r", router_request_number=number), outbox, number, lambda: None)
        for number in (1, 2)
    ]
    decodes.route(StepOutput(failed=[Failed(ids[1], RequestCancelledError("cancelled"))]))
    assert decodes.starts.watermarks() == {"r": 0}
    decodes.route(StepOutput(failed=[Failed(ids[0], RequestCancelledError("cancelled"))]))
    assert decodes.starts.watermarks() == {"r": 2}


def test_start_numbers_lost_with_a_broken_stream_do_not_stop_the_count() -> None:
    counted = CountedStarts()
    for number in (1, 2, 5, 6):
        counted.arrive("r", number)
    counted.arrive("", 9)
    counted.arrive("without numbers", 0)
    counted.count_in("r", 2)
    assert counted.watermarks() == {"r": 0}
    counted.count_in("r", 1)
    assert counted.watermarks() == {"r": 4}
    counted.count_in("r", 6)
    counted.count_in("r", 5)
    counted.count_in("stranger", 1)
    assert counted.watermarks() == {"r": 6}


def test_a_start_that_overtook_another_stays_arrived() -> None:
    counted = CountedStarts()  # each encode has a stream of its own
    counted.arrive("r", 2)
    counted.arrive("r", 1)
    assert counted.arrivals() == {"r": 2}
    counted.count_in("r", 1)
    counted.count_in("r", 2)
    assert counted.watermarks() == {"r": 2}


def test_routers_that_are_gone_are_forgotten_in_the_end() -> None:
    counted = CountedStarts()
    for index in range(5000):
        counted.arrive(f"router-{index}", 1)
    assert len(counted.watermarks()) <= 1024
    assert "router-4999" in counted.watermarks()


def test_a_quiet_router_is_forgotten_but_not_while_a_start_of_its_own_is_uncounted() -> None:
    now_s = 0.0
    counted = CountedStarts(clock=lambda: now_s)
    counted.arrive("quiet", 1)
    counted.count_in("quiet", 1)
    counted.arrive("waiting", 1)
    counted.arrive("waiting", 2)
    now_s = 599.0
    assert counted.watermarks() == {"quiet": 1, "waiting": 0}
    now_s = 601.0
    assert counted.watermarks() == {"waiting": 0}
    counted.count_in("waiting", 1)
    counted.count_in("waiting", 2)
    assert counted.watermarks() == {"waiting": 2}, "the last is told before the router is forgotten"
    now_s = 1202.0
    assert counted.watermarks() == {}
    counted.arrive("quiet", 7)
    assert counted.watermarks() == {"quiet": 6}


def test_a_placed_start_is_reported_by_its_own_number_and_does_not_stop_the_count() -> None:
    decodes = DecodeDispatcher(StubEngine(), metrics())
    outbox = decodes.new_outbox()
    first, second = (decodes.submit(_placed(number), outbox, number, _nothing) for number in (7, 3))
    decodes.submit(make_start([1], router_id="r", router_request_number=1), outbox, 9, _nothing)
    assert decodes.starts.watermarks() == {"r": 0}
    assert decodes.placements.progress() == {}
    decodes.route(StepOutput(started=[Started(second, 0, 0.0)]))
    assert decodes.placements.progress() == {"r": PlacementProgress(started=(3,))}
    decodes.route(StepOutput(failed=[Failed(id, RequestCancelledError("cancelled")) for id in (first, second)]))
    whole = {"r": PlacementProgress(started=(3,), ended=(3, 7), num_output_tokens=(0, 0))}
    assert [decodes.placements.progress(), decodes.placements.news()] == [whole, whole]
    assert decodes.starts.watermarks() == {"r": 0}


def test_a_refused_placed_start_is_reported_as_ended() -> None:
    decodes = DecodeDispatcher(StubEngine(), metrics())
    decodes.drain()
    with pytest.raises(DrainingError):
        decodes.submit(_placed(4), decodes.new_outbox(), 1, _nothing)
    assert decodes.placements.progress() == {"r": PlacementProgress(ended=(4,), num_output_tokens=(0,))}


@pytest.mark.parametrize("num_streams", [1, 2])
def test_a_placed_start_is_reported_with_its_tokens_however_it_ends(num_streams: int) -> None:
    decodes = DecodeDispatcher(StubEngine(), metrics())
    outboxes = [decodes.new_outbox() for _ in range(num_streams)]
    placed = _placed(1), _placed(2, generated=[5] * 30), _placed(3)
    ids = [decodes.submit(start, outboxes[-1], slot, _nothing) for slot, start in enumerate(placed)]
    ids.append(decodes.submit(make_start([1], router_id="r", router_request_number=1), outboxes[0], 9, _nothing))
    decodes.route(_step(ids, num_tokens=[1, 1, 1, 1], offsets=[0, 30, 0, 0]))
    finished = Finished(ids[0], FinishReason.LENGTH, num_output_tokens=3)
    decodes.route(_step([ids[0], ids[1], ids[3]], num_tokens=[2, 1, 1], offsets=[1, 31, 1], finished=[finished]))
    assert decodes.placements.progress() == {"r": PlacementProgress((), (1,), (3,))}
    decodes.abandon(ids[2:3])  # its client went away
    decodes.route(StepOutput(failed=[Failed(id, RequestCancelledError("cancelled")) for id in ids[1:]]))
    assert decodes.placements.progress() == {"r": PlacementProgress((), (3, 2, 1), (1, 32, 3))}
    assert not decodes._num_signed_tokens


def _step(ids: list[int], *, num_tokens: list[int], offsets: list[int], **changes: Any) -> StepOutput:
    tokens = [7] * sum(num_tokens)
    return StepOutput(ids=ids, num_tokens=num_tokens, token_offsets=offsets, token_ids=tokens, **changes)


def _placed(number: int, generated: Sequence[int] = ()) -> WorkerStart:
    start = make_start([1], router_id="r", router_request_number=number)
    generation = replace(start.generation, generated_token_ids=tuple(generated))
    return replace(start, generation=generation, is_signed=True)


def _nothing() -> None: ...
