"""Child processes that never outlive their parent, with their output line by line.

A child and everything that it starts inherit a mark in their environment. By the mark they are found and killed even in
other process groups or sessions: an MPI launcher starts its ranks in sessions of their own.
"""

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
from dataclasses import dataclass
from pathlib import Path

_GUARD = Path(__file__).with_name("guard.py")

_NUM_KEPT_LINES = 20

_MAX_LINE_BYTES = 1 << 16

# An ended process's last output is in the pipe already. The pipe stays open longer only if another process holds it.
_REST_TIMEOUT_S = 0.5

#: The variable that carries the mark.
MARK_VARIABLE = "QUARTET_PROCESS"

_PROC = Path("/proc")

# A process that starts another one during a scan is killed, and the new one is found by the next scan.
_NUM_SCANS = 5


@dataclass(frozen=True, kw_only=True)
class ChildLimits:
    """What a child and all that it starts may take, on Linux.

    Attributes:
        cpus: the numbers of the CPUs that they run on; empty: any.
        memory_bytes: private memory that each of their processes may allocate; ``None``: any.
    """

    cpus: tuple[int, ...] = ()
    memory_bytes: int | None = None


#: Any CPU, any amount of memory.
NO_LIMITS = ChildLimits()


async def start_child(
    name: str,
    command: Sequence[str],
    env: Mapping[str, str],
    on_line: Callable[[str], None],
    limits: ChildLimits = NO_LIMITS,
) -> Child:
    """Start ``command`` with the environment ``env`` and a mark; ``on_line`` is called for each line of its output.

    Raises:
        OSError: the Python interpreter can't be started. A missing program gives an exit code, as in a shell.
    """
    cpus = ",".join(map(str, limits.cpus)) or "-"
    memory = "-" if limits.memory_bytes is None else str(limits.memory_bytes)
    guard = [sys.executable, "-S", "-E", str(_GUARD), str(os.getpid()), cpus, memory]
    mark = secrets.token_hex(16)
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
    return Child(name, transport, output, mark, limits)


class Child:
    """One running process, in a session of its own: the terminal's Ctrl-C does not reach it.

    Attributes:
        name: what to call it in messages.
        last_lines: the end of its output.
    """

    def __init__(
        self,
        name: str,
        transport: asyncio.SubprocessTransport,
        output: _Output,
        mark: str,
        limits: ChildLimits = NO_LIMITS,
    ) -> None:
        """Made by ``start_child``."""
        self.name = name
        self.last_lines = output.last_lines
        self._transport = transport
        self._output = output
        self._mark = mark
        self._limits = limits
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
        """Its exit code, once it has ended and its output is read; negative: the number of the signal that ended it."""
        return await asyncio.shield(self._ended)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to it and its process group; nothing happens after it has ended."""
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def kill_rest(self) -> None:
        """After its end, SIGKILL the processes that it started: they may hold a GPU's memory or a port.

        That is its process group, and on Linux also all its descendants in other sessions.
        """
        if not self.is_running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                # Once its group has ended too, its id is free, and may be another process's already.
                if not is_alive(self.pid):
                    os.killpg(self.pid, signal.SIGKILL)
            _kill_marked(self._mark)

    def describe_end(self) -> str:
        """How it ended, and its last output."""
        code = self._transport.get_returncode()
        how = "is running" if code is None else describe_exit(code)
        if code and self._limits.memory_bytes is not None:
            # Native libraries that get no memory end the process without a word.
            how = f"{how}; its memory was limited to {self._limits.memory_bytes / 1e9:g} GB a process"
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


def describe_exit(code: int) -> str:
    """In words, how a process with this exit code ended; negative: the number of the signal that ended it."""
    return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"


class _Output(asyncio.SubprocessProtocol):
    """Splits a process's output into lines.

    Unlike asyncio's ``Process.wait`` it does not wait for other holders of the pipe, such as the process's children.
    """

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self.last_lines: deque[str] = deque(maxlen=_NUM_KEPT_LINES)
        self.exited, self.closed = asyncio.Event(), asyncio.Event()
        self._on_line = on_line
        self._rest = b""

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        # A very long line is shown in pieces, so that memory stays bounded.
        if len(self._rest) >= _MAX_LINE_BYTES:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._show(line)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self.closed.set()

    def process_exited(self) -> None:
        self.exited.set()

    def end(self) -> None:
        """Show a last line without a newline."""
        if self._rest:
            self._show(self._rest)
        self._rest = b""

    def _show(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip()
        self.last_lines.append(text)
        self._on_line(text)


def is_alive(pid: int) -> bool:
    """Whether a process has this id, of any user."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _kill_marked(mark: str) -> None:
    """SIGKILL every process of this user that was started with ``mark``. Linux only.

    No other process gets the signal, even if it was given the id of a marked process meanwhile.
    """
    killed: set[int] = set()
    for _ in range(_NUM_SCANS):
        found = {pid for pid in _marked(mark) if _kill(pid, mark)}
        if found <= killed:
            break
        killed |= found


def _marked(mark: str) -> Iterator[int]:
    # OSError: this system has no /proc.
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
        return False  # it has ended, or may not be read
    return f"{MARK_VARIABLE}={mark}".encode() in variables


def _kill(pid: int, mark: str) -> bool:
    """Whether the signal was sent. The descriptor makes sure that the process checked is the process killed."""
    with contextlib.suppress(OSError):
        descriptor = os.pidfd_open(pid)
        try:
            if _has_mark(pid, mark):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                return True
        finally:
            os.close(descriptor)
    return False
