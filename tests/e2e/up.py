"""``quartet up`` as a person runs it, and every process that it started."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from services.topology.launch import TOOLS_DIR
from tests.stopwatch import Stopwatch

QUARTET = Path(sys.executable).with_name("quartet")
CONFIGS = Path(__file__).parents[2] / "configs"

START_TIMEOUT_S = 150.0
_MARK = "QUARTET_TEST_MARK"
_PROC = Path("/proc")


@dataclass(frozen=True)
class Ran:
    """What one command ended with."""

    code: int
    out: str
    err: str


class Mark:
    """Finds the processes that were started with its environment, and all that those started."""

    def __init__(self) -> None:
        self._value = secrets.token_hex(8)

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """This process's variables without its etcd, ``variables``, and the mark."""
        without_etcd = {name: value for name, value in os.environ.items() if name != "ETCD_ENDPOINTS"}
        return {**without_etcd, **variables, _MARK: self._value}

    def processes(self) -> dict[int, str]:
        """Command lines of all that run, by process id."""
        found = {}
        for directory in _PROC.iterdir():
            if directory.name.isdecimal():
                try:
                    is_ours = f"{_MARK}={self._value}".encode() in (directory / "environ").read_bytes()
                    command = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                except OSError:  # it ended meanwhile, or is another user's
                    continue
                # One that has ended and not been waited for has no command line any more.
                if is_ours and command:
                    found[int(directory.name)] = command
        return found


class Up:
    """One ``quartet up``: use it with ``async with``, whose end kills what is left of it.

    Attributes:
        lines: what it printed to paste, from ``ready`` on.
    """

    def __init__(
        self,
        directory: Path,
        *arguments: str,
        variables: Mapping[str, str] | None = None,
        python: Path | None = None,
        quartet: Path = QUARTET,
        within: Sequence[str] = (),
    ) -> None:
        """It runs ``quartet`` in ``directory``; ``variables`` are added to the environment.

        It and its services run with ``python`` in place of this Python; see ``ForkServer.python``. ``within`` is a
        command that becomes the one that follows it, such as ``Host.command``.
        """
        self.lines: list[str] = []
        self._directory = directory
        own = [quartet] if python is None else [python, "-m", "tests.e2e.quartet_with", python]
        self._quartet = [*within, *own]
        self._arguments = arguments
        self._mark = Mark()
        self._variables = self._mark.environment({"PATH": _path_of_a_newcomer(), **(variables or {})})
        self._log: list[str] = []
        self._logged = asyncio.Event()
        self._process: asyncio.subprocess.Process
        self._reading: asyncio.Task[None]

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *self._quartet,
            "up",
            *self._arguments,
            cwd=self._directory,
            env=self._variables,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        self._reading = asyncio.create_task(self._read_log())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process.stdout is not None
        kill_at_once(self.processes())  # children end with their parent
        # To its end: a pipe that is still open when the event loop closes could not be closed any more.
        await self._process.stdout.read()
        await self._reading
        await self._process.wait()

    @property
    def log(self) -> str:
        """All that it and its processes have logged so far."""
        return "".join(self._log)

    @property
    def router_address(self) -> str:
        """Of the router, out of the line with grpcurl or ``quartet workers``."""
        return self.lines[-1].split()[-1]

    async def wait_ready(self) -> None:
        """Read up to the last line to paste."""
        assert self._process.stdout is not None
        async with asyncio.timeout(START_TIMEOUT_S):
            while not any(line.startswith("quartet workers") for line in self.lines):
                line = await self._process.stdout.readline()
                assert line, f"it ended before it was ready:\n{self.log}"
                if self.lines or line == b"ready\n":
                    self.lines.append(line.decode().rstrip("\n"))

    async def wait_logged(self, text: str) -> None:
        """Wait until ``text`` is in the log."""
        async with asyncio.timeout(START_TIMEOUT_S):
            while text not in self.log:
                self._logged.clear()
                await self._logged.wait()

    def send(self, number: signal.Signals) -> None:
        """Signal ``up`` alone, not what it started."""
        self._process.send_signal(number)

    async def exit_code(self) -> int:
        """Of ``up``, once it has ended."""
        async with asyncio.timeout(START_TIMEOUT_S):
            await self._reading
            return await self._process.wait()

    async def end(self, number: signal.Signals) -> float:
        """Signal it, wait for its end, and return what a ``Stopwatch`` made of that; all must be gone then."""
        stopwatch = Stopwatch()
        self.send(number)
        assert await self.exit_code() == 0, self.log
        took_s = stopwatch.seconds
        assert self.processes() == {}, self.log
        return took_s

    def kill(self, *names: str) -> None:
        """End these of its processes at once."""
        kill_at_once(self.find(*names))

    def find(self, *names: str) -> list[int]:
        """The ids of these of its processes."""
        found = [pid for pid, command in self.processes().items() if any(f"/{name}.yaml" in command for name in names)]
        assert len(found) == len(names)
        return found

    async def paste(self, start: str, part: str = "") -> Ran:
        """Run the lines that begin with ``start`` and hold ``part`` in a shell, after the ``export`` line if any."""
        lines = [line for line in self.lines if line.startswith("export ") or (line.startswith(start) and part in line)]
        process = await asyncio.create_subprocess_exec(
            "bash",
            "-c",
            "\n".join(lines),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"PATH": self._variables["PATH"]},
        )
        async with asyncio.timeout(120):
            out, err = await process.communicate()
        return Ran(process.returncode or 0, out.decode(), err.decode())

    def processes(self) -> dict[int, str]:
        """Command lines of all that runs of it, itself included, by process id."""
        return self._mark.processes()

    async def _read_log(self) -> None:
        assert self._process.stderr is not None
        while line := await self._process.stderr.readline():
            self._log.append(line.decode("utf-8", "replace"))
            self._logged.set()


def kill_at_once(pids: Iterable[int]) -> None:
    """SIGKILL to those that have not ended yet."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _path_of_a_newcomer() -> str:
    """The PATH of a terminal that knows nothing of Quartet, whatever this one's owner has pasted into it."""
    own = {str(QUARTET.parent), str(TOOLS_DIR)}
    return os.pathsep.join(part for part in os.environ["PATH"].split(os.pathsep) if part not in own)
