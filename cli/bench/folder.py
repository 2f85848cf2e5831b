"""A folder of results: what was deployed, and for each load its figures and what the workers wrote meanwhile."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer
import yaml

from cli.bench.load import Load, Window
from cli.bench.measure import Recorder
from cli.bench.run import Point, RunObserver
from cli.output import complain
from quartet.client import Model, QuartetClient, WorkerStatus
from quartet.errors import PermissionDeniedError
from quartet.telemetry.provenance import write_report

DEPLOYMENT_FILE, REPORT_FILE, RESULT_FILE = "deployment.json", "bench.json", "result.json"
_LOGS = "logs"
# As ``services.topology.launch.SETTINGS_FILE``, which brings all of ``quartet up``. A test holds that both are equal.
SETTINGS_FILE = "settings.yaml"
# A line on the end of a request takes this long at most to reach its log, on a machine that keeps up.
_LAST_LINES_S = 0.3


@dataclass(frozen=True, kw_only=True)
class FolderOptions:
    """The folder, and what goes into it beside figures.

    Attributes:
        path: ``None``: no folder is wanted.
        log_dir: that of the ``quartet up`` whose workers are measured; ``None``: their logs stay where they are.
        labels: what the user calls the deployment, by name.
    """

    path: Path | None
    log_dir: Path | None
    labels: Mapping[str, str]

    def prepare(self) -> None:
        """Make the folder. Raises ``typer.BadParameter`` if it can't take results: now, not after the measuring."""
        if self.path is None:
            if self.log_dir or self.labels:
                raise typer.BadParameter("needs --out", param_hint="--log-dir" if self.log_dir else "--label")
            return
        # A run that was killed has left its loads' folders, and no report.
        if any(path.is_file() for name in (REPORT_FILE, f"*/{RESULT_FILE}") for path in self.path.glob(name)):
            raise typer.BadParameter(f"{self.path} holds results already: name another one", param_hint="--out")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise typer.BadParameter(f"can't make {self.path}: {error.strerror}", param_hint="--out") from error

    def check_logs(self) -> None:
        """Raise ``typer.BadParameter`` if there are no logs, once the deployment is ready."""
        if self.log_dir is not None and not _log_files(self.log_dir):
            raise typer.BadParameter(
                f"{self.log_dir} holds no *.log: is it the --log-dir of `quartet up`?", param_hint="--log-dir"
            )


def parse_labels(texts: Sequence[str]) -> dict[str, str]:
    """``NAME=VALUE`` each. Raises ``typer.BadParameter``."""
    labels = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not name or not sign:
            raise typer.BadParameter(f"{text!r} is not like kind=disagg", param_hint="--label")
        labels[name] = value
    return labels


class ResultFolder(RunObserver):
    """Writes a load's folder when the load has ended. What can't be written is reported, and ends no measuring.

    Attributes:
        is_complete: whether all was written so far.
    """

    def __init__(self, path: Path, log_dir: Path | None) -> None:
        self.is_complete = True
        self._path = path
        self._log_dir = log_dir
        self._starts: dict[Path, int] = {}
        self._names: set[str] = set()

    def began(self, load: Load, number: int, recorder: Recorder, window: Window) -> None:
        """Remember where each log ends."""
        files = [] if self._log_dir is None else _log_files(self._log_dir)
        self._starts = {path: path.stat().st_size for path in files}

    def ended(self, point: Point) -> None:
        """Write the load's figures, and what the logs have got since it began."""
        load = point.result.load
        folder = self._path / self._name(f"{load.kind}_{load.value:g}")
        self._try_write(folder / RESULT_FILE, asdict(point.result))
        if self._log_dir is not None:
            # Blocks the event loop, as nothing runs between loads, and Ctrl-C must not lose this load's figures here.
            time.sleep(_LAST_LINES_S)
            self._copy_logs(self._log_dir, folder / _LOGS)

    def _copy_logs(self, log_dir: Path, target: Path) -> None:
        try:
            target.mkdir(parents=True, exist_ok=True)
            for path in _log_files(log_dir):
                _copy_from(path, self._starts.get(path, 0), target / path.name)
        except OSError as error:
            self._failed(target, error)

    def write(self, name: str, report: Mapping[str, object]) -> None:
        """Write ``report`` as the file ``name`` of the folder."""
        self._try_write(self._path / name, report)

    def _name(self, name: str) -> str:
        """``name``, or with a number behind it where a sweep has the same load again."""
        number, unique = 1, name
        while unique in self._names:
            number += 1
            unique = f"{name}_{number}"
        self._names.add(unique)
        return unique

    def _try_write(self, path: Path, report: Mapping[str, object]) -> None:
        try:
            write_report(report, str(path))
        except OSError as error:
            self._failed(path, error)

    def _failed(self, path: Path, error: OSError) -> None:
        self.is_complete = False
        complain(f"can't write {path}: {error.strerror or error}")


async def describe_deployment(client: QuartetClient, model: Model, options: FolderOptions) -> dict[str, object]:
    """What serves ``model``: labels, the model, its workers as a router shows them, and settings of the processes.

    ``workers`` is ``None`` where this client may not list them, ``processes`` where no ``quartet up`` has kept them.
    """
    try:
        workers = [_describe_worker(worker) for worker in await client.list_workers(model.name)]
    except PermissionDeniedError:
        workers = None
    return {
        "labels": dict(options.labels),
        "model": asdict(model),
        "workers": workers,
        "processes": None if options.log_dir is None else _read_settings(options.log_dir / SETTINGS_FILE),
    }


def _describe_worker(worker: WorkerStatus) -> dict[str, object]:
    record = worker.record
    return {
        "worker_id": record.worker_id,
        "role": record.role,
        "state": worker.state,
        "address": record.grpc_address,
        "data_parallel_size": record.data_parallel_size,
        "num_blocks": record.num_blocks,
        "block_size": record.block_size,
        "max_model_len": record.max_model_len,
        "transfer_ways": record.transfer_ways,
        "contract_version": record.contract_version,
    }


def _read_settings(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return None


def _log_files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("*.log") if path.is_file())


def _copy_from(source: Path, start: int, target: Path) -> None:
    """Copy what follows the first ``start`` bytes; all where ``source`` has become shorter: it has begun anew."""
    with source.open("rb") as reader, target.open("wb") as writer:
        size = source.stat().st_size
        reader.seek(start if start <= size else 0)
        shutil.copyfileobj(reader, writer)
