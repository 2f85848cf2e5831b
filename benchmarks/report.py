"""The JSON that every benchmark writes: what was run, of which code, where, when, and what came out."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_REPOSITORY = Path(__file__).resolve().parent.parent
_PACKAGES = ("grpcio", "protobuf")
_STDOUT = "-"


@dataclass(frozen=True, kw_only=True)
class Commit:
    """The code that was measured.

    Attributes:
        revision: the commit's hash; ``None`` outside a git checkout.
        is_dirty: tracked files differed from it, or nobody could tell.
    """

    revision: str | None
    is_dirty: bool


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What it ran on; nothing here says whose it is."""

    cpu_model: str
    num_cores: int
    memory_bytes: int
    system: str


@dataclass(frozen=True, kw_only=True)
class LoadAverage:
    """The system's load averages over the last minute, when the benchmark began and when it ended."""

    before: float
    after: float


class Report:
    """One benchmark's run, from its construction to ``finish``."""

    def __init__(self, name: str, *, arguments: Sequence[str] | None = None, packages: Sequence[str] = ()) -> None:
        """Begin the clock.

        Args:
            name: the module, without ``benchmarks.``.
            arguments: of its command line; ``None``: this process's own.
            packages: whose versions matter beside gRPC's and protobuf's.
        """
        self._name = name
        self._command = shlex.join(
            ["python", "-m", f"benchmarks.{name}", *(sys.argv[1:] if arguments is None else arguments)]
        )
        self._packages = (*_PACKAGES, *packages)
        self._commit = read_commit()
        self._started_at = datetime.now(UTC)
        self._began = time.monotonic()
        self._load_before = os.getloadavg()[0]

    def finish(self, results: DataclassInstance) -> dict[str, object]:
        """The whole report; the fields of ``results`` stand beside those that every report has.

        Raises:
            ValueError: ``results`` has a field of one of their names.
        """
        about: dict[str, object] = {
            "benchmark": self._name,
            "command": self._command,
            "started_at": self._started_at.isoformat(timespec="seconds"),
            "duration_s": round(time.monotonic() - self._began, 3),
            "commit": asdict(self._commit),
            "versions": read_versions(self._packages),
            "machine": asdict(read_machine()),
            "load_average": asdict(LoadAverage(before=self._load_before, after=os.getloadavg()[0])),
        }
        values = asdict(results)
        if taken := sorted(about.keys() & values.keys()):
            raise ValueError(f"results must not name {', '.join(taken)}")
        return about | values


def add_report_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``, which every benchmark has."""
    parser.add_argument(
        "--json", required=True, metavar="FILE", help="where to write the results; - is standard output"
    )


def write_report(report: Mapping[str, object], destination: str) -> None:
    """Write ``report`` as JSON to the file ``destination``, or to standard output where that is ``-``."""
    text = json.dumps(_rounded(report), indent=2) + "\n"
    if destination == _STDOUT:
        sys.stdout.write(text)
    else:
        Path(destination).parent.mkdir(parents=True, exist_ok=True)
        Path(destination).write_text(text, encoding="utf-8")


def read_commit() -> Commit:
    """What this checkout holds. Files that git does not track don't count."""
    revision = _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return Commit(revision=revision, is_dirty=revision is None or bool(changes))


def read_versions(packages: Sequence[str]) -> dict[str, str]:
    """The interpreter's version, and those of installed ``packages``."""
    return {"python": platform.python_version()} | {name: metadata.version(name) for name in packages}


def read_machine() -> Machine:
    """The machine that this runs on."""
    return Machine(
        cpu_model=_cpu_model(),
        num_cores=os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=f"{platform.system()} {platform.machine()}",
    )


def _git(*arguments: str) -> str | None:
    """What git says, or ``None`` where it can't: no git, or no checkout."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=_REPOSITORY, capture_output=True, text=True, timeout=10, check=True
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
