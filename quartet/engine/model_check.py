"""Whether a model's files are whole: all there, each of the length that it says, with the digest that it should have.

A file's digest is known where the Hub's cache keeps it (a file's name there is its SHA-256, or git's digest of a small
file), or where the folder has ``SHA256SUMS``, as ``sha256sum`` writes it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from quartet.engine.fingerprint import weight_files
from quartet.errors import ConfigError

#: The file of digests in a folder: lines of ``DIGEST  NAME``, as ``sha256sum`` writes and checks them.
SUMS_FILE = "SHA256SUMS"

_INDEX_FILE = "model.safetensors.index.json"
_LENGTH = struct.Struct("<Q")
# The format's own limit.
_MAX_HEADER_SIZE_BYTES = 100_000_000
_READ_SIZE_BYTES = 1 << 24
_SHA256, _GIT_SHA1 = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")
_SUM_LINE = re.compile(r"\\?([0-9a-f]{64}) [ *](.+)")


class FileVerdict(StrEnum):
    """What a check of one file found."""

    WHOLE = "whole"
    NO_DIGEST = "no digest known"
    DAMAGED = "damaged"
    MISSING = "missing"


@dataclass(frozen=True)
class CheckedFile:
    """One file of a model.

    Attributes:
        why: of what is damaged or missing; else empty.
    """

    name: str
    size_bytes: int
    verdict: FileVerdict
    why: str = ""

    @property
    def is_bad(self) -> bool:
        """Whether a model with this file can't be served, or not as what it is."""
        return self.verdict in (FileVerdict.DAMAGED, FileVerdict.MISSING)


def check_model(folder: Path, on_read: Callable[[int], object] = lambda _: None) -> list[CheckedFile]:
    """Read all files of a model and compare them with their digests, by name; those that should be there come last.

    Args:
        folder: as Hugging Face lays it out; files in its folders don't count.
        on_read: called with each number of bytes that was read.

    Raises:
        ConfigError: field ``model``; there is no such folder, or it or a file in it can't be read.
    """
    try:
        sums = read_sums(folder)
        found = [_check(path, sums.get(path.name), on_read) for path in model_files(folder)]
    except OSError as error:
        raise ConfigError(f"model: {error.filename or folder} can't be read: {error.strerror or error}") from error
    names = {file.name for file in found}
    listed = [
        CheckedFile(name, 0, FileVerdict.MISSING, f"{SUMS_FILE} lists it") for name in sorted(sums) if name not in names
    ]
    needed = [CheckedFile(name, 0, FileVerdict.MISSING, why) for name, why in missing_files(folder)]
    return [*found, *{file.name: file for file in listed + needed}.values()]


def model_files(folder: Path) -> list[Path]:
    """The files of a folder by name, without ``SHA256SUMS``, hidden ones and folders. Raises ``OSError``."""
    paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    # A link to what is gone is listed, too: reading it says so.
    return [path for path in paths if not path.is_dir() and path.name != SUMS_FILE]


def missing_files(folder: Path) -> Iterator[tuple[str, str]]:
    """What a model needs and ``folder`` lacks: names, and what asks for them. Reads only small files."""
    if not (folder / "config.json").is_file():
        yield "config.json", "every model has one"
    try:
        index = json.loads((folder / _INDEX_FILE).read_bytes())
        needed = sorted(set(index["weight_map"].values()))
    except FileNotFoundError:
        if not weight_files(folder):
            yield "*.safetensors", "there are no weights"
        return
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        yield _INDEX_FILE, "it is there, but can't be read"
        return
    for name in needed:
        if not (folder / str(name)).is_file():
            yield str(name), f"{_INDEX_FILE} lists it"


def weights_fault(path: Path) -> str:
    """What is wrong with the frame of a safetensors file, such as a length other than its header's; else empty.

    Reads only the header. Raises ``OSError``.
    """
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(_LENGTH.size)
        if len(start) < _LENGTH.size:
            return "it is too short"
        (header_size_bytes,) = _LENGTH.unpack(start)
        if header_size_bytes > min(_MAX_HEADER_SIZE_BYTES, size_bytes - _LENGTH.size):
            return "its header is longer than it may be"
        header = file.read(header_size_bytes)
    try:
        tensors = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        end = max((int(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return "its header can't be read"
    expected = _LENGTH.size + header_size_bytes + end
    return "" if expected == size_bytes else f"it has {size_bytes:,} bytes, and should have {expected:,}"


def read_sums(folder: Path) -> dict[str, str]:
    """SHA-256 by file name, of ``SHA256SUMS`` in ``folder``; empty without one. Raises ``OSError``."""
    try:
        text = (folder / SUMS_FILE).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return {}
    matches = (_SUM_LINE.fullmatch(line) for line in text.splitlines())
    return {match[2]: match[1] for match in matches if match is not None and "/" not in match[2]}


def sha256_of(path: Path, on_read: Callable[[int], object] = lambda _: None) -> str:
    """The SHA-256 of a file's content. Raises ``OSError``."""
    return _digest(hashlib.sha256(), path, on_read)


def _check(path: Path, listed: str | None, on_read: Callable[[int], object]) -> CheckedFile:
    blob = Path(os.path.realpath(path))
    try:
        size_bytes = blob.stat().st_size
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP):
            raise
        return CheckedFile(path.name, 0, FileVerdict.MISSING, "its link leads to no file")
    fault = weights_fault(path) if path.suffix == ".safetensors" else ""
    expected, digest = listed, hashlib.sha256()
    if expected is None and blob.parent.name == "blobs":
        if _SHA256.fullmatch(blob.name):
            expected = blob.name
        elif _GIT_SHA1.fullmatch(blob.name):
            expected = blob.name
            digest = hashlib.sha1(b"blob %d\0" % size_bytes, usedforsecurity=False)
    if fault:
        return CheckedFile(path.name, size_bytes, FileVerdict.DAMAGED, fault)
    if expected is None:
        return CheckedFile(path.name, size_bytes, FileVerdict.NO_DIGEST)
    actual = _digest(digest, path, on_read)
    if actual != expected:
        why = f"its digest is {actual[:12]}..., and should be {expected[:12]}..."
        return CheckedFile(path.name, size_bytes, FileVerdict.DAMAGED, why)
    return CheckedFile(path.name, size_bytes, FileVerdict.WHOLE)


def _digest(digest: hashlib._Hash, path: Path, on_read: Callable[[int], object]) -> str:
    buffer = bytearray(min(_READ_SIZE_BYTES, max(path.stat().st_size, 1)))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(memoryview(buffer)[:size])
            on_read(size)
    return digest.hexdigest()
