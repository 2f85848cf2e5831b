"""The JSON that every benchmark writes: the command, the code's revision, machine and time, and the results."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from quartet.telemetry.provenance import Commit, read_commit, read_machine, read_versions, write_report

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_PACKAGES = ("grpcio", "protobuf")


@dataclass(frozen=True, kw_only=True)
class LoadAverage:
    """The system's load averages over the last minute, when the benchmark began and when it ended."""

    before: float
    after: float


class Report:
    """One benchmark's run, from its construction to ``finish``."""

    def __init__(
        self,
        name: str,
        *,
        arguments: Sequence[str] | None = None,
        packages: Sequence[str] = (),
        revision: str | None = None,
    ) -> None:
        """Start the clock.

        Args:
            name: the module, without ``benchmarks.``.
            arguments: of the command line; ``None``: this process's own.
            packages: packages whose versions matter, besides gRPC's and protobuf's.
            revision: the commit, as the caller knows it; ``None``: git says it.
        """
        self._name = name
        self._command = shlex.join(
            ["python", "-m", f"benchmarks.{name}", *(sys.argv[1:] if arguments is None else arguments)]
        )
        self._packages = (*_PACKAGES, *packages)
        self._commit = read_commit() if revision is None else Commit(revision=revision, is_dirty=False)
        self._started_at = datetime.now(UTC)
        self._began = time.monotonic()
        self._load_before = os.getloadavg()[0]

    def finish(self, results: DataclassInstance) -> dict[str, object]:
        """The whole report: the fields of ``results`` beside the fields that every report has.

        Raises:
            ValueError: ``results`` has a field with one of those names.
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

    def write(self, results: DataclassInstance, destination: str) -> None:
        """Write the whole report to the file ``destination``, or to standard output where that is ``-``."""
        write_report(self.finish(results), destination)


def make_parser(name: str, description: str) -> argparse.ArgumentParser:
    """The command line of the benchmark ``name``, with ``--json`` and ``--commit``, the report's ``revision``.

    The first line of ``description`` is shown.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description.partition("\n")[0])
    parser.add_argument(
        "--json", required=True, metavar="FILE", help="where to write the results; - is standard output"
    )
    parser.add_argument("--commit", metavar="HASH", help="what is measured, in a copy of the files without git")
    return parser
