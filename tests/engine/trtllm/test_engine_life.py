"""Loading, dying, hanging and closing."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest

from quartet.engine.base import Failed, Finished, FinishReason, RequestKind
from quartet.engine.trtllm.engine import TrtllmEngine
from quartet.errors import ConfigError, EngineError, WorkerUnavailableError
from tests.engine.consumer import Consumer
from tests.engine.trtllm.engines import ON_1_2, TIMES, WAIT_S, OpaquePuller, Running, asked, running, stand_in
from tests.engine.trtllm.specs import spec_of
from tests.fakes.driving import STORY

DECODE = RequestKind.DECODE


@pytest.fixture
def control(package: Any) -> Any:
    from tensorrt_llm._stand_in.control import control

    return control


def make_engine(**settings: Any) -> TrtllmEngine:
    return TrtllmEngine(spec_of(**settings), DECODE, OpaquePuller(), TIMES)


def test_without_the_package_a_configuration_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.kind.*docs/trtllm\.md"):
        make_engine()


async def test_the_engines_capabilities_are_known_once_it_runs(package: Any) -> None:
    async with running(max_model_len=512, block_size=16) as decode:
        can = decode.engine.capabilities
        assert can.kinds == {DECODE}
        assert (can.vocab_size, can.max_model_len, can.block_size) == (2048, 512, 16)
        assert (can.layout, decode.engine.memory, can.data_parallel_size, can.adapters) == (None, None, 1, ())
        assert "logit_bias" not in can.sampling_fields
        assert "guided" not in can.sampling_fields
        assert {"temperature", "min_tokens", "stop_token_ids", "logprobs"} <= can.sampling_fields
        assert can.num_blocks > 0
        named_by_events = package.__version__ != "1.2.1"
        assert can.unannounced_blocks == (("adapter",) if named_by_events else ("salted", "adapter", "media"))
        assert decode.control.num_steps > 0, "it was warmed up"
        assert decode.engine.is_alive


async def test_an_error_while_loading_is_raised_and_nothing_runs(control: Any) -> None:
    engine = make_engine()
    control.fail_next_load(RuntimeError("out of memory"))
    with pytest.raises(EngineError, match="out of memory"):
        await engine.start()
    assert not engine.is_alive
    with pytest.raises(EngineError):
        _ = [output async for output in engine.outputs()]
    await engine.close()


@ON_1_2
async def test_an_argument_that_it_refuses_is_a_matter_of_configuration(package: Any) -> None:
    with pytest.raises(ConfigError):
        make_engine(override_engine_args={"no_such_thing": 1})


async def test_an_argument_that_a_later_line_alone_can_check_is_refused_by_it() -> None:
    with stand_in(version="1.4.0rc1"):
        engine = make_engine(override_engine_args={"no_such_thing": 1})
        with pytest.raises(ConfigError, match=r"^no_such_thing: .*\(1\.4\.0rc1\) does not have it"):
            await engine.start()
        await engine.close()


async def test_closing_does_not_wait_for_loading_which_ends_what_it_loaded(control: Any) -> None:
    control.loads.close()
    engine = make_engine()
    starting = asyncio.create_task(engine.start())
    await asyncio.to_thread(control.loads.wait_reached)
    await engine.close()
    with pytest.raises(WorkerUnavailableError):
        await starting
    control.loads.open()
    assert await asyncio.to_thread(engine._thread.wait_ended, WAIT_S)
    [loaded] = control.engines
    assert loaded.llm._executor is None, "it was shut down"


async def test_a_start_that_was_given_up_leaves_nothing(control: Any) -> None:
    control.loads.close()
    engine = make_engine()
    starting = asyncio.create_task(engine.start())
    await asyncio.to_thread(control.loads.wait_reached)
    starting.cancel()
    await asyncio.wait([starting])
    await engine.close()
    control.loads.open()
    assert await asyncio.to_thread(engine._thread.wait_ended, WAIT_S)
    assert all(loaded.llm._executor is None for loaded in control.engines)


async def test_closing_fails_what_runs_and_may_be_done_twice(package: Any) -> None:
    async with running() as decode:
        decode.control.steps.close()
        request = asked(STORY)
        decode.engine.submit(request)
        await asyncio.to_thread(decode.control.steps.wait_reached)
        closing = asyncio.gather(decode.engine.close(), decode.engine.close())
        end = await decode.consumer.wait_terminal(request)
        assert isinstance(end, Failed)
        assert isinstance(end.error, WorkerUnavailableError)
        decode.control.steps.open()
        await closing
        await decode.engine.close()
        await decode.consumer.wait_end()
        with pytest.raises(WorkerUnavailableError):
            decode.engine.submit(asked(STORY))
        assert decode.engine.stats(), "which may be asked for afterwards, too"


async def test_an_engine_that_hangs_does_not_keep_close(package: Any) -> None:
    async with running(times=replace(TIMES, close_timeout_s=0.05)) as decode:
        decode.control.steps.close()
        decode.engine.submit(asked(STORY))
        await asyncio.to_thread(decode.control.steps.wait_reached)
        async with asyncio.timeout(WAIT_S):
            await decode.engine.close()
        decode.control.steps.open()


async def assert_dead(decode: Running) -> None:
    with pytest.raises(EngineError):
        await decode.consumer.wait_end()
    assert not decode.engine.is_alive
    with pytest.raises(EngineError):
        decode.engine.submit(asked(STORY))


@pytest.mark.parametrize("error", [None, AssertionError("kv cache is full"), MemoryError()])
async def test_its_death_in_the_middle_fails_every_request_and_is_reported(
    package: Any, error: Exception | None
) -> None:
    async with running() as decode:
        decode.control.steps.close()
        requests = [asked(STORY, 64) for _ in range(3)]
        for request in requests:
            decode.engine.submit(request)
        decode.control.steps.let_through(3)
        await decode.consumer.wait_tokens(requests[0], 2)
        decode.control.die(error)
        decode.control.steps.open()
        for request in requests:
            end = await decode.consumer.wait_terminal(request)
            assert isinstance(end, Failed)
            assert isinstance(end.error, EngineError)
        await assert_dead(decode)


@pytest.mark.parametrize("check_health", [False, True])
async def test_its_death_without_work_is_noticed(check_health: bool) -> None:
    with stand_in(check_health=check_health):
        async with running() as decode:
            decode.control.die()
            await assert_dead(decode)


async def test_a_hang_without_work_is_seen_and_what_comes_back_is_alive(package: Any) -> None:
    times = replace(TIMES, canary_interval_s=0.01, canary_timeout_s=0.01)
    async with running(times=times) as decode:
        await _until(lambda: decode.engine.stats()[0].num_steps >= 2)  # canaries come back
        assert decode.engine.is_alive
        decode.control.steps.close()
        await _until(lambda: not decode.engine.is_alive)
        decode.control.steps.open()
        await _until(lambda: decode.engine.is_alive)
        request = asked(STORY, 3)
        assert await decode.end_of(request) == Finished(request.id, FinishReason.LENGTH, 3)


async def test_while_work_hangs_no_step_is_counted(package: Any) -> None:
    async with running(publish_events_and_metrics=False) as decode:
        decode.control.steps.close()
        request = asked(STORY, 8)
        decode.engine.submit(request)
        await asyncio.to_thread(decode.control.steps.wait_reached)
        [before] = decode.engine.stats()
        await decode.settle()
        [hanging] = decode.engine.stats()
        assert (hanging.num_steps, hanging.num_waiting) == (before.num_steps, 1)
        decode.control.steps.open()
        await decode.consumer.wait_terminal(request)
        [after] = decode.engine.stats()
        assert after.num_steps > before.num_steps


async def test_an_answer_that_never_comes_to_the_first_request_is_an_error(control: Any) -> None:
    engine = TrtllmEngine(spec_of(), DECODE, OpaquePuller(), replace(TIMES, warm_up_timeout_s=0.0))
    with pytest.raises(EngineError, match="first answer"):
        await engine.start()
    await engine.close()


async def test_a_start_that_failed_is_reported_though_the_llm_does_not_shut_down(
    package: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, shutdown = threading.Event(), package.LLM.shutdown
    monkeypatch.setattr(package.LLM, "shutdown", lambda llm: (may_end.wait(WAIT_S), shutdown(llm)))
    times = replace(TIMES, warm_up_timeout_s=0.0, close_timeout_s=0.05)
    engine = TrtllmEngine(spec_of(), DECODE, OpaquePuller(), times)
    with pytest.raises(EngineError, match="first answer"):
        await engine.start()
    await engine.close()
    may_end.set()
    assert await asyncio.to_thread(engine._thread.wait_ended, WAIT_S)


async def test_outputs_of_many_handles_in_one_turn_are_one_output(package: Any) -> None:
    async with running() as decode:
        seen: list[Any] = []
        take = Consumer._take
        decode.consumer._take = lambda output: (seen.append(output), take(decode.consumer, output))  # type: ignore
        decode.control.steps.close()
        requests = [asked(STORY, 3) for _ in range(4)]
        for request in requests:
            decode.engine.submit(request)
        await decode.settle()
        loop_held = asyncio.Event()
        may_go_on = threading.Event()
        loop = asyncio.get_running_loop()

        def hold() -> None:
            loop.call_soon_threadsafe(loop_held.set)
            assert may_go_on.wait(WAIT_S)

        decode.engine._thread.post(hold)
        await loop_held.wait()
        decode.control.steps.open()
        await decode.until(lambda: decode.control.num_running == 0)
        may_go_on.set()
        for request in requests:
            await decode.consumer.wait_terminal(request)
        [output] = [output for output in seen if output.ids]
        assert list(output.ids) == [request.id for request in requests]
        assert list(output.num_tokens) == [3, 3, 3, 3]
        assert len(output.finished) == 4


async def _until(condition: Any) -> None:
    """What is polled here has no event, and a worker polls it too."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - it says so itself
            await asyncio.sleep(0.005)
