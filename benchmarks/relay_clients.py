"""Load in processes of its own: this module starts them, tells them when to count, and ends them."""

from __future__ import annotations

import asyncio
import json
import sys
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from types import TracebackType

from benchmarks.relay_load import Command, Job, Opened, Window, encode_job, new_latencies

_ANSWER_TIMEOUT_S = 90.0
_QUIT_TIMEOUT_S = 15.0
# A window of a minute with a thousand streams takes 16 MB.
_MAX_LINE_BYTES = 1 << 26


class LoadFailedError(Exception):
    """The load is not as it should be; the message says why."""


class AbsentError(Exception):
    """The servers do not offer this way to get tokens; the message is the servers'."""


class ClientProcess:
    """One process of load."""

    def __init__(self, job: Job) -> None:
        """Start nothing before ``start``."""
        self._job = job
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._running.pid

    async def start(self) -> Opened:
        """Begin the load; returns how that went."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "benchmarks.relay_client"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_MAX_LINE_BYTES,
        )
        return Opened(**json.loads(await self._ask(encode_job(self._job))))

    async def command(self, command: Command) -> Window:
        """Tell it to begin or end counting; returns what it counted."""
        return Window.decode(await self._ask(command))

    async def stop(self) -> None:
        """End the load and the process."""
        if self._process is None:
            return
        assert self._process.stdin is not None, "made with a pipe"
        self._process.stdin.close()  # the process ends with its input
        try:
            async with asyncio.timeout(_QUIT_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    @property
    def _running(self) -> asyncio.subprocess.Process:
        assert self._process is not None, "started"
        return self._process

    async def _ask(self, line: str) -> bytes:
        process = self._running
        assert process.stdin is not None and process.stdout is not None, "made with pipes"
        process.stdin.write(f"{line}\n".encode())
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            answer = await process.stdout.readline()
        if not answer:
            raise LoadFailedError(f"a load client ended with exit code {await process.wait()}")
        return answer


class Clients:
    """The processes of one load, started on entry and ended on exit."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        """Make one process a job."""
        self._processes = [ClientProcess(job) for job in jobs]
        self.opened_s = 0.0

    @property
    def pids(self) -> Mapping[str, int]:
        """Process ids by name: ``client-0``, ``client-1``, ..."""
        return {f"client-{number}": process.pid for number, process in enumerate(self._processes)}

    async def __aenter__(self) -> Clients:
        """Start them all; ``opened_s`` says how long that took.

        Raises:
            AbsentError, LoadFailedError: the load can't be opened.
        """
        try:
            opened = await asyncio.gather(*(process.start() for process in self._processes))
            self.opened_s = _check(opened)
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End them all."""
        await self._stop()

    async def begin(self) -> None:
        """Count from now on."""
        await self._command(Command.BEGIN)

    async def pause(self) -> None:
        """Send no more requests, until ``resume``; endless streams go on."""
        await self._command(Command.PAUSE)

    async def resume(self) -> None:
        """Send requests again."""
        await self._command(Command.RESUME)

    async def end(self) -> Window:
        """What all of them together counted. Raises ``LoadFailedError`` if requests failed."""
        windows = await self._command(Command.END)
        latencies_us: array[int] = new_latencies()
        for window in windows:
            latencies_us.extend(window.latencies_us)
        if errors := _add([window.errors for window in windows]):
            raise LoadFailedError(f"requests failed: {errors}")
        return Window(
            duration_s=max(window.duration_s for window in windows),
            num_tokens=sum(window.num_tokens for window in windows),
            num_messages=sum(window.num_messages for window in windows),
            num_requests=sum(window.num_requests for window in windows),
            cpu_s=sum(window.cpu_s for window in windows),
            errors={},
            latencies_us=latencies_us,
        )

    async def _command(self, command: Command) -> list[Window]:
        return await asyncio.gather(*(process.command(command) for process in self._processes))

    async def _stop(self) -> None:
        await asyncio.gather(*(process.stop() for process in self._processes))


def _check(opened: Sequence[Opened]) -> float:
    """Seconds until everything was open."""
    for item in opened:
        if item.absent is not None:
            raise AbsentError(item.absent)
    if errors := _add([item.errors for item in opened]):
        raise LoadFailedError(f"the load could not be opened: {errors}")
    return max(item.duration_s for item in opened)


def _add(errors: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return dict(sum((Counter(item) for item in errors), Counter()))
