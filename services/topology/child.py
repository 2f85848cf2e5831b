"""A child process whose output is read line by line, and that never outlives us."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

_GUARD = Path(__file__).with_name("guard.py")

_NUM_KEPT_LINES = 20

_MAX_LINE_BYTES = 1 << 16

# What a process wrote before it ended lies in the pipe; only somebody else who holds it could keep us longer.
_REST_TIMEOUT_S = 0.5


class Child:
    """One running process, in a session of its own: the terminal's Ctrl-C does not reach it.

    Attributes:
        name: what to call it in messages.
        last_lines: the end of its output.
    """

    def __init__(self, name: str, transport: asyncio.SubprocessTransport, output: _Output, mark: str) -> None:
        """Made by ``start_child``."""
        self.name = name
        self.last_lines = output.last_lines
        self._transport = transport
        self._output = output
        self._mark = mark
        self._ended = asyncio.create_task(self._follow(), name=f"child-{name}")

    @property
    def pid(self) -> int:
        """Its process id, which is also its process group's and its session's."""
        return self._transport.get_pid()

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return self._transport.get_returncode() is None

    async def wait(self) -> int:
        """Its exit code, once it has ended and its output is read; negative: the number of the signal that did it."""
        return await asyncio.shield(self._ended)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to it and to whatever it started; nothing happens where it has ended."""
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def kill_rest(self) -> None:
        """SIGKILL what it started and did not end before it: such a one may hold a GPU's memory, or a port.

        Of its process group, and on Linux all that came of it, in sessions of their own, too.
        """
        if not self.is_running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                # Its id is free once its group is, too: then it may be somebody else's.
                if not _exists(self.pid):
                    os.killpg(self.pid, signal.SIGKILL)
            kill_marked(self._mark)

    def describe_end(self) -> str:
        """How it ended, and the last that it said."""
        code = self._transport.get_returncode()
        how = "is running" if code is None else f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        return "\n".join([f"{self.name} {how}", *(f"    {line}" for line in self.last_lines)])

    async def _follow(self) -> int:
        await self._output.exited.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REST_TIMEOUT_S):
                await self._output.closed.wait()
        self._output.end()
        self._transport.close()
        code = self._transport.get_returncode()
        assert code is not None, "it has exited"
        return code


class _Output(asyncio.SubprocessProtocol):
    """Makes lines of what a process says.

    asyncio's own ``Process.wait`` would also wait for whoever else holds the pipe, such as what the process started.
    """

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self.last_lines: deque[str] = deque(maxlen=_NUM_KEPT_LINES)
        self.exited, self.closed = asyncio.Event(), asyncio.Event()
        self._on_line = on_line
        self._rest = b""

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        # A line without an end is shown in pieces, so that memory stays bounded.
        if len(self._rest) >= _MAX_LINE_BYTES:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._tell(line)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self.closed.set()

    def process_exited(self) -> None:
        self.exited.set()

    def end(self) -> None:
        """Tell a last line that has no end."""
        if self._rest:
            self._tell(self._rest)
        self._rest = b""

    def _tell(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip()
        self.last_lines.append(text)
        self._on_line(text)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def start_child(
    name: str, command: Sequence[str], env: Mapping[str, str], on_line: Callable[[str], None]
) -> Child:
    """Start ``command`` with the environment ``env`` and a mark; ``on_line`` is called for each line of its output.

    Raises:
        OSError: the Python interpreter can't be started. A missing program is an exit code, as a shell has it.
    """
    guard = [sys.executable, "-S", "-E", str(_GUARD), str(os.getpid())]
    mark = new_mark()
    loop = asyncio.get_running_loop()
    transport, output = await loop.subprocess_exec(
        lambda: _Output(on_line),
        *guard,
        *command,
        env={**env, MARK_VARIABLE: mark},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    return Child(name, transport, output, mark)


# Finds what a process started, however it was started: by a mark in the environment that all of it inherits.
#
# A process group, or a session, is left by whoever wants to: an MPI launcher's ranks are in sessions of their own.

#: The variable that carries the mark.
MARK_VARIABLE = "QUARTET_PROCESS"

_PROC = Path("/proc")

# One that is killed cannot start others, but who starts one while we look is seen only the next time.
_NUM_LOOKS = 5


def new_mark() -> str:
    """One that nobody else has."""
    return secrets.token_hex(16)


def kill_marked(mark: str) -> int:
    """SIGKILL every process of this user that was started with ``mark``; how many were sent it. Linux only.

    Nothing else is touched: a process that is gone by then, or whose id is another's, is left alone.
    """
    killed: set[int] = set()
    for _ in range(_NUM_LOOKS):
        found = {pid for pid in _marked(mark) if _kill(pid, mark)}
        if found <= killed:
            break
        killed |= found
    return len(killed)


def _marked(mark: str) -> Iterator[int]:
    # Where there is no such directory, nothing is found.
    with contextlib.suppress(OSError):
        for entry in os.scandir(_PROC):
            if entry.name.isdigit() and int(entry.name) != os.getpid() and _has_mark(int(entry.name), mark):
                yield int(entry.name)


def _has_mark(pid: int, mark: str) -> bool:
    try:
        if (_PROC / str(pid)).stat().st_uid != os.getuid():
            return False
        variables = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return False  # it has ended, or is not ours to see
    return f"{MARK_VARIABLE}={mark}".encode() in variables


def _kill(pid: int, mark: str) -> bool:
    """Whether it was sent the signal. A descriptor is held meanwhile: the process that is looked at is the one."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not _has_mark(pid, mark):
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
