"""``file:`` URLs (RFC 8089): files of this machine, below the directories that are allowed."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit

from quartet.errors import InvalidMediaError, MediaFetchError, MediaNotAllowedError, MediaTooLargeError

# A FIFO nobody writes to must not hold us up; what is opened is looked at before it is read.
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC


class LocalFiles:
    """Regular files below some directories. Links are followed first and what they lead to is checked."""

    def __init__(self, directories: Sequence[Path], max_size_bytes: int) -> None:
        self._directories = [os.fsencode(directory) for directory in directories]
        self._max_size_bytes = max_size_bytes

    def read(self, url: str) -> bytes:
        """The file that ``url`` names; blocks.

        Raises:
            InvalidMediaError: a malformed URL, or no regular file.
            MediaFetchError: not there, or not readable.
            MediaNotAllowedError: outside of the directories, whether it is there or not.
            MediaTooLargeError: more bytes than allowed.
        """
        path = os.path.realpath(_path_of(url))
        for directory in map(os.path.realpath, self._directories):
            if path != directory and os.path.commonpath((path, directory)) == directory:
                return self._read_below(directory, os.path.relpath(path, directory))
        raise MediaNotAllowedError("files there are not allowed here")

    def _read_below(self, directory: bytes, relative_path: bytes) -> bytes:
        try:
            descriptor = _open_below(directory, relative_path)
            try:
                return self._read_regular(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise MediaFetchError("there is no such file, or it cannot be read") from error

    def _read_regular(self, descriptor: int) -> bytes:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise InvalidMediaError("there is something else than a regular file")
        if status.st_size > self._max_size_bytes:
            raise MediaTooLargeError(f"the file has more than the {self._max_size_bytes} bytes allowed")
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(status.st_size + 1)
        if len(data) != status.st_size:
            raise MediaFetchError("the file changed while it was read")
        return data


def _path_of(url: str) -> bytes:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise InvalidMediaError("the URL is malformed") from error
    if parts.netloc.lower() not in ("", "localhost"):
        raise MediaNotAllowedError("files of other hosts are not allowed here")
    path = unquote_to_bytes(parts.path)
    if not path.startswith(b"/") or b"\0" in path or "?" in url or "#" in url:
        raise InvalidMediaError("the URL must be file:// with an absolute path, and nothing behind it")
    return path


def _open_below(directory: bytes, relative_path: bytes) -> int:
    """A descriptor of the file; the caller closes it.

    No step follows a link: the path has none left in it, so one that is met was put there after the path was checked.
    """
    *parents, name = relative_path.split(b"/")
    parent = os.open(directory, _DIRECTORY_FLAGS)
    try:
        for step in parents:
            child = os.open(step, _DIRECTORY_FLAGS, dir_fd=parent)
            os.close(parent)
            parent = child
        return os.open(name, _FILE_FLAGS, dir_fd=parent)
    finally:
        os.close(parent)
