"""Files of a model that are cut, changed or gone are found, by digests and by what the files themselves say."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from quartet.engine.model_check import SUMS_FILE, CheckedFile, FileVerdict, check_model, weights_fault
from quartet.errors import ConfigError
from tests import tiny

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the tiny model."""
    return Path(shutil.copytree(tiny.CHECKPOINT, tmp_path / "model"))


def write_sums(folder: Path) -> None:
    names = sorted(path.name for path in folder.iterdir())
    command = ["sha256sum", *names]
    (folder / SUMS_FILE).write_bytes(subprocess.run(command, cwd=folder, capture_output=True, check=True).stdout)


def flip(path: Path, position: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def bad(files: list[CheckedFile]) -> dict[str, FileVerdict]:
    return {file.name: file.verdict for file in files if file.is_bad}


def test_without_digests_nothing_more_is_claimed_than_was_seen(folder: Path) -> None:
    files = check_model(folder)
    assert {file.verdict for file in files} == {FileVerdict.NO_DIGEST}
    assert [file.name for file in files] == sorted(path.name for path in folder.iterdir())
    assert {file.name: file.size_bytes for file in files}[WEIGHTS] == (folder / WEIGHTS).stat().st_size


def test_files_are_held_against_the_sums_that_sha256sum_wrote(folder: Path) -> None:
    write_sums(folder)
    num_read = 0

    def on_read(size_bytes: int) -> None:
        nonlocal num_read
        num_read += size_bytes

    files = check_model(folder, on_read)
    assert {file.verdict for file in files} == {FileVerdict.WHOLE}
    assert num_read == sum(file.size_bytes for file in files)

    flip(folder / "tokenizer.json")
    (folder / "config.json").unlink()
    assert bad(check_model(folder)) == {"tokenizer.json": FileVerdict.DAMAGED, "config.json": FileVerdict.MISSING}


@pytest.mark.parametrize("cut", [1, 18_000_000, 18_042_230, 18_042_232])
def test_weights_that_were_cut_are_damaged_without_any_digest(folder: Path, cut: int) -> None:
    path = folder / WEIGHTS
    assert weights_fault(path) == ""
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - cut)
    assert bad(check_model(folder)) == {WEIGHTS: FileVerdict.DAMAGED}


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 64, (9).to_bytes(8, "little") + b"no JSON! ", b"\2" + bytes(7) + b"[]"]
)
def test_weights_that_are_none_are_damaged(folder: Path, content: bytes) -> None:
    (folder / WEIGHTS).write_bytes(content)
    assert bad(check_model(folder)) == {WEIGHTS: FileVerdict.DAMAGED}


def test_weights_that_the_index_lists_are_missed(folder: Path) -> None:
    index = {"weight_map": {"a": WEIGHTS, "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert bad(check_model(folder)) == {"model-00002-of-00002.safetensors": FileVerdict.MISSING}


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_an_index_that_is_none_is_named(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    assert bad(check_model(folder)) == {"model.safetensors.index.json": FileVerdict.MISSING}


def test_a_model_without_weights_or_configuration_is_missing_them(tmp_path: Path) -> None:
    assert bad(check_model(tmp_path)) == {"config.json": FileVerdict.MISSING, "*.safetensors": FileVerdict.MISSING}


def test_the_name_of_a_file_in_the_hubs_cache_is_its_digest(folder: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    for path in folder.iterdir():
        content = path.read_bytes()
        git_digest = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        name = hashlib.sha256(content).hexdigest() if path.name == WEIGHTS else git_digest
        (blobs / name).write_bytes(content)
        (snapshot / path.name).symlink_to(blobs / name)
    assert {file.verdict for file in check_model(snapshot)} == {FileVerdict.WHOLE}
    flip((snapshot / WEIGHTS).resolve())
    flip((snapshot / "tokenizer.json").resolve())
    (snapshot / "chat_template.jinja").resolve().unlink()
    assert bad(check_model(snapshot)) == {
        WEIGHTS: FileVerdict.DAMAGED,
        "tokenizer.json": FileVerdict.DAMAGED,
        "chat_template.jinja": FileVerdict.MISSING,
    }


def test_sums_come_before_the_name_of_a_file_in_the_hubs_cache(folder: Path, tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    shutil.move(folder / WEIGHTS, blobs / ("0" * 64))
    (folder / WEIGHTS).symlink_to(blobs / ("0" * 64))
    assert bad(check_model(folder)) == {WEIGHTS: FileVerdict.DAMAGED}
    write_sums(folder)
    assert bad(check_model(folder)) == {}


def test_a_link_that_leads_to_itself_leads_to_no_file(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("tokenizer.json")
    assert bad(check_model(folder)) == {"tokenizer.json": FileVerdict.MISSING}


def test_a_folder_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^model: .*/gone can't be read: No such file"):
        check_model(tmp_path / "gone")
