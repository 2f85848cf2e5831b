"""Findings, which every check reports, and how checks and the programs that they ask are run in bounded time."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeAlias

from services.topology.child import Child, describe_exit, start_child

# Time for a killed process to end. One that hangs in a driver can't be killed, and is left behind.
_END_TIMEOUT_S = 1.0
_MAX_LINES = 10_000

_log = logging.getLogger(__name__)


class Verdict(StrEnum):
    """How bad it is, mildest first."""

    OK = "ok"
    WARNING = "warning"  # works, but not everything or not as well
    WRONG = "wrong"  # something that was asked for can't work


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        check: what was checked, in a word or two.
        verdict: how bad it is.
        message: what was seen.
        advice: what to do; empty if there is nothing to do.
    """

    check: str
    verdict: Verdict
    message: str
    advice: str = ""


def ok(check: str, message: str) -> Finding:
    """A finding without anything to do."""
    return Finding(check, Verdict.OK, message)


def warning(check: str, message: str, advice: str) -> Finding:
    """A finding that some things do not work, or not well."""
    return Finding(check, Verdict.WARNING, message, advice)


def wrong(check: str, message: str, advice: str) -> Finding:
    """A finding that something which was asked for can't work."""
    return Finding(check, Verdict.WRONG, message, advice)


def worst(findings: Iterable[Finding]) -> Verdict:
    """The worst verdict among ``findings``."""
    order = list(Verdict)
    return max((finding.verdict for finding in findings), key=order.index, default=Verdict.OK)


Check: TypeAlias = Callable[[], Awaitable[Sequence[Finding]]]


async def check_up(checks: Mapping[str, Check], *, timeout_s: float) -> list[Finding]:
    """Run ``checks`` at the same time, and return their findings in order.

    It takes little more than ``timeout_s`` seconds: a check that hangs becomes a finding and delays no other.
    """
    findings = await asyncio.gather(*(_run(name, check, timeout_s) for name, check in checks.items()))
    return [finding for some in findings for finding in some]


@dataclass(frozen=True)
class ProgramRun:
    """How a program ended, and what it printed.

    Attributes:
        exit_code: negative: the number of the signal that ended it; ``None``: it did not end in time.
        lines: of its output and its errors, in the order in which they came; at most 10,000.
    """

    exit_code: int | None
    lines: tuple[str, ...]

    @property
    def end(self) -> str:
        """How it ended, in words."""
        return "did not end in time" if self.exit_code is None else describe_exit(self.exit_code)

    @property
    def last_words(self) -> str:
        """Its last line, to be put behind ``end``."""
        return f": {self.lines[-1]}" if self.lines else ""


class Program(Protocol):
    """A program that runs."""

    async def wait(self) -> int:
        """Its exit code, once it has ended; negative: the number of the signal that ended it."""
        ...


@asynccontextmanager
async def started(
    command: Sequence[str], variables: Mapping[str, str], on_line: Callable[[str], None]
) -> AsyncIterator[Program]:
    """Start ``command`` with these variables over the environment's; at the end kill it and all that it started.

    ``on_line`` is called for each line of its output and its errors as it comes.
    """
    child = await start_child(command[0], command, {**os.environ, **variables}, on_line)
    try:
        yield child
    finally:
        await _end(child)


Start: TypeAlias = Callable[
    [Sequence[str], Mapping[str, str], Callable[[str], None]], AbstractAsyncContextManager[Program]
]


async def run_program(
    command: Sequence[str],
    *,
    timeout_s: float,
    on_line: Callable[[str], None] | None = None,
    variables: Mapping[str, str] | None = None,
    start: Start = started,
) -> ProgramRun:
    """Run ``command`` to its end; after ``timeout_s`` seconds kill it and all that it started.

    Args:
        command: the program and its arguments.
        timeout_s: how long it may take.
        on_line: called for each line as it comes.
        variables: over those of the environment.
        start: as ``started``.
    """
    lines: list[str] = []

    def keep(line: str) -> None:
        if len(lines) < _MAX_LINES:
            lines.append(line)
        if on_line is not None:
            on_line(line)

    async with start(command, variables or {}, keep) as program:
        try:
            async with asyncio.timeout(timeout_s):
                return ProgramRun(await program.wait(), tuple(lines))
        except TimeoutError:
            return ProgramRun(None, tuple(lines))


async def _run(name: str, check: Check, timeout_s: float) -> Sequence[Finding]:
    try:
        async with asyncio.timeout(timeout_s):
            return await check()
    except TimeoutError:
        return [wrong(name, f"no answer within {timeout_s:g} s", "a system call hangs: see the kernel's log (dmesg)")]
    except Exception as error:  # noqa: BLE001 - a check ends here; the other findings must be shown
        _log.exception("the check of %s failed", name)
        return [wrong(name, f"the check itself failed: {error!r}", "report it: that is a fault of `quartet doctor`")]


async def _end(child: Child) -> None:
    child.send(signal.SIGKILL)
    await asyncio.wait({asyncio.ensure_future(child.wait())}, timeout=_END_TIMEOUT_S)
