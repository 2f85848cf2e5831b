"""When requests are sent: as clients become free, or when they are due."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator

import pytest

from cli.bench.load import Phase, Window, poisson_schedule, replay_schedule, run_closed_loop, run_open_loop
from cli.bench.workload import BenchRequest


def numbered(num_requests: int) -> Iterator[BenchRequest]:
    """``num_requests`` requests of different lengths."""
    for number in range(1, num_requests + 1):
        yield BenchRequest(token_ids=[1], num_output_tokens=number, at_s=0.001 * number)


class Server:
    """Takes requests and answers none before ``release``."""

    def __init__(self, when_running: int = 0) -> None:
        self.due_at: list[float] = []
        self.sent_at: list[float] = []
        self.num_running = self.most_running = 0
        self.reached = asyncio.Event()
        self.release = asyncio.Event()
        self._when_running = when_running

    async def send(self, request: BenchRequest, due_at: float) -> float:
        self.due_at.append(due_at)
        self.sent_at.append(time.perf_counter())
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        if self.num_running == self._when_running:
            self.reached.set()
        await self.release.wait()
        await asyncio.sleep(0)
        self.num_running -= 1
        return 0.0


def open_window(max_requests: int | None = None) -> Window:
    window = Window(max_requests)
    window.open()
    return window


async def test_a_closed_loop_keeps_as_many_running_as_it_has_clients() -> None:
    server = Server(when_running=3)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(run_closed_loop(server.send, numbered(10), open_window(), 3))
        await server.reached.wait()
        server.release.set()
    assert server.most_running == 3
    assert len(server.due_at) == 10


async def test_a_closed_loop_ends_after_so_many_requests() -> None:
    server = Server()
    server.release.set()
    await run_closed_loop(server.send, numbered(100), open_window(max_requests=7), 3)
    assert len(server.due_at) == 7


async def test_requests_of_the_warm_up_do_not_count() -> None:
    window = Window(1)
    assert [window.admit() for _ in range(5)] == [True] * 5
    assert not window.is_open
    window.open()
    assert [window.admit() for _ in range(3)] == [True, False, False]
    window.close()
    assert (window.phase, window.admit()) == (Phase.DRAINING, False)


async def test_clients_hold_their_next_requests_back_while_the_warm_up_settles() -> None:
    window, server = Window(2), Server(when_running=3)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        loop = tasks.create_task(run_closed_loop(server.send, numbered(10), window, 3))
        await server.reached.wait()
        window.settle()
        server.release.set()
        while server.num_running:  # noqa: ASYNC110 - a count rings no bell
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        assert (len(server.due_at), loop.done()) == (3, False)
        window.open()
    assert len(server.due_at) == 5


async def test_a_schedule_goes_on_where_the_warm_up_was_settled() -> None:
    window, server = Window(None), Server()
    server.release.set()
    window.settle()
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(run_open_loop(server.send, numbered(3), window, replay_schedule(0.5)))
        began = time.perf_counter()
        while time.perf_counter() < began + 0.02:  # noqa: ASYNC110 - all of them would be due by then
            await asyncio.sleep(0)
        assert server.due_at == []
        opened_at = time.perf_counter()
        window.open()
    assert server.due_at[0] >= opened_at
    assert [later - earlier for earlier, later in itertools.pairwise(server.due_at)] == pytest.approx([0.002] * 2)


@pytest.mark.parametrize("end", [Window.open, Window.close])
async def test_nobody_waits_for_a_warm_up_once_the_window_has_opened_or_closed(end: Callable[[Window], None]) -> None:
    window = Window(None)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        await window.settled()
        window.settle()
        tasks.create_task(window.settled())
        await asyncio.sleep(0)
        end(window)
        await window.settled()


async def test_a_client_that_was_turned_away_waits_but_not_beyond_the_end() -> None:
    window = open_window()
    failed = asyncio.Event()

    async def refuse(request: BenchRequest, due_at: float) -> float:
        failed.set()
        return 3600.0

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(run_closed_loop(refuse, numbered(100), window, 1))
        await failed.wait()
        window.close()


async def test_an_open_loop_keeps_sending_without_answers() -> None:
    server = Server(when_running=50)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(run_open_loop(server.send, numbered(50), open_window(), replay_schedule(1.0)))
        await server.reached.wait()
        server.release.set()
    assert server.most_running == 50


async def test_a_request_counts_from_when_it_was_due_and_is_not_sent_before() -> None:
    server = Server()
    server.release.set()
    began = time.perf_counter()
    async with asyncio.timeout(60):
        await run_open_loop(server.send, numbered(20), open_window(), replay_schedule(0.5))
    gaps = [later - earlier for earlier, later in itertools.pairwise(server.due_at)]
    assert gaps == pytest.approx([0.002] * 19)
    assert server.due_at[0] >= began
    assert all(sent >= due for sent, due in zip(server.sent_at, server.due_at, strict=True))


async def test_an_open_loop_that_is_late_catches_up() -> None:
    server = Server()
    server.release.set()
    # All are due at once: none waits for a turn of its own.
    schedule: Callable[[BenchRequest], float] = lambda request: 0.0  # noqa: E731
    async with asyncio.timeout(60):
        await run_open_loop(server.send, numbered(30), open_window(), schedule)
    assert len(set(server.due_at)) == 1
    assert len(server.due_at) == 30


async def test_a_closed_window_ends_the_wait_for_the_next_arrival() -> None:
    window = open_window()
    server = Server()
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(run_open_loop(server.send, numbered(1), window, lambda request: 3600.0))
        await asyncio.sleep(0)
        window.close()
    assert server.due_at == []


def test_arrivals_are_those_of_a_poisson_process() -> None:
    schedule = poisson_schedule(50.0, (1,))
    request = BenchRequest(token_ids=[1], num_output_tokens=1)
    times = [schedule(request) for _ in range(20_000)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean == pytest.approx(0.02, rel=0.03)
    # Exponential gaps: the deviation is the mean.
    assert variance**0.5 == pytest.approx(mean, rel=0.03)
    again = poisson_schedule(50.0, (1,))
    assert [again(request) for _ in range(20_000)] == times
