"""What ships beside the code: no file that is a user's own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools.build_data import SUFFIXES, shipped_files

ROOT = Path(__file__).parents[2]


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A source distribution with a topology and a model, and files beside them that are not ours."""
    for name in ("configs/agg.yaml", "configs/engines/a.yaml", "models/tiny/checkpoint/config.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("ours")
    for name in ("configs/mine.yaml", "configs/mine.env", "configs/.hidden.yaml", "models/tiny/checkpoint/notes.txt"):
        (tmp_path / name).write_text("token: secret")
    return tmp_path


def test_of_a_checkout_only_what_git_tracks_is_shipped(sources: Path) -> None:
    git(sources, "init")
    (sources / ".gitignore").write_text("mine.*\n")
    git(sources, "add", "configs/agg.yaml", "configs/engines/a.yaml", "models/tiny/checkpoint/config.json")
    assert [*map(str, shipped_files(sources))] == [
        "configs/agg.yaml",
        "configs/engines/a.yaml",
        "models/tiny/checkpoint/config.json",
    ]
    (sources / "configs/agg.yaml").unlink()  # and not what was deleted
    assert len(shipped_files(sources)) == 2


def test_without_git_only_files_of_known_kinds_are(sources: Path) -> None:
    names = [*map(str, shipped_files(sources))]
    assert {"configs/agg.yaml", "configs/engines/a.yaml", "models/tiny/checkpoint/config.json"} < set(names)
    assert not [name for name in names if name.endswith((".env", ".txt")) or "hidden" in name]


def test_a_checkout_of_which_git_says_nothing_is_not_built(sources: Path) -> None:
    (sources / ".git").write_text("gitdir: nowhere")
    with pytest.raises(subprocess.CalledProcessError):
        shipped_files(sources)


def test_known_kinds_are_those_of_all_files_that_ship() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    tracked = shipped_files(ROOT)
    assert tracked and {file.suffix for file in tracked} <= set(SUFFIXES)
