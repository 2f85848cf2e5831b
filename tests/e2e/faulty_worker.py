"""Runs a worker whose engine can be made to hang, as in ``benchmarks.wedged_process``, and whose KV events be lost.

Events are lost as long as the file ``lost-NAME`` is in the same folder.

    QUARTET_BENCHMARK_WEDGE=FOLDER python -m tests.e2e.faulty_worker services.ROLE --config FILE
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.wedged_process import WEDGE_VARIABLE, install_hooks
from quartet.discovery.base import Role
from quartet.events.publisher import EventPublisher
from services.workers.process import main as run_worker


def lost_file(folder: Path, name: str) -> Path:
    """The file that has the KV events of the worker ``name`` lost as long as it is there."""
    return folder / f"lost-{name}"


def _lose_while(file: Path) -> None:
    publish = EventPublisher.publish_kv

    def publish_or_lose(self: EventPublisher, changed: Any) -> None:
        if file.exists():
            self.kv_number += 1
        else:
            publish(self, changed)

    EventPublisher.publish_kv = publish_or_lose  # type: ignore[method-assign]


def main() -> None:
    """Run a worker of the role that the first argument, its module, names."""
    role, folder, name = sys.argv.pop(1).rpartition(".")[2], Path(os.environ[WEDGE_VARIABLE]), Path(sys.argv[-1]).stem
    install_hooks(folder, name)
    _lose_while(lost_file(folder, name))
    run_worker(Role(role))


if __name__ == "__main__":
    main()
