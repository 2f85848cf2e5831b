"""Runs a program for what it prints, in bounded time, whatever it does."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.topology.child import Child, start_child

# What a killed process takes to end. One that waits in a driver can't be killed, and is left behind.
_END_TIMEOUT_S = 1.0
_MAX_LINES = 10_000


@dataclass(frozen=True)
class ProgramRun:
    """How a program ended.

    Attributes:
        exit_code: negative: the number of the signal that ended it; ``None``: it did not end in time.
        lines: of its output and its errors, as they came.
    """

    exit_code: int | None
    lines: tuple[str, ...]

    @property
    def end(self) -> str:
        """How it ended, in words."""
        if self.exit_code is None:
            return "did not end in time"
        if self.exit_code < 0:
            return f"was killed by {signal.Signals(-self.exit_code).name}"
        return f"ended with exit code {self.exit_code}"


async def run_program(
    command: Sequence[str], *, timeout_s: float, on_line: Callable[[str], None] | None = None
) -> ProgramRun:
    """Run ``command`` in this environment, and kill it and what it started after ``timeout_s`` seconds.

    ``on_line`` is called for each line as it comes.
    """
    lines: list[str] = []

    def keep(line: str) -> None:
        if len(lines) < _MAX_LINES:
            lines.append(line)
        if on_line is not None:
            on_line(line)

    child = await start_child(command[0], command, os.environ, keep)
    try:
        async with asyncio.timeout(timeout_s):
            return ProgramRun(await child.wait(), tuple(lines))
    except TimeoutError:
        return ProgramRun(None, tuple(lines))
    finally:
        await _end(child)


async def _end(child: Child) -> None:
    if not child.is_running:
        return
    child.send(signal.SIGKILL)
    await asyncio.wait({asyncio.ensure_future(child.wait())}, timeout=_END_TIMEOUT_S)
