"""The hooks: what a test can make go wrong, and what the adapter then sees."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tests.fakes.driving import SPELL, STORY, ended, engine, greedy, params, steps_of
from tests.fakes.installation import installed

with installed():
    from tensorrt_llm._stand_in.control import control
    from tensorrt_llm.executor.utils import RequestError


async def test_an_engine_that_dies_fails_all_its_requests_and_takes_no_more() -> None:
    llm = engine()
    hands = control.of(llm)
    hands.steps.close()
    handles = [llm.generate_async(STORY, params(), streaming=True) for _ in range(2)]
    hands.die()
    hands.steps.open()
    for handle in handles:
        with pytest.raises(Exception, match="Executor worker") as death:
            await ended(handle)
        assert not isinstance(death.value, RequestError | RuntimeError)
    hands.wait_until(llm._executor.is_shutdown)
    with pytest.raises(RuntimeError, match="LLM is shutting down"):
        llm.generate_async(STORY, params())
    llm.shutdown()


async def test_an_idle_engine_dies_too() -> None:
    llm = engine()
    hands = control.of(llm)
    hands.die(MemoryError("out of memory"))
    hands.wait_until(llm._executor.is_shutdown)


async def test_shutting_down_ends_requests() -> None:
    llm = engine()
    hands = control.of(llm)
    handle = llm.generate_async(STORY, params(4_000, ignore_eos=True), streaming=True)
    hands.wait_until(lambda: hands.num_steps > 0)
    await asyncio.to_thread(llm.shutdown)
    with pytest.raises(RuntimeError, match="shutting down"):
        async for _ in handle:
            pass


async def test_one_request_fails_and_the_engine_lives() -> None:
    llm = engine()
    control.of(llm).fail_next_request("not today")
    with pytest.raises(RequestError, match="not today"):
        await ended(llm.generate_async(SPELL, params()))
    assert (await ended(llm.generate_async(SPELL, params()))).outputs[0].token_ids == greedy(SPELL, 24)


async def test_a_load_takes_until_it_is_released() -> None:
    control.loads.close()
    loading = asyncio.create_task(asyncio.to_thread(engine))
    await asyncio.to_thread(control.loads.wait_reached)
    assert not loading.done()
    assert not control.engines
    control.loads.open()
    assert (await loading)._executor is not None


def test_a_load_may_fail() -> None:
    control.fail_next_load(RuntimeError("out of memory"))
    with pytest.raises(RuntimeError, match="out of memory"):
        engine()
    assert not control.engines
    engine()


async def test_a_step_hangs_until_it_is_released() -> None:
    llm = engine()
    hands = control.of(llm)
    hands.steps.close()
    handle = llm.generate_async(STORY, params(3), streaming=True)
    await asyncio.to_thread(hands.steps.wait_reached)
    handle.abort()
    assert (hands.num_steps, hands.num_running, handle.finished) == (0, 1, False)
    hands.steps.let_through()
    assert (await ended(handle)).outputs[0].finish_reason == "cancelled"


async def test_single_steps_give_single_tokens() -> None:
    llm = engine()
    hands = control.of(llm)
    hands.steps.close()
    handle = llm.generate_async(STORY, params(5), streaming=True)
    for number in range(1, 4):
        hands.steps.let_through()
        step = await asyncio.wait_for(anext(handle), 30)
        assert len(step.outputs[0].token_ids) == number


async def test_aborting_is_asynchronous_and_harmless_when_repeated() -> None:
    llm = engine()
    hands = control.of(llm)
    hands.steps.close()
    handle = llm.generate_async(STORY, params(50), streaming=True)
    hands.steps.let_through(3)
    for _ in range(3):
        await asyncio.wait_for(anext(handle), 30)
    handle.abort()
    handle.abort()
    assert handle.aborted()
    hands.steps.open()
    assert (await steps_of(handle))[-1][:3] == greedy(STORY, 3)
    assert handle.outputs[0].finish_reason == "cancelled"
    hands.wait_until(lambda: hands.num_running == 0 and hands.num_used_blocks() == 0)
    done = await ended(llm.generate_async(SPELL, params()))
    done.abort()
    assert done.outputs[0].finish_reason == "stop"


async def test_a_queued_request_can_be_aborted() -> None:
    llm = engine(max_batch_size=1)
    hands = control.of(llm)
    hands.steps.close()
    first = llm.generate_async(STORY, params(5), streaming=True)
    second = llm.generate_async(STORY, params(5), streaming=True)
    hands.steps.let_through(2)
    hands.wait_until(lambda: hands.num_steps == 2)
    second.abort()
    hands.steps.open()
    assert (await ended(second)).outputs[0].token_ids == []
    assert (await steps_of(first))[-1] == greedy(STORY, 5)


async def test_the_engine_s_time_limit_is_a_finish_reason() -> None:
    llm = engine()
    hands = control.of(llm)
    handle = llm.generate_async(STORY, params(4_000, ignore_eos=True), streaming=True)
    await asyncio.wait_for(anext(handle), 30)
    hands.time_out_requests()
    assert (await ended(handle)).outputs[0].finish_reason == "timeout"


def test_calls_are_kept_as_they_were_made() -> None:
    llm = engine()
    given: Any = params(7, temperature=0.0)
    llm.generate_async(SPELL, given, cache_salt="tenant").result()
    [call] = control.of(llm).calls
    assert call.arguments["cache_salt"] == "tenant"
    assert (call.arguments["sampling_params"].max_tokens, call.arguments["sampling_params"].end_id) == (7, None)


def test_the_result_s_time_out_is_ignored_unless_it_turns_out_to_work() -> None:
    llm = engine()
    control.of(llm).steps.close()
    handle = llm.generate_async(SPELL, params(2))
    waiting = threading.Thread(target=handle.result, kwargs={"timeout": 0.001})
    waiting.start()
    control.of(llm).steps.wait_reached()
    control.of(llm).steps.open()
    waiting.join(30)
    assert handle.finished
    with installed(result_timeout_works=True) as other, other.LLM(llm.args.model) as later:
        hands = later._control
        hands.steps.close()
        with pytest.raises(TimeoutError):
            later.generate_async(SPELL, other.SamplingParams()).result(timeout=0.001)
        hands.steps.open()
