"""A child process whose output is read line by line, and that never outlives us."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_GUARD = Path(__file__).with_name("guard.py")
_NUM_KEPT_LINES = 20
_READ_BYTES = 1 << 16
# What a process wrote before it ended lies in the pipe; only somebody else who holds it could keep us longer.
_REST_TIMEOUT_S = 0.5


class Child:
    """One running process, in a session of its own: the terminal's Ctrl-C does not reach it.

    Attributes:
        name: what to call it in messages.
        last_lines: the end of its output.
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process, on_line: Callable[[str], None]) -> None:
        """Made by ``start_child``."""
        self.name = name
        self.last_lines: deque[str] = deque(maxlen=_NUM_KEPT_LINES)
        self._process = process
        self._on_line = on_line
        self._ended = asyncio.create_task(self._follow(), name=f"child-{name}")

    @property
    def pid(self) -> int:
        """Its process id, which is also its process group's and its session's."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.returncode is None

    async def wait(self) -> int:
        """Its exit code, once it has ended and its output is read; negative: the number of the signal that did it."""
        return await asyncio.shield(self._ended)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to it and to whatever it started; nothing happens where it has ended."""
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def describe_end(self) -> str:
        """How it ended, and the last that it said."""
        code = self._process.returncode
        how = "is running" if code is None else f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        return "\n".join([f"{self.name} {how}", *(f"    {line}" for line in self.last_lines)])

    async def _follow(self) -> int:
        reading = asyncio.create_task(self._read())
        code = await self._process.wait()
        await asyncio.wait({reading}, timeout=_REST_TIMEOUT_S)
        reading.cancel()
        return code

    async def _read(self) -> None:
        assert self._process.stdout is not None, "made with a pipe"
        rest = b""
        while chunk := await self._process.stdout.read(_READ_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            # A line without an end is shown in pieces, so that memory stays bounded.
            if len(rest) >= _READ_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._tell(line)
        if rest:
            self._tell(rest)

    def _tell(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip()
        self.last_lines.append(text)
        self._on_line(text)


async def start_child(
    name: str, command: Sequence[str], env: Mapping[str, str], on_line: Callable[[str], None]
) -> Child:
    """Start ``command`` with exactly the environment ``env``; ``on_line`` is called for each line of its output.

    Raises:
        OSError: the Python interpreter can't be started. A missing program is an exit code, as a shell has it.
    """
    guard = [sys.executable, "-S", "-E", str(_GUARD), str(os.getpid())]
    process = await asyncio.create_subprocess_exec(
        *guard,
        *command,
        env=env,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    return Child(name, process, on_line)
