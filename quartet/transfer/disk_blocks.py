"""Blocks in files: one a block, checksummed, in a folder that outlives the process.

A file is written under another name and renamed, so that a process that is killed leaves no half of a block. What is
damaged, or of another model or layout, is deleted, and never given out. Nothing is flushed: after a crash of the
machine, checksums find what did not get to the disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
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

    def probe(self, data: memoryview) -> float:
        """Seconds to read a block, as measured with ``data``, whose bytes may change. Raises ``ConfigError``."""
        name = BlockName(bytes(_DIGEST_BYTES), bytes(_DIGEST_BYTES), 0, None)
        try:
            self.write(name, data)
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


_LOCK = "lock"


def _take_folder(path: Path, fingerprint: str) -> tuple[Path, int]:
    """The first folder that nobody has locked, and the descriptor that locks it."""
    for number in range(_MAX_FOLDERS):
        folder = path / f"{fingerprint}-{number}"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            continue
        return folder, descriptor
    raise OSError(f"{_MAX_FOLDERS} processes use {path}")


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    left = memoryview(data).cast("B")
    while left:
        left = left[os.write(descriptor, left) :]


def _checksum(data: memoryview) -> bytes:
    digest = xxh3_128()
    digest.update(data)  # without the interpreter's lock, for a whole block
    return digest.digest()
