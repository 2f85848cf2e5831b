"""Keeps the processes of a topology running: whichever ends by itself is started again, or ends them all."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

from services.child import Child
from services.launch import LaunchError, LaunchObserver
from services.restarts import Backoff, RestartConfig


class SupervisorObserver(LaunchObserver, Protocol):
    """Is also told who ended."""

    def died(self, child: Child) -> None:
        """A process ended by itself; it is started again."""
        ...


class Restartable(Protocol):
    """Started processes; ``LocalTopology`` is one."""

    @property
    def children(self) -> Sequence[Child]:
        """Those that were started last, each name once."""
        ...

    async def restart(self, name: str) -> Child:
        """Start the one that ended once more."""
        ...


@dataclass(frozen=True, kw_only=True)
class Time:
    """The clock, and how to wait by it."""

    now_s: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


class Supervisor:
    """Watches processes that serve; one ``run`` each."""

    def __init__(
        self,
        processes: Restartable,
        observer: SupervisorObserver,
        wait_serving: Callable[[str], Awaitable[object]],
        *,
        restarts: RestartConfig | None,
        clock: Time | None = None,
    ) -> None:
        """``wait_serving`` returns once the process of that name serves; without ``restarts`` none is started again."""
        self._processes = processes
        self._observer = observer
        self._wait_serving = wait_serving
        self._restarts = restarts
        self._clock = clock or Time()

    async def run(self) -> NoReturn:
        """Keep all running until cancelled, which leaves them as they are.

        Raises:
            LaunchError: one ended and is not started again; the message says which, why, and the last that it said.
        """
        keeping = [
            asyncio.create_task(self._keep(child), name=f"keep-{child.name}") for child in self._processes.children
        ]
        try:
            await asyncio.gather(*keeping)
        finally:
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)
        raise LaunchError("there is nothing to keep running")

    async def _keep(self, child: Child) -> NoReturn:
        if self._restarts is None:
            await child.wait()
            raise LaunchError(child.describe_end())
        backoff, is_again = Backoff(self._restarts), False
        while True:
            served_s = await self._served_until_end(child, tell=is_again)
            delay_s = backoff.next_delay_s(self._clock.now_s(), served_s)
            if delay_s is None:
                restarts = self._restarts
                often = f"{restarts.max_restarts} restarts within {restarts.window_s:g} s"
                raise LaunchError(f"given up after {often}: {child.describe_end()}")
            self._observer.died(child)
            self._observer.progress(f"starting {child.name} again in {delay_s:g} s")
            await self._clock.sleep(delay_s)
            child, is_again = await self._processes.restart(child.name), True

    async def _served_until_end(self, child: Child, *, tell: bool) -> float:
        """Wait for its end; seconds that it had served by then."""
        serving = asyncio.create_task(self._serving_since(child.name, tell=tell), name=f"serving-{child.name}")
        try:
            await child.wait()
            return self._clock.now_s() - serving.result() if serving.done() else 0.0
        finally:
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving

    async def _serving_since(self, name: str, *, tell: bool) -> float:
        await self._wait_serving(name)
        if tell:
            self._observer.progress(f"{name} serves again")
        return self._clock.now_s()
