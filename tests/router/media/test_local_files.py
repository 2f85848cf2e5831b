"""``file:`` URLs with real files, links and other things that lie in directories."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from quartet.errors import InvalidMediaError, MediaFetchError, MediaNotAllowedError, MediaTooLargeError
from router.media import fetch
from router.media.config import MediaConfig
from router.media.fetch import LocalFiles
from tests.router.media.conftest import MakeFetcher
from tests.router.media.site import PNG, fetch_one, num_open_files

MAX_SIZE_BYTES = 1000


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """The directory that is allowed. Beside it lies ``outside/secret``."""
    pictures = tmp_path / "pictures"
    (pictures / "deep" / "er").mkdir(parents=True)
    (pictures / "a.png").write_bytes(b"a")
    (pictures / "deep" / "er" / "ü b.png").write_bytes(b"b")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_bytes(b"secret")
    (tmp_path / "pictures2").mkdir()
    (tmp_path / "pictures2" / "a.png").write_bytes(b"another's")
    return pictures


@pytest.fixture
def files(pictures: Path) -> LocalFiles:
    return LocalFiles([pictures], MAX_SIZE_BYTES)


@pytest.mark.parametrize("data", [b"", b"longer"])
def test_a_file_that_changes_while_it_is_read_is_not_taken(
    data: bytes, files: LocalFiles, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fstat = pictures / "a.png", os.fstat

    def change(descriptor: int) -> os.stat_result:
        status = fstat(descriptor)
        path.write_bytes(data)
        return status

    monkeypatch.setattr(os, "fstat", change)
    with pytest.raises(MediaFetchError, match="changed"):
        files.read(path.as_uri())


async def test_a_picture_below_an_allowed_directory_is_fetched(pictures: Path, make_fetcher: MakeFetcher) -> None:
    (pictures / "a.png").write_bytes(PNG)
    fetcher = make_fetcher(MediaConfig(allowed_local_paths=(pictures,)))
    assert await fetch_one(fetcher, (pictures / "a.png").as_uri()) == PNG
    with pytest.raises(MediaNotAllowedError) as caught:
        await fetch_one(fetcher, (pictures.parent / "outside" / "secret").as_uri())
    assert caught.value.field == "media[0].url"


def test_paths_are_read_as_urls_spell_them(files: LocalFiles, pictures: Path) -> None:
    assert files.read((pictures / "deep" / "er" / "ü b.png").as_uri()) == b"b"
    assert files.read(f"FILE://localhost{pictures}/a.png") == b"a"
    assert files.read(f"file:{pictures}/a.png") == b"a"
    assert files.read(f"file://{pictures}/deep/../a.png") == b"a"
    assert files.read(f"file://{pictures}/deep/%2e%2e/%61.png") == b"a"


def test_links_are_followed_and_their_targets_are_checked(files: LocalFiles, pictures: Path) -> None:
    (pictures / "inside").symlink_to("deep/er/ü b.png")
    (pictures / "deeper").symlink_to("deep/er")
    (pictures / "out").symlink_to("../outside/secret")
    (pictures / "out_directory").symlink_to("../outside")
    (pictures / "other").symlink_to(pictures.parent / "pictures2")
    assert files.read(f"file://{pictures}/inside") == b"b"
    assert files.read(f"file://{pictures}/deeper/ü%20b.png") == b"b"
    for path in ("out", "out_directory/secret", "other/a.png"):
        with pytest.raises(MediaNotAllowedError):
            files.read(f"file://{pictures}/{path}")


def test_an_allowed_directory_may_itself_be_a_link(pictures: Path) -> None:
    link = pictures.parent / "link"
    link.symlink_to(pictures)
    files = LocalFiles([link], MAX_SIZE_BYTES)
    assert files.read(f"file://{link}/a.png") == b"a"
    assert files.read(f"file://{pictures}/a.png") == b"a"


@pytest.mark.parametrize(
    "path",
    [
        "../outside/secret",
        "%2e%2e/outside/secret",
        "deep/../../outside/secret",
        "../outside/nothing",
        "",
        ".",
        "../pictures2/a.png",
    ],
)
def test_paths_outside_the_directory_are_refused_alike_whether_they_exist_or_not(
    path: str, files: LocalFiles, pictures: Path
) -> None:
    with pytest.raises(MediaNotAllowedError):
        files.read(f"file://{pictures}/{path}")


@pytest.mark.parametrize("host", ["images.test", "127.0.0.1", "user@localhost"])
def test_files_of_other_hosts_are_refused(host: str, files: LocalFiles, pictures: Path) -> None:
    with pytest.raises(MediaNotAllowedError, match="other hosts"):
        files.read(f"file://{host}{pictures}/a.png")


@pytest.mark.parametrize("rest", ["/a.png?x", "/a.png#x", "/a.png%00", "/a.png?"])
def test_a_url_that_is_no_plain_path_is_refused(rest: str, files: LocalFiles, pictures: Path) -> None:
    with pytest.raises(InvalidMediaError):
        files.read(f"file://{pictures}{rest}")


def test_a_relative_path_is_refused(files: LocalFiles) -> None:
    for url in ("file:a.png", "file:", "file://", "file://["):
        with pytest.raises(InvalidMediaError):
            files.read(url)


@pytest.mark.parametrize("kind", ["fifo", "socket", "directory", "device"])
def test_a_path_that_is_no_regular_file_is_refused_at_once(kind: str, files: LocalFiles, pictures: Path) -> None:
    path = pictures / kind
    num_files = num_open_files()
    with socket.socket(socket.AF_UNIX) as unix:
        match kind:
            case "fifo":
                os.mkfifo(path)
            case "socket":
                unix.bind(os.path.relpath(path))
            case "directory":
                path.mkdir()
            case "device":
                files = LocalFiles([Path("/dev")], MAX_SIZE_BYTES)
                path = Path("/dev/zero")
        with pytest.raises((InvalidMediaError, MediaFetchError)):
            files.read(f"file://{path}")
    assert num_open_files() == num_files


def test_a_missing_file_and_a_loop_of_links_are_refused(files: LocalFiles, pictures: Path) -> None:
    (pictures / "loop").symlink_to("loop")
    num_files = num_open_files()
    for path in ("nothing", "deep/nothing/a.png", "a.png/b.png", "loop", "n" * 300):
        with pytest.raises(MediaFetchError):
            files.read(f"file://{pictures}/{path}")
    assert num_open_files() == num_files


def test_more_bytes_than_allowed_are_not_read(files: LocalFiles, pictures: Path) -> None:
    (pictures / "a.png").write_bytes(bytes(MAX_SIZE_BYTES))
    assert files.read(f"file://{pictures}/a.png") == bytes(MAX_SIZE_BYTES)
    # Sparse: to read it would take all memory.
    os.truncate(pictures / "a.png", 1 << 40)
    num_files = num_open_files()
    with pytest.raises(MediaTooLargeError):
        files.read(f"file://{pictures}/a.png")
    assert num_open_files() == num_files


@pytest.mark.parametrize("swapped", ["deep/er/ü b.png", "deep/er", "deep"])
def test_a_link_put_there_after_the_check_is_not_followed(
    swapped: str, files: LocalFiles, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = pictures.parent / "elsewhere"
    open_below = fetch._open_below

    def swap_then_open(directory: bytes, relative_path: bytes) -> int:
        (pictures / swapped).rename(elsewhere)
        (pictures / swapped).symlink_to(elsewhere)
        return open_below(directory, relative_path)

    url = (pictures / "deep" / "er" / "ü b.png").as_uri()
    assert files.read(url) == b"b"
    monkeypatch.setattr(fetch, "_open_below", swap_then_open)
    num_files = num_open_files()
    with pytest.raises(MediaFetchError):
        files.read(url)
    assert num_open_files() == num_files
