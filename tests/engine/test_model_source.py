"""A model by its repository's name: found in the Hub's cache, or refused with the reason. Nothing is downloaded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from quartet.engine.model_source import Repository, fetch_model, is_repository_id, repository_of
from quartet.errors import ConfigError
from tests import tiny

COMMIT = "0123456789abcdef0123456789abcdef01234567"

# What is fetched, in a process whose Hub is a folder.
PROGRAM = """
import sys
from quartet.engine.model_source import fetch_model, repository_of
from quartet.errors import ConfigError
try:
    print(fetch_model(repository_of(sys.argv[1]), needs_weights=True))
except ConfigError as error:
    print(error)
"""


def fetch_offline(home: Path, name: str) -> str:
    """What a process says whose only source is the cache in ``home``."""
    variables = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    variables.pop("HF_HUB_CACHE", None)
    command = [sys.executable, "-c", PROGRAM, name]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=50, check=True).stdout.strip()


@pytest.mark.parametrize("text", ["Qwen/Qwen3-0.6B", "org/name@main", "org/name@refs/pr/3", "a/b", f"a/b@{COMMIT}"])
def test_an_organisation_and_a_name_are_a_repository(text: str) -> None:
    assert is_repository_id(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "model",
        "./org/name",
        "../name",
        "/models/name",
        "models/tiny/checkpoint",
        "org/name/",
        "org/na me",
        "a/b@",
        "~/a",
    ],
)
def test_all_else_is_a_path(text: str) -> None:
    assert not is_repository_id(text)


def test_an_existing_folder_is_a_folder_even_if_its_name_looks_like_a_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_repository_id("org/name")
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert not is_repository_id("org/name")


def test_the_revision_stands_behind_the_name() -> None:
    assert repository_of("org/name@v1.0") == Repository("org/name", "v1.0")
    assert str(Repository("org/name", "v1.0")) == "org/name@v1.0"


@pytest.mark.parametrize("needs_weights", [True, False])
def test_weights_are_fetched_where_they_are_needed(tmp_path: Path, needs_weights: bool) -> None:
    asked: list[tuple[Repository, Sequence[str]]] = []
    (tmp_path / "config.json").write_text("{}")

    def fetch(repository: Repository, patterns: Sequence[str]) -> Path:
        asked.append((repository, patterns))
        return tmp_path

    assert fetch_model(Repository("org/name"), needs_weights=needs_weights, fetch=fetch) == tmp_path
    [(repository, patterns)] = asked
    assert repository == Repository("org/name")
    assert ("*.safetensors" in patterns) == needs_weights
    assert {"*.json", "*.jinja"} <= set(patterns)
    assert not any("py" in pattern for pattern in patterns)


def test_a_repository_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^model_path: the repository org/name holds no config.json"):
        fetch_model(Repository("org/name"), needs_weights=True, fetch=lambda _repository, _patterns: tmp_path)


def test_a_repository_in_the_hub_cache_is_found_without_a_network(tmp_path: Path) -> None:
    cached = tmp_path / "hub" / "models--org--name"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(COMMIT)
    shutil.copytree(tiny.CHECKPOINT, cached / "snapshots" / COMMIT)
    assert fetch_offline(tmp_path, "org/name") == str(cached / "snapshots" / COMMIT)
    assert fetch_offline(tmp_path, f"org/name@{COMMIT}") == str(cached / "snapshots" / COMMIT)


def test_a_repository_that_cannot_be_fetched_is_refused_with_the_reason_and_without_an_address(tmp_path: Path) -> None:
    said = fetch_offline(tmp_path, "org/name")
    assert said.startswith("model_path: org/name is no folder here, and no repository that can be had")
    assert "HF_HUB_OFFLINE" in said
    assert "://" not in said
