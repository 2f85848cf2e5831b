"""What was measured where: the commit, the versions and the machine that a report of figures names, and its JSON."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

_PROJECT = Path(__file__).resolve().parents[2]
# What a benchmark writes, and the page that is made of it, is no code.
_CODE = (".", ":(exclude)benchmarks/results", ":(exclude)docs")
_STDOUT = "-"


@dataclass(frozen=True, kw_only=True)
class Commit:
    """The code that was measured.

    Attributes:
        revision: the commit's hash; ``None`` outside a git checkout of this project.
        is_dirty: tracked files other than results and docs differed from it, or git could not say.
    """

    revision: str | None
    is_dirty: bool


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine that it ran on, without anything that identifies its owner.

    Attributes:
        num_usable_cores: how many of its cores this process and those that it starts may run on.
    """

    cpu_model: str
    num_cores: int
    num_usable_cores: int
    memory_bytes: int
    system: str


def write_report(report: Mapping[str, object], destination: str) -> None:
    """Write ``report`` as JSON to the file ``destination``, or to standard output where that is ``-``."""
    text = json.dumps(_rounded(report), indent=2) + "\n"
    if destination == _STDOUT:
        sys.stdout.write(text)
    else:
        Path(destination).parent.mkdir(parents=True, exist_ok=True)
        Path(destination).write_text(text, encoding="utf-8")


def read_commit(project: Path = _PROJECT) -> Commit:
    """What the checkout at ``project`` holds. Files that git does not track don't count."""
    top = _git(project, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != project.resolve():
        # Installed somewhere below a repository of other things: its commit says nothing of this code.
        return Commit(revision=None, is_dirty=True)
    revision = _git(project, "rev-parse", "HEAD")
    changes = _git(project, "status", "--porcelain", "--untracked-files=no", "--", *_CODE)
    return Commit(revision=revision, is_dirty=revision is None or changes != "")


def read_versions(packages: Sequence[str]) -> dict[str, str]:
    """The interpreter's version, and those of installed ``packages``."""
    return {"python": platform.python_version()} | {name: metadata.version(name) for name in packages}


def count_usable_cores() -> int:
    """How many cores this process may run on; where the system can't say, how many there are."""
    return len(usable_cpus()) or os.cpu_count() or 1


def usable_cpus() -> tuple[int, ...]:
    """The numbers of the CPUs that this process may run on; empty where the system can't say."""
    return tuple(sorted(os.sched_getaffinity(0))) if sys.platform == "linux" else ()


def read_machine() -> Machine:
    """The machine that this runs on."""
    return Machine(
        cpu_model=_cpu_model(),
        num_cores=os.cpu_count() or 1,
        num_usable_cores=count_usable_cores(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=f"{platform.system()} {platform.machine()}",
    )


def _git(directory: Path, *arguments: str) -> str | None:
    """What git says in ``directory``, or ``None`` where it can't: no git, or no checkout."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=directory, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _rounded(value: object) -> object:
    """Without digits that mean nothing."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
