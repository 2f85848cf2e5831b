"""A file of secrets, one a line, that is read again when it changes."""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from quartet.errors import ConfigError

logger = logging.getLogger(__name__)

_POLL_INTERVAL_S = 1.0
# The same after an unknown name or key, which the file may have by now; made-up ones cause no more reads than that.
_UNKNOWN_POLL_INTERVAL_S = 0.05

# Differs between two contents of a file: time of change, inode, size. ``None``: there is no file.
_Signature: TypeAlias = "tuple[int, int, int] | None"

ContentT = TypeVar("ContentT")


class SecretFile(Generic[ContentT]):
    """What a file of secrets holds, as ``parse`` makes it of its lines.

    A changed file that can't be used, or is gone, is logged and changes nothing else. No message or log ever holds a
    secret.
    """

    def __init__(
        self,
        path: Path,
        parse: Callable[[Iterator[tuple[str, str]]], ContentT],
        *,
        setting: str,
        max_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        count: Callable[[bool], None] = lambda is_used: None,
    ) -> None:
        """Read ``path``.

        Args:
            path: the file, which not everybody may read or write.
            parse: takes each line that is not empty and does not begin with ``#``, after how errors name it, and raises
                ``ConfigError``.
            setting: what the configuration calls the file.
            max_bytes: of the file.
            clock: monotonic seconds.
            count: is told of each change whether the file could be used.

        Raises:
            ConfigError: the file can't be used; names the setting.
        """
        self._path = path
        self._parse = parse
        self._setting = setting
        self._max_bytes = max_bytes
        self._clock = clock
        self._count = count
        self._polled_at = clock()
        self._signature, self._content = self._read()

    def current(self, *, is_unknown: bool = False) -> ContentT:
        """What the file holds, as of a second ago at most; ``is_unknown``: a twentieth of that."""
        now = self._clock()
        if now - self._polled_at >= (_UNKNOWN_POLL_INTERVAL_S if is_unknown else _POLL_INTERVAL_S):
            self._polled_at = now
            signature = file_signature(self._path)
            if signature != self._signature:
                self._reread(signature)
        return self._content

    def _reread(self, signature: _Signature) -> None:
        try:
            self._signature, self._content = self._read()
        except ConfigError as error:
            self._signature = signature  # log once for each content of the file
            logger.warning("a changed file is not used: %s", error)
            self._count(False)
        else:
            logger.info("%s: %s was read again", self._setting, self._path)
            self._count(True)

    def _read(self) -> tuple[_Signature, ContentT]:
        setting, path = self._setting, self._path
        try:
            with path.open("rb") as file:
                found = os.fstat(file.fileno())
                content = file.read(self._max_bytes + 1)
        except OSError as error:
            raise ConfigError(f"{setting}: cannot read {path}: {error.strerror}") from error
        if stat.S_IMODE(found.st_mode) & stat.S_IRWXO:
            # A process that can read or write a secret can do all that it allows.
            raise ConfigError(
                f"{setting}: {path} is open to everybody: chmod o-rwx (for a Kubernetes secret, defaultMode)"
            )
        if len(content) > self._max_bytes:
            raise ConfigError(f"{setting}: {path} is longer than {self._max_bytes} bytes")
        return _signature_of(found), self._parse(self._lines(content))

    def _lines(self, content: bytes) -> Iterator[tuple[str, str]]:
        for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), start=1):
            if line.strip() and not line.startswith("#"):
                yield f"{self._setting}: {self._path}, line {number}", line


def file_signature(path: Path) -> _Signature:
    """Differs between two contents of a file; ``None``: there is none."""
    try:
        return _signature_of(path.stat())
    except OSError:
        return None


def _signature_of(found: os.stat_result) -> _Signature:
    return found.st_mtime_ns, found.st_ino, found.st_size
