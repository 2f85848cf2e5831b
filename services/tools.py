"""Finds the programs that Quartet starts but does not contain: etcd and grpcurl.

``make tools`` puts what the machine lacks into ``.tools/bin`` of the repository; that copy is preferred,
because its version is pinned.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

#: Where ``make tools`` puts its binaries. Absent in an installed wheel, where the PATH alone counts.
TOOLS_DIR = Path(__file__).resolve().parent.parent / ".tools" / "bin"


def find_etcd() -> Path | None:
    """Return the ``etcd`` binary to start, or ``None`` if this machine has none."""
    return _find("etcd")


def find_grpcurl() -> Path | None:
    """Return the ``grpcurl`` binary, or ``None`` if this machine has none."""
    return _find("grpcurl")


def _find(name: str) -> Path | None:
    own = TOOLS_DIR / name
    if own.is_file() and os.access(own, os.X_OK):
        return own
    on_path = shutil.which(name)
    return Path(on_path) if on_path else None
