"""A worker or router that stands still on command, for ``benchmarks.wedge``: the product's own, with hooks.

A hook blocks its thread as long as the file ``PLACE-NAME`` is in the folder that the environment variable names, where
NAME is that of the process's configuration file.

    QUARTET_BENCHMARK_WEDGE=FOLDER python -m benchmarks.wedged_process ROLE --config FILE
"""

from __future__ import annotations

import functools
import os
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Any

from quartet.discovery.base import Role
from quartet.engine.mock.runner import MockRunner
from quartet.engine.step_loop import StepLoop
from quartet.engine.torch.encoder import TowerThread
from quartet.events.publisher import EventPublisher
from router.__main__ import main as run_router
from router.workers import WorkerTable
from services.workers.dispatch import DecodeDispatcher, PrefillDispatcher
from services.workers.process import main as run_worker

#: Names the folder of the files that wedge processes.
WEDGE_VARIABLE = "QUARTET_BENCHMARK_WEDGE"

_POLL_S = 0.02


class Place(StrEnum):
    """Where a thread stands still."""

    STEP = "step"  # an engine's thread, in the model
    INBOX = "inbox"  # an engine's thread, before it takes its messages
    OUTPUTS = "outputs"  # a worker's event loop, with a step's outputs
    EVENTS = "events"  # a worker's event loop, in its events' socket
    REPORTS = "reports"  # a router's event loop, with a load report
    TOWER = "tower"  # an encode worker's thread, with a batch of pictures


_METHODS: dict[Place, list[tuple[type[Any], str]]] = {
    Place.STEP: [(MockRunner, "run")],
    Place.INBOX: [(StepLoop, "step")],
    Place.OUTPUTS: [(DecodeDispatcher, "route"), (PrefillDispatcher, "route")],
    Place.EVENTS: [(EventPublisher, "publish_load")],
    Place.REPORTS: [(WorkerTable, "report")],
    Place.TOWER: [(TowerThread, "_notify")],
}


def wedge_file(folder: Path, place: Place, name: str) -> Path:
    """The file that wedges the process ``name`` at ``place`` as long as it is there."""
    return folder / f"{place}-{name}"


def install_hooks(folder: Path, name: str) -> None:
    """Let every place of this process stand still on command."""
    for place, methods in _METHODS.items():
        file = str(wedge_file(folder, place, name))
        for owner, method in methods:
            setattr(owner, method, _waiting_before(getattr(owner, method), file))


def _waiting_before(method: Any, file: str) -> Any:
    @functools.wraps(method)
    def wait_then_call(*arguments: Any, **named: Any) -> Any:
        while os.path.exists(file):
            time.sleep(_POLL_S)
        return method(*arguments, **named)

    return wait_then_call


def main() -> None:
    """Run a router, or a worker of the role that the first argument names."""
    role = sys.argv.pop(1)
    install_hooks(Path(os.environ[WEDGE_VARIABLE]), Path(sys.argv[-1]).stem)
    if role == "router":
        run_router()
    else:
        run_worker(Role(role))


if __name__ == "__main__":
    main()
