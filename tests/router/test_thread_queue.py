"""Long texts wait for threads in turn: no tenant keeps them all, too much text is refused, unwanted work never runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from quartet.errors import ConfigError, InvalidRequestError, QueueFullError
from router.admission import FairShare
from router.config import TokenizeConfig
from router.thread_queue import IsWanted, TokenizeQueue

WAIT_S = 30.0


class Works:
    """Works that run until they are let go, and the order in which they began."""

    def __init__(self, queue: TokenizeQueue) -> None:
        self.queue = queue
        self.began: list[str] = []
        self.gates: dict[str, threading.Event] = {}
        self._has_begun = threading.Semaphore(0)

    def run(self, tenant: str, name: str, num_characters: int = 100) -> asyncio.Task[str]:
        gate = self.gates[name] = threading.Event()

        def work(is_wanted: IsWanted) -> str:
            self.began.append(name)
            self._has_begun.release()
            assert gate.wait(WAIT_S)
            return f"{name} {is_wanted()}"

        return asyncio.create_task(self.queue.run(tenant, num_characters, work))

    async def wait_begun(self, number: int) -> None:
        for _ in range(number):
            assert await asyncio.to_thread(self._has_begun.acquire, timeout=WAIT_S)

    def finish(self, *names: str) -> None:
        for name in names:
            self.gates[name].set()


@asynccontextmanager
async def running(**config: float) -> AsyncIterator[Works]:
    works = Works(TokenizeQueue(TokenizeConfig(num_threads=2, **config), FairShare()))  # type: ignore[arg-type]
    try:
        yield works
    finally:
        works.finish(*works.gates)
        works.queue.close()


async def test_one_tenant_leaves_a_thread_to_the_others() -> None:
    async with running() as works:
        first, second = works.run("a", "a1"), works.run("a", "a2")
        await works.wait_begun(1)
        other = works.run("b", "b1")
        await works.wait_begun(1)
        assert works.began == ["a1", "b1"]
        assert works.queue.length == 1
        works.finish("b1")
        assert await other == "b1 True"
        assert works.began == ["a1", "b1"], "the thread is kept for others"
        works.finish("a1", "a2")
        assert [await first, await second] == ["a1 True", "a2 True"]


async def test_waiting_texts_take_turns_by_tenant() -> None:
    async with running() as works:
        holders = [works.run("x", "x"), works.run("y", "y")]
        await works.wait_begun(2)
        names = ["a1", "a2", "a3", "b1"]
        tasks = [works.run(name[0], name) for name in names]
        await asyncio.sleep(0)
        works.finish("x", "y", *names)
        await asyncio.gather(*holders, *tasks)
        assert works.began.index("b1") < works.began.index("a2")


async def test_tiny_texts_of_one_tenant_do_not_go_before_all_of_another_ones() -> None:
    async with running() as works:
        holders = [works.run("x", "x"), works.run("y", "y")]
        await works.wait_begun(2)
        tasks = [works.run("a", f"a{number}", 1) for number in range(5)]
        tasks += [works.run("b", f"b{number}", 10_000) for number in range(5)]
        await asyncio.sleep(0)
        for name in list(works.gates):
            works.finish(name)
        await asyncio.gather(*holders, *tasks)
        assert sum(name.startswith("a") for name in works.began[2:8]) <= 4


async def test_work_that_has_not_begun_never_runs_for_a_caller_that_left() -> None:
    async with running() as works:
        first = works.run("a", "a1")
        await works.wait_begun(1)
        left, kept = works.run("a", "left"), works.run("a", "kept")
        await asyncio.sleep(0)
        assert works.queue.length == 2
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        assert works.queue.length == 1
        works.finish("a1", "kept")
        await asyncio.gather(first, kept)
        assert works.began == ["a1", "kept"]


async def test_work_that_runs_learns_that_its_caller_has_left() -> None:
    async with running() as works:
        seen = threading.Event()
        began = asyncio.Event()
        loop = asyncio.get_running_loop()

        def work(is_wanted: IsWanted) -> None:
            loop.call_soon_threadsafe(began.set)
            while is_wanted():
                seen.wait(0.001)
            seen.set()

        task = asyncio.create_task(works.queue.run("a", 1, work))
        await began.wait()
        task.cancel()
        assert await asyncio.to_thread(seen.wait, WAIT_S)


async def test_too_much_text_is_refused_to_the_tenant_that_has_most_of_it() -> None:
    async with running(max_queued_characters=1_000_000) as works:
        tasks = [works.run("hog", "running")]
        await works.wait_begun(1)
        big, small = works.run("hog", "h1", 600_000), works.run("hog", "h2", 390_000)
        await asyncio.sleep(0)
        blocked = works.run("other", "o1", 100)  # takes the second thread
        await works.wait_begun(1)
        modest = works.run("modest", "m1", 50)
        with pytest.raises(QueueFullError) as caught:
            await small
        assert caught.value.retry_delay_s == 1.0
        alone = works.run("third", "t1", 5_000_000)
        with pytest.raises(QueueFullError):
            await alone
        works.finish(*works.gates)
        await asyncio.gather(*tasks, big, blocked, modest)
        assert works.queue.length == 0


async def test_a_refusal_that_meets_a_caller_who_has_just_left_is_nobody_elses_error() -> None:
    async with running(max_queued_characters=100_000) as works:
        holders = [works.run("x", "x"), works.run("y", "y")]
        await works.wait_begun(2)
        left = works.run("hog", "left", 90_000)
        await asyncio.sleep(0)
        kept = works.run("modest", "kept", 50)
        left.cancel()  # it has still to leave the line when the next one comes, and the line is too long
        works.finish(*works.gates)
        assert await kept == "kept True"
        await asyncio.gather(*holders)
        assert "left" not in works.began


async def test_an_error_of_the_work_is_its_callers() -> None:
    async with running() as works:

        def work(_is_wanted: IsWanted) -> None:
            raise InvalidRequestError("no", field="text")

        with pytest.raises(InvalidRequestError, match="no"):
            await works.queue.run("a", 1, work)
        task = works.run("a", "next")
        works.finish("next")
        assert await task == "next True"


@pytest.mark.parametrize("name", ["num_threads", "max_queued_characters", "retry_delay_s"])
def test_impossible_limits_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        TokenizeConfig(**{name: 0})
