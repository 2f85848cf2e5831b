"""Figures name the code that they were measured with, and no other."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from quartet.telemetry.provenance import read_commit

_TRACKED = ("code.py", "benchmarks/results/relay.json", "benchmarks/relay.py", "docs/performance.md")


def git(directory: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=Test", "-c", "user.email=test@example.invalid")
    command = ["git", *identity, *arguments]
    return subprocess.run(command, cwd=directory, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in _TRACKED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("before\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "All")
    return tmp_path


def test_a_clean_checkout_is_its_commit(checkout: Path) -> None:
    (checkout / "untracked").touch()
    commit = read_commit(checkout)
    assert (commit.revision, commit.is_dirty) == (git(checkout, "rev-parse", "HEAD"), False)


@pytest.mark.parametrize(
    ("name", "is_dirty"), list(zip(_TRACKED, (True, False, True, False), strict=True)), ids=_TRACKED
)
def test_changed_code_is_dirty_but_results_and_pages_are_none(checkout: Path, name: str, is_dirty: bool) -> None:
    (checkout / name).write_text("after\n")
    assert read_commit(checkout).is_dirty is is_dirty


def test_a_repository_around_an_installed_copy_is_a_stranger(checkout: Path) -> None:
    installed = checkout / "lib" / "site-packages"
    installed.mkdir(parents=True)
    commit = read_commit(installed)
    assert (commit.revision, commit.is_dirty) == (None, True)


def test_outside_any_repository_the_commit_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    commit = read_commit(tmp_path)
    assert (commit.revision, commit.is_dirty) == (None, True)
