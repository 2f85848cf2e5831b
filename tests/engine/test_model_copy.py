"""A copy of a model's folder is whole, goes on where it broke off, and never mixes two states of a file."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from quartet.engine import model_copy
from quartet.engine.fingerprint import model_fingerprint
from quartet.engine.model_cache import CachedModel, Origin, cached_models
from quartet.engine.model_check import SUMS_FILE, FileVerdict, check_model
from quartet.engine.model_copy import copy_model, copy_target, files_to_copy, is_whole_copy, origin_of
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
    begun = tmp_path / "begun"
    begun.hardlink_to(target / f"{WEIGHTS}.part")
    assert begun.stat().st_size >= 4 * CHUNK

    total = sum(path.stat().st_size for path in files_to_copy(source))
    room = total - sum(path.stat().st_size for path in target.iterdir() if path.name != SUMS_FILE)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=room - 1))
    with pytest.raises(ConfigError, match=r"^cache: .* GB left"):
        copy(source, target)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=room))
    assert copy(source, target) == total, "what was begun needs no more room"
    assert (target / WEIGHTS).samefile(begun), "what was begun is used"
    assert {file.verdict for file in check_model(target)} == {FileVerdict.WHOLE}
    assert is_whole_copy(target)


@pytest.mark.parametrize("damage", ["zeros", "too long"])
def test_what_a_crash_left_of_a_file_is_not_trusted(source: Path, tmp_path: Path, damage: str) -> None:
    target = tmp_path / "tiny"
    with pytest.raises(BrokenOffError):
        copy(source, target, break_after=5 * CHUNK)
    part = target / f"{WEIGHTS}.part"
    if damage == "zeros":
        with part.open("r+b") as file:
            file.seek(CHUNK + 100)
            file.write(bytes(1000))
    else:
        part.write_bytes((source / WEIGHTS).read_bytes() + b"more")
    copy(source, target)
    assert (target / WEIGHTS).read_bytes() == (source / WEIGHTS).read_bytes()
    assert {file.verdict for file in check_model(target)} == {FileVerdict.WHOLE}


def test_a_copy_made_twice_copies_nothing(source: Path, tmp_path: Path) -> None:
    copy(source, tmp_path / "tiny")
    before = {path.name: path.stat().st_ino for path in (tmp_path / "tiny").iterdir()}
    assert copy(source, tmp_path / "tiny") == sum(path.stat().st_size for path in files_to_copy(source))
    assert {path.name: path.stat().st_ino for path in (tmp_path / "tiny").iterdir()} == before


@pytest.mark.parametrize("is_finished", [True, False])
@pytest.mark.parametrize("by_ns", [1, -(10**15)])
def test_a_file_that_changed_since_is_copied_anew(source: Path, tmp_path: Path, is_finished: bool, by_ns: int) -> None:
    written_at = (source / WEIGHTS).stat().st_mtime_ns
    target = tmp_path / "tiny"
    if is_finished:
        copy(source, target)
    else:
        with pytest.raises(BrokenOffError):
            copy(source, target, break_after=5 * CHUNK)
    content = bytearray((source / WEIGHTS).read_bytes())
    content[-1], content[CHUNK] = content[-1] ^ 1, content[CHUNK] ^ 1
    (source / WEIGHTS).write_bytes(content)
    # `cp -p` and `rsync -a` bring a file with a time from before the copy.
    os.utime(source / WEIGHTS, ns=(written_at + by_ns, written_at + by_ns))
    copy(source, target)
    assert (target / WEIGHTS).read_bytes() == content
    assert {file.verdict for file in check_model(target)} == {FileVerdict.WHOLE}


def test_a_file_of_the_same_time_whose_sums_are_others_is_copied_anew(source: Path, tmp_path: Path) -> None:
    copy(source, tmp_path / "tiny")
    path = source / "tokenizer_config.json"
    written_at, content = path.stat().st_mtime_ns, path.read_bytes()[::-1]
    path.write_bytes(content)
    os.utime(path, ns=(written_at, written_at))
    (source / SUMS_FILE).write_text(f"{hashlib.sha256(content).hexdigest()}  {path.name}\n")
    copy(source, tmp_path / "tiny")
    assert (tmp_path / "tiny" / path.name).read_bytes() == content


def test_damaged_files_are_copied_again_and_foreign_ones_stay(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "tiny"
    copy(source, target)
    path = target / WEIGHTS
    before = path.stat()
    path.write_bytes(bytes(before.st_size))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    (target / "notes.txt").write_text("mine")
    copy(source, target)
    assert [file.name for file in check_model(target) if file.is_bad] == [WEIGHTS]
    copy_model(files_to_copy(source), target, damaged=[WEIGHTS, "notes.txt"])
    assert path.read_bytes() == (source / WEIGHTS).read_bytes()
    assert not [file.name for file in check_model(target) if file.is_bad]
    assert (target / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("leads_to", ["gone", WEIGHTS])
def test_a_link_to_nothing_is_refused_and_the_earlier_copy_stays(source: Path, tmp_path: Path, leads_to: str) -> None:
    copy(source, tmp_path / "tiny")
    (source / WEIGHTS).unlink()
    (source / WEIGHTS).symlink_to(leads_to)
    with pytest.raises(ConfigError, match=rf"^model: .*{WEIGHTS} is a link that leads to no file"):
        copy(source, tmp_path / "tiny")
    assert (tmp_path / "tiny" / WEIGHTS).stat().st_size == (tiny.CHECKPOINT / WEIGHTS).stat().st_size
    assert WEIGHTS not in {path.name for path in files_to_copy(source, needs_weights=False)}


@pytest.mark.parametrize("name", ["../x", "/x", "a/b", "..", ".", ""])
def test_a_copy_is_named_as_one_folder(source: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"^name: "):
        copy_target(source, tmp_path / "models", name)
    assert copy_target(source, tmp_path / "models") == tmp_path / "models" / "source"
    assert copy_target(source, tmp_path / "models", "x") == tmp_path / "models" / "x"


def test_no_folder_is_copied_into_itself(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    for copies, name in ((source, None), (source / "deep", "x"), (tmp_path, None), (tmp_path / "link", "x")):
        with pytest.raises(ConfigError, match=r"^cache: .* which is to be copied"):
            copy_target(source, copies, name)
    assert copy_target(source, tmp_path, "source2") == tmp_path / "source2"


def test_a_copy_is_listed_with_what_it_lacks(source: Path, tmp_path: Path) -> None:
    def listed() -> list[CachedModel]:
        return [one for one in cached_models(tmp_path / "models") if one.origin is Origin.COPY]

    started_at = time.time()
    with pytest.raises(BrokenOffError):
        copy(source, tmp_path / "models" / "tiny", break_after=5 * CHUNK)
    [begun] = listed()
    assert "it is being copied, or that broke off" in begun.faults
    for path in files_to_copy(source):
        os.utime(path, (0, 0))
    copy(source, tmp_path / "models" / "tiny")
    [whole] = listed()
    assert whole.faults == ()
    assert whole.changed_at > started_at - 10, "it says when it was copied"
    (tmp_path / "models" / "tiny" / "extra.json").symlink_to("gone")
    [linked] = listed()
    assert linked.faults == ("extra.json is missing: its link leads to no file",)


def test_a_file_that_changes_meanwhile_is_no_copy(source: Path, tmp_path: Path) -> None:
    def change(_: int) -> None:
        (source / WEIGHTS).touch()

    with pytest.raises(ConfigError, match=rf"^model: .*{WEIGHTS} changed while it was copied"):
        copy_model(files_to_copy(source), tmp_path / "tiny", change)
    assert not list((tmp_path / "tiny").glob(f"{WEIGHTS}*"))


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
    assert not list((tmp_path / "tiny").glob("config.json*"))


def test_other_files_and_other_models_are_never_overwritten(source: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"^cache: .*other holds files that are no copy of a model"):
        copy(source, other)
    assert [path.name for path in other.iterdir()] == ["thesis.txt"]
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
