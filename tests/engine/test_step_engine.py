"""The engine with its thread, on a fake model."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import count

import pytest

from quartet.engine.base import EngineRequest, Failed, Finished, FinishReason, Prefilled, RequestKind, StepOutput
from quartet.engine.sampling import GrammarKind, GuidedDecoding, OutputOptions, Sampling
from quartet.engine.scheduler import SchedulerConfig
from quartet.engine.step_engine import StepEngine
from quartet.engine.step_loop import StepLoop
from quartet.errors import (
    EngineError,
    InvalidRequestError,
    NoHandOffError,
    PromptTooLongError,
    RequestCancelledError,
    ServingError,
    UnsupportedFieldError,
    WorkerUnavailableError,
)
from tests.engine.consumer import Consumer, StartEngine
from tests.engine.fakes import WAIT_S, FakePuller, FakeRunner, expected_output, fake_layout, make_request, next_token
from tests.engine.launching import LaunchingRunner


def _check_idle(engine: StepEngine, *, num_held_blocks: int = 0) -> None:
    [stats] = engine.stats()
    assert stats.num_held_blocks == num_held_blocks
    assert stats.num_free_blocks + stats.num_cached_blocks + num_held_blocks == stats.num_total_blocks
    assert (stats.num_running, stats.num_waiting, stats.num_queued_prefill_tokens) == (0, 0, 0)


def _error(terminal: object) -> ServingError:
    assert isinstance(terminal, Failed)
    return terminal.error


async def test_a_decode_streams_its_tokens_and_finishes(start_engine: StartEngine) -> None:
    engine = await start_engine(FakeRunner())
    consumer = Consumer(engine)
    request = make_request(range(10), generated=expected_output(make_request(range(10)).generation)[:2], max_tokens=6)
    engine.submit(request)
    assert await consumer.wait_terminal(request) == Finished(request.id, FinishReason.LENGTH, 6)
    assert consumer.tokens[request.id] == expected_output(request.generation)[2:]
    assert consumer.offsets[request.id] == [2, 3, 4, 5]
    assert consumer.started[request.id].num_cached_tokens == 0
    assert consumer.started[request.id].queue_s >= 0


async def test_a_prefill_answers_with_a_token_and_holds_blocks_until_released(start_engine: StartEngine) -> None:
    engine = await start_engine(FakeRunner())
    consumer = Consumer(engine)
    request = make_request(range(10), kind=RequestKind.PREFILL)
    engine.submit(request)
    prefilled = await consumer.wait_terminal(request)
    assert isinstance(prefilled, Prefilled)
    assert prefilled.token_id == next_token(range(10), 64)
    assert (len(prefilled.block_ids), prefilled.num_tokens, prefilled.finished) == (3, 10, None)
    assert prefilled.compute_s > 0
    assert consumer.tokens[request.id] == []
    _check_idle(engine, num_held_blocks=3)
    engine.release(request.id)
    await consumer.wait_seen()
    _check_idle(engine)


async def test_a_hand_off_goes_from_pool_to_pool(start_engine: StartEngine) -> None:
    puller = FakePuller()
    source, sink = await start_engine(FakeRunner()), await start_engine(FakeRunner(), puller=puller)
    source_consumer, sink_consumer = Consumer(source), Consumer(sink)
    prefill = make_request(range(10), kind=RequestKind.PREFILL)
    source.submit(prefill)
    prefilled = await source_consumer.wait_terminal(prefill)
    assert isinstance(prefilled, Prefilled)
    assert source.memory is not None
    assert source.capabilities.layout is not None
    hand_off = puller.offer_prefilled(source.memory, source.capabilities.layout, prefilled)
    decode = make_request(range(10), generated=[prefilled.token_id], hand_off=hand_off)
    sink.submit(decode)
    assert await sink_consumer.wait_terminal(decode) == Finished(decode.id, FinishReason.LENGTH, 4)
    assert sink_consumer.tokens[decode.id] == expected_output(decode.generation)[1:]
    started = sink_consumer.started[decode.id]
    assert (started.transfer_bytes, started.transfer_s, started.transfer_way) == (3 * 64, 0.001, "shm")
    assert started.queue_after_transfer_s > 0, "the engine's thread learns of its end before it schedules the request"
    assert puller.claims[0].num_releases == 0


async def test_logprobs_come_with_their_tokens_where_asked_for(start_engine: StartEngine) -> None:
    engine = await start_engine(FakeRunner())
    consumer = Consumer(engine)
    request = make_request([1, 2])
    request = replace(request, generation=replace(request.generation, output=OutputOptions(logprobs=0)))
    other = make_request([1, 3])
    engine.submit(request)
    engine.submit(other)
    await consumer.wait_terminal(request)
    await consumer.wait_terminal(other)
    assert [logprobs.token_id for logprobs in consumer.logprobs[request.id]] == consumer.tokens[request.id]
    assert other.id not in consumer.logprobs


@pytest.mark.parametrize("make_runner", [FakeRunner, LaunchingRunner])
async def test_two_hundred_requests_at_once_give_the_tokens_of_their_solo_runs(
    start_engine: StartEngine, make_runner: Callable[..., FakeRunner]
) -> None:
    draw = random.Random(7)
    engine = await start_engine(make_runner(num_blocks=48), max_num_seqs=16)
    consumer = Consumer(engine)
    requests = [
        make_request(draw.choices([1, 2], k=draw.randint(1, 30)), max_tokens=draw.randint(1, 30), priority=n % 3)
        for n in range(200)
    ]
    for request in requests:
        engine.submit(request)
    for request in requests:
        await consumer.wait_terminal(request)
        assert consumer.tokens[request.id] == expected_output(request.generation)
    _check_idle(engine)
    [stats] = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_output_tokens == sum(len(tokens) for tokens in consumer.tokens.values())


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (make_request([64]), InvalidRequestError),
        (make_request(range(10), max_tokens=300), PromptTooLongError),
        (make_request([1], sampling=Sampling(guided=GuidedDecoding(GrammarKind.REGEX, "a+"))), UnsupportedFieldError),
        (make_request([1, 2], hand_off=FakePuller(layout=fake_layout()).offer_prefix([1, 2])), NoHandOffError),
    ],
)
async def test_a_refusal_comes_as_an_output(
    start_engine: StartEngine, request_: EngineRequest, error: type[ServingError]
) -> None:
    engine = await start_engine(FakeRunner())
    consumer = Consumer(engine)
    engine.submit(request_)
    assert type(_error(await consumer.wait_terminal(request_))) is error


async def test_a_waiting_and_a_running_request_can_be_cancelled(start_engine: StartEngine) -> None:
    gate = threading.Semaphore(3)
    engine = await start_engine(FakeRunner(step_gate=gate), max_num_seqs=1)
    consumer = Consumer(engine)
    running, waiting = make_request(range(10), max_tokens=200), make_request([1])
    engine.submit(running)
    engine.submit(waiting)
    await consumer.wait_tokens(running, 3)
    engine.cancel(waiting.id)
    engine.cancel(running.id)
    gate.release(2)
    assert isinstance(_error(await consumer.wait_terminal(waiting)), RequestCancelledError)
    assert isinstance(_error(await consumer.wait_terminal(running)), RequestCancelledError)
    _check_idle(engine)


async def test_cancelling_an_ended_or_unknown_request_changes_nothing(start_engine: StartEngine) -> None:
    engine = await start_engine(FakeRunner())
    consumer = Consumer(engine)
    first, second = make_request([1]), make_request([2])
    engine.submit(first)
    await consumer.wait_terminal(first)
    engine.cancel(first.id)
    engine.cancel(10**9)
    engine.release(10**9)
    engine.submit(second)
    await consumer.wait_terminal(second)
    assert isinstance(consumer.terminal[first.id], Finished)


async def test_a_request_that_no_step_has_seen_yet_counts_as_waiting(start_engine: StartEngine) -> None:
    gate = threading.Semaphore(0)
    runner = FakeRunner(step_gate=gate)
    engine = await start_engine(runner)
    engine.submit(make_request(range(10)))
    await asyncio.to_thread(runner.step_began.wait, WAIT_S)
    engine.submit(make_request(range(5)))  # the thread is inside a step
    [stats] = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    assert (stats.num_queued_prefill_tokens, stats.num_unbegun_prefill_tokens) == (15, 5)
    gate.release(100)


async def test_a_short_prompt_that_no_step_has_seen_yet_takes_of_what_is_spare(start_engine: StartEngine) -> None:
    gate = threading.Semaphore(0)
    runner = FakeRunner(step_gate=gate)
    engine = await start_engine(runner, max_num_batched_tokens=16)
    engine.submit(make_request(range(40)))
    await asyncio.to_thread(runner.step_began.wait, WAIT_S)
    assert engine.stats()[0].num_spare_prefill_tokens == 8
    engine.submit(make_request(range(5)))  # the thread is inside a step
    assert engine.stats()[0].num_spare_prefill_tokens == 3
    engine.submit(make_request(range(5)))
    assert engine.stats()[0].num_spare_prefill_tokens == 0
    gate.release(100)


async def test_the_event_loop_is_notified_of_prompts_as_they_begin_and_not_of_decoding(
    start_engine: StartEngine,
) -> None:
    gate = threading.Semaphore(0)
    engine = await start_engine(FakeRunner(step_gate=gate))
    outputs = engine.outputs()
    engine.submit(make_request(range(10), max_tokens=3))
    async with asyncio.timeout(WAIT_S):
        assert await anext(outputs) == StepOutput()
        [stats] = engine.stats()
        assert (stats.num_queued_prefill_tokens, stats.num_unbegun_prefill_tokens) == (10, 0)
        assert stats.num_prompt_steps == 1
        gate.release(100)
        assert [len((await anext(outputs)).ids) for _ in range(3)] == [1, 1, 1]


async def test_an_idle_engine_sleeps(start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    num_turns = count()
    step = StepLoop.step
    monkeypatch.setattr(StepLoop, "step", lambda steps, messages: (next(num_turns), step(steps, messages))[1])
    engine = await start_engine(FakeRunner())
    consumer = Consumer(engine)
    engine.release(10**9)  # wakes it up for nothing
    engine.submit(request := make_request([1], max_tokens=3))
    await consumer.wait_terminal(request)
    await asyncio.sleep(0.02)  # a window to be watched: a loop that spins turns thousands of times
    assert engine.stats()[0].num_steps == 3
    assert next(num_turns) <= 10


async def test_a_runner_that_raises_ends_the_engine_and_every_request(start_engine: StartEngine) -> None:
    gate = threading.Semaphore(1)
    runner = FakeRunner(step_gate=gate)
    engine = await start_engine(runner, max_num_seqs=1)
    consumer = Consumer(engine)
    running, waiting = make_request([1], max_tokens=9), make_request([2])
    engine.submit(running)
    engine.submit(waiting)
    await consumer.wait_tokens(running, 1)
    runner.failure = RuntimeError("the device is gone")
    gate.release()
    for request in (running, waiting):
        assert isinstance(_error(await consumer.wait_terminal(request)), EngineError)
    with pytest.raises(EngineError, match="the device is gone"):
        await consumer.wait_end()
    assert not engine.is_alive
    with pytest.raises(EngineError, match="the device is gone"):
        engine.submit(make_request([3]))
    assert runner.num_closes == 0, "transfers may still use its memory"
    await engine.close()
    assert runner.num_closes == 1


@pytest.mark.parametrize("error", [RuntimeError("no such file"), EngineError("no such file")])
async def test_a_model_that_cannot_be_loaded_fails_the_start(error: Exception) -> None:
    def load() -> FakeRunner:
        raise error

    engine = StepEngine(load, SchedulerConfig())
    with pytest.raises(EngineError, match="no such file"):
        await engine.start()
    assert not engine.is_alive
    await engine.close()


async def test_the_model_is_loaded_in_the_engine_thread() -> None:
    names: list[str] = []

    def load() -> FakeRunner:
        names.append(threading.current_thread().name)
        return FakeRunner()

    engine = StepEngine(load, SchedulerConfig())
    await engine.start()
    assert engine.is_alive
    assert engine.capabilities.num_blocks == 64
    await engine.close()
    assert names == ["quartet-engine"]


async def test_close_fails_running_requests_and_ends_the_outputs(start_engine: StartEngine) -> None:
    gate = threading.Semaphore(1)
    runner = FakeRunner(step_gate=gate)
    engine = await start_engine(runner)
    consumer = Consumer(engine)
    request = make_request([1], max_tokens=9)
    engine.submit(request)
    await consumer.wait_tokens(request, 1)
    closing = asyncio.create_task(engine.close())
    assert isinstance(_error(await consumer.wait_terminal(request)), WorkerUnavailableError)
    gate.release()  # the step that it is in is the last one
    await consumer.wait_end()
    await closing
    await engine.close()
    assert runner.num_closes == 1
    assert not engine.is_alive
    with pytest.raises(WorkerUnavailableError):
        engine.submit(make_request([3]))


async def test_close_is_bounded_even_if_a_step_hangs() -> None:
    gate = threading.Semaphore(0)
    runner = FakeRunner(step_gate=gate)
    engine = StepEngine(lambda: runner, SchedulerConfig(), close_timeout_s=0.05)
    await engine.start()
    consumer = Consumer(engine)
    request = make_request([1])
    engine.submit(request)
    await asyncio.to_thread(runner.step_began.wait, WAIT_S)
    async with asyncio.timeout(WAIT_S):
        await engine.close()
    assert isinstance(_error(await consumer.wait_terminal(request)), WorkerUnavailableError)
    [thread] = [thread for thread in threading.enumerate() if thread.name == "quartet-engine"]
    gate.release(9)
    await asyncio.to_thread(thread.join, WAIT_S)
    assert runner.num_closes == 1


async def test_an_engine_that_was_never_started_can_be_closed() -> None:
    engine = StepEngine(FakeRunner, SchedulerConfig())
    await engine.close()
    assert [output async for output in engine.outputs()] == []
