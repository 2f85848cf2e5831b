"""The file of a benchmark on GPUs whose rows are measured one by one, by several commands and on several machines."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quartet.errors import ConfigError
from quartet.telemetry.provenance import write_report

# Measurements of one row that the file keeps.
_NUM_KEPT = 2


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
