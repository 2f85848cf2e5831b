"""Requests that end before their time: cancelled, dropped, or late, at every stage."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NoReturn

import pytest

from quartet.api.answer import Answer
from quartet.engine.base import FinishReason
from quartet.errors import (
    DrainingError,
    InvalidRequestError,
    QueueFullError,
    RequestTimeoutError,
    WorkerUnavailableError,
)
from router.config import AdmissionConfig
from router.workers import PoolKey
from tests.router.fakes import TIMEOUT_S, Collected, Fleet, Plan, collect, expected_tokens
from tests.router.http.face import until
from tests.router.records import make_load
from tests.router.test_generate import make_start


class Stage:
    """A point that a request reaches and stays at."""

    def __init__(self, name: str, prepare: Callable[[Fleet], None], reached: Callable[[Fleet], asyncio.Event]) -> None:
        self.name, self.prepare, self.reached = name, prepare, reached


def _fill(fleet: Fleet) -> None:
    for status in fleet.table.statuses(0.0):
        full = make_load(status.record, num_in_use_blocks=status.record.num_blocks)
        fleet.table.report(full, 0.0)


def _queued(fleet: Fleet) -> asyncio.Event:
    return fleet.policy.kept_waiting


STAGES = [
    Stage("tokenize", lambda fleet: fleet.texts.gate.clear(), lambda fleet: fleet.texts.asked),
    Stage("queue", _fill, _queued),
    Stage("prefill", lambda fleet: fleet.hops.plan("prefill", Plan(hang_after=0)), lambda fleet: fleet.hops.hung),
    Stage("transfer", lambda fleet: fleet.hops.plan("decode", Plan(hang_after=0)), lambda fleet: fleet.hops.hung),
    Stage("decode", lambda fleet: fleet.hops.plan("decode", Plan(hang_after=4)), lambda fleet: fleet.hops.hung),
]
each_stage = pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
SHOWN = {"tokenize": 0, "queue": 0, "prefill": 0, "transfer": 1, "decode": 5}


@each_stage
async def test_a_cancelled_request_ends_well_and_leaves_nothing(stage: Stage) -> None:
    fleet = Fleet("prefill-0", "decode-0")
    stage.prepare(fleet)
    reached = stage.reached(fleet)
    run = fleet.generate(make_start())
    reading = asyncio.create_task(collect(run))
    async with asyncio.timeout(TIMEOUT_S):
        await reached.wait()
        run.cancel()
        answer = await reading
    assert answer.accepted is not None
    assert answer.finished[0].reason is FinishReason.CANCELLED
    assert answer.token_ids.get(0, []) == expected_tokens(5, 0, 20, SHOWN[stage.name])
    usage = answer.finished[0].usage
    assert (usage.num_output_tokens, usage.num_attempts) == (SHOWN[stage.name], stage.name not in ("tokenize", "queue"))
    fleet.assert_nothing_left()


@each_stage
async def test_a_dropped_request_leaves_nothing(stage: Stage) -> None:
    fleet = Fleet("prefill-0", "decode-0")
    stage.prepare(fleet)
    reached = stage.reached(fleet)
    reading = asyncio.create_task(collect(fleet.generate(make_start())))
    async with asyncio.timeout(TIMEOUT_S):
        await reached.wait()
        reading.cancel()
        await asyncio.wait([reading])
    fleet.assert_nothing_left()


@each_stage
async def test_a_late_request_fails_and_leaves_nothing(stage: Stage) -> None:
    fleet = Fleet("prefill-0", "decode-0")
    stage.prepare(fleet)
    with pytest.raises(RequestTimeoutError):
        await collect(fleet.generate(make_start(timeout_s=0.05)))
    fleet.assert_nothing_left()


async def test_the_routers_limit_caps_a_clients_timeout() -> None:
    fleet = Fleet("decode-0", max_timeout_s=0.05)
    fleet.hops.plan("decode", Plan(hang_after=2))
    with pytest.raises(RequestTimeoutError):
        await collect(fleet.generate(make_start(timeout_s=1000.0)))


async def test_choices_that_ended_keep_their_end_when_the_rest_is_cancelled() -> None:
    fleet = Fleet("decode-0")
    fleet.hops.plan("decode", Plan(), Plan(hang_after=3))
    run = fleet.generate(make_start(num_choices=2))
    answer = Collected()
    async with asyncio.timeout(TIMEOUT_S):
        async for part in run.parts():
            answer.add(part)
            if answer.finished:
                run.cancel()
    assert sorted(finished.reason for finished in answer.finished.values()) == [
        FinishReason.CANCELLED,
        FinishReason.LENGTH,
    ]
    fleet.assert_nothing_left()


async def test_cancelling_before_anything_ran_still_answers() -> None:
    fleet = Fleet("decode-0")
    run = fleet.generate(make_start(num_choices=2))
    run.cancel()
    answer = await collect(run)
    assert [finished.reason for finished in answer.finished.values()] == [FinishReason.CANCELLED] * 2


async def test_cancelling_an_impossible_request_says_that_it_was_impossible() -> None:
    fleet = Fleet("decode-0")
    run = fleet.generate(make_start(num_choices=2**32 - 1))
    run.cancel()
    with pytest.raises(InvalidRequestError):
        await collect(run)


async def test_a_request_that_is_aborted_as_it_is_cancelled_ends_with_the_error() -> None:
    fleet = Fleet("decode-0")
    run = fleet.generate(make_start())
    run.cancel()
    run.abort(DrainingError("going away"))
    with pytest.raises(DrainingError):
        await collect(run)
    fleet.assert_nothing_left()


async def test_cancelling_twice_or_after_the_end_is_harmless() -> None:
    fleet = Fleet("decode-0")
    run = fleet.generate(make_start())
    answer = await collect(run)
    run.cancel()
    run.cancel()
    assert answer.finished[0].reason is FinishReason.LENGTH


async def test_a_request_that_waited_too_long_for_room_is_refused() -> None:
    fleet = Fleet("decode-0", admission=AdmissionConfig(queue_timeout_s=0.05, retry_delay_s=2.0))
    _fill(fleet)
    with pytest.raises(QueueFullError) as caught:
        await collect(fleet.generate(make_start()))
    assert caught.value.retry_delay_s == 2.0
    fleet.assert_nothing_left()


async def test_without_a_ready_decode_worker_a_request_is_unavailable() -> None:
    fleet = Fleet("prefill-0", "decode-0", admission=AdmissionConfig(unavailable_timeout_s=0.05))
    fleet.break_worker("decode-0")
    with pytest.raises(WorkerUnavailableError):
        await collect(fleet.generate(make_start()))
    fleet.assert_nothing_left()


async def test_a_worker_that_comes_back_in_time_takes_the_queued_request() -> None:
    fleet = Fleet("decode-0")
    fleet.break_worker("decode-0")
    queued = _queued(fleet)
    reading = asyncio.create_task(collect(fleet.generate(make_start())))
    async with asyncio.timeout(TIMEOUT_S):
        await queued.wait()
        fleet.join("decode-0")
        answer = await reading
    assert answer.token_ids[0] == expected_tokens(5, 0, 20, 12)


async def test_a_reader_cancelled_twice_leaves_only_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet("decode-0")
    asked, leaving, gate = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow_to_leave(_pool: PoolKey) -> NoReturn:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            leaving.set()
            await gate.wait()

    fleet.texts.model_text = slow_to_leave
    with caplog.at_level(logging.INFO, logger="router"):
        reading = asyncio.create_task(collect(fleet.generate(make_start())))
        async with asyncio.timeout(TIMEOUT_S):
            await asked.wait()
            reading.cancel()
            await leaving.wait()
            reading.cancel()
            await asyncio.wait([reading])
            assert fleet.pipeline.num_running == 1, "it still holds something"
            gate.set()
            for _ in range(10):  # turns of the event loop that it takes to leave
                await asyncio.sleep(0)
    assert len(caplog.records) == 1
    fleet.assert_nothing_left()


async def test_all_runs_of_a_client_end_also_if_the_wait_for_them_is_cancelled() -> None:
    fleet, may_end, num_begun = Fleet("decode-0"), asyncio.Event(), 0

    async def slow_to_leave(_pool: PoolKey) -> NoReturn:
        nonlocal num_begun
        num_begun += 1
        try:
            await asyncio.Event().wait()
        finally:
            await may_end.wait()
        raise AssertionError

    fleet.texts.model_text = slow_to_leave  # type: ignore[method-assign]
    runs = [fleet.pipeline.generate(make_start(), Answer()) for _ in range(3)]
    await until(lambda: num_begun == len(runs))
    dropping = asyncio.create_task(fleet.pipeline.drop_all(runs))
    await asyncio.sleep(0)
    dropping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dropping
    may_end.set()
    await until(lambda: not fleet.pipeline.num_running)
    fleet.assert_nothing_left()


async def test_a_sink_that_fails_at_the_end_keeps_nothing() -> None:
    class Failing(Answer):
        def end(self, error: BaseException | None = None) -> None:
            raise RuntimeError("a bug of the sink")

    fleet, told = Fleet("decode-0"), list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: told.append(context["exception"]))
    run = fleet.pipeline.generate(make_start(), Failing())
    await until(lambda: bool(told))
    assert [str(error) for error in told] == ["a bug of the sink"]
    assert fleet.pipeline.num_running == 0 and not run._request.prompt_token_ids
    fleet.assert_nothing_left()
