"""The file of a benchmark on GPUs whose rows are measured one by one, by several commands and on several machines."""

from __future__ import annotations

import json
import logging
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.progress import LiveLine
from benchmarks.report import Report
from quartet.errors import ConfigError
from quartet.telemetry.provenance import write_report

logger = logging.getLogger(__name__)

# Measurements of one row that the file keeps.
_NUM_KEPT = 2

_Row = TypeVar("_Row", bound=str)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One row, measured once.

    Attributes:
        row: its name.
        shape: of the model.
        num_gpus: 2: one for each side; 1: both share it; 0: on the CPU.
        gpus: their names.
        figures: as the row's module describes them.
    """

    row: str
    shape: str
    num_gpus: int
    gpus: Sequence[str]
    figures: Any


class Measurements:
    """The file of all measurements: the newest command's report, with every measurement's own report in ``rows``."""

    def __init__(self, path: Path) -> None:
        """Go on with the file at ``path``, if there is one."""
        self._path = path
        self._rows: list[Mapping[str, Any]] = []
        if path.exists():
            self._rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        self._before = list(self._rows)

    def write(self, report: Mapping[str, Any]) -> None:
        """Keep ``report``, of one ``Measured``; it takes the place of one that this command wrote of the same row."""
        same = [row for row in self._before if _key(row) == _key(report)]
        others = [row for row in self._rows if _key(row) != _key(report)]
        self._rows = [*others, *same[1 - _NUM_KEPT :], report]
        about = {name: value for name, value in report.items() if name not in Measured.__dataclass_fields__}
        write_report({**about, "rows": self._rows}, str(self._path))

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        """What it holds, of one row the newest last."""
        return self._rows


@dataclass(frozen=True, kw_only=True)
class Command:
    """What the rows of one command have in common.

    Attributes:
        name: of the benchmark.
        packages: whose versions are noted.
        commit: what is measured, in a copy of the files without git; ``None``: what git says.
        shape, num_gpus: as ``Measured`` has them.
    """

    name: str
    packages: Sequence[str]
    commit: str | None
    shape: str
    num_gpus: int


async def measure_rows(
    rows: Sequence[_Row],
    command: Command,
    measure: Callable[[_Row, Callable[[Any], None]], Awaitable[Any]],
    measurements: Measurements,
    line: LiveLine,
) -> bool:
    """Measure each row and write it at once, and go on where one fails.

    Args:
        rows: their names.
        command: noted with each of them.
        measure: returns the figures of a row; what it is given writes those of a part of a long one.
        measurements: where they are written.
        line: says how long each row took.

    Returns:
        Whether none failed.

    Raises:
        ConfigError: there are fewer GPUs.
    """
    is_done = True
    gpus = gpu_names(command.num_gpus) if rows else ()
    for row in rows:
        report = Report(command.name, packages=command.packages, revision=command.commit)

        def write(figures: Any, row: str = row, report: Report = report) -> None:
            measured = Measured(row=row, shape=command.shape, num_gpus=command.num_gpus, gpus=gpus, figures=figures)
            measurements.write(report.finish(measured))

        began = time.monotonic()
        try:
            write(await measure(row, write))
        except Exception:  # a row ends here, and the others can be measured all the same
            logger.exception("%s could not be measured", row)
            is_done = False
        line.say(f"{row} took {time.monotonic() - began:.0f} s")
    return is_done


def gpu_names(num_gpus: int) -> Sequence[str]:
    """The names of the first GPUs, as the driver has them. Raises ``ConfigError``: there are fewer."""
    if not num_gpus:
        return ()
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"--device: nvidia-smi finds no GPU here ({error}); try --device cpu --shape tiny") from error
    names = tuple(line.strip() for line in done.stdout.splitlines()[:num_gpus])
    if len(names) < num_gpus:
        raise ConfigError(f"--gpus: this machine has {len(names)}, not {num_gpus}")
    return names


def _key(report: Mapping[str, Any]) -> tuple[object, ...]:
    return report["row"], report["shape"], report["num_gpus"]
