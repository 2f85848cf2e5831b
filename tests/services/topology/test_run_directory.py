"""Run directories: each running topology has its own, and what a killed one left goes with the next start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quartet.errors import ConfigError
from services.topology.launch import make_run_directory


def test_only_what_dead_topologies_left_is_removed(tmp_path: Path) -> None:
    made_by_dead = [
        sys.executable,
        "-c",
        f"from services.topology.launch import make_run_directory as make\n"
        f"from pathlib import Path\nprint(make(Path({str(tmp_path)!r}), 'old'))",
    ]
    root = Path(__file__).parents[3]
    dead = Path(subprocess.run(made_by_dead, cwd=root, check=True, capture_output=True, text=True).stdout.strip())
    assert dead.is_dir()
    stranger = tmp_path / "model-99999999"
    stranger.mkdir()

    mine = make_run_directory(tmp_path, "some-name")
    assert mine == tmp_path / f"some-name-{os.getpid()}"
    assert not dead.exists()
    assert stranger.is_dir()


def test_what_an_earlier_process_of_the_same_id_left_is_gone(tmp_path: Path) -> None:
    (make_run_directory(tmp_path, "some") / "router.yaml").touch()
    assert not (make_run_directory(tmp_path, "some") / "router.yaml").exists()


def test_where_none_can_be_made_that_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot make a directory in .*file"):
        make_run_directory(tmp_path / "file", "some")
