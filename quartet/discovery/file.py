"""The registry in a directory: one JSON file per worker, for hosts that share a file system and run no etcd.

A worker's file is ``<directory>/<namespace>/<role>.<worker id>.json``. Its lease is its modification time: the worker
touches it, and readers treat a file older than the time to live as gone. So all hosts need synchronized clocks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from quartet.discovery.base import (
    Registration,
    Registry,
    WorkerRecord,
    WorkerSet,
    check_name,
    parse_key,
    parse_record,
    to_json,
)
from quartet.errors import DiscoveryError

logger = logging.getLogger(__name__)

_SUFFIX = ".json"


@dataclass(frozen=True, kw_only=True)
class FileConfig:
    """Where the files are and how they are watched; every process must have the same time to live.

    Attributes:
        directory: made when first written to.
        namespace: separates deployments that share the directory.
        ttl_s: seconds without a touch after which a record is gone; touched every third of it.
        poll_interval_s: seconds between two polls of a watch.
    """

    directory: Path
    namespace: str = "default"
    ttl_s: float = 5.0
    poll_interval_s: float = 0.2

    def __post_init__(self) -> None:
        if self.ttl_s <= 0 or self.poll_interval_s <= 0:
            raise ValueError("ttl_s and poll_interval_s must be positive")
        check_name("namespace", self.namespace)

    @property
    def namespace_directory(self) -> Path:
        """Where this namespace's files are."""
        return self.directory / self.namespace

    def is_expired(self, status: os.stat_result) -> bool:
        """Whether a file of this status has not been touched for longer than the time to live."""
        return time.time() - status.st_mtime > self.ttl_s


class FileRegistration(Registration):
    """A worker's file, touched by a task until closed."""

    def __init__(self, config: FileConfig, record: WorkerRecord, *, on_close: Callable[[Registration], None]) -> None:
        super().__init__(record, on_close=on_close)
        self._config = config
        self._path = config.namespace_directory / f"{record.role}.{record.worker_id}{_SUFFIX}"
        self._inode: int | None = None

    async def start(self) -> None:
        """Write the file and begin to touch it.

        Raises:
            DiscoveryError: the file cannot be written.
        """
        try:
            await asyncio.to_thread(self._write)
        except OSError as error:
            raise DiscoveryError(f"cannot write {self._path}: {error}") from error
        self._keep(self._keep_alive())

    async def _remove(self) -> None:
        try:
            await asyncio.to_thread(self._unlink)
        except OSError as error:
            logger.warning("left %s to the end of its time to live: %s", self._path, error)

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(self._config.ttl_s / 3)
            try:
                await asyncio.to_thread(self._touch)
            except OSError as error:
                logger.warning("cannot touch %s: %s", self._path, error)

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Another suffix, so that no reader reads a half-written file as a record.
        unfinished = self._path.with_name(f"{self._path.name}.{secrets.token_hex(4)}")
        try:
            unfinished.write_bytes(to_json(self.record))
            self._inode = unfinished.stat().st_ino
            unfinished.replace(self._path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise

    def _touch(self) -> None:
        status = _status(self._path)
        if status is not None and status.st_ino == self._inode:
            os.utime(self._path)
        elif status is None or self._config.is_expired(status):
            self._write()

    def _unlink(self) -> None:
        # Another inode is the file of a later registration of this worker id.
        status = _status(self._path)
        if status is not None and status.st_ino == self._inode:
            self._path.unlink(missing_ok=True)


class FileRegistry(Registry):
    """A ``Registry`` in a directory; use it within one event loop."""

    def __init__(self, config: FileConfig) -> None:
        super().__init__()
        self._config = config

    async def register(self, record: WorkerRecord) -> FileRegistration:
        """Announce ``record`` and keep it alive.

        Raises:
            DiscoveryError: its file cannot be written.
        """
        registration = FileRegistration(self._config, record, on_close=self._open.discard)
        await registration.start()
        self._open.add(registration)
        return registration

    async def workers(self) -> list[WorkerRecord]:
        """The readable records of this moment, ordered by role and id.

        Raises:
            DiscoveryError: the directory cannot be read.
        """
        return await _Reader(self._config).read()

    async def _feed(self, workers: WorkerSet) -> None:
        reader = _Reader(self._config)
        while True:
            try:
                workers.replace(await reader.read())
            except DiscoveryError as error:
                logger.warning("watch of %s: %s", self._config.namespace_directory, error)
            await asyncio.sleep(self._config.poll_interval_s)


class _Reader:
    """Reads a directory again and again, and only those files that have changed."""

    def __init__(self, config: FileConfig) -> None:
        self._config = config
        # By path, with inode and time of the last change: these differ between two states of a file.
        self._parsed: dict[Path, tuple[tuple[int, int], WorkerRecord | None]] = {}

    async def read(self) -> list[WorkerRecord]:
        """The live records, ordered by role and id."""
        try:
            return await asyncio.to_thread(self._read)
        except OSError as error:
            raise DiscoveryError(f"cannot read {self._config.namespace_directory}: {error}") from error

    def _read(self) -> list[WorkerRecord]:
        directory = self._config.namespace_directory
        try:
            names = os.listdir(directory)
        except FileNotFoundError:
            names = []  # No worker has registered yet.
        paths = [directory / name for name in names if name.endswith(_SUFFIX)]
        records = sorted(filter(None, map(self._read_file, paths)), key=attrgetter("key"))
        self._parsed = {path: self._parsed[path] for path in paths if path in self._parsed}
        return records

    def _read_file(self, path: Path) -> WorkerRecord | None:
        try:
            status = path.stat()
            if self._config.is_expired(status):
                return None
            version = (status.st_ino, status.st_mtime_ns)
            if path not in self._parsed or self._parsed[path][0] != version:
                self._parsed[path] = (version, _parse(path))
        except FileNotFoundError:
            return None  # Its worker left meanwhile.
        return self._parsed[path][1]


def _parse(path: Path) -> WorkerRecord | None:
    role, _, worker_id = path.name.removesuffix(_SUFFIX).partition(".")
    key = parse_key(role, worker_id)
    return None if key is None else parse_record(key, path.read_bytes())


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None
