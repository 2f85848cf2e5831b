"""Copies a model's folder, such as one on a network's file system, to a faster disk: resumed, with digests."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
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
        ConfigError: field ``model``; there is no such folder, no ``config.json`` in it, or a file is a link to nothing.
    """
    try:
        found = sorted(source.iterdir())
    except OSError as error:
        raise ConfigError(f"model: {source} can't be read: {error.strerror}") from error
    wanted = [path for path in found if is_model_file(path.name, needs_weights=needs_weights)]
    for path in wanted:
        if path.is_symlink() and not path.exists():
            raise ConfigError(f"model: {path} is a link that leads to no file")
    if not (source / "config.json").is_file():
        raise ConfigError(f"model: {source} holds no config.json")
    return [path for path in wanted if path.is_file()]


def is_copy_name(name: str) -> bool:
    """Whether a copy can have that name: it names a folder directly in the folder of copies."""
    return "/" not in name and name not in ("", ".", "..")


def copy_target(source: Path, copies: Path, name: str | None = None) -> Path:
    """The folder that a copy of ``source`` is to be: in ``copies``, of that name, else of the source's. Makes nothing.

    Raises:
        ConfigError: field ``name``; it is not the name of one folder; field ``cache``; the copy would be in ``source``.
    """
    real_source = Path(os.path.realpath(source))
    name = real_source.name if name is None else name
    if not is_copy_name(name):
        raise ConfigError(f"name: {name!r} is not a name of one folder in {copies}")
    target = copies / name
    if Path(os.path.realpath(target)).is_relative_to(real_source):
        raise ConfigError(f"cache: {target} is in {source}, which is to be copied")
    return target


def copy_model(
    files: Sequence[Path],
    target: Path,
    on_copied: Callable[[int], object] = lambda _: None,
    *,
    damaged: Collection[str] = (),
) -> None:
    """Make ``target`` a copy of ``files``, with their digests in ``SHA256SUMS``. Blocks until then.

    What an earlier call copied is not copied again, unless the file has changed since: copies have their file's time of
    change. A file begun is gone on with where it first differs from its source, which is read from its start.
    Files that an earlier call copied and that are no longer among ``files`` are deleted. Digests are of what was read;
    whether it came to the disk whole is for ``check_model`` to say.

    Args:
        files: of one folder.
        target: made if there is none.
        on_copied: called with each number of bytes that need no more be copied.
        damaged: names of files in ``target`` that an earlier call copied, and that are to be copied again.

    Raises:
        ConfigError: field ``cache``; ``target`` holds something else, has too little room, can't be written, or another
            process copies to it; field ``model``; a file can't be read, changes meanwhile, or does not have the digest
            that ``SHA256SUMS`` beside it says.
    """
    source = files[0].parent.resolve()
    try:
        # A folder of another kind does not even get a lock file.
        _demand_ours(target, source)
        target.mkdir(parents=True, exist_ok=True)
        with _locked(target):
            _demand_ours(target, source)
            _copy(source, files, target, on_copied, damaged)
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


def _demand_ours(target: Path, source: Path) -> None:
    """Refuse a ``target`` that holds anything but a copy of ``source``."""
    origin = origin_of(target)
    if origin is None and target.exists() and any(path.name != _LOCK_FILE for path in target.iterdir()):
        raise ConfigError(f"cache: {target} holds files that are no copy of a model: name the copy otherwise")
    if origin not in (None, source):
        raise ConfigError(f"cache: {target} is a copy of {origin}: name the copy of {source} otherwise")


def _copy(
    source: Path,
    files: Sequence[Path],
    target: Path,
    on_copied: Callable[[int], object],
    damaged: Collection[str],
) -> None:
    expected, done = read_sums(source), read_sums(target)
    _drop_leftovers(target, _names(files), done)
    for name in done.keys() & set(damaged):
        (target / name).unlink(missing_ok=True)
    todo = [
        path
        for path in files
        if not (
            path.name in done
            and expected.get(path.name) in (None, done[path.name])
            and _is_same(path, target / path.name)
        )
    ]
    for path in files:
        if path not in todo:
            on_copied(path.stat().st_size)
    _demand_room(todo, target)
    sums = {name: digest for name, digest in done.items() if name in _names(files) - _names(todo)}
    if sums != done or not done:
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
    """Whether ``copy`` has the length and the time of change of ``path``, which may become older (``cp -p``)."""
    try:
        there, here = path.stat(), copy.stat()
    except FileNotFoundError:
        return False
    return (there.st_size, there.st_mtime_ns) == (here.st_size, here.st_mtime_ns)


def _demand_room(files: Sequence[Path], target: Path) -> None:
    needed, free = sum(_size_to_write(path, target) for path in files), shutil.disk_usage(target).free
    if needed > free:
        raise ConfigError(f"cache: {target} has {free / 1e9:.1f} GB left, and {needed / 1e9:.1f} GB are to be copied")


def _size_to_write(path: Path, target: Path) -> int:
    part = target / f"{path.name}{_PART}"
    begun = part.stat().st_size if part.exists() else 0
    return max(0, path.stat().st_size - begun)


def _copy_file(path: Path, copy: Path, expected: str | None, on_copied: Callable[[int], object]) -> str:
    """Copy one file, and return the SHA-256 of what was read."""
    part = copy.with_name(copy.name + _PART)
    before = path.stat()
    digest = hashlib.sha256()
    part.touch()
    with part.open("r+b") as written, _opened(path) as read:
        is_begun = True
        for chunk in _chunks(lambda size: _read(path, read, size)):
            digest.update(chunk)
            start = written.tell()
            # What a crash or another state of the file left is not to be trusted.
            if is_begun and written.read(len(chunk)) != chunk:
                is_begun = False
                written.seek(start)
            if not is_begun:
                written.write(chunk)
            on_copied(len(chunk))
        written.truncate()
        written.flush()
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
    os.utime(part, ns=(before.st_atime_ns, before.st_mtime_ns))
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
