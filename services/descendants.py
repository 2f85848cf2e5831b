"""Finds what a process started, however it was started: by a mark in the environment that all of it inherits.

A process group, or a session, is left by whoever wants to: an MPI launcher's ranks are in sessions of their own.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

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
