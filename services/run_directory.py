"""The directory of one running topology: the files that its processes read, and its etcd's data."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from quartet.errors import ConfigError

_MARK = ".quartet-up"


def make_run_directory(parent: Path, namespace: str) -> Path:
    """Make ``PARENT/NAMESPACE-PID``, and remove those of topologies that were killed before they could.

    Raises:
        ConfigError: it can't be made.
    """
    try:
        return _make(parent, namespace)
    except OSError as error:
        raise ConfigError(f"cannot make a directory in {parent.absolute()}: {error.strerror}") from error


def _make(parent: Path, namespace: str) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    for other in parent.glob("*-*"):
        pid = other.name.rpartition("-")[2]
        # Only what is marked as ours: the folder is shared with models and whatever else.
        if pid.isdecimal() and (other / _MARK).is_file() and not _is_alive(int(pid)):
            shutil.rmtree(other, ignore_errors=True)
    directory = parent / f"{namespace}-{os.getpid()}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    (directory / _MARK).touch()
    return directory.resolve()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
