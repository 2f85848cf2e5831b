"""What is particular to the registry in a directory."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from quartet.discovery.base import Role, Synchronised, WorkerAdded
from quartet.discovery.create import DiscoveryConfig, DiscoveryKind
from quartet.discovery.etcd_client import EtcdConfig
from quartet.discovery.file import FileConfig, FileRegistry
from quartet.discovery.record_json import to_json
from quartet.errors import DiscoveryError, WorkerReplacedError
from tests.discovery.backends import touch_for_good
from tests.discovery.records import TIMEOUT_S, eventually, make_record, next_event


async def test_a_living_workers_file_outlives_its_time_to_live(tmp_path: Path) -> None:
    registry = FileRegistry(FileConfig(directory=tmp_path, ttl_s=0.3))
    await registry.register(make_record())
    [path] = (tmp_path / "default").iterdir()
    deadline = path.stat().st_mtime + 2 * 0.3

    async def is_older_than_two_ttls() -> bool:
        return path.stat().st_mtime > deadline

    await eventually(is_older_than_two_ttls)
    assert await registry.workers() == [make_record()]
    await registry.close()


async def test_a_file_that_its_worker_no_longer_touches_is_gone_after_its_time_to_live(tmp_path: Path) -> None:
    registry = FileRegistry(FileConfig(directory=tmp_path, ttl_s=5))
    await registry.register(make_record())
    [path] = (tmp_path / "default").iterdir()
    assert path.name == "decode.decode-0.json"
    os.utime(path, (time.time() - 6, time.time() - 6))
    assert await FileRegistry(FileConfig(directory=tmp_path, ttl_s=5)).workers() == []
    await registry.close()


async def test_a_deleted_file_comes_back_while_its_worker_lives(tmp_path: Path) -> None:
    registry = FileRegistry(FileConfig(directory=tmp_path, ttl_s=0.3))
    await registry.register(make_record())
    [path] = (tmp_path / "default").iterdir()
    path.unlink()

    async def is_back() -> bool:
        return await registry.workers() == [make_record()]

    await eventually(is_back)
    await registry.close()
    assert list((tmp_path / "default").iterdir()) == []


async def test_a_worker_takes_its_file_back_from_another_that_died_with_it(tmp_path: Path) -> None:
    registry = FileRegistry(FileConfig(directory=tmp_path, ttl_s=0.3))
    await registry.register(make_record())
    [path] = (tmp_path / "default").iterdir()
    other = tmp_path / "other"
    other.write_bytes(to_json(make_record(epoch=1)))
    os.utime(other, (time.time() - 1, time.time() - 1))
    other.replace(path)

    async def is_back() -> bool:
        return await registry.workers() == [make_record()]

    await eventually(is_back)
    await registry.close()


async def test_a_life_that_was_frozen_between_look_and_write_does_not_take_its_id_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    former = FileRegistry(FileConfig(directory=tmp_path, ttl_s=0.3))
    registration = await former.register(make_record(epoch=1))
    [path] = (tmp_path / "default").iterdir()
    living = to_json(make_record(epoch=2))
    is_expired = FileConfig.is_expired

    def replaced_after(self: FileConfig, status: os.stat_result) -> bool:
        was_expired = is_expired(self, status)
        if was_expired and path.read_bytes() == stale:
            new = path.with_name("new")
            new.write_bytes(living)
            touch_for_good(new)
            new.replace(path)
        return was_expired

    # It finds a file that expired, and then the next life comes.
    stale = to_json(make_record(epoch=3))
    monkeypatch.setattr(FileConfig, "is_expired", replaced_after)
    path.write_bytes(stale)
    os.utime(path, (time.time() - 1, time.time() - 1))
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(WorkerReplacedError):
            await registration.ended()
    assert path.read_bytes() == living
    await former.close()
    assert path.read_bytes() == living
    assert [file.name for file in path.parent.iterdir()] == [path.name], "nothing is left beside it"


async def test_a_frozen_life_whose_id_went_to_another_role_does_not_revive_its_file(tmp_path: Path) -> None:
    former = FileRegistry(FileConfig(directory=tmp_path, ttl_s=0.3))
    registration = await former.register(make_record("both"))
    [path] = (tmp_path / "default").iterdir()
    # In one step: it expires, and the id is another's.
    os.utime(path, (time.time() - 5, time.time() - 5))
    other = path.with_name("prefill.both.json")
    other.write_bytes(to_json(make_record("both", role=Role.PREFILL)))
    touch_for_good(other)
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(WorkerReplacedError, match="worker_id both is taken by"):
            await registration.ended()
    await former.close()


async def test_a_file_in_place_of_the_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "default").write_text("a file")
    registry = FileRegistry(FileConfig(directory=tmp_path))
    with pytest.raises(DiscoveryError, match="cannot write"):
        await registry.register(make_record())
    with pytest.raises(DiscoveryError, match="cannot read"):
        await registry.workers()


async def test_a_directory_that_breaks_removes_no_worker_and_heals(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.mkdir()
    bad.write_text("a file")
    _point(tmp_path / "default", good)
    registry = FileRegistry(FileConfig(directory=tmp_path, poll_interval_s=0.01))
    await registry.register(make_record())
    watch = registry.watch()
    assert [await next_event(watch), await next_event(watch)] == [WorkerAdded(make_record()), Synchronised()]

    _point(tmp_path / "default", bad)

    async def has_seen_it() -> bool:
        return "cannot read" in caplog.text

    await eventually(has_seen_it)
    _point(tmp_path / "default", good)
    second = make_record("prefill-0", role=Role.PREFILL)
    await registry.register(second)
    assert await next_event(watch) == WorkerAdded(second)
    await registry.close()


def _directory(path: Path) -> None:
    path.mkdir()


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


def _link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def _too_long(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


_KINDS = [_directory, _fifo, _unix_socket, _too_long]


@pytest.mark.parametrize("put", [*_KINDS, _link_to_itself])
async def test_an_entry_that_is_no_record_hides_no_worker_and_is_logged_once(
    put: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "default").mkdir()
    put(tmp_path / "default" / "decode.bad.json")
    registry = FileRegistry(FileConfig(directory=tmp_path, poll_interval_s=0.01))
    async with asyncio.timeout(TIMEOUT_S):
        watch = registry.watch()
        assert await next_event(watch) == Synchronised()
        for record in (make_record(), make_record("prefill-0", role=Role.PREFILL)):
            await registry.register(record)
            assert await next_event(watch) == WorkerAdded(record)
        assert len(await registry.workers()) == 2
        await registry.close()
    assert len(caplog.messages) == 1
    assert "decode/bad" in caplog.messages[0]


@pytest.mark.parametrize("put", [_directory, _fifo, _unix_socket])
async def test_what_is_no_file_takes_no_workers_id(put: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "default").mkdir()
    put(tmp_path / "default" / "prefill.decode-0.json")
    registry = FileRegistry(FileConfig(directory=tmp_path))
    async with asyncio.timeout(TIMEOUT_S):
        await registry.register(make_record())
    assert await registry.workers() == [make_record()]
    await registry.close()


@pytest.mark.parametrize("put", _KINDS)
async def test_a_worker_takes_its_file_back_from_what_is_no_record(put: Callable[[Path], None], tmp_path: Path) -> None:
    registry = FileRegistry(FileConfig(directory=tmp_path, ttl_s=0.3))
    await registry.register(make_record())
    [path] = (tmp_path / "default").iterdir()
    path.unlink()
    put(path)

    async def is_back() -> bool:
        return await registry.workers() == [make_record()]

    await eventually(is_back)
    await registry.close()


async def test_a_file_that_cannot_be_read_for_a_moment_removes_its_worker_only_after_its_time_to_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = FileConfig(directory=tmp_path)
    reader = FileRegistry(config)
    path = tmp_path / "default" / "decode.decode-0.json"
    path.parent.mkdir()
    path.write_bytes(to_json(make_record()))
    began_at = time.time()
    os.utime(path, (began_at, began_at))
    assert await reader.workers() == [make_record()]

    def fail(*_args: object) -> int:
        raise OSError(errno.EIO, "the disk is broken")

    with monkeypatch.context() as broken:
        broken.setattr(os, "open", fail)
        os.utime(path, (began_at + 1, began_at + 1))
        for _ in range(3):
            assert await reader.workers() == [make_record()]
        broken.setattr(time, "time", lambda: began_at + config.ttl_s + 0.5)
        assert await reader.workers() == [], "what was read of it is too old, though it is touched on"
    assert await reader.workers() == [make_record()]
    assert len(caplog.messages) == 1
    assert "the disk is broken" in caplog.messages[0]


def _point(link: Path, target: Path) -> None:
    """Let ``link`` lead to ``target``, in one step."""
    new = link.with_name("new")
    new.symlink_to(target)
    new.replace(link)


def test_a_configuration_knows_the_namespace_of_its_kind(tmp_path: Path) -> None:
    etcd, file = EtcdConfig(namespace="pool-a"), FileConfig(directory=tmp_path, namespace="pool-b")
    assert DiscoveryConfig(etcd=etcd).namespace == "pool-a"
    assert DiscoveryConfig(kind=DiscoveryKind.FILE, etcd=etcd, file=file).namespace == "pool-b"
