"""A command in a terminal of its own, and a person's fingers on the keys."""

from __future__ import annotations

import asyncio
import codecs
import os
import re
import signal
import sys
from pathlib import Path
from typing import Self

from tests.e2e.up import START_TIMEOUT_S, Mark

CTRL_C = b"\x03"
# Gives the command a controlling terminal, which makes signals of keys, and copies between that and its own pipes.
_STYLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_TERMINAL = "import pty, sys; pty.spawn(sys.argv[1:])"


class Terminal:
    """Runs a command until it ends: use it with ``async with``, whose end kills what is left."""

    def __init__(self, directory: Path, *command: str) -> None:
        """It runs in ``directory``."""
        self._directory = directory
        self._command = command
        self._mark = Mark()
        self._text = ""
        self._unseen = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._process: asyncio.subprocess.Process

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            _TERMINAL,
            *self._command,
            cwd=self._directory,
            env=self._mark.environment({"TERM": "xterm"}),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        # To their ends: a pipe that is still open when the event loop closes could not be closed any more.
        self._process.stdin.close()
        await self._process.stdin.wait_closed()
        await self._process.stdout.read()
        await self._process.wait()

    @property
    def text(self) -> str:
        """All that the terminal has shown."""
        return self._text

    def processes(self) -> dict[int, str]:
        """Command lines of all that runs in it or was started there, by process id."""
        return self._mark.processes()

    async def read_line(self, start: str) -> str:
        """Wait for a line that begins so, and return it."""
        assert self._process.stdout is not None
        async with asyncio.timeout(START_TIMEOUT_S):
            while line := (await self._process.stdout.readline()).decode("utf-8", "replace"):
                self._text += line
                if line.startswith(start):
                    return line.rstrip()
        raise AssertionError(f"it ended without a line {start!r}:\n{self._text}")

    async def read_until(self, text: str) -> str:
        """Wait until ``text`` is shown, from here on, and return what was shown up to it; without colours and moves."""
        assert self._process.stdout is not None
        async with asyncio.timeout(START_TIMEOUT_S):
            while (before := _plain(self._unseen).partition(text))[1] == "":
                read = await self._process.stdout.read(1 << 16)
                assert read, f"it ended without {text!r}:\n{self._text}"
                self._text += (more := self._decoder.decode(read))
                self._unseen += more
        self._unseen = before[2]
        return before[0] + text

    def press(self, key: bytes) -> None:
        """Press a key."""
        assert self._process.stdin is not None
        self._process.stdin.write(key)

    async def wait_end(self) -> None:
        """Wait until the command has ended, and read what it still showed."""
        assert self._process.stdout is not None
        async with asyncio.timeout(START_TIMEOUT_S):
            self._text += (await self._process.stdout.read()).decode("utf-8", "replace")
            await self._process.wait()


def _plain(text: str) -> str:
    return _STYLE.sub("", text)
