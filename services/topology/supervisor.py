"""Keeps the processes of a topology running: a process that ends by itself is started again, or ends them all."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

from quartet.errors import ConfigError, ServingError
from services.topology.child import Child
from services.topology.launch import LaunchError, LaunchObserver
from services.topology.pacing import Time
from services.workers.config import EXIT_REPLACED

logger = logging.getLogger(__name__)

_ASK_AGAIN_S = 1.0


class SupervisorObserver(LaunchObserver, Protocol):
    """Also shows which process ended."""

    def died(self, child: Child) -> None:
        """A process ended by itself; it is started again, unless another one has its worker id."""
        ...


class Restartable(Protocol):
    """Started processes; ``LocalTopology`` is one."""

    @property
    def children(self) -> Sequence[Child]:
        """The newest process of each name."""
        ...

    async def restart(self, name: str) -> Child:
        """Start the ended process of that name again."""
        ...


@dataclass(frozen=True, kw_only=True)
class RestartConfig:
    """How long to wait before a restart, and how often to try.

    Attributes:
        first_delay_s: wait before the first restart; it doubles with each further restart.
        max_delay_s: longest wait.
        reset_after_s: after serving for so long, a process begins with ``first_delay_s`` again.
        max_restarts: restarts within ``window_s``; after one more end the process is given up.
    """

    first_delay_s: float = 1.0
    max_delay_s: float = 30.0
    reset_after_s: float = 60.0
    max_restarts: int = 10
    window_s: float = 600.0

    def __post_init__(self) -> None:
        """Refuse impossible values, naming the field."""
        for name in ("first_delay_s", "max_delay_s", "reset_after_s", "window_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: must be above 0")
        if self.max_restarts < 0:
            raise ConfigError("max_restarts: must not be negative")


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
        """``wait_serving`` returns once the process of that name serves; ``restarts`` ``None``: never restart."""
        self._processes = processes
        self._observer = observer
        self._wait_serving = wait_serving
        self._restarts = restarts
        self._clock = clock or Time()

    async def run(self) -> NoReturn:
        """Keep all running until cancelled; processes go on after that.

        Raises:
            LaunchError: a process ended and is not started again; the message says which, why, and its last output.
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

    async def _keep(self, child: Child) -> None:
        """Return only if another process has its worker id; raise once it is given up."""
        if self._restarts is None:
            await self._served_until_end(child, is_again=False)
            raise LaunchError(child.describe_end())
        backoff, is_again = Backoff(self._restarts), False
        while True:
            served_s = await self._served_until_end(child, is_again=is_again)
            if await child.wait() == EXIT_REPLACED:
                # To start it again would take the id back, from a process that may be started again as well.
                self._observer.died(child)
                self._observer.progress(f"{child.name} is not started again: another process has its worker id")
                return
            delay_s = backoff.next_delay_s(self._clock.now_s(), served_s)
            if delay_s is None:
                restarts = self._restarts
                often = f"{restarts.max_restarts} restarts within {restarts.window_s:g} s"
                raise LaunchError(f"given up after {often}: {child.describe_end()}")
            self._observer.died(child)
            self._observer.progress(f"starting {child.name} again in {delay_s:g} s")
            await self._clock.sleep(delay_s)
            child, is_again = await self._processes.restart(child.name), True

    async def _served_until_end(self, child: Child, *, is_again: bool) -> float:
        """Wait for its end; returns the seconds that it served."""
        serving = asyncio.create_task(self._serving_since(child.name, is_again=is_again), name=f"serving-{child.name}")
        try:
            await child.wait()
            return self._clock.now_s() - serving.result() if serving.done() else 0.0
        finally:
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving

    async def _serving_since(self, name: str, *, is_again: bool) -> float:
        while True:
            try:
                await self._wait_serving(name)
                break
            except ServingError as error:
                # The router that was asked may have died at that moment, and is started again too.
                logger.debug("whether %s serves is not known: %s", name, error)
                await self._clock.sleep(_ASK_AGAIN_S)
        if is_again:
            self._observer.progress(f"{name} serves again")
        return self._clock.now_s()


class Backoff:
    """The restarts of one process. Pure: the caller gives the time."""

    def __init__(self, config: RestartConfig) -> None:
        self._config = config
        self._num_in_row = 0
        self._restarted_at_s: deque[float] = deque()

    def next_delay_s(self, now_s: float, served_s: float) -> float | None:
        """How long to wait before the next restart; ``None``: give up.

        Args:
            now_s: when it ended.
            served_s: how long it had served by then.
        """
        config, restarts = self._config, self._restarted_at_s
        while restarts and restarts[0] <= now_s - config.window_s:
            restarts.popleft()
        if len(restarts) >= config.max_restarts:
            return None
        if served_s >= config.reset_after_s:
            self._num_in_row = 0
        # Bounded: two to the power of many restarts overflows a float.
        doublings = min(self._num_in_row, 32)
        self._num_in_row += 1
        restarts.append(now_s)
        return min(config.first_delay_s * 2.0**doublings, config.max_delay_s)
