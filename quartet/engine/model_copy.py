"""Copies a model's folder, such as one on a network's file system, to a faster disk: resumed, with digests."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from quartet.engine.model_check import SUMS_FILE, read_sums
from quartet.engine.model_source import is_model_file
from quartet.errors import ConfigError

_PART = ".part"
_LOCK_FILE = ".lock"
_ORIGIN = "# copied from "
_READ_SIZE_BYTES = 1 << 24


def copies_folder() -> Path:
    """Where copies are kept: ``quartet/models`` in ``XDG_CACHE_HOME``, or in ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quartet" / "models"


def files_to_copy(source: Path, *, needs_weights: bool = True) -> list[Path]:
    """The files of ``source`` that serve a model, by name: what would be fetched of a repository.

    Raises:
        ConfigError: field ``model``; there is no such folder, or no ``config.json`` in it.
    """
    try:
        files = sorted(path for path in source.iterdir() if path.is_file())
    except OSError as error:
        raise ConfigError(f"model: {source} can't be read: {error.strerror}") from error
    if not (source / "config.json").is_file():
        raise ConfigError(f"model: {source} holds no config.json")
    return [path for path in files if is_model_file(path.name, needs_weights=needs_weights)]


def copy_model(files: Sequence[Path], target: Path, on_copied: Callable[[int], object] = lambda _: None) -> None:
    """Make ``target`` a copy of ``files``, with their digests in ``SHA256SUMS``. Blocks until then.

    What an earlier call copied is not copied again, unless the file has changed since; a file begun is gone on with.
    Files that an earlier call copied and that are no longer among ``files`` are deleted. Digests are of what was read;
    whether it came to the disk whole is for ``check_model`` to say.

    Args:
        files: of one folder.
        target: made if there is none.
        on_copied: called with each number of bytes that need no more be copied.

    Raises:
        ConfigError: field ``cache``; ``target`` holds something else, has too little room, can't be written, or another
            process copies to it; field ``model``; a file can't be read, changes meanwhile, or does not have the digest
            that ``SHA256SUMS`` beside it says.
    """
    source = files[0].parent.resolve()
    try:
        target.mkdir(parents=True, exist_ok=True)
        with _locked(target):
            _copy(source, files, target, on_copied)
    except OSError as error:
        raise ConfigError(f"cache: {target} can't be written: {error.strerror or error}") from error


def origin_of(folder: Path) -> Path | None:
    """The folder that ``folder`` is a copy of; ``None``: it is none. Raises ``OSError``."""
    with suppress(FileNotFoundError), (folder / SUMS_FILE).open(encoding="utf-8", errors="replace") as file:
        first = file.readline().rstrip("\n")
        if first.startswith(_ORIGIN):
            return Path(first.removeprefix(_ORIGIN))
    return None


def is_whole_copy(folder: Path) -> bool:
    """Whether no file of a copy is still on its way. Raises ``OSError``."""
    return not any(path.suffix == _PART for path in folder.iterdir())


def _copy(source: Path, files: Sequence[Path], target: Path, on_copied: Callable[[int], object]) -> None:
    origin = origin_of(target)
    if origin is None and any(path.name != _LOCK_FILE for path in target.iterdir()):
        raise ConfigError(f"cache: {target} holds files that are no copy of a model: name the copy otherwise")
    if origin not in (None, source):
        raise ConfigError(f"cache: {target} is a copy of {origin}: name the copy of {source} otherwise")
    expected, done = read_sums(source), read_sums(target)
    _drop_leftovers(target, {path.name for path in files}, done)
    todo = [path for path in files if not (path.name in done and _is_same(path, target / path.name))]
    for path in files:
        if path not in todo:
            on_copied(path.stat().st_size)
    _demand_room(todo, target)
    sums = {name: digest for name, digest in done.items() if name in {path.name for path in files} - _names(todo)}
    _write_sums(target, source, sums)
    for path in todo:
        sums[path.name] = _copy_file(path, target / path.name, expected.get(path.name), on_copied)
        _write_sums(target, source, sums)


def _names(files: Sequence[Path]) -> set[str]:
    return {path.name for path in files}


def _drop_leftovers(target: Path, names: set[str], done: dict[str, str]) -> None:
    for path in list(target.iterdir()):
        name = path.name.removesuffix(_PART)
        if name not in names and (path.suffix == _PART or name in done):
            path.unlink()


def _is_same(path: Path, copy: Path) -> bool:
    """Whether ``copy`` is as long as ``path``, and not older."""
    try:
        there, here = path.stat(), copy.stat()
    except FileNotFoundError:
        return False
    return there.st_size == here.st_size and there.st_mtime_ns <= here.st_mtime_ns


def _demand_room(files: Sequence[Path], target: Path) -> None:
    begun = sum(part.stat().st_size for part in target.glob(f"*{_PART}"))
    needed, free = sum(path.stat().st_size for path in files) - begun, shutil.disk_usage(target).free
    if needed > free:
        raise ConfigError(f"cache: {target} has {free / 1e9:.1f} GB left, and {needed / 1e9:.1f} GB are to be copied")


def _copy_file(path: Path, copy: Path, expected: str | None, on_copied: Callable[[int], object]) -> str:
    """Copy one file, and return the SHA-256 of what was read."""
    part = copy.with_name(copy.name + _PART)
    before = path.stat()
    # A part begun before the file's last change is of another file.
    if part.exists() and (part.stat().st_mtime_ns < before.st_mtime_ns or part.stat().st_size > before.st_size):
        part.unlink()
    digest = hashlib.sha256()
    with part.open("a+b", buffering=0) as written, _opened(path) as read:
        written.seek(0)
        for chunk in _chunks(written.read):
            digest.update(chunk)
            on_copied(len(chunk))
        read.seek(written.tell())
        for chunk in _chunks(lambda size: _read(path, read, size)):
            digest.update(chunk)
            written.write(chunk)
            on_copied(len(chunk))
        os.fsync(written.fileno())
        # Who checks the copy is to read the disk, not what memory still holds.
        os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    after, actual = path.stat(), digest.hexdigest()
    if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        part.unlink()
        raise ConfigError(f"model: {path} changed while it was copied")
    if expected not in (None, actual):
        part.unlink()
        raise ConfigError(f"model: {path} does not have the digest that {SUMS_FILE} beside it says")
    part.rename(copy)
    return actual


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        file = path.open("rb", buffering=0)
    except OSError as error:
        raise _unreadable(path, error) from error
    with file:
        yield file


def _read(path: Path, file: Any, size: int) -> bytes:
    try:
        return bytes(file.read(size))
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"model: {path} can't be read: {error.strerror}")


def _chunks(read: Callable[[int], bytes]) -> Iterator[bytes]:
    while chunk := read(_READ_SIZE_BYTES):
        yield chunk


def _write_sums(target: Path, source: Path, sums: dict[str, str]) -> None:
    lines = [f"{_ORIGIN}{source}", *(f"{digest}  {name}" for name, digest in sorted(sums.items()))]
    new = target / f"{SUMS_FILE}{_PART}"
    new.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    new.rename(target / SUMS_FILE)


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Hold ``target``'s lock, which ends with the process."""
    with (target / _LOCK_FILE).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"cache: another process copies to {target}") from None
        yield
