"""Blocks in files: what is whole comes back, whatever happened to the process, and nothing else ever does."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from quartet.errors import ConfigError
from quartet.kvcache.layout import KvLayout
from quartet.kvcache.tiers import BlockName
from quartet.transfer.disk_blocks import DiskBlocks

LAYOUT = KvLayout(model_fingerprint="a model", dtype="uint8", num_layers=2, num_kv_heads=4, head_dim=64, block_size=32)
SIZE = LAYOUT.piece_size_bytes

# Writes blocks 1 and 2, and half of block 3.
PROGRAM = """
import os, sys
from pathlib import Path
from tests.transfer.test_disk_blocks import LAYOUT, data_of, name_of
from quartet.transfer.disk_blocks import DiskBlocks
disk = DiskBlocks(Path(sys.argv[1]), LAYOUT)
for number in (1, 2):
    disk.write(name_of(number), data_of(number))
write = os.write
def write_half(descriptor, data):
    if len(data) < 1000:
        return write(descriptor, data)
    write(descriptor, data[: len(data) // 2])
    print("half", flush=True)
    sys.stdin.read()
os.write = write_half
disk.write(name_of(3), data_of(3))
"""


def name_of(number: int) -> BlockName:
    parent = None if number == 1 else number - 1
    return BlockName(bytes([number]) * 32, bytes([number - 1]) * 32, number, parent)


def data_of(number: int) -> memoryview:
    return memoryview(bytearray([number]) * SIZE)


def read(disk: DiskBlocks, number: int) -> bytes | None:
    into = bytearray(SIZE)
    return bytes(into) if disk.read(name_of(number), memoryview(into)) else None


def file_of(disk: DiskBlocks, number: int) -> Path:
    return disk.folder / f"{name_of(number).digest.hex()}.kv"


def test_blocks_are_found_again_the_least_recently_used_first(tmp_path: Path) -> None:
    disk = DiskBlocks(tmp_path, LAYOUT)
    for number in (1, 2, 3):
        disk.write(name_of(number), data_of(number))
        os.utime(file_of(disk, number), (number, number))
    assert read(disk, 1) == data_of(1)  # which is a use of it
    disk.close()
    again = DiskBlocks(tmp_path, LAYOUT)
    assert again.scan() == [name_of(2), name_of(3), name_of(1)]
    assert [read(again, number) for number in (1, 2, 3)] == [data_of(number) for number in (1, 2, 3)]
    again.close()


def test_a_process_that_is_killed_while_it_writes_leaves_whole_blocks_only(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "half\n"
        child.send_signal(signal.SIGKILL)
        assert child.wait(60) == -signal.SIGKILL
    assert len(list(tmp_path.rglob("*.part"))) == 1
    disk = DiskBlocks(tmp_path, LAYOUT)
    assert set(map(str, disk.scan())) == {str(name_of(1)), str(name_of(2))}
    assert [read(disk, number) for number in (1, 2, 3)] == [data_of(1), data_of(2), None]
    assert not list(tmp_path.rglob("*.part"))
    disk.close()


@pytest.mark.parametrize("place", [0, 8, 12, 17, 50, 80, 120, 135, 150, 165, 1000, -1])
def test_a_block_with_one_wrong_bit_is_deleted_and_not_given_out(tmp_path: Path, place: int) -> None:
    disk = DiskBlocks(tmp_path, LAYOUT)
    disk.write(name_of(1), data_of(1))
    content = bytearray(file_of(disk, 1).read_bytes())
    content[place] ^= 4
    file_of(disk, 1).write_bytes(content)
    assert read(disk, 1) is None
    assert not file_of(disk, 1).exists()
    disk.close()


@pytest.mark.parametrize("size", [0, 10, 160, SIZE, -1, 1])
def test_a_block_of_another_length_is_deleted_and_not_given_out(tmp_path: Path, size: int) -> None:
    disk = DiskBlocks(tmp_path, LAYOUT)
    disk.write(name_of(1), data_of(1))
    content = file_of(disk, 1).read_bytes()
    file_of(disk, 1).write_bytes(content + b"x" if size == 1 else content[:size])
    assert disk.scan() == []
    assert not file_of(disk, 1).exists()
    file_of(disk, 1).write_bytes(content[:size] if size != 1 else content[:-1])
    assert read(disk, 1) is None
    disk.close()


def test_a_file_under_another_ones_name_is_not_given_out(tmp_path: Path) -> None:
    disk = DiskBlocks(tmp_path, LAYOUT)
    disk.write(name_of(1), data_of(1))
    file_of(disk, 1).rename(file_of(disk, 2))
    assert read(disk, 2) is None
    disk.write(name_of(1), data_of(1))
    file_of(disk, 1).rename(file_of(disk, 3))
    (disk.folder / "notes.txt").write_text("not a block")
    assert disk.scan() == []
    disk.close()


def test_a_block_of_another_model_or_layout_is_never_found(tmp_path: Path) -> None:
    disk = DiskBlocks(tmp_path, LAYOUT)
    disk.write(name_of(1), data_of(1))
    for other in (replace(LAYOUT, model_fingerprint="another"), replace(LAYOUT, num_kv_heads=8, head_dim=32)):
        foreign = DiskBlocks(tmp_path, other)
        assert foreign.scan() == []
        foreign_file = foreign.folder / file_of(disk, 1).name
        foreign_file.write_bytes(file_of(disk, 1).read_bytes())
        assert read(foreign, 1) is None
        foreign_file.write_bytes(file_of(disk, 1).read_bytes())
        assert foreign.scan() == []
        foreign.close()
    assert read(disk, 1) == data_of(1)
    disk.close()


def test_two_pools_with_one_path_have_folders_of_their_own(tmp_path: Path) -> None:
    first, second = DiskBlocks(tmp_path, LAYOUT), DiskBlocks(tmp_path, LAYOUT)
    first.write(name_of(1), data_of(1))
    assert second.scan() == []
    first.close()
    third = DiskBlocks(tmp_path, LAYOUT)
    assert third.scan() == [name_of(1)]
    second.close()
    third.close()


def test_a_folder_that_another_process_deletes_just_then_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = fcntl.flock

    def delete_before(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        [path] = tmp_path.rglob("lock")
        path.unlink()
        path.parent.rmdir()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", delete_before)
    disk = DiskBlocks(tmp_path, LAYOUT)
    disk.write(name_of(1), data_of(1))
    assert read(disk, 1) == data_of(1)
    disk.close()


def other_folder(path: Path, number: int, *, used_at: float) -> DiskBlocks:
    """The folder of another model, with three blocks, of a process that has ended."""
    disk = DiskBlocks(path, replace(LAYOUT, model_fingerprint=f"model {number}"))
    for block in (1, 2, 3):
        disk.write(name_of(block), data_of(block))
    disk.close()
    os.utime(disk.folder, (used_at, used_at))
    return disk


def test_folders_of_other_models_take_no_more_than_they_may(tmp_path: Path) -> None:
    now = time.time()
    others = [other_folder(tmp_path, number, used_at=now - 10_000 - number) for number in range(4)]
    size_bytes = 3 * file_of(others[0], 1).stat().st_size
    (others[2].folder / "notes.txt").write_text("of somebody else")
    os.utime(others[2].folder, (now - 10_002, now - 10_002))
    disk, twin = DiskBlocks(tmp_path, LAYOUT), DiskBlocks(tmp_path, LAYOUT)
    twin.write(name_of(1), data_of(1))
    twin.close()
    disk.trim_others(2 * size_bytes)
    assert [other.folder.exists() for other in others] == [True, True, True, False]
    assert sorted(path.name for path in others[2].folder.iterdir()) == ["lock", "notes.txt"]
    assert file_of(twin, 1).exists(), "another process of this model finds it again"
    disk.trim_others(2 * size_bytes)
    assert file_of(others[1], 1).exists(), "they fit"
    disk.close()


def test_a_folder_that_is_held_or_was_used_lately_or_is_not_ours_stays(tmp_path: Path) -> None:
    old = time.time() - 10_000
    lately, held, foreign = (
        other_folder(tmp_path, 1, used_at=time.time() - 60),
        other_folder(tmp_path, 2, used_at=old),
        other_folder(tmp_path, 3, used_at=old),
    )
    holder = DiskBlocks(tmp_path, replace(LAYOUT, model_fingerprint="model 2"))
    os.utime(held.folder, (old, old))
    (foreign.folder / "lock").write_text("of somebody else")
    disk = DiskBlocks(tmp_path, LAYOUT)
    disk.trim_others(0)
    assert all(len(list(other.folder.glob("*.kv"))) == 3 for other in (lately, held, foreign))
    holder.close()
    os.utime(held.folder, (old, old))
    disk.trim_others(0)
    assert [other.folder.exists() for other in (lately, held, foreign)] == [True, False, True]
    disk.close()


def test_the_measured_read_is_not_of_what_the_system_has_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda _descriptor: calls.append("written"))
    monkeypatch.setattr(os, "posix_fadvise", lambda *arguments: calls.append(f"forgotten {arguments[1:]}"))
    disk = DiskBlocks(tmp_path, LAYOUT)
    monkeypatch.setattr(disk, "read", lambda _name, _into: calls.append("read"))
    assert disk.probe(data_of(1)) >= 0
    assert calls == ["written", f"forgotten {(0, 0, os.POSIX_FADV_DONTNEED)}", "read"]
    disk.close()


def test_a_write_that_fails_says_so_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = DiskBlocks(tmp_path, LAYOUT)

    def fail(*_args: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="no space"):
        disk.write(name_of(1), data_of(1))
    assert [path.name for path in disk.folder.iterdir()] == ["lock"]
    disk.close()


def test_a_path_that_can_t_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ConfigError, match=r"^cache\.disk\.path: .*file"):
        DiskBlocks(tmp_path / "file", LAYOUT)
