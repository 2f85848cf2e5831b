"""The secrets that seal and verify starts: a file of keys, followed while it changes."""

from __future__ import annotations

import hmac
import logging
import os
import re
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from quartet.errors import ConfigError

logger = logging.getLogger(__name__)

#: Bytes of a MAC.
MAC_SIZE_BYTES = 32

_SETTING = "seal_keys_file"
_KEY_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
# As long as the MAC: a shorter secret would be the weakest part of it.
_MIN_SECRET_BYTES = 32
_MAX_FILE_BYTES = 1 << 16
_LOOK_INTERVAL_S = 1.0
# After a name that is not known, which the file may have by now; whoever makes names up has it looked at no oftener.
_UNKNOWN_LOOK_INTERVAL_S = 0.05

# What tells one content of a file from the next: time of change, inode, size. ``None``: there is no file.
_Signature: TypeAlias = "tuple[int, int, int] | None"


@dataclass(frozen=True, kw_only=True)
class SealKey:
    """One secret, by its public name."""

    key_id: str
    secret: bytes = field(repr=False)

    def mac(self, sealed: bytes) -> bytes:
        """HMAC-SHA256 over exactly these bytes."""
        return hmac.digest(self.secret, sealed, "sha256")


class SealKeys:
    """The keys of one file, which is read again when it has changed.

    One key a line: ``key_id hex-secret``, the secret of 32 bytes or more; empty lines and lines that begin with ``#``
    are left out. The first key seals, all verify. So a new key is given to every process below the old one, then put
    first, and the old one taken out once nothing is under way that it sealed: no start is ever refused.

    A changed file that can't be used changes nothing but the log. Nothing here ever tells a secret.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Read ``path``; look at it again once a second of ``clock``, or for an unknown name, 20 times at most.

        Raises:
            ConfigError: the file can't be used; the message names the setting and the line, never a secret.
        """
        self._path = path
        self._clock = clock
        self._looked_at = clock()
        self._signature, self._keys = _read(path)

    @property
    def sealing_key(self) -> SealKey:
        """The key that seals."""
        return next(iter(self._current().values()))

    def find(self, key_id: str) -> SealKey | None:
        """The key of that name, if it verifies; for one that is not known the file is looked at sooner."""
        return self._current().get(key_id) or self._current(_UNKNOWN_LOOK_INTERVAL_S).get(key_id)

    def _current(self, look_interval_s: float = _LOOK_INTERVAL_S) -> dict[str, SealKey]:
        now = self._clock()
        if now - self._looked_at >= look_interval_s:
            self._looked_at = now
            signature = _look(self._path)
            if signature != self._signature:
                self._reread(signature)
        return self._keys

    def _reread(self, signature: _Signature) -> None:
        try:
            self._signature, self._keys = _read(self._path)
        except ConfigError as error:
            # Told once for each content of the file.
            self._signature = signature
            logger.warning("the keys stay as they were: %s", error)
        else:
            logger.info("keys for sealed starts: %s", ", ".join(self._keys))


def _look(path: Path) -> _Signature:
    try:
        return _signature_of(path.stat())
    except OSError:
        return None


def _signature_of(found: os.stat_result) -> _Signature:
    return found.st_mtime_ns, found.st_ino, found.st_size


def _read(path: Path) -> tuple[_Signature, dict[str, SealKey]]:
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{_SETTING}: cannot read {path}: {error.strerror}") from error
    if stat.S_IMODE(found.st_mode) & stat.S_IRWXO:
        # Who can read a key can start whatever they like; who can write it too.
        raise ConfigError(
            f"{_SETTING}: {path} is open to everybody: chmod o-rwx (for a Kubernetes secret, defaultMode)"
        )
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigError(f"{_SETTING}: {path} is longer than {_MAX_FILE_BYTES} bytes")
    return _signature_of(found), _parse(content, path)


def _parse(content: bytes, path: Path) -> dict[str, SealKey]:
    keys: dict[str, SealKey] = {}
    for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            key = _parse_line(line)
        except ValueError as error:
            # `from None`: what lies beneath may quote the secret.
            raise ConfigError(f"{_SETTING}: {path}, line {number}: {error}") from None
        if key.key_id in keys:
            raise ConfigError(f"{_SETTING}: {path}, line {number}: {key.key_id} stands twice")
        keys[key.key_id] = key
    if not keys:
        raise ConfigError(f"{_SETTING}: {path} holds no key")
    return keys


def _parse_line(line: str) -> SealKey:
    key_id, _, digits = line.strip().partition(" ")
    if not _KEY_ID.fullmatch(key_id):
        raise ValueError("a key's name has 1 to 64 letters, digits, dots, dashes or underscores")
    try:
        secret = bytes.fromhex(digits)
    except ValueError:
        raise ValueError("a key's secret must be hexadecimal") from None
    if len(secret) < _MIN_SECRET_BYTES:
        raise ValueError(f"a key's secret must have {_MIN_SECRET_BYTES} bytes or more")
    return SealKey(key_id=key_id, secret=secret)
