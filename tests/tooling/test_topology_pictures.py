"""The pictures in docs/ show the topologies as they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


def test_every_picture_is_of_its_topology_as_it_is() -> None:
    ran = subprocess.run(
        [sys.executable, "tools/draw_topologies.py", "--check"],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
