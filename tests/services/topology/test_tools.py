"""The repository's own, pinned binaries come before those of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.topology import launch


def make_program(directory: Path, *, mode: int = 0o755) -> Path:
    directory.mkdir(parents=True)
    program = directory / "etcd"
    program.write_text("#!/bin/sh\n")
    program.chmod(mode)
    return program


def test_the_own_binary_is_preferred_to_the_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = make_program(tmp_path / "own")
    on_path = make_program(tmp_path / "path")
    monkeypatch.setenv("PATH", str(on_path.parent))
    monkeypatch.setattr(launch, "TOOLS_DIR", own.parent)
    assert launch.find_etcd() == own


def test_the_path_serves_where_the_own_file_cannot_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = make_program(tmp_path / "own", mode=0o644)
    on_path = make_program(tmp_path / "path")
    monkeypatch.setenv("PATH", str(on_path.parent))
    monkeypatch.setattr(launch, "TOOLS_DIR", own.parent)
    assert launch.find_etcd() == on_path


def test_a_machine_without_a_program_gives_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(launch, "TOOLS_DIR", tmp_path)
    assert launch.find_grpcurl() is None
