"""A model by its repository's name: found in the Hub's cache, or refused with the reason. Nothing is downloaded."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.utils import _cache_manager as cache_manager

from quartet.engine.model_cache import Origin, cached_models
from quartet.engine.model_source import (
    Repository,
    drop_leftovers,
    fetch_model,
    find_cached_model,
    is_repository_id,
    repository_of,
)
from quartet.errors import ConfigError
from tests import tiny
from tests.fakes.hub import REPOSITORY, Hub, serve_hub

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


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub that this process uses, with its cache in ``tmp_path/hub``."""
    with serve_hub(tiny.CHECKPOINT) as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(cache_manager, "HF_HUB_CACHE", str(tmp_path / "hub"))
        yield hub


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


@pytest.mark.parametrize(
    ("refusal", "reason"),
    [
        ((403, "GatedRepo"), "its terms have to be accepted, and HF_TOKEN set"),
        ((404, "RepoNotFound"), "there is none of that name, or it is private and HF_TOKEN is not set"),
        ((404, "RevisionNotFound"), "it has no such revision"),
    ],
)
def test_what_the_hub_refuses_is_said(hub: Hub, refusal: tuple[int, str], reason: str) -> None:
    hub.refusal = refusal
    with pytest.raises(ConfigError) as refused:
        fetch_model(Repository(REPOSITORY), needs_weights=True)
    assert str(refused.value).endswith(f"from the Hugging Face Hub: {reason}")


def test_a_cache_that_cannot_be_written_is_named(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "hub").write_text("no folder")
    with pytest.raises(
        ConfigError, match=r"^model_path: org/name: the Hub's cache can't be used: /.*/hub.*: Not a dir"
    ):
        fetch_model(Repository(REPOSITORY), needs_weights=False)
    with pytest.raises(ConfigError, match=r"^cache: .*found a file"):
        cached_models(tmp_path / "models")


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", write)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ConfigError, match=r"the Hub's cache can't be used: /.*/hub: No space left on device$"):
        fetch_model(Repository(REPOSITORY), needs_weights=True)


def test_a_repository_without_weights_is_found_and_one_without_a_small_file_is_not(hub: Hub, tmp_path: Path) -> None:
    folder = fetch_model(Repository(REPOSITORY), needs_weights=False)
    assert find_cached_model(Repository(REPOSITORY)) == folder
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="it is not in the cache, or not wholly"):
        find_cached_model(Repository(REPOSITORY))


def test_a_repository_that_the_list_must_leave_out_is_named(hub: Hub, tmp_path: Path) -> None:
    folder = fetch_model(Repository(REPOSITORY), needs_weights=False)
    said: list[str] = []
    [listed] = cached_models(tmp_path / "models", said.append)
    assert (listed.name, listed.origin, said) == (REPOSITORY, Origin.HUB, [])
    blob = (folder / "tokenizer.json").resolve()
    blob.unlink()
    (tmp_path / "hub" / "datasets--org--name").mkdir()
    assert cached_models(tmp_path / "models", said.append) == []
    assert len(said) == 1 and str(blob) in said[0]


def test_leftovers_are_deleted_and_downloads_under_way_are_not(tmp_path: Path) -> None:
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshots" / COMMIT
    blobs.mkdir()
    folder.mkdir(parents=True)
    for name in ("here", "here.0a1b.incomplete", "coming.0a1b.incomplete"):
        (blobs / name).write_text("")
    drop_leftovers(folder)
    assert {path.name for path in blobs.iterdir()} == {"here", "coming.0a1b.incomplete"}
