"""The registry in a directory: one JSON file per worker or router, for hosts that share a file system and run no etcd.

The file is ``<directory>/<namespace>/<role>.<id>.json``. Its lease is its modification time: the process touches it,
and readers treat a file older than the time to live as gone. So all hosts need synchronized clocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from quartet.discovery.base import AnyRecord, RecordSet, Registration, Registry, Role
from quartet.discovery.checks import check_name
from quartet.discovery.record_json import MAX_RECORD_BYTES, RecordReader, read_epoch, to_json
from quartet.errors import DiscoveryError, WorkerReplacedError
from quartet.limited_log import LimitedLog

logger = logging.getLogger(__name__)

_SUFFIX = ".json"

# While another role's worker has the id: it may be a leftover whose time to live ends soon.
_REGISTER_WITHIN_S = 10.0


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
        return self.is_over(status.st_mtime)

    def is_over(self, touched_at: float) -> bool:
        """Whether the lease of a file that was last touched at ``touched_at``, in seconds since 1970, has ended."""
        return time.time() - touched_at > self.ttl_s


class FileRegistration(Registration):
    """A worker's file, touched by a task until closed.

    The first write replaces the file of an earlier start. Later ones only make a file where there is none, or one that
    no process touches any more, in steps that fail if another process comes in between.
    """

    def __init__(self, config: FileConfig, record: AnyRecord, *, on_close: Callable[[Registration], None]) -> None:
        super().__init__(record, on_close=on_close)
        self._config = config
        own, id = record.key
        self._path = _path(config, own, id)
        self._paths_of_other_roles = [_path(config, role, id) for role in Role if role is not own]
        self._value = to_json(record)
        self._log = LimitedLog(logger)

    async def start(self) -> None:
        """Write the file and begin to touch it.

        Raises:
            DiscoveryError: the file cannot be written, or a worker of another role has the id for 10 s.
        """
        give_up_at = time.monotonic() + _REGISTER_WITHIN_S
        try:
            while (taken := await asyncio.to_thread(self._find_other_role)) is not None:
                if time.monotonic() >= give_up_at:
                    raise DiscoveryError(self._refusal(taken))
                await asyncio.sleep(self._config.poll_interval_s)
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
                self._log.warning("cannot touch %s: %s", self._path, error)

    def _write(self) -> None:
        with self._unfinished() as unfinished:
            unfinished.replace(self._path)

    def _touch(self) -> None:
        status, is_own = _status(self._path), _read_any(self._path) == self._value
        if status is None or not is_own or self._config.is_expired(status):
            self._check_not_replaced()
        if is_own:
            os.utime(self._path)
            return
        self._clear()
        with self._unfinished() as unfinished, contextlib.suppress(FileExistsError):
            os.link(unfinished, self._path)  # unlike a replacement it fails if another came first

    def _check_not_replaced(self) -> None:
        if self._is_anothers(self._path):
            raise WorkerReplacedError(f"another process has registered as {' '.join(self.record.key)}")
        if (taken := self._find_other_role()) is not None:
            raise WorkerReplacedError(self._refusal(taken))

    def _is_anothers(self, path: Path) -> bool:
        """Whether the file is kept alive by another process; one that names no epoch belongs to no process."""
        status, value = _status(path), _read_any(path)
        if status is None or value is None or value == self._value:
            return False
        return not self._config.is_expired(status) and read_epoch(value) is not None

    def _clear(self) -> None:
        """Remove the file, unless another process touches or replaces it at this moment."""
        aside = self._aside()
        try:
            self._path.rename(aside)
        except FileNotFoundError:
            return
        with contextlib.suppress(FileExistsError):
            if self._is_anothers(aside):
                os.link(aside, self._path)
        aside.unlink()

    @contextlib.contextmanager
    def _unfinished(self) -> Iterator[Path]:
        """The record in a file beside its own, which readers don't see: so none reads half a record."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._aside()
        try:
            unfinished.write_bytes(self._value)
            yield unfinished
        finally:
            unfinished.unlink(missing_ok=True)

    def _aside(self) -> Path:
        return self._path.with_name(f"{self._path.name}.{secrets.token_hex(4)}")

    def _unlink(self) -> None:
        # Another value is the file of a later registration of this worker id.
        if _read_any(self._path) == self._value:
            self._path.unlink(missing_ok=True)

    def _find_other_role(self) -> Path | None:
        """The living file of a worker of another role with this id."""
        for path in self._paths_of_other_roles:
            status = _status(path)
            if status is not None and stat.S_ISREG(status.st_mode) and not self._config.is_expired(status):
                return path
        return None

    def _refusal(self, taken: Path) -> str:
        return f"{self.id_field} {self.record.key.worker_id} is taken by {taken}: give each an id of its own"


class FileRegistry(Registry):
    """A ``Registry`` in a directory; use it within one event loop."""

    def __init__(self, config: FileConfig) -> None:
        super().__init__()
        self._config = config
        self._reader = _Reader(config)
        self._log = LimitedLog(logger)

    async def register(self, record: AnyRecord) -> FileRegistration:
        """Announce ``record`` and keep it alive.

        Raises:
            DiscoveryError: its file cannot be written, or another role's worker had the id for 10 s.
        """
        registration = FileRegistration(self._config, record, on_close=self._open.discard)
        await registration.start()
        self._open.add(registration)
        return registration

    async def records(self) -> list[AnyRecord]:
        """All readable records of this moment, ordered by role and id.

        Raises:
            DiscoveryError: the directory cannot be read.
        """
        return await self._reader.read()

    async def _feed(self, known: RecordSet) -> None:
        while True:
            try:
                known.replace(await self._reader.read())
            except DiscoveryError as error:
                self._log.warning("watch of %s: %s", self._config.namespace_directory, error)
            await asyncio.sleep(self._config.poll_interval_s)


class _Reader:
    """Reads a directory again and again, and only those files that have changed.

    Anything may lie in the directory. What can't be read is no worker, and hides none: it is logged once.
    """

    def __init__(self, config: FileConfig) -> None:
        self._config = config
        self._lock = asyncio.Lock()
        self._records = RecordReader()
        # By path, with inode and time of the last change: these differ between two states of a file.
        self._parsed: dict[Path, tuple[tuple[int, int], AnyRecord | None]] = {}

    async def read(self) -> list[AnyRecord]:
        """The live records, ordered by role and id."""
        try:
            async with self._lock:
                return await asyncio.to_thread(self._read)
        except OSError as error:
            raise DiscoveryError(f"cannot read {self._config.namespace_directory}: {error}") from error

    def _read(self) -> list[AnyRecord]:
        directory = self._config.namespace_directory
        try:
            names = os.listdir(directory)
            os.stat(os.path.join(directory, "."))  # fails, unlike the list, where no file in it could be looked at
        except FileNotFoundError:
            names = []  # No worker has registered yet.
        paths = [directory / name for name in names if name.endswith(_SUFFIX)]
        found = [record for record in map(self._read_file, paths) if record is not None]
        records = sorted(found, key=attrgetter("key"))
        self._parsed = {path: self._parsed[path] for path in paths if path in self._parsed}
        return records

    def _read_file(self, path: Path) -> AnyRecord | None:
        try:
            status = path.stat()
            if self._config.is_expired(status):
                return None
            version = (status.st_ino, status.st_mtime_ns)
            if path not in self._parsed or self._parsed[path][0] != version:
                self._parsed[path] = (version, self._parse(path))
        except FileNotFoundError:
            return None  # Its worker left meanwhile.
        except _NoRecordFileError as error:
            self._records.unreadable(*_key_parts(path), error)
            return None
        except OSError as error:
            self._records.unreadable(*_key_parts(path), error)
            return self._last_known(path)
        return self._parsed[path][1]

    def _parse(self, path: Path) -> AnyRecord | None:
        key = self._records.key(*_key_parts(path))
        value = None if key is None else _read(path)
        return None if key is None or value is None else self._records.record(key, value)

    def _last_known(self, path: Path) -> AnyRecord | None:
        """What the file held when it could be read last: a fault that passes removes no worker."""
        (_, mtime_ns), record = self._parsed.get(path, ((0, 0), None))
        return None if self._config.is_over(mtime_ns / 1e9) else record


class _NoRecordFileError(OSError):
    """What has a record's name is no file that could hold one."""


def _path(config: FileConfig, role: Role, worker_id: str) -> Path:
    return config.namespace_directory / f"{role}.{worker_id}{_SUFFIX}"


def _key_parts(path: Path) -> tuple[str, str]:
    """Role and worker id, as the file's name has them."""
    role, _, worker_id = path.name.removesuffix(_SUFFIX).partition(".")
    return role, worker_id


def _read(path: Path) -> bytes | None:
    """What the file holds; ``None``: there is none. Raises ``OSError``: it can't be read."""
    try:
        _check_record_file(path.stat())
        # Something else may lie there by now, such as a FIFO, which would keep its reader waiting.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        _check_record_file(os.fstat(descriptor))
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(MAX_RECORD_BYTES + 1)
    finally:
        os.close(descriptor)


def _check_record_file(status: os.stat_result) -> None:
    """Refuse what can't hold a record, before it is read. Raises ``_NoRecordFileError``."""
    if not stat.S_ISREG(status.st_mode):
        raise _NoRecordFileError(errno.EINVAL, "it is no regular file: remove it")
    if status.st_size > MAX_RECORD_BYTES:
        raise _NoRecordFileError(errno.EFBIG, f"it has more than {MAX_RECORD_BYTES} bytes: remove it")


def _read_any(path: Path) -> bytes | None:
    """As ``_read``; empty where no process can have written a record."""
    try:
        return _read(path)
    except _NoRecordFileError:
        return b""


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None
