"""Processes that end are started again, later each time, and given up at last: with real processes and no real time."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Sequence

import pytest

from quartet.errors import ConfigError, RouterUnavailableError
from services.topology.child import Child, start_child
from services.topology.launch import LaunchError
from services.topology.pacing import Time
from services.topology.supervisor import Backoff, RestartConfig, Supervisor

TIMEOUT_S = 90.0
SLEEPER = "import signal; print('up', flush=True); signal.pause()"
FAILING = "raise SystemExit('no luck')"


class Processes:
    """Python programs by name; each can be started again."""

    def __init__(self, programs: dict[str, str]) -> None:
        self._programs = programs
        self._children: dict[str, Child] = {}
        self._all: list[Child] = []
        self.was_restarted = asyncio.Event()

    @property
    def children(self) -> Sequence[Child]:
        return tuple(self._children.values())

    async def start(self) -> None:
        for name in self._programs:
            await self._start(name)

    async def restart(self, name: str) -> Child:
        child = await self._start(name)
        self.was_restarted.set()
        return child

    async def end(self) -> None:
        for child in self._all:
            child.send(signal.SIGKILL)
            await child.wait()

    def child(self, name: str) -> Child:
        return self._children[name]

    async def _start(self, name: str) -> Child:
        command = [sys.executable, "-S", "-E", "-u", "-c", self._programs[name]]
        child = await start_child(name, command, {}, lambda _line: None)
        self._children[name] = child
        self._all.append(child)
        return child


class Observer:
    """Keeps what it is shown."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.waiting: dict[str, asyncio.Event] = {}

    def log_line(self, process: str, line: str) -> None: ...

    def progress(self, message: str) -> None:
        self.shown.append(message)
        self.waiting.setdefault(message, asyncio.Event()).set()

    def died(self, child: Child) -> None:
        self.shown.append(child.describe_end().splitlines()[0])

    async def wait_shown(self, message: str) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await self.waiting.setdefault(message, asyncio.Event()).wait()


class FakeTime:
    """Stands still but for sleeps, which are over at once; with ``gate``, once that is open."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept: list[float] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def sleep(self, delay_s: float) -> None:
        self.slept.append(delay_s)
        await self.gate.wait()
        self.now_s += delay_s


class Scene:
    """A supervisor, with all that it watches and reports to."""

    def __init__(self, programs: dict[str, str]) -> None:
        self.processes = Processes(programs)
        self.observer = Observer()
        self.time = FakeTime()
        self.serving: dict[str, asyncio.Event] = {name: asyncio.Event() for name in programs}
        self._running: list[asyncio.Task[None]] = []

    async def wait_serving(self, name: str) -> None:
        await self.serving[name].wait()

    def run(self, restarts: RestartConfig | None) -> asyncio.Task[None]:
        clock = Time(now_s=lambda: self.time.now_s, sleep=self.time.sleep)
        supervisor = Supervisor(self.processes, self.observer, self.wait_serving, restarts=restarts, clock=clock)
        self._running.append(asyncio.create_task(supervisor.run()))
        return self._running[-1]

    async def end(self) -> None:
        """End the supervisor first: where a test failed, it would start again what is ended here."""
        for running in self._running:
            running.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self.processes.end()


@pytest.fixture
async def scenes() -> AsyncIterator[list[Scene]]:
    """Scenes that a test adds end with it."""
    made: list[Scene] = []
    yield made
    for scene in made:
        await scene.end()


async def started(scenes: list[Scene], **programs: str) -> Scene:
    scene = Scene(programs)
    scenes.append(scene)
    await scene.processes.start()
    return scene


async def test_a_worker_whose_id_another_process_has_stays_down_and_the_others_go_on(scenes: list[Scene]) -> None:
    scene = await started(scenes, replaced="raise SystemExit(3)", other=SLEEPER)
    running = scene.run(RestartConfig())
    await scene.observer.wait_shown("replaced is not started again: another process has its worker id")
    assert scene.observer.shown[0] == "replaced ended with exit code 3", "observers hear of its end, as of any other"
    assert not scene.processes.was_restarted.is_set()
    assert scene.processes.child("other").is_running and not running.done()
    running.cancel()
    await asyncio.wait([running])


async def failure_of(running: asyncio.Task[None]) -> str:
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(LaunchError) as error:
            await running
    return str(error.value)


async def test_a_failing_process_is_restarted_ever_later_and_then_given_up_with_its_last_log_lines(
    scenes: list[Scene],
) -> None:
    scene = await started(scenes, bad=FAILING, good=SLEEPER)
    message = await failure_of(scene.run(RestartConfig(max_restarts=3)))
    assert message == "given up after 3 restarts within 600 s: bad ended with exit code 1\n    no luck"
    assert scene.time.slept == [1, 2, 4]
    each = ["bad ended with exit code 1", "starting bad again in {} s"]
    assert scene.observer.shown == [line.format(delay) for delay in (1, 2, 4) for line in each]
    assert scene.processes.child("good").is_running, "the caller stops the rest, not the supervisor"


async def test_a_process_that_served_for_long_begins_with_the_first_delay_and_its_return_is_shown(
    scenes: list[Scene],
) -> None:
    scene = await started(scenes, one=SLEEPER)
    running = scene.run(RestartConfig())
    scene.serving["one"].set()
    for served_s in (0.0, 10.0, 60.0, 5.0):
        scene.time.now_s += served_s
        scene.processes.was_restarted.clear()
        scene.observer.waiting.clear()
        scene.processes.child("one").send(signal.SIGKILL)
        await scene.observer.wait_shown("one serves again")
    assert scene.time.slept == [1, 2, 1, 2]
    assert not running.done()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_time_spent_loading_is_not_service(scenes: list[Scene]) -> None:
    scene = await started(scenes, one=SLEEPER)
    running = scene.run(RestartConfig())
    for _ in range(2):
        scene.time.now_s += 100.0
        scene.processes.was_restarted.clear()
        scene.processes.child("one").send(signal.SIGKILL)
        async with asyncio.timeout(TIMEOUT_S):
            await scene.processes.was_restarted.wait()
    assert scene.time.slept == [1, 2]
    running.cancel()


async def test_without_restarts_the_first_that_ends_is_named_with_its_last_words(scenes: list[Scene]) -> None:
    scene = await started(scenes, good=SLEEPER, bad=FAILING)
    assert await failure_of(scene.run(None)) == "bad ended with exit code 1\n    no luck"
    assert scene.time.slept == []


async def test_it_can_be_stopped_while_one_waits_to_be_started_again(scenes: list[Scene]) -> None:
    scene = await started(scenes, bad=FAILING, good=SLEEPER)
    scene.time.gate.clear()
    running = scene.run(RestartConfig())
    await scene.observer.wait_shown("starting bad again in 1 s")
    running.cancel()
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(asyncio.CancelledError):
            await running
    assert not scene.processes.was_restarted.is_set()


def delays(backoff: Backoff, *ends: tuple[float, float]) -> list[float | None]:
    """For ends at so many seconds, after so many seconds of service."""
    return [backoff.next_delay_s(now_s, served_s) for now_s, served_s in ends]


def test_delays_double_up_to_the_longest() -> None:
    backoff = Backoff(RestartConfig())
    assert delays(backoff, *((float(end), 0.0) for end in range(7))) == [1, 2, 4, 8, 16, 30, 30]


def test_a_process_that_served_for_a_minute_begins_with_the_first_delay_again() -> None:
    backoff = Backoff(RestartConfig())
    assert delays(backoff, (0, 0), (5, 1), (70, 59.9), (200, 60), (210, 0)) == [1, 2, 4, 1, 2]


def test_too_many_restarts_in_the_window_are_given_up_however_well_it_served() -> None:
    backoff = Backoff(RestartConfig(max_restarts=2, window_s=100))
    assert delays(backoff, (0, 0), (50, 60), (99.9, 60), (100.1, 0), (120, 0)) == [1, 1, None, 2, None]


def test_none_at_all_may_be_allowed() -> None:
    assert Backoff(RestartConfig(max_restarts=0)).next_delay_s(0.0, 1000.0) is None


def test_many_restarts_stay_at_the_longest_delay() -> None:
    backoff = Backoff(RestartConfig(max_restarts=10_000))
    assert delays(backoff, *((0.0, 0.0) for _ in range(3000)))[-1] == 30


@pytest.mark.parametrize("name", ["first_delay_s", "max_delay_s", "reset_after_s", "window_s"])
def test_times_are_above_zero(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}: must be above 0"):
        RestartConfig(**{name: 0.0})
    with pytest.raises(ConfigError, match="max_restarts: must not be negative"):
        RestartConfig(max_restarts=-1)


async def test_a_router_that_fails_while_it_is_asked_ends_nothing(scenes: list[Scene]) -> None:
    scene = Scene({"worker": SLEEPER})
    scenes.append(scene)
    await scene.processes.start()
    num_asked, is_serving = 0, asyncio.Event()

    async def wait_serving(_name: str) -> None:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 1:
            raise RouterUnavailableError("lost the router")
        is_serving.set()

    scene.wait_serving = wait_serving  # type: ignore[method-assign]
    running = scene.run(RestartConfig())
    async with asyncio.timeout(TIMEOUT_S):
        await is_serving.wait()
        scene.processes.child("worker").send(signal.SIGKILL)
        await scene.processes.was_restarted.wait()
    assert not running.done()
    running.cancel()
