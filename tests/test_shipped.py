"""Names of what ships with Quartet: they hold in any folder, and never hide what is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from quartet.config import expand_path
from quartet.shipped import CONFIGS, ROOT, find_shipped, topologies

CHECKPOINT = "models/tiny/checkpoint"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, which is empty."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", [CHECKPOINT, "models/tiny", "configs/engines/qwen3/prefill.yaml"])
def test_a_name_of_what_ships_is_found_in_any_folder(name: str) -> None:
    assert find_shipped(name) == str(ROOT / name)
    assert expand_path(name) == str(ROOT / name)


def test_what_the_folder_has_itself_goes_before_what_ships(folder: Path) -> None:
    (folder / CHECKPOINT).mkdir(parents=True)
    assert find_shipped(CHECKPOINT) == CHECKPOINT


@pytest.mark.parametrize(
    "name",
    ["README.md", "quartet", "configs/no_such.yaml", "models", "configs/../quartet", "Qwen/Qwen3-0.6B", "", "/configs"],
)
def test_other_paths_stay_as_they_are(name: str) -> None:
    assert find_shipped(name) == name


def test_topologies_are_named_as_their_files_and_engine_files_are_none() -> None:
    names = topologies()
    assert {"disagg", "mock_fleet", "gpu/disagg", "trtllm/disagg"} <= names.keys()
    assert not [name for name in names if name.startswith(("engines", "tools"))]
    assert names["trtllm/disagg"] == CONFIGS / "trtllm" / "disagg.yaml"
