"""Blocks in files: one a block, checksummed, in a folder that outlives the process.

A file is written under another name and renamed, so that a process that is killed leaves no half of a block. What is
damaged, or of another model or layout, is deleted, and never given out. Nothing is flushed: after a crash of the
machine, checksums find what did not get to the disk.

A folder is held by the process that has locked the file ``lock`` in it, which says whose folder it is: nothing else is
ever deleted.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import struct
import time
from collections.abc import Iterable
from dataclasses import astuple
from pathlib import Path

from xxhash import xxh3_64_digest, xxh3_128

from quartet.errors import ConfigError
from quartet.kvcache.layout import KvLayout
from quartet.kvcache.tiers import BlockName

logger = logging.getLogger(__name__)

_MAGIC = b"QRTKVBLK"
_VERSION = 1
# Magic, version, whether there is a parent's hash; fingerprint, digest, parent's digest; sequence hash, parent's hash,
# bytes; checksum of the bytes. Then a checksum of this header.
_HEADER = struct.Struct("<8sII32s32s32sQQQ16s")
_CHECKSUM_BYTES, _DIGEST_BYTES = 8, 32
_HEADER_BYTES = _HEADER.size + _CHECKSUM_BYTES
_SUFFIX, _UNFINISHED = ".kv", ".part"
_MAX_FOLDERS = 1024
_LOCK, _MARK = "lock", b"KV blocks of Quartet\n"
_FOLDER = re.compile(r"(?P<fingerprint>[0-9a-f]{16})-\d+")
_FILE = re.compile(r"[0-9a-f]{64}\.(kv|part)")
# A folder that was used since may be one whose process is about to start again.
_KEPT_S = 3600.0


class DiskBlocks:
    """The files of one pool. ``write``, ``read`` and ``delete`` may be called on any thread."""

    def __init__(self, path: Path, layout: KvLayout) -> None:
        """Take the first folder in ``path`` for blocks of ``layout`` that no other process, or pool of this one, has.

        Raises:
            ConfigError: the folder can't be made or written.
        """
        self._fingerprint = hashlib.sha256(repr(astuple(layout)).encode()).digest()
        self._size_bytes = layout.piece_size_bytes
        self._has_warned = False
        self._path_of_all = path
        try:
            self.folder, self._lock = _take_folder(path, self._fingerprint.hex()[:16])
        except OSError as error:
            raise ConfigError(f"cache.disk.path: {error}") from error

    def scan(self) -> list[BlockName]:
        """The blocks that are there by their headers, the least recently used first. Deletes all else."""
        found: list[tuple[int, BlockName]] = []
        num_bad = 0
        for path in list(self.folder.iterdir()):
            if path.name == self._lock_path.name:
                continue
            name = self._read_name(path)
            if name is None:
                num_bad += path.suffix != _UNFINISHED
                path.unlink(missing_ok=True)
            else:
                found.append((path.stat().st_mtime_ns, name))
        if num_bad:
            logger.warning("%s: deleted %d files that were damaged or not of this pool", self.folder, num_bad)
        return [name for _, name in sorted(found, key=lambda item: item[0])]

    def trim_others(self, max_bytes: int, *, kept_s: float = _KEPT_S) -> None:
        """Let files of other models and layouts that no process holds take ``max_bytes`` at most.

        The folders that were used least recently go first; those that were within ``kept_s`` stay.
        """
        own, found = self.folder.name.partition("-")[0], list[_IdleFolder | None]()
        for path in self._path_of_all.iterdir():
            match = _FOLDER.fullmatch(path.name)
            if match and match["fingerprint"] != own:
                found.append(_IdleFolder.open(path))
        idle = sorted((folder for folder in found if folder is not None), key=lambda folder: folder.used_at)
        num_bytes = sum(folder.size_bytes for folder in idle)
        for folder in idle:
            if num_bytes > max_bytes and folder.used_at < time.time() - kept_s:
                logger.info("deleted %s: no process has used it since %s", folder.path, time.ctime(folder.used_at))
                folder.delete()
                num_bytes -= folder.size_bytes
            folder.close()

    def probe(self, data: memoryview) -> float:
        """Seconds to read a block, as measured with ``data``, whose bytes may change. Raises ``ConfigError``.

        From the disk, where the system lets go of what it has in memory. Later reads may find it there.
        """
        name = BlockName(bytes(_DIGEST_BYTES), bytes(_DIGEST_BYTES), 0, None)
        try:
            self.write(name, data)
            _forget(self._path(name.digest))
        except OSError as error:
            raise ConfigError(f"cache.disk.path: {error}") from error
        began = time.monotonic()
        self.read(name, data)
        took_s = time.monotonic() - began
        self.delete([name.digest])
        return took_s

    def write(self, name: BlockName, data: memoryview) -> None:
        """Store a block; one of that name is replaced. Raises ``OSError``: it is not there, then."""
        path = self._path(name.digest)
        unfinished = path.with_suffix(_UNFINISHED)
        try:
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                _write_all(descriptor, self._header(name, data))
                _write_all(descriptor, data)
            finally:
                os.close(descriptor)
            os.rename(unfinished, path)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise

    def read(self, name: BlockName, into: memoryview) -> bool:
        """Fill ``into`` with a block's bytes. False: they are not there, or were damaged and are deleted now."""
        path = self._path(name.digest)
        try:
            is_good = self._read_good(path, name, into)
            if is_good:
                os.utime(path)
        except OSError as error:
            is_good = False
            self._warn(path, str(error))
        else:
            if not is_good:
                self._warn(path, "damaged")
        if not is_good:
            self.delete([name.digest])
        return is_good

    def delete(self, digests: Iterable[bytes]) -> None:
        """These blocks are not wanted any more."""
        for digest in digests:
            with contextlib.suppress(OSError):
                self._path(digest).unlink(missing_ok=True)

    def close(self) -> None:
        """Leave the folder to others."""
        with contextlib.suppress(OSError):
            os.utime(self.folder)
        os.close(self._lock)

    @property
    def _lock_path(self) -> Path:
        return self.folder / _LOCK

    def _path(self, digest: bytes) -> Path:
        return self.folder / f"{digest.hex()}{_SUFFIX}"

    def _header(self, name: BlockName, data: memoryview) -> bytes:
        parent_hash = 0 if name.parent_hash is None else name.parent_hash
        header = _HEADER.pack(
            _MAGIC,
            _VERSION,
            name.parent_hash is not None,
            self._fingerprint,
            name.digest,
            name.parent_digest,
            name.sequence_hash,
            parent_hash,
            len(data),
            _checksum(data),
        )
        return header + xxh3_64_digest(header)

    def _read_name(self, path: Path) -> BlockName | None:
        """The name in a file's header; ``None``: it is no whole file of this pool."""
        try:
            with path.open("rb", buffering=0) as file:
                header = file.read(_HEADER_BYTES)
                size_bytes = os.fstat(file.fileno()).st_size
        except OSError:
            return None
        parsed = self._parse(header)
        if parsed is None or path != self._path(parsed[0].digest) or size_bytes != _HEADER_BYTES + self._size_bytes:
            return None
        return parsed[0]

    def _parse(self, header: bytes) -> tuple[BlockName, bytes] | None:
        """Name and checksum that a header of this pool gives."""
        if len(header) != _HEADER_BYTES or xxh3_64_digest(header[: _HEADER.size]) != header[_HEADER.size :]:
            return None
        magic, version, has_parent, fingerprint, digest, parent, sequence_hash, parent_hash, size_bytes, checksum = (
            _HEADER.unpack_from(header)
        )
        if (magic, version, fingerprint, size_bytes) != (_MAGIC, _VERSION, self._fingerprint, self._size_bytes):
            return None
        return BlockName(digest, parent, sequence_hash, parent_hash if has_parent else None), checksum

    def _read_good(self, path: Path, name: BlockName, into: memoryview) -> bool:
        header = bytearray(_HEADER_BYTES)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            num_read = os.preadv(descriptor, [header, into], 0)
            while 0 < num_read < _HEADER_BYTES + len(into):
                more = os.preadv(descriptor, [into[max(0, num_read - _HEADER_BYTES) :]], num_read)
                num_read = num_read + more if more else 0
        finally:
            os.close(descriptor)
        parsed = self._parse(bytes(header)) if num_read == _HEADER_BYTES + len(into) else None
        return parsed is not None and parsed[0] == name and parsed[1] == _checksum(into)

    def _warn(self, path: Path, what: str) -> None:
        level = logging.DEBUG if self._has_warned else logging.WARNING
        self._has_warned = True
        logger.log(level, "a block on disk can't be used, and is computed instead: %s: %s", path, what)


class _IdleFolder:
    """A folder of ours that was locked, as no process holds it.

    Attributes:
        used_at: when a file came or went, or a process left it, in seconds of ``time.time``.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path, self._lock = path, lock
        self.used_at = path.stat().st_mtime
        self._files = [file for file in path.iterdir() if _FILE.fullmatch(file.name)]
        self.size_bytes = sum(file.stat().st_size for file in self._files)

    @classmethod
    def open(cls, path: Path) -> _IdleFolder | None:
        """``None``: it is held, or not ours."""
        try:
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            if _is_locked(path, lock) and os.pread(lock, len(_MARK) + 1, 0) == _MARK:
                return cls(path, lock)
        except OSError:
            pass  # it goes away just now
        os.close(lock)
        return None

    def delete(self) -> None:
        """Delete its blocks, and itself, if that was all."""
        with contextlib.suppress(OSError):
            for file in self._files:
                file.unlink(missing_ok=True)
            if [file.name for file in self.path.iterdir()] == [_LOCK]:
                (self.path / _LOCK).unlink()
                self.path.rmdir()

    def close(self) -> None:
        """Let others hold it."""
        os.close(self._lock)


def _take_folder(path: Path, fingerprint: str) -> tuple[Path, int]:
    """The first folder that nobody has locked, and the descriptor that locks it."""
    for number in range(_MAX_FOLDERS):
        folder = path / f"{fingerprint}-{number}"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue  # another process has just deleted it
        if not _is_locked(folder, descriptor):
            os.close(descriptor)
            continue
        os.pwrite(descriptor, _MARK, 0)
        return folder, descriptor
    raise OSError(f"{_MAX_FOLDERS} processes use {path}")


def _is_locked(folder: Path, descriptor: int) -> bool:
    """Lock the folder. False: somebody else has, or has deleted it meanwhile."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), (folder / _LOCK).stat())
    except OSError:
        return False


def _forget(path: Path) -> None:
    """Have the next read of a file come from the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)  # what was not written yet is kept
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    left = memoryview(data).cast("B")
    while left:
        left = left[os.write(descriptor, left) :]


def _checksum(data: memoryview) -> bytes:
    digest = xxh3_128()
    digest.update(data)  # without the interpreter's lock, for a whole block
    return digest.digest()
