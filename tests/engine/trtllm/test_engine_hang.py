"""A hanging engine is detected, whatever ends meanwhile; an engine that moves does not count as hanging."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest

from quartet.engine.base import EngineRequest, Failed
from quartet.engine.sampling import Sampling
from quartet.engine.trtllm.model_facts import ModelFacts
from quartet.errors import EngineError
from tests.engine.trtllm.engines import LINES, ON_1_2, TIMES, WAIT_S, Running, asked, running, stand_in
from tests.fakes.driving import STORY

HASTY = replace(TIMES, canary_interval_s=0.02, canary_timeout_s=0.05, abort_timeout_s=0.02)


pytestmark = pytest.mark.usefixtures("package")


async def until(condition: Any) -> None:
    """What is polled here has no event, and a worker polls it too."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - it says so itself
            await asyncio.sleep(0.005)


async def refuse(decode: Running, running_one: EngineRequest) -> EngineRequest:
    request = asked(STORY, 8, sampling=Sampling(logit_bias={1: 2.0}))
    decode.engine.submit(request)
    return request


async def cancel(decode: Running, running_one: EngineRequest) -> EngineRequest:
    decode.engine.cancel(running_one.id)
    return running_one


@ON_1_2
@pytest.mark.parametrize("end", [refuse, cancel])
async def test_a_request_that_ends_during_a_hang_counts_as_no_step(end: Any) -> None:
    async with running(times=HASTY, publish_events_and_metrics=False) as decode:
        decode.control.steps.close()
        request = asked(STORY, 8)
        decode.engine.submit(request)
        await until(lambda: not decode.engine.is_alive)
        [before] = decode.engine.stats()
        ended = await end(decode, request)
        assert isinstance(await decode.consumer.wait_terminal(ended), Failed)
        await decode.settle()
        [after] = decode.engine.stats()
        assert after.num_steps == before.num_steps
        # For longer than the time that the polled condition is given.
        for _ in range(20):
            await asyncio.sleep(HASTY.canary_timeout_s / 5)
            assert not decode.engine.is_alive
        decode.control.steps.open()
        await until(lambda: decode.engine.is_alive)


async def test_an_engine_that_moves_between_hangs_is_seen_to_hang_again() -> None:
    async with running(times=HASTY, publish_events_and_metrics=False) as decode:
        decode.control.steps.close()
        request = asked(STORY, 64)
        decode.engine.submit(request)
        # What was out before the hang has ended.
        await asyncio.to_thread(decode.control.steps.wait_reached)
        await decode.settle()
        await until(lambda: not decode.engine.is_alive)
        # A canary is still out, so none is sent for what hangs after this.
        canary = decode.engine._session._canary  # type: ignore[union-attr]
        owed_since, num_ended = canary._quiet_since, canary.num_ended
        assert owed_since is not None
        decode.engine._session.loaded.book.begin(request.id)  # type: ignore[union-attr]
        decode.engine._session.loaded.book.finish_turn()  # type: ignore[union-attr]
        await until(lambda: canary._quiet_since > owed_since)
        await until(lambda: not decode.engine.is_alive)
        assert canary.num_ended == num_ended
        decode.control.steps.open()
        await until(lambda: decode.engine.is_alive)


async def test_every_rank_is_asked() -> None:
    times = replace(TIMES, canary_interval_s=0.02)
    settings = {"tensor_parallel_size": 2, "enable_attention_dp": True}
    async with running(times=times, override_engine_args=settings) as decode:
        assert _ranks_of(decode.control.calls) == [0, 1], "for its warm-up"
        await until(lambda: decode.engine._session.num_canaries > 0)  # type: ignore[union-attr]
        assert _ranks_of(decode.control.calls)[2:4] == [0, 1]
        assert all(not call.arguments["scheduling_params"].attention_dp_relax for call in decode.control.calls)


async def test_a_canary_shares_no_blocks_with_the_dummy_request_of_an_idle_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Where the end is 0, a canary's first choice is 1, of which the dummy's prompt is made.
    read = ModelFacts.read
    monkeypatch.setattr(ModelFacts, "read", lambda *given: replace(read(*given), eos_token_ids=(0,)))
    settings = {"tensor_parallel_size": 2, "enable_attention_dp": True}
    async with running(override_engine_args=settings) as decode:
        assert decode.last_call["inputs"] == {"prompt_token_ids": [1]}
        assert decode.last_call["cache_salt"]
        assert decode.engine.is_alive


def _ranks_of(calls: Any) -> list[int]:
    return [call.arguments["scheduling_params"].attention_dp_rank for call in calls]


@ON_1_2
@pytest.mark.parametrize("switches", LINES, ids=str)
async def test_a_rank_that_died_ends_all_though_the_llms_thread_is_blocked_and_is_not_waited_for(
    switches: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the stand-in's switch: where the executor notes it."""
    may_go_on, is_blocked = threading.Event(), threading.Event()
    # Nothing but the watchdog could notice it.
    times = replace(TIMES, check_interval_s=3_600.0)
    with stand_in(**switches) as module:
        shutdowns: list[Any] = []
        async with running(times=times) as decode:
            monkeypatch.setattr(module.LLM, "shutdown", lambda llm: shutdowns.append(llm))
            decode.control.steps.close()
            requests = [asked(STORY, 64), asked(STORY, 8)]
            for request in requests:
                decode.engine.submit(request)
            await asyncio.to_thread(decode.control.steps.wait_reached)

            def block() -> None:
                is_blocked.set()
                may_go_on.wait(WAIT_S)

            decode.engine._thread.post(block)
            assert await asyncio.to_thread(is_blocked.wait, WAIT_S)
            decode.control.lose_rank()
            for request in requests:
                end = await decode.consumer.wait_terminal(request)
                assert isinstance(end, Failed)
                assert isinstance(end.error, EngineError)
            with pytest.raises(EngineError, match="RuntimeError"):
                await decode.consumer.wait_end()
            assert not decode.engine.is_alive
            may_go_on.set()
            await decode.engine.close()
            assert await asyncio.to_thread(decode.engine._thread.wait_ended, WAIT_S)
        assert not shutdowns
        monkeypatch.undo()
