"""Processes that a benchmark starts and talks with: lines of JSON, over their standard input and output.

A child ends with its standard input, and so with the process that started it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, is_dataclass
from typing import Any

#: The environment variable that names a worker's role where a module of this package runs it.
ROLE_VARIABLE = "QUARTET_BENCHMARK_ROLE"

_ANSWER_TIMEOUT_S = 90.0
_QUIT_TIMEOUT_S = 15.0
# A window of a minute with a thousand streams takes 16 MB.
_MAX_LINE_BYTES = 1 << 26


class ChildEndedError(RuntimeError):
    """A child ended where it should have answered."""


class Child:
    """A process that answers lines. ``start_child`` makes it.

    Attributes:
        pid: its process id.
    """

    def __init__(self, name: str, process: Process) -> None:
        assert process.stdin is not None and process.stdout is not None, "made with pipes"
        self.pid = process.pid
        self._name = name
        self._process, self._input, self._output = process, process.stdin, process.stdout

    def send(self, value: object) -> None:
        """Send ``value``."""
        self._input.write(f"{_encode(value)}\n".encode())

    async def read(self, timeout_s: float = _ANSWER_TIMEOUT_S) -> Any:
        """The child's next answer. Raises ``ChildEndedError``, ``TimeoutError``."""
        async with asyncio.timeout(timeout_s):
            line = await self._output.readline()
            if not line:
                code = await self._process.wait()
                raise ChildEndedError(f"{self._name} ended without an answer, with exit code {code}")
        return json.loads(line)

    async def ask(self, value: object, timeout_s: float = _ANSWER_TIMEOUT_S) -> Any:
        """Send ``value``; return the answer. Raises as ``read`` does."""
        self.send(value)
        return await self.read(timeout_s)

    async def stop(self) -> None:
        """Close its standard input, and wait until it has ended; kill it if it does not end."""
        self._input.close()
        try:
            async with asyncio.timeout(_QUIT_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


@asynccontextmanager
async def start_child(module: str, *arguments: object) -> AsyncIterator[Child]:
    """Run ``module`` as a process while the block runs. It gets ``arguments`` as JSON; ``argument`` reads one."""
    async with start_program([sys.executable, "-m", module], *arguments, name=module) as child:
        yield child


@asynccontextmanager
async def start_program(command: Sequence[str], *arguments: object, name: str) -> AsyncIterator[Child]:
    """The same of any program that talks in lines of JSON and ends with its standard input; ``name`` is for people."""
    process = await asyncio.create_subprocess_exec(
        *[*command, *map(_encode, arguments)], stdin=PIPE, stdout=PIPE, limit=_MAX_LINE_BYTES
    )
    child = Child(name, process)
    try:
        yield child
    finally:
        await child.stop()


def argument(number: int = 0) -> Any:
    """In a child: one of the arguments of ``start_child``."""
    return json.loads(sys.argv[1 + number])


async def orders() -> AsyncIterator[Any]:
    """In a child: the values that its parent sends, until standard input ends."""
    reader = asyncio.StreamReader(_MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield json.loads(line)


def answer(value: object) -> None:
    """In a child: send ``value``, which may be a dataclass, to the process that started this one."""
    print(_encode(value), flush=True)


def _encode(value: object) -> str:
    return json.dumps(asdict(value) if is_dataclass(value) and not isinstance(value, type) else value)
