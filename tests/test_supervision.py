"""Background tasks whose end ends their process, and event loops that are blocked."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading

import pytest

from quartet.errors import EngineError
from quartet.supervision import AwakeClock, LoopWatch, Supervisor, TaskEndedError, report_failure, vital

_TIMEOUT_S = 30.0


async def fail(error: Exception) -> None:
    raise error


async def end() -> None:
    """Ends at once, as no background task should."""


async def run_until_stopped(supervisor: Supervisor) -> None:
    async with asyncio.timeout(_TIMEOUT_S), supervisor:
        await supervisor.run_until(asyncio.Event())


async def test_an_exception_in_a_task_is_logged_with_its_traceback_and_ends_the_block(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls: list[str] = []
    supervisor = Supervisor(lambda: calls.append("failed"))
    supervisor.start("well", asyncio.Event().wait())
    supervisor.start("discovery", fail(RuntimeError("a lone surrogate")))
    with pytest.raises(TaskEndedError, match=r"discovery.*a lone surrogate"):
        await run_until_stopped(supervisor)
    assert calls == ["failed"]
    [record] = caplog.records
    assert "discovery" in record.message
    assert record.exc_info is not None and "a lone surrogate" in str(record.exc_info[1])


async def test_a_task_that_just_returns_ends_the_block_too(caplog: pytest.LogCaptureFixture) -> None:
    supervisor = Supervisor()
    supervisor.start("load", end())
    with pytest.raises(TaskEndedError, match="load"):
        await run_until_stopped(supervisor)
    assert supervisor.has_failed
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


async def test_a_task_that_is_cancelled_by_someone_else_ends_the_block_too() -> None:
    supervisor = Supervisor()
    started: list[asyncio.Task[object]] = []

    async def work() -> None:
        task = asyncio.current_task()
        assert task is not None
        started.append(task)
        await asyncio.Event().wait()

    supervisor.start("tend", work())
    await asyncio.sleep(0)
    started[0].cancel()
    with pytest.raises(TaskEndedError, match="tend"):
        await run_until_stopped(supervisor)


async def test_an_error_that_says_all_is_raised_as_it_is() -> None:
    supervisor = Supervisor(expected=(EngineError,))
    supervisor.start("outputs", fail(EngineError("the engine is lost")))
    with pytest.raises(EngineError, match="the engine is lost"):
        await run_until_stopped(supervisor)


async def test_an_error_of_a_vital_callback_ends_the_block_too(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []
    supervisor = Supervisor(lambda: calls.append("failed"))

    @vital
    def turn(number: int) -> None:
        raise RuntimeError(f"turn {number}")

    async def begin() -> None:
        asyncio.get_running_loop().call_soon(turn, 3)
        await asyncio.Event().wait()

    supervisor.start("well", begin())
    with pytest.raises(TaskEndedError, match=r"turn has ended: RuntimeError\('turn 3'\)"):
        await run_until_stopped(supervisor)
    assert calls == ["failed"]
    [record] = caplog.records
    assert record.exc_info is not None and "turn 3" in str(record.exc_info[1])


async def test_an_error_of_any_other_callback_is_logged_and_the_block_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    stop = asyncio.Event()

    def fail_once() -> None:
        asyncio.get_running_loop().call_soon(stop.set)
        raise RuntimeError("one request's")

    async with asyncio.timeout(_TIMEOUT_S), Supervisor() as supervisor:
        asyncio.get_running_loop().call_soon(fail_once)
        await supervisor.run_until(stop)
        assert not supervisor.has_failed
    assert "one request's" in caplog.text


async def test_the_other_tasks_run_until_the_block_ends() -> None:
    stop, supervisor, was_cancelled = asyncio.Event(), Supervisor(), asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            was_cancelled.set()

    async with asyncio.timeout(_TIMEOUT_S), supervisor:
        supervisor.start("serves the drain", work())
        stop.set()
        await supervisor.run_until(stop)
        assert not was_cancelled.is_set()
    assert was_cancelled.is_set()
    assert not supervisor.has_failed


async def test_a_task_that_fails_during_the_drain_is_not_lost() -> None:
    stop, drained, supervisor = asyncio.Event(), asyncio.Event(), Supervisor(on_failure=lambda: drained.set())
    stop.set()
    must_fail = asyncio.Event()

    async def fail_later() -> None:
        await must_fail.wait()
        raise RuntimeError("too late")

    with pytest.raises(TaskEndedError, match="too late"):
        async with asyncio.timeout(_TIMEOUT_S), supervisor:
            supervisor.start("late", fail_later())
            await supervisor.run_until(stop)
            must_fail.set()
            await drained.wait()


async def test_the_blocks_own_error_comes_first() -> None:
    supervisor = Supervisor()
    with pytest.raises(ValueError, match="the start failed"):
        async with supervisor:
            supervisor.start("load", end())
            await asyncio.sleep(0)
            raise ValueError("the start failed")


async def test_a_side_task_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    task = asyncio.create_task(fail(RuntimeError("unexpected")), name="probe-decode-0")
    task.add_done_callback(report_failure)
    await asyncio.wait([task])
    await asyncio.sleep(0)
    [record] = caplog.records
    assert "probe-decode-0" in record.message and record.exc_info is not None


def test_a_process_that_hangs_while_it_closes_still_ends_with_its_code() -> None:
    code = (
        "import threading; from quartet.supervision import end_process_within;"
        "end_process_within(0.01, code=7); threading.Event().wait()"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=_TIMEOUT_S, check=False).returncode == 7


async def test_a_blocked_event_loop_is_noticed_from_other_threads(caplog: pytest.LogCaptureFixture) -> None:
    watch = LoopWatch(blocked_after_s=0.3, dead_after_s=0.4, tick_s=0.01)
    seen: list[bool] = []

    def block_the_loop() -> None:
        """As a probe would see it, from a thread of its own; bounded, but by far longer than it takes."""

        def look() -> None:
            is_noticed = threading.Event()
            for _ in range(3000):
                if watch.is_dead:
                    break
                is_noticed.wait(0.01)
            seen.extend([watch.is_blocked, watch.is_dead])

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()

    beating = asyncio.create_task(watch.run())
    await asyncio.sleep(0)
    block_the_loop()
    assert seen == [True, True]
    [record] = [record for record in caplog.records if "blocked" in record.message]
    assert "block_the_loop" in record.message
    async with asyncio.timeout(_TIMEOUT_S):
        while watch.is_blocked:  # noqa: ASYNC110 - the next beat ends it
            await asyncio.sleep(0.01)
    beating.cancel()


def test_time_in_which_the_process_did_not_run_does_not_count() -> None:
    now = 100.0
    clock = AwakeClock(max_gap_s=2.0, clock=lambda: now)
    now = 101.0
    assert clock.now() == 1.0
    now = 161.0  # it was stopped for a minute
    assert clock.now() == 3.0
    now = 162.0
    assert clock.now() == 4.0
