"""The files that ``quartet bench`` and ``quartet replay`` write beside their tables: figures as JSON, and a picture."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from cli.output import open_console, try_write
from quartet.telemetry.provenance import read_commit, read_machine, read_versions, write_report

if TYPE_CHECKING:
    from rich.console import Console

_STDOUT = "-"
_PICTURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True, kw_only=True)
class OutputFiles:
    """Names of the files; ``None``: not wanted. ``json`` may be ``-``, standard output."""

    json: str | None
    plot: Path | None

    def check(self) -> None:
        """Raise ``typer.BadParameter`` if one of them could not be written: now, not after the measuring."""
        if self.json is not None and Path(self.json).is_dir():
            raise typer.BadParameter(f"{self.json} is a directory", param_hint="--json")
        if self.plot is None:
            return
        if self.plot.suffix not in _PICTURES:
            raise typer.BadParameter(f"{self.plot} must end in one of {', '.join(_PICTURES)}", param_hint="--plot")
        if importlib.util.find_spec("matplotlib") is None:
            raise typer.BadParameter("drawing needs matplotlib: pip install 'quartet[plot]'", param_hint="--plot")

    def open_console(self, pipe_width: int) -> Console:
        """A console for the tables. Standard output is for JSON only where ``json`` names it."""
        return open_console(pipe_width=pipe_width, stderr=self.json == _STDOUT)

    def write(self, report: Mapping[str, object], draw: Callable[[Path], None]) -> bool:
        """Write each wanted file, also when the other can't be written; return whether all were written."""
        outcomes = []
        if self.json is not None:
            outcomes.append(try_write(self.json, partial(write_report, report, self.json)))
        if self.plot is not None:
            outcomes.append(try_write(str(self.plot), partial(draw, self.plot)))
        return all(outcomes)


def describe_run(benchmark: str, started_at: datetime, packages: Sequence[str]) -> dict[str, object]:
    """The first keys of a report: command, time, machine, commit, versions of ``packages``."""
    return {
        "benchmark": benchmark,
        "command": shlex.join(["quartet", *sys.argv[1:]]),
        "started_at": started_at.isoformat(timespec="seconds"),
        "commit": asdict(read_commit()),
        "versions": read_versions(packages),
        "machine": asdict(read_machine()),
    }
