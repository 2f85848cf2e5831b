"""A copy of a model's folder is whole, goes on where it broke off, and never mixes two states of a file."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from quartet.engine import model_copy
from quartet.engine.fingerprint import model_fingerprint
from quartet.engine.model_check import SUMS_FILE, FileVerdict, check_model
from quartet.engine.model_copy import copy_model, files_to_copy, is_whole_copy, origin_of
from quartet.errors import ConfigError
from tests import tiny

WEIGHTS = "model.safetensors"
CHUNK = 1 << 20


class BrokenOffError(Exception):
    """Stands for the end of the process."""


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_copy, "_READ_SIZE_BYTES", CHUNK)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of the tiny model, with files that don't serve it."""
    folder = Path(shutil.copytree(tiny.CHECKPOINT, tmp_path / "source"))
    (folder / "modeling.py").write_text("code")
    (folder / "consolidated.safetensors").write_text("the weights again")
    (folder / "onnx").mkdir()
    return folder


def copy(source: Path, target: Path, break_after: int | None = None) -> int:
    """Copy, and return how many bytes were done, or break off after about so many."""
    num_done = 0

    def on_copied(size_bytes: int) -> None:
        nonlocal num_done
        num_done += size_bytes
        if break_after is not None and num_done > break_after:
            raise BrokenOffError

    copy_model(files_to_copy(source), target, on_copied)
    return num_done


def test_what_serves_the_model_is_copied_with_digests(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "models" / "tiny"
    num_done = copy(source, target)
    assert {path.name for path in target.iterdir() if not path.name.startswith(".")} == {
        *(path.name for path in tiny.CHECKPOINT.iterdir()),
        SUMS_FILE,
    }
    assert num_done == sum(path.stat().st_size for path in tiny.CHECKPOINT.iterdir())
    assert {file.verdict for file in check_model(target)} == {FileVerdict.WHOLE}
    assert model_fingerprint(target, "float32") == model_fingerprint(tiny.CHECKPOINT, "float32")
    assert origin_of(target) == source
    assert is_whole_copy(target)
    subprocess.run(["sha256sum", "--check", "--strict", SUMS_FILE], cwd=target, check=True, capture_output=True)


def test_a_copy_that_broke_off_goes_on(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "tiny"
    with pytest.raises(BrokenOffError):
        copy(source, target, break_after=5 * CHUNK)
    assert not is_whole_copy(target)
    begun = (target / f"{WEIGHTS}.part").stat().st_size
    assert begun >= 4 * CHUNK

    num_read = 0
    read = model_copy._read

    def counted(path: Path, file: object, size: int) -> bytes:
        nonlocal num_read
        chunk = read(path, file, size)
        num_read += len(chunk)
        return chunk

    monkeypatch.setattr(model_copy, "_read", counted)
    total = copy(source, target)
    assert total == sum(path.stat().st_size for path in files_to_copy(source))
    assert num_read < total - begun + 1, "what was copied is not read from the source again"
    assert {file.verdict for file in check_model(target)} == {FileVerdict.WHOLE}
    assert is_whole_copy(target)


def test_a_copy_made_twice_copies_nothing(source: Path, tmp_path: Path) -> None:
    copy(source, tmp_path / "tiny")
    written_at = (tmp_path / "tiny" / WEIGHTS).stat().st_mtime_ns
    assert copy(source, tmp_path / "tiny") == sum(path.stat().st_size for path in files_to_copy(source))
    assert (tmp_path / "tiny" / WEIGHTS).stat().st_mtime_ns == written_at


@pytest.mark.parametrize("is_finished", [True, False])
def test_a_file_that_changed_since_is_copied_anew(source: Path, tmp_path: Path, is_finished: bool) -> None:
    target = tmp_path / "tiny"
    if is_finished:
        copy(source, target)
    else:
        with pytest.raises(BrokenOffError):
            copy(source, target, break_after=5 * CHUNK)
    content = bytearray((source / WEIGHTS).read_bytes())
    content[-1], content[CHUNK] = content[-1] ^ 1, content[CHUNK] ^ 1
    (source / WEIGHTS).write_bytes(content)
    later = max(path.stat().st_mtime_ns for path in target.iterdir()) + 1
    os.utime(source / WEIGHTS, ns=(later, later))
    copy(source, target)
    assert (target / WEIGHTS).read_bytes() == content
    assert {file.verdict for file in check_model(target)} == {FileVerdict.WHOLE}


def test_a_file_that_changes_meanwhile_is_no_copy(source: Path, tmp_path: Path) -> None:
    def change(_: int) -> None:
        (source / WEIGHTS).touch()

    with pytest.raises(ConfigError, match=rf"^model: .*{WEIGHTS} changed while it was copied"):
        copy_model(files_to_copy(source), tmp_path / "tiny", change)
    assert not (tmp_path / "tiny" / WEIGHTS).exists()


def test_a_file_that_is_gone_from_the_source_is_gone_from_the_copy(source: Path, tmp_path: Path) -> None:
    copy(source, tmp_path / "tiny")
    (source / "chat_template.jinja").unlink()
    copy(source, tmp_path / "tiny")
    assert not (tmp_path / "tiny" / "chat_template.jinja").exists()
    assert {file.verdict for file in check_model(tmp_path / "tiny")} == {FileVerdict.WHOLE}


def test_a_source_with_sums_is_held_against_them(source: Path, tmp_path: Path) -> None:
    (source / SUMS_FILE).write_text(f"{'0' * 64}  config.json\n")
    with pytest.raises(ConfigError, match=rf"^model: .*config.json does not have the digest that {SUMS_FILE}"):
        copy(source, tmp_path / "tiny")


def test_other_files_and_other_models_are_never_overwritten(source: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"^cache: .*other holds files that are no copy of a model"):
        copy(source, other)
    copy(source, tmp_path / "tiny")
    with pytest.raises(ConfigError, match=r"^cache: .*tiny is a copy of .*source: name the copy of .*checkpoint"):
        copy(tiny.CHECKPOINT, tmp_path / "tiny")


def test_two_processes_never_copy_to_one_folder(source: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    with (tmp_path / "tiny" / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"^cache: another process copies to"):
            copy(source, tmp_path / "tiny")


def test_a_disk_without_room_is_said_before_anything_is_copied(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ConfigError, match=r"^cache: .*has 0.0 GB left"):
        copy(source, tmp_path / "tiny")
    assert not (tmp_path / "tiny" / "config.json").exists()


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^model: .* holds no config.json"):
        files_to_copy(tmp_path)
    with pytest.raises(ConfigError, match=r"^model: .*gone can't be read: No such file"):
        files_to_copy(tmp_path / "gone")


def test_random_weights_need_no_weight_files() -> None:
    names = {path.name for path in files_to_copy(tiny.CHECKPOINT, needs_weights=False)}
    assert {"config.json", "tokenizer.json"} <= names
    assert WEIGHTS not in names
